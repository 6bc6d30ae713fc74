"""Learning: from trajectories to gradients and the next state.

`packing.py` makes rows of trajectories, `score.py` scores them, `estimate.py` computes advantages, `update.py` and
`optim.py` are the parts of a `trainable.py`, a model that learns; `ppo.py` combines these into the stages of a step,
on the mesh of `sharding.py`. What they compile is pure, and they run without `jppo.settings`. `catalogue.py` names
algorithms, losses and optimizers; `make.py` builds what every training has, `run/make.py` PPO's learner. These three
read settings. `cost.py` counts FLOP. Read `ppo.py` first, then `trainable.py` and `batch.py`.
"""
