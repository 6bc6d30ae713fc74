"""From responses to the samples of a step.

`queue.py` requests responses and hands a step's samples on, with prefetching, staleness and the queue that a checkpoint
keeps; `dynamic_sampling.py` replaces prompts that teach nothing. `make.py` builds either from the settings. Read
`queue.py` first.
"""
