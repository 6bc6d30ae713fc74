"""Rollouts by vLLM, and the transfer of weights to it.

Read `client.py` first, then `publish.py` and `worker.py`.
"""
