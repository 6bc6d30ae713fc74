"""What conftest.py promises every test."""

import warnings

import jax
import jax.numpy as jnp
import pytest


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank"):
        jnp.zeros((2, 3)) + jnp.zeros(3)


def test_a_key_that_is_used_twice_raises():
    key = jax.random.key(0)
    jax.random.normal(key)
    with pytest.raises(jax.errors.KeyReuseError):
        jax.random.normal(key)


def test_a_warning_of_ours_is_an_error_and_of_others_is_not():
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "x.py", 1, module="jppo.learner.ppo")
    with pytest.warns(UserWarning, match="theirs"):
        warnings.warn_explicit("theirs", UserWarning, "x.py", 1, module="numpy")
