"""What conftest.py promises every test."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.data.tokenizer import load_tokenizer
from jppo.models import hf


def test_there_are_eight_devices():
    assert [d.platform for d in jax.devices()] == ["cpu"] * 8


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


def test_the_tiny_model_loads(tiny_model):
    _, cfg = hf.read_config(tiny_model)
    params = hf.load_params(tiny_model, cfg, head="lm", param_dtype="float32")
    assert params["embed"]["embedding"].shape == (cfg.vocab_size, cfg.hidden_size)
    assert np.std(params["embed"]["embedding"]) == pytest.approx(0.08, rel=0.1)  # initializer_range
    assert load_tokenizer(str(tiny_model)).encode("1+2=") == [3, 12, 4, 13]
