"""Conversations of several turns: tools, simulated users, environments."""
