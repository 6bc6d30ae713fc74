"""A language model behind an API that scores responses: `reward.judge`. Start with `judge.py`."""
