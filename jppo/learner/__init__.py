"""Learning: from trajectories to gradients and the next state.

`packing.py` makes rows of trajectories, `score.py` scores them, `estimate.py` computes advantages, `update.py` and
`optim.py` change a model; `ppo.py` combines these into the stages of a step, on the mesh of `sharding.py`. What
they compile is pure, and they read no settings. `estimators.py` and `policy_losses.py` have the registries: from a
setting's value to a function of `algorithms/`. `make.py` and `recipe.py` build all from the settings; `cost.py` counts
FLOP. Imports algorithms, models and settings. Read `ppo.py` first, then `batch.py`.
"""
