"""From responses to the samples of a step.

`queue.py` requests responses and hands a step's samples on, with prefetching, staleness and the queue that a checkpoint
keeps. `make.py` builds it from the settings, or the queue with dynamic sampling, which replaces prompts that teach
nothing. Read `queue.py` first.
"""
