"""A gateway that runs the user's own agent programs against the policy, through OpenAI's and Anthropic's APIs.

Read `gateway.py` first; `apis.py` has the four APIs.
"""
