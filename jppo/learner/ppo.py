"""A run's mathematics as compiled passes over rows, and the descent of one model: what `train.py` calls by name."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jppo.algorithms import correction, kl, losses, masked
from jppo.learner import batch, correct, estimate, packing, score, sharding, update
from jppo.models import offload, placing
from jppo.models.families import ModelConfig
from jppo.models.lora import Base, Weights, join
from jppo.structs import Array, Counts, Params, Rows, Scored, TrainState

Model = tuple[Any, ModelConfig]  # the flax module, and what it was made from


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of a run; None where nothing asks for one."""

    policy: Model
    critic: Model | None
    reference: Model | None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is computed: pure functions with their numbers bound."""

    estimator: estimate.Estimator
    policy_loss: Callable[..., losses.PolicyLoss]
    by_sequence: bool  # the policy loss is one number for a sequence
    weigh: update.Weigh  # tokens in the policy's loss
    weigh_value: update.Weigh  # tokens in the critic's
    cliprange_value: float
    entropy_coeff: float
    kl_penalty: str | None  # of the KL in the reward; None: there is none
    kl_loss_type: str | None  # of the KL in the loss; None: there is none
    kl_loss_coef: float
    bypass: bool  # the sampler's log-probs are the old ones
    correction: correct.Correction | None
    entropy_metric: bool = True  # False: the entropy is computed only where the loss has it

    def in_reward(self, policy: Weights) -> Weights | None:
        """The policy where the pass of the reference reads it: for an exact KL."""
        return policy if self.kl_penalty in kl.EXACT else None

    def in_loss(self, reference: Weights | None) -> Weights | None:
        """The reference where the policy's loss reads it: for an exact KL."""
        return reference if self.kl_loss_type in kl.EXACT else None


@dataclasses.dataclass(frozen=True)
class Passes:
    """The compiled functions of a step; one compilation of each for every shape of rows."""

    logprob: score.LogProb
    entropy: Callable[[Rows, Array], Array]
    gap: Callable[[Rows, Array], dict[str, Array]]
    reference: Callable[..., tuple[Array | None, Array | None]] | None
    value: score.Value | None
    correct: Callable[..., tuple[Array | None, Array, dict[str, Array]]] | None
    normalized: Callable[..., Array]
    reward: Callable[..., tuple[Array, dict[str, Array]]]
    sequences: Callable[[Array, Array, Array], Array] | None
    tokens: Callable[..., dict[str, Array]]
    finish: Callable[..., tuple[Array, dict[str, Array]]]
    actor: Callable[..., tuple[update.Carry, dict[str, Array]]]
    critic: Callable[..., tuple[update.Carry, dict[str, Array]]] | None


def make_passes(
    models: Models,
    recipe: Recipe,
    *,
    temperature: float,
    chunk_tokens: int,
    sequences: int,
    mesh: Mesh | None = None,
    options: dict[str, Any] | None = None,
) -> Passes:
    """Closes the pure functions over models and numbers; `sequences` is how many trajectories a step has.

    `options` are the compiler's for the programs of the models.
    """
    r = recipe
    heads = dict[str, Any](temperature=temperature, chunk_tokens=chunk_tokens, mesh=mesh)
    together = sharding.join_positions(mesh)

    def logprob(model: Model, with_entropy: bool) -> score.LogProb:
        return score.make_logprob(*model, **heads, with_entropy=with_entropy)

    def along(fn: Callable[..., Any]) -> Any:
        """What walks along rows, compiled."""
        return jax.jit(functools.wraps(fn)(lambda *args: fn(*together(args))))

    reference = exact = None
    if models.reference is not None:
        if r.kl_penalty in kl.EXACT or r.kl_loss_type in kl.EXACT:
            exact = score.make_exact(models.policy, models.reference, **heads)
        reference = score.make_reference(r.kl_penalty, r.kl_loss_type, logprob(models.reference, False), exact)
    # Without a pass for the old log-probs the update is where the entropy is seen.
    with_entropy = r.entropy_coeff != 0.0 or (r.bypass and r.entropy_metric)
    in_update = logprob(models.policy, with_entropy=with_entropy)
    actor = update.make_actor_loss(
        score.make_logprob_kl(r.kl_loss_type, in_update, exact),
        r.policy_loss,
        r.weigh,
        by_sequence=r.by_sequence,
        entropy_coeff=r.entropy_coeff,
        entropy_metric=with_entropy,
        kl_loss_coef=r.kl_loss_coef,
    )
    value = critic = None
    if models.critic is not None:
        value = score.make_value(models.critic[0])
        critic = update.make_accumulate(
            update.make_critic_loss(value, r.weigh_value, cliprange_value=r.cliprange_value), mesh=mesh, options=options
        )
    e = r.estimator
    return Passes(
        logprob=jax.jit(logprob(models.policy, with_entropy=r.entropy_metric), compiler_options=options),
        entropy=jax.jit(lambda rows, entropy: masked.masked_sum(entropy, rows.mask)),
        gap=along(correct.make_gap()),
        reference=None if reference is None else jax.jit(reference, compiler_options=options),
        value=None if value is None else jax.jit(value, compiler_options=options),
        correct=None if r.correction is None else along(correct.make_correct(r.correction)),
        normalized=jax.jit(correction.normalized),
        reward=along(estimate.make_reward(sequences)),
        sequences=None if e.sequences is None else jax.jit(e.sequences),
        tokens=along(estimate.make_tokens(e)),
        finish=jax.jit(functools.partial(estimate.finish, whiten=e.whiten)),
        actor=update.make_accumulate(actor, mesh=mesh, options=options),
        critic=critic,
    )


