"""Patterns of frozen parameters: what they find, in several families, and what is refused."""

import jax
import numpy as np
import pytest

from jppo.errors import UserError
from jppo.models import freeze, hf, params

ATTENTION = {("layers", "attn", name, "kernel") for name in "qkvo"}


def config_of(checkpoint, name):
    return hf.read_config(checkpoint(name)[0])[1]


def test_patterns_are_of_hugging_faces_names(checkpoint):
    cfg = config_of(checkpoint, "qwen2-tied")
    biases = {("layers", "attn", name, "bias") for name in "qkv"}
    found = freeze.find_frozen(cfg, "*.self_attn.*", "critic.freeze", head="value")
    assert found == ATTENTION | biases
    both = freeze.find_frozen(cfg, " *.self_attn.*.weight, model.embed_tokens.weight ", "critic.freeze", head="lm")
    assert both == ATTENTION | {("embed", "embedding")}
    all_but_head = freeze.find_frozen(cfg, "model.*", "critic.freeze", head="value")
    assert {entry.path for entry in params.table(cfg, head="value")} - all_but_head == {("score", "kernel")}


def test_each_stack_of_layers_learns_or_is_frozen(checkpoint):
    """Layers with attention are one stack, those with gated delta nets another."""
    cfg = config_of(checkpoint, "qwen3.5-periods")
    found = freeze.find_frozen(cfg, "*.linear_attn.*", "actor.freeze", head="lm")
    assert found and {path[2] for path in found} == {"delta"}


def test_the_two_parts_are_the_model(checkpoint):
    directory, _ = checkpoint("qwen2-tied")
    cfg = config_of(checkpoint, "qwen2-tied")
    values = hf.load_params(directory, cfg, head="lm", param_dtype="float32")
    frozen = freeze.find_frozen(cfg, "*.q_proj.*, *norm*", "actor.freeze", head="lm")
    learned, rest = freeze.divide(cfg, values, frozen, head="lm")
    size = [len(jax.tree.leaves(tree)) for tree in (values, learned, rest)]
    assert size == [14, 9, 5] and "q" not in learned["layers"]["attn"] and [*rest["layers"]["attn"]] == ["q"]
    jax.tree.map(np.testing.assert_array_equal, params.merge(rest, learned), values)


@pytest.mark.parametrize(
    "patterns, said",
    [
        (
            "*.attn.*",
            r"critic.freeze='\*.attn.\*': no parameter .*\*.attn.\*; .*model.layers.0.self_attn.q_proj",
        ),
        ("*.self_attn.*, lm_head.weight", r"no parameter has a name like lm_head.weight"),
        ("model.layers.0.*", r"freezes model.layers.0.*weight and not model.layers.1.* write \* for the number"),
        ("*", r"critic.freeze='\*' freezes every parameter"),
        ("model.*,score.weight", r"freezes every parameter"),
    ],
)
def test_what_is_refused(checkpoint, patterns, said):
    with pytest.raises(UserError, match=said):
        freeze.find_frozen(config_of(checkpoint, "qwen2-tied"), patterns, "critic.freeze", head="value")
