"""Compiles every pass and update of a run before its first step."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jppo.learner import batch, packing, ppo, sharding
from jppo.models import placing
from jppo.models.lora import Weights, join
from jppo.types import Counts, Params, TrainState


def compile_all(
    passes: ppo.Passes,
    recipe: ppo.Recipe,
    plan: packing.Plan,
    mesh: Mesh,
    *,
    now: TrainState,
    reference: Weights | None,
    actor: ppo.ModelUpdate,
    critic: ppo.ModelUpdate | None,
    shape: tuple[int, int],
    part: Callable[[str, int], Callable[[], None]] = lambda *_: ppo.silent,
) -> None:
    """Runs every pass once on empty rows of every shape, so that no later step compiles; nothing is learned.

    `shape` is the batch's, [B, L]. `part` begins the compilation of so many programs.
    """
    whole = actor.model(now.policy)
    judge = None if critic is None else critic.model(now.value)
    descents: list[tuple[ppo.ModelUpdate, Params, Any, tuple[Any, ...]]] = [
        (actor, now.policy, now.policy_opt, (recipe.in_loss(reference),))
    ]
    if critic is not None:
        descents.append((critic, now.value, now.value_opt, ()))
    greedy = np.zeros(0, np.float32) if recipe.estimator.greedy else None
    nobody = np.zeros(0, np.int32)
    how = dict[str, Any](earns=recipe.earns, episode=nobody if recipe.branches else None)
    how["parts"] = recipe.estimator.parts
    data = batch.flatten([], [], nobody, greedy, shape=shape, **how)
    done = part("programs compiled", len(plan.shapes) * (1 + len(descents)) + len(descents))
    rows = [packing.empty_rows(of_rows, plan) for of_rows in plan.shapes]
    for one in rows:
        micros = [batch.Micro(one, sharding.put_rows(one, mesh))]
        passes.logprob(placing.to_device(whole), micros[0].device)  # for the check before the first step, in any recipe
        data = ppo.with_old_logprob(passes, recipe, data, micros, whole)
        data = ppo.with_reference(passes, recipe, data, micros, whole, reference)
        data = ppo.with_values(passes, data, micros, judge)
        done()
    if passes.reference is None and (recipe.kl_penalty or recipe.kl_loss_type):  # by a server
        data = batch.with_reference(data, [])
    kl_coef = placing.put(np.float32(0), sharding.replicated(mesh))  # placed as the state's is
    data, _ = ppo.with_advantages(passes, data, kl_coef, mesh, now.value_norm)
    counts = Counts(tokens=np.ones((), np.float32), sequences=np.ones((), np.float32))
    for one in rows:
        mini = batch.Mini([batch.scored(data, one)], counts, sharding.rows_sharding(mesh), batch=data)
        for descent, learned, _, further in descents:
            models = placing.to_device((learned, descent.base, further))
            taken = mini if descent.select is None else descent.select(join(*models[:2]), mini, now.key, now.step, 0)
            taken = batch.with_dropout(taken, now.key, now.step, 0) if descent.drops else taken
            micro = placing.put(taken.micros[0], taken.place)
            whole_counts = descent.counts(join(*models[:2]), counts, [micro.rows])
            jax.block_until_ready(descent.accumulate(*models[:2], descent.zeros(), micro, whole_counts, *models[2]))
            done()
    for descent, learned, opt, _ in descents:
        carry = descent.zeros() if descent.exchange is None else descent.exchange(descent.zeros())
        descent.apply.lower(*placing.on_device_shapes((learned, opt)), carry, now.step, np.True_).compile()
        done()
