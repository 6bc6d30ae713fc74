"""The mathematics: advantages, losses, KL, corrections. Pure functions: arrays, then masks, scalars by name.

Imports jax, chex and `jppo.types` only. Read `advantage.py` first, then `losses.py`; each docstring has its equation.
"""
