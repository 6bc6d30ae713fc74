"""The weights that a run begins with: of each model its own files, whatever `model.init` says of the policy's."""

import jax
import numpy as np
import pytest

from examples import arithmetic
from jppo.errors import UserError
from jppo.learner.make import make_mesh
from jppo.models import hf
from jppo.run.inputs import read_inputs
from jppo.run.make import make_learner
from tests.make import typed


def assert_read(found, path, cfg):
    """The trunk is the file's; a value head has no file."""
    expected = hf.load_params(path, cfg, head="lm", param_dtype="float32")
    for name, part in expected.items():
        for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(part), strict=True):
            np.testing.assert_array_equal(one, other)


def matrices(params):
    """The embedding and the kernels of the trunk, by name."""
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(params)}
    return {n: x for n, x in leaves.items() if n.endswith(("['kernel']", "['embedding']")) and "score" not in n}


def test_a_random_policy_has_the_teacher_and_the_critic_that_their_paths_name(small_run, tiny_model):
    c = small_run
    assert c.model.init == "random"
    c.ref.path, c.critic.path, c.algorithm.use_kl_in_reward = str(tiny_model), str(tiny_model), True
    inputs = read_inputs(typed(c))
    learner, begin = make_learner(typed(c), inputs, make_mesh(typed(c)))
    assert_read(learner.reference, tiny_model, inputs.reference)
    assert_read(begin.value, tiny_model, inputs.critic)


def test_a_random_policys_critic_is_random_as_well(small_run):
    """Its directory has no weights."""
    _, begin = make_learner(typed(small_run), read_inputs(typed(small_run)), make_mesh(typed(small_run)))
    policy, critic = matrices(begin.policy), matrices(begin.value)
    assert policy.keys() == critic.keys() and len(critic) == 8
    for name, drawn in critic.items():
        assert np.std(drawn) == pytest.approx(arithmetic.MODEL["initializer_range"], rel=0.2), name
        assert abs(np.corrcoef(drawn.ravel(), policy[name].ravel())[0, 1]) < 0.25, f"{name}: the policy's draw"
    assert not np.any(begin.value["score"]["kernel"]), "critic.value_head_std=0"


@pytest.mark.parametrize("setting", ["ref.path", "critic.path"])
def test_a_path_without_weights_is_refused_beside_a_random_policy(small_run, tmp_path, setting):
    section, name = setting.split(".")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        source = tmp_path / "model" / file
        if source.exists():
            (bare / file).write_bytes(source.read_bytes())
    small_run[section][name], small_run.algorithm.use_kl_in_reward = str(bare), True
    with pytest.raises(UserError, match=r"bare.*safetensors"):
        read_inputs(typed(small_run))
