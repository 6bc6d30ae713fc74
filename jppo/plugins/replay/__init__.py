"""Recorded steps, and their replay: `trainer.replay_steps`, `jppo replay`. Start with `bundle.py`."""
