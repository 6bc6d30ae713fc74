"""Conversations: several turns of the policy with tools, simulated users, environments or a program of the user.

`make.py` builds what the settings ask for. `conversation.py` leads a conversation turn by turn; `turn_tokens.py` has
the tokens between two turns. `gateway/` is an HTTP API through which a program asks the policy. Imports settings,
data, rollout, rewards and sandbox. Read `conversation.py` first.
"""