@dataclasses.dataclass(frozen=True)
class Descent:
    """What one model is trained by: its compiled gradient, optimizer step and accumulator."""

    accumulate: Callable[..., tuple[update.Carry, dict[str, Array]]]
    apply: jax.stages.Wrapped
    zeros: Callable[[], update.Carry]
    exchange: Any  # of gradients, between groups of devices; None where there is one group
    name: str  # 'actor' or 'critic', of its metrics
    base: Base | None = None  # what stays of a model with adapters
    spare: tuple[Any, Any] = ((), ())  # of what is learned and of the optimizer: rows for the mesh alone

    def model(self, learned: Params) -> Weights:
        """The whole model."""
        return join(learned, self.base)


def score_rows(
    passes: Passes, recipe: Recipe, rows: Sequence[Rows], policy: Weights
) -> tuple[list[Scored], dict[str, float]]:
    """The old log-probs, the gap to the sampler's and its correction, as the recipe says; and their metrics."""
    if recipe.bypass:
        return [Scored(rows=one, logp=one.sampler_logp) for one in rows], {}
    policy = offload.to_device(policy)
    found = batch.each(lambda one: passes.logprob(policy, one), rows)
    scored = [Scored(rows=one, logp=logp) for one, (logp, _) in zip(rows, found, strict=True)]
    gaps = batch.each(lambda one, pair: passes.gap(one, pair[0]), rows, found)
    metrics = correct.gap_metrics(gaps)
    if recipe.entropy_metric:
        entropy = jax.device_get(batch.each(lambda one, pair: passes.entropy(one, pair[1]), rows, found))
        tokens = sum(float(one["tokens"]) for one in jax.device_get(gaps))
        metrics["actor/entropy"] = float(sum(entropy)) / max(tokens, 1.0)
    if recipe.correction is not None:
        scored, more = correct.corrected(passes, recipe.correction, scored, gaps)
        metrics |= more
    return scored, metrics


def refer(
    passes: Passes, recipe: Recipe, scored: Sequence[Scored], policy: Weights, reference: Weights | None
) -> tuple[list[Scored], list[Array | None]]:
    """The reference's log-probs where the loss wants them, and the KL of the reward where there is one."""
    if passes.reference is None or reference is None:
        return list(scored), [None] * len(scored)
    run = passes.reference
    models = offload.to_device((reference, recipe.in_reward(policy)))
    found = batch.each(lambda one: run(*models, one.rows, one.logp), scored)
    with_reference = [dataclasses.replace(one, ref_logp=pair[0]) for one, pair in zip(scored, found, strict=True)]
    return with_reference, [penalty for _, penalty in found]


