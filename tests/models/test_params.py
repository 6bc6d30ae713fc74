"""The table of parameters against the module's own, and its layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.models import config_reader, decoder, params
from tests.make import abstract_params

NAMES = (
    "qwen2-tied",
    "qwen2-untied",
    "llama-biased",
    "llama-tied",
    "qwen2-moe-mixed",
    "olmoe-grouped",
    "gpt-oss-clamped",
)
LATENT = ("deepseek2-grouped", "deepseek3-grouped")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("name", NAMES + LATENT)
def test_table_is_what_the_module_makes(hf_config, name, head):
    cfg = config_reader.parse_config(hf_config(name), path="config.json")
    made = jax.eval_shape(
        lambda key: decoder.init_params(cfg, key, head=head, param_dtype=jnp.bfloat16), jax.random.key(0)
    )
    assert made == abstract_params(cfg, head=head, param_dtype=jnp.bfloat16)
    axes = params.tree(params.table(cfg, head=head), lambda entry: entry.axes)
    ranks = [len(names) for names in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))]
    assert ranks == [leaf.ndim for leaf in jax.tree.leaves(made)]


def test_names_are_unique_and_axes_are_the_legends(hf_config):
    cfg = config_reader.parse_config(hf_config("llama-biased"), path="config.json")
    entries = params.table(cfg, head="lm")
    names = [name for entry in entries for name in entry.hf_names]
    assert len(set(names)) == len(names) and "model.layers.1.self_attn.o_proj.bias" in names
    by_path = {"/".join(entry.path): entry for entry in entries}
    assert by_path["layers/attn/q/kernel"].axes == ("layers", "embed", "heads", None)
    assert by_path["layers/attn/k/bias"].axes == ("layers", "kv_heads", None)
    assert by_path["layers/mlp_norm/scale"].axes == ("layers", "norm")
    assert by_path["layers/mlp/down/kernel"].axes == ("layers", "mlp", "embed")
    assert by_path["lm_head/kernel"].axes == ("vocab", "embed")
    latent = params.table(config_reader.parse_config(hf_config(LATENT[1]), path="config.json"), head="lm")
    axes = {entry.path[-2:]: entry.axes for entry in latent}
    assert axes["q_b", "kernel"] == ("layers", "embed", "heads", None) and axes["q_norm", "scale"] == ("layers", "norm")
    for entry in (*entries, *latent):  # a mesh axis may shard one axis of an array only
        named = [axis for axis in entry.axes if axis is not None]
        assert len(set(named)) == len(named)


def test_matrices_are_those_of_the_layers(hf_config):
    """Muon's inputs and outputs: a gate and an up of an expert are matrices of their own, and a bias is none."""
    cfg = config_reader.parse_config(hf_config("gpt-oss-clamped"), path="config.json")
    found = {"/".join(e.path[1:]): e.matrix and [[e.letters[i] for i in axes] for axes in e.matrix]
             for e in params.table(cfg, head="lm") if e.stacked}  # fmt: skip
    assert {path: axes for path, axes in found.items() if axes} == {
        "attn/q/kernel": [["D"], ["H", "A"]], "attn/k/kernel": [["D"], ["K", "A"]],
        "attn/v/kernel": [["D"], ["K", "A"]], "attn/o/kernel": [["H", "A"], ["D"]],
        "experts/router": [["D"], ["E"]], "experts/gate_up": [["D"], ["M"]], "experts/down": [["M"], ["D"]],
    }  # fmt: skip


def test_heads_are_cut_out_of_hfs_rows(hf_config, rng):
    cfg = config_reader.parse_config(hf_config("qwen2-tied"), path="config.json")  # H 6, A 10, D 40
    q = next(e for e in params.table(cfg, head="lm") if e.path == ("layers", "attn", "q", "kernel"))
    o = next(e for e in params.table(cfg, head="lm") if e.path == ("layers", "attn", "o", "kernel"))
    theirs = rng.normal(size=(60, 40))
    assert params.from_hf(q, theirs)[7, 2, 3] == theirs[2 * 10 + 3, 7]
    theirs = rng.normal(size=(40, 60))
    assert params.from_hf(o, theirs)[2, 3, 7] == theirs[7, 2 * 10 + 3]


@pytest.mark.parametrize(
    "name, head", [("llama-biased", "lm"), ("llama-biased", "value"), ("qwen2-moe-mixed", "lm"), (LATENT[1], "lm")]
)
def test_to_hf_inverts_from_hf(hf_config, rng, name, head):
    cfg = config_reader.parse_config(hf_config(name), path="config.json")
    for entry in params.table(cfg, head=head):
        theirs = rng.normal(size=(len(entry.hf_names), *entry.hf_shape)).astype(np.float32)
        ours = np.stack([params.from_hf(entry, x) for x in theirs]).reshape(entry.shape)
        back = params.to_hf(entry, jnp.asarray(ours))
        np.testing.assert_array_equal(back.reshape(theirs.shape), theirs)


def test_tied_and_value_models_have_no_language_head(hf_config):
    cfg = config_reader.parse_config(hf_config("qwen2-untied"), path="config.json")
    tied = dataclasses.replace(cfg, tie_word_embeddings=True)
    tops = lambda cfg, head: {e.path[0] for e in params.table(cfg, head=head)}  # noqa: E731
    assert tops(cfg, "lm") == {"embed", "layers", "norm", "lm_head"}
    assert tops(tied, "lm") == {"embed", "layers", "norm"}
    assert tops(cfg, "value") == tops(tied, "value") == {"embed", "layers", "norm", "score"}
