"""Rollout engines, and the publish of weights to them.

`protocol.py` has the interface that training uses. `inprocess.py` samples on the trainer's devices; `servers/` starts
and watches servers of any kind, `vllm/` is one kind, the plugin `sglang` another. `make.py` builds an engine,
`publish.py` publishes to it: to servers by `servers/delivery.py`. Imports learner and settings. Read `protocol.py`
first.
"""
