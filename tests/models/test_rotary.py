"""Rotary frequencies against transformers', for every kind of scaling."""

import numpy as np
import pytest

from jppo import settings
from jppo.learner.sharding import mesh_of_shape
from jppo.models import config_reader, hf
from jppo.models.rotary import frequencies
from jppo.rollout.make import inprocess_settings
from jppo.run.make import read_models_of_run
from tests.make import assert_close, logits, typed
from tests.models.conftest import config_of

LONG = dict(
    rope_type="longrope",
    original_max_position_embeddings=32,
    short_factor=list(np.linspace(1.0, 2.0, 32)),
    long_factor=list(np.linspace(1.0, 9.0, 32)),
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)


def stretched(scaling, longest=None, **changes):
    """A llama's rotary frequencies and their scale by jppo, and by transformers, for rows of `longest` tokens."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = config_of("llama-llama3") | dict(head_dim=64, rope_scaling=scaling) | changes
    cfg = config_reader.parse_config(config, path="config.json", longest=longest)
    theirs = transformers.LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"})
    of_kind = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    expected, scale = of_kind(theirs, torch.device("cpu"), seq_len=longest)
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
        dict(rope_type="dynamic", factor=3.0),
        LONG,
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


@pytest.mark.parametrize(("longest", "context"), [(None, 32), (7, 32), (32, 32), (33, 128), (500, 128)])
def test_longrope_is_chosen_by_the_longest_row_of_a_run(longest, context):
    """Its short factors are for the first context alone, so that no row of a run has others than vLLM's."""
    cfg, (ours, scale), (theirs, their_scale) = stretched(LONG, longest)
    np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=0)
    assert scale == pytest.approx(their_scale, rel=1e-12) and cfg.max_position_embeddings == context


@pytest.mark.parametrize(("response", "context"), [(24, 64), (25, 128)])
def test_trainer_and_engine_choose_by_the_settings_of_the_run(checkpoint, response, context):
    c = settings.default()
    c.model.path, c.model.init = str(checkpoint("phi3-partial")[0]), "random"
    c.data.max_prompt_length, c.data.max_response_length = 40, response
    models = read_models_of_run(typed(c))
    policy = models.policy
    assert policy.max_position_embeddings == models.critic.max_position_embeddings == context
    assert inprocess_settings(typed(c), mesh_of_shape((1, 1, 1))).cfg.kinds == policy.kinds


def test_dynamic_scaling_ends_where_it_would_depend_on_the_longest_row():
    cfg, (ours, _), (theirs, _) = stretched(dict(rope_type="dynamic", factor=3.0), 128)
    np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=0)
    assert cfg.max_position_embeddings == 128
    _, (same, _), (longer, _) = stretched(dict(rope_type="dynamic", factor=3.0), 129)
    assert np.array_equal(same, ours) and not np.allclose(longer, ours)


def test_rows_beyond_the_first_context_have_the_long_factors_of_transformers(checkpoint, rng, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory, model = checkpoint("phi3-partial")
    theirs = transformers.Phi3ForCausalLM(transformers.Phi3Config(**model.config.to_dict()))
    theirs.load_state_dict(model.state_dict())
    tokens = rng.integers(0, 51, (1, 70)).astype(np.int32)
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens).long()).logits.numpy()
    _, cfg = hf.read_config(directory, longest=70)
    values = hf.load_params(directory, cfg, head="lm", param_dtype=np.float32)
    assert_close(logits(cfg, values, tokens), expected)