def compile_all(
    passes: Passes,
    recipe: Recipe,
    plan: packing.Plan,
    mesh: Mesh,
    *,
    now: TrainState,
    reference: Weights | None,
    actor: Descent,
    critic: Descent | None,
    sequences: int,
) -> None:
    """Runs every pass once on empty rows of every shape, so that no later step compiles; nothing is learned."""
    whole = actor.model(now.policy)
    judge = None if critic is None else critic.model(now.value)
    descents: list[tuple[Descent, Params, Any, tuple[Any, ...]]] = [
        (actor, now.policy, now.policy_opt, (recipe.in_loss(reference),))
    ]
    if critic is not None:
        descents.append((critic, now.value, now.value_opt, ()))
    kl_coef = placing.put(jnp.float32(0), sharding.replicated(mesh))  # placed as the state's is
    outcome = estimate.Outcome(
        score=np.zeros(sequences, np.float32),
        group=np.zeros(sequences, np.int32),
        greedy=np.zeros(sequences, np.float32),
    )
    counts = Counts(tokens=np.ones((), np.float32), sequences=np.ones((), np.float32))
    place = sharding.rows_sharding(mesh)
    for shape in plan.shapes:
        rows = [sharding.put_rows(packing.empty_rows(shape), mesh)]
        passes.logprob(offload.to_device(whole), rows[0])  # also of use before the first step, whatever the recipe
        scored, _ = score_rows(passes, recipe, rows, whole)
        scored, penalty = refer(passes, recipe, scored, whole, reference)
        scored = with_values(passes, scored, judge)
        scored, _ = estimate.advantages(passes, scored, penalty, outcome, kl_coef)
        micro = placing.put(placing.fetch(scored[0]), place)  # as it comes from the host in a step
        for how, learned, _, further in descents:
            models = offload.to_device((learned, how.base, further))
            jax.block_until_ready(how.accumulate(*models[:2], how.zeros(), micro, counts, *models[2]))
    for how, learned, opt, _ in descents:
        carry = how.zeros() if how.exchange is None else how.exchange(how.zeros())
        how.apply.lower(*offload.shapes((learned, opt)), carry, now.step, np.True_).compile()


def with_values(passes: Passes, scored: Sequence[Scored], value: Weights | None) -> list[Scored]:
    """The critic's values of every state, where there is a critic."""
    if passes.value is None:
        return list(scored)
    run, value = passes.value, offload.to_device(value)
    found = batch.each(lambda one: run(value, one.rows), scored)
    return [dataclasses.replace(one, value=new) for one, new in zip(scored, found, strict=True)]


def descend(
    how: Descent, params: Params, opt: Any, step: Array, minis: Iterable[batch.Mini], *further: Any
) -> tuple[Params, Any, dict[str, float]]:
    """One optimizer step a mini-batch, gradients accumulated over its micro-batches.

    What waits on the host is on the devices while it is used: the models for all of it, the optimizer for its steps.
    """
    before, history = params, []
    base, further = offload.to_device((how.base, further))
    params = offload.take(params)
    for mini in minis:
        carry, sums = how.zeros(), list[Any]()
        for micro in mini.micros:
            rows = placing.put(micro, mini.place)
            carry, part = how.accumulate(params, base, carry, rows, mini.counts, *further)
            jax.block_until_ready(sums[-1:])  # else the rows of all of them would be there at once
            sums.append(part)
        carry = carry if how.exchange is None else how.exchange(carry)
        params, stepped, stats = how.apply(params, offload.take(opt), carry, step, np.bool_(mini.learns))
        opt = offload.put_back(stepped, opt)
        history.append((sums, jax.block_until_ready(stats)))
        del carry, stepped  # before there are others
    params = jax.block_until_ready(offload.put_back(params, before))
    return params, opt, _mean_metrics(jax.device_get(history), how.name)


def _mean_metrics(history: list[tuple[list[dict[str, Any]], dict[str, Any]]], name: str) -> dict[str, float]:
    """Micro-batches add up to their mini-batch, except for extremes; mini-batches are averaged."""
    minis = []
    for sums, stats in history:
        mini = {key: float(sum(part[key] for part in sums)) for key in sums[0] if not key.endswith(("_max", "_min"))}
        mini |= {key: float(max(part[key] for part in sums)) for key in sums[0] if key.endswith("_max")}
        mini |= {key: float(min(part[key] for part in sums)) for key in sums[0] if key.endswith("_min")}
        minis.append(mini | {f"{name}/{key}": float(value) for key, value in stats.items()})
    out = {key: float(np.mean([mini[key] for mini in minis])) for key in minis[0]}
    out |= {key: max(mini[key] for mini in minis) for key in out if key.endswith("_max")}
    out |= {key: min(mini[key] for mini in minis) for key in out if key.endswith("_min")}
    return out
