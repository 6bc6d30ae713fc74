"""Learning: from trajectories to gradients and the next state.

`packing.py` makes rows of trajectories, `score.py` scores them, `estimate.py` computes advantages, `update.py` and
`optim.py` are the parts of a `trainable.py`, a model that learns; `ppo.py` combines these into the stages of a step,
on the mesh of `sharding.py`. What they compile is pure, and they run without `jppo.settings`. `estimators.py` and
`policy_losses.py` have the registries: from a setting's value to a function of `algorithms/`. `make.py` alone reads
settings, and builds all from them; `cost.py` counts FLOP. Read `ppo.py` first, then `trainable.py` and `batch.py`.
"""
