"""Rotary frequencies against transformers', for every kind of scaling."""

import numpy as np
import pytest

from jppo.models import families
from jppo.models.rotary import frequencies
from tests.models.conftest import config_of

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)


def stretched(scaling, **changes):
    """A llama's rotary frequencies and their scale by jppo, and by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = config_of("llama-llama3") | dict(head_dim=64, rope_scaling=scaling) | changes
    cfg = families.from_hf(config, path="config.json")
    theirs = transformers.LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"})
    of_kind = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    expected, scale = of_kind(theirs, torch.device("cpu"))
    rotary = cfg.kinds[0].rotary
    return cfg, (frequencies(rotary, cfg.head_dim), rotary.scale), (expected.numpy(), scale)


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        YARN | dict(beta_fast=20, beta_slow=3.5, truncate=False),
        YARN | dict(attention_factor=0.7),
        YARN | dict(mscale=0.707, mscale_all_dim=1.3),
        YARN | dict(mscale=0.707),
        YARN | dict(factor=1.0),
        YARN | dict(original_max_position_embeddings=8192, factor=40.0),
        YARN | dict(beta_fast=1.02, beta_slow=1.0, truncate=False, original_max_position_embeddings=128),
        dict(rope_type="linear", factor=3.0),
        config_of("llama-llama3")["rope_scaling"],
    ],
)
def test_frequencies_and_their_scale_are_those_of_transformers(scaling):
    _, (ours, scale), (theirs, their_scale) = stretched(scaling)
    np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=0)
    assert scale == pytest.approx(their_scale, rel=1e-12)


@pytest.mark.parametrize(("longest", "context"), [(128, 128), (100, 100), (1000, 128)])
def test_the_context_of_yarn_is_the_scaled_one_of_the_config(longest, context):
    cfg, _, _ = stretched(YARN, max_position_embeddings=longest)
    assert cfg.max_position_embeddings == context
