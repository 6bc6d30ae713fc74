"""What vLLM and SGLang have in common: server processes, HTTP, fleets of servers, and the publish to all of them.

Read `api.py` and `fleet.py` first, then `delivery.py`.
"""
