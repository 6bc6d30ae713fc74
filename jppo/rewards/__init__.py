"""Rewards: a weighted sum of parts for each response.

`make.py` builds the parts that the settings ask for. `parts.py` has their interface, and sums them: submit a sample
from any thread, get a future of its `Reward`. Rules are in `rules.py`; judges, reward models and the sandbox of graded
programs are plugins. What may hang or crash runs in `pool.py`: a user's function is `FunctionPart` in `graders.py`, and
`pool_worker.py` calls it. Read `parts.py` first.
"""
