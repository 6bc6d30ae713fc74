"""A referee of algorithms: trainings on small tasks against PPO and GRPO, and a verdict. Start with `contest.py`."""
