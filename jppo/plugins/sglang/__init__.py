"""Rollouts by SGLang. Tested against a stand-in for its server, never on a GPU."""
