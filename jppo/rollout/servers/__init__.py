"""What vLLM and SGLang have in common: server processes, HTTP, fleets of servers, and the publish to all of them.

Read `fleet.py` first, then `delivery.py`.
"""
