"""A run: its command line; start, validation and export of PPO."""
