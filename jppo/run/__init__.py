"""An opened run of PPO: its start, its tests, its export."""
