"""After `prepare_programs` and one step nothing is compiled, whatever lengths the batches have."""

import contextlib

import jax
import numpy as np
import pytest

from jppo.learner import catalogue, estimate, sharding, state
from jppo.learner.ppo import Epochs, StepLearner
from jppo.learner.programs import list_programs
from jppo.run.make import prepare_programs

CORRECTED = dict(
    correction=estimate.Correction("sequence", 0.5, 2.0, normalize=True, rules=(("token_k1", 0.5, 2.0),)),
    kl_penalty="full",
    kl_loss_type="full+",
    value_norm_decay=0.8,
    value_range=(-3.0, 3.0),
)
CLIP = dict(clip_low=0.2, clip_high=0.2)
SELECTED = dict(loss=catalogue.clip_cov(ratio=0.2, low=-9.0, high=9.0, **CLIP))
EPOCHS = Epochs(1, 8, shuffle=False, most_sequences=16, warmup=0, in_warmup=0)
EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
    """The list of what XLA compiles inside the block: one entry each."""
    seen, listening = [], True

    def listen(event, _, **about):
        if listening and event == EVENT:
            seen.append(about.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    listening = False  # public jax has no way to take one listener away


def test_the_count_sees_a_compilation():
    with compilations() as seen:
        jax.jit(lambda x: x * 3.0 + 1.0)(np.float32(2.0))
    assert seen
    jax.jit(lambda x: x * 3.0 + 2.0)(np.float32(2.0))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "mesh_shape,changes",
    [
        pytest.param((1, 2, 1, 1), {}, marks=pytest.mark.slow),
        ((1, 1, 1), CORRECTED),
        ((1, 1, 1), SELECTED),
        pytest.param((1, 1, 1), {}, marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 2), {}, marks=pytest.mark.slow),
    ],
)
def test_no_step_after_the_first_compiles(new_learner, make_recipe, drawn, mesh_shape, changes):
    ours = new_learner(mesh_shape, make_recipe(**changes))
    plan = ours.plan("buckets", 23, 8)  # two shapes
    policy, value, reference = ours.weights("actor", 0), ours.weights("critic", 2), ours.weights("actor", 1)
    how = {}
    how["actor"], policy_opt = ours.make_trainable("actor", policy, lr=1e-3, tx=ours.adamw)
    how["critic"], value_opt = ours.make_trainable("critic", value, lr=1e-3, tx=ours.adamw)
    value_norm = (0.0, 0.0, 0.0) if "value_norm_decay" in changes else None
    now = state.begin_state(policy, policy_opt, value, value_opt, kl_coef=0.0, seed=0, value_norm=value_norm)
    learner = StepLearner(
        mesh=ours.mesh, cfg=None, plan=plan, shape=ours.shape, recipe=ours.recipe, passes=ours.passes,
        reference=reference, actor_epochs=EPOCHS, critic_epochs=EPOCHS, **how,
    )  # fmt: skip
    prepare_programs(list_programs(learner, now))
    step = jax.device_put(np.int32(0), sharding.replicated(ours.mesh))
    batches = [drawn(16, seed=seed) for seed in range(4)]
    # The first batch has one shape only, so that the others bring shapes that no step has had.
    shortest = min(batches[0][0], key=lambda t: len(t.tokens))
    batches[0] = ([shortest] * 16, batches[0][1])
    shapes, judge = [], ours.recipe.reference_for_loss(reference)
    for number, (trajectories, scores) in enumerate(batches):
        with compilations() as seen:
            flat, _ = ours.score(trajectories, scores, plan=plan, policy=policy, reference=reference, value=value)
            minis, of_critic = (
                list(ours.minis(flat, trajectories, plan=plan, mini=8, name=name)) for name in ("actor", "critic")
            )
            value, value_opt, _ = how["critic"].learn(value, value_opt, step, of_critic)
            policy, policy_opt, _ = how["actor"].learn(policy, policy_opt, step, minis, judge, key=now.key)
            step = step + 1
        shapes.append({micro.rows.mask.shape for mini in minis for micro in mini.micros})
        # The first also has `step + 1`, which is of this test.
        assert seen in ([], ["jit(add)"] * (not number)), f"step {number} compiled {seen}"
    assert len(set.union(*shapes)) > len(shapes[0]), "the later batches must bring shapes that the first had not"
