"""Multi-turn conversations: tools, simulated users, environments."""
