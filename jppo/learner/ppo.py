"""The learner: the stages of a step by compiled passes over rows, which `train.py` calls by name.

`Recipe` has the choices of a run, which `run/make.py` makes from the settings, `Passes` the compiled programs,
`Learner` both with the models. The losses are in `algorithms/losses.py`, the updates in `update.py`.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jppo.algorithms import kl, values
from jppo.learner import batch, estimate, packing, score, sharding, state, update
from jppo.learner.algorithm import Algorithm
from jppo.learner.stats import join_stages
from jppo.learner.streams import Step
from jppo.learner.trainable import CompiledLoss, Trainable, make_before
from jppo.learner.views import STATISTIC
from jppo.models import placing
from jppo.models.config import ModelConfig
from jppo.models.freeze import ALL_LEARN, Frozen
from jppo.models.lora import Lora, Weights
from jppo.types import Array, Batch, Params, Rows, TrainState, Trajectory

Model = tuple[Any, ModelConfig]  # the flax module, and its config


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfigs:
    """The models of a PPO run, its number of steps and the lengths of its prompts."""

    policy: ModelConfig
    critic: ModelConfig | None = None  # None: the estimator needs none
    reference: ModelConfig | None = None  # None: no KL is used
    adapters: Lora | None = None  # of the policy; None: full fine-tuning
    critic_adapters: Lora | None = None
    frozen: Frozen = ALL_LEARN  # parameters of the policy that are not learned
    critic_frozen: Frozen = ALL_LEARN
    total_steps: int = 0
    prompt_lengths: tuple[int, ...] = ()  # of the training prompts, in tokens; (): unknown

    @property
    def configs(self) -> list[ModelConfig]:
        """The configs of the models that there are."""
        return [cfg for cfg in (self.policy, self.critic, self.reference) if cfg is not None]


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of a run; None for a model that no setting needs."""

    policy: Model
    critic: Model | None
    reference: Model | None


token_mean: update.Mean = functools.partial(update.aggregate, usual="token-mean", scale=1.0)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The computations of a run: its algorithm, and what the core does around it."""

    algorithm: Algorithm
    bypass: bool  # the engine's log-probs are the old ones
    correction: estimate.Correction | None  # with `bypass`: by the current policy, in its loss
    kl_penalty: kl.Kind | None  # of the KL in the reward; None: no such KL
    kl_loss_type: kl.Kind | None  # of the KL that a term of the loss reads; None: no such KL
    kl_topk: tuple[tuple[str, Any], ...] = ()  # keyword arguments of `kl.forward_kl_topk`
    adapt_kl: Callable[[Array, Array], Array] | None = None  # (β, KL) -> the next β; None: a fixed β
    mean: update.Mean = token_mean  # the weights of the policy's tokens in a term
    value_mean: update.Mean = token_mean  # the weights of the critic's
    value_norm_decay: float | None = None  # of the statistics of returns; None: values are not normalised
    value_range: tuple[float, float] | None = None  # of a critic's histogram; None: a scalar head
    entropy_metric: bool = True  # False: the entropy is computed only where it is read
    earns: bool = False  # rewards may be earned inside a response
    branches: bool = False  # an episode may have several rows

    def policy_for_reward(self, policy: Weights) -> Weights | None:
        """Returns the policy for the reference pass of an exact KL in the reward, else None."""
        return policy if self.kl_penalty in kl.EXACT else None

    def reference_for_loss(self, reference: Weights | None) -> Weights | None:
        """Returns the reference for the policy loss of an exact KL, else None."""
        return reference if self.kl_loss_type in kl.EXACT else None


@dataclasses.dataclass(frozen=True)
class Passes:
    """The compiled functions of a step: the models' passes, compiled for every shape of rows, and one of the batch."""

    logprob: score.LogProb
    reference: Callable[..., tuple[Array | None, Array | None]] | None
    value: score.Value | None
    advantages: Callable[..., tuple[dict[str, Array], dict[str, Array]]]
    actor: CompiledLoss
    critic: CompiledLoss | None


def make_passes(
    models: Models,
    recipe: Recipe,
    *,
    temperature: float,
    chunk_tokens: int,
    mesh: Mesh | None = None,
    options: dict[str, Any] | None = None,
) -> Passes:
    """Makes the passes of a recipe, compiled when they are first called; `options` are the compiler's."""
    r, algorithm = recipe, recipe.algorithm
    heads = dict[str, Any](temperature=temperature, chunk_tokens=chunk_tokens, mesh=mesh)
    replicated = None if mesh is None else sharding.replicated(mesh)

    def compile_pass(fn: Callable[..., Any] | None, **jit_options: Any) -> Any:
        return None if fn is None else jax.jit(fn, compiler_options=options, **jit_options)

    reference = None
    if models.reference is not None:
        by_token = score.make_logprob(*models.reference, with_entropy=False, **heads)
        exact_pass = _make_exact_pass(models, r, r.kl_penalty, **heads)
        reads_ref_logprob = "ref_logprob" in algorithm.loss_reads
        reference = score.make_reference(r.kl_penalty, r.kl_loss_type, by_token, exact_pass, sampled=reads_ref_logprob)
    value = critic = None
    if models.critic is not None:
        value, loss = make_critic(models.critic, r)
        critic = CompiledLoss(update.make_accumulate(loss, mesh=mesh, options=options), VALUE_READS)
    statistics = algorithm.statistics_of(algorithm.reads)
    with_entropy = r.entropy_metric or "entropy" in algorithm.reads
    old_logprob = compile_pass(
        score.make_logprob(*models.policy, with_entropy=with_entropy, compare=True, statistics=statistics, **heads)
    )
    advantages = estimate.make_advantages(
        algorithm,
        kl_penalty=r.kl_penalty,
        correction=None if r.bypass else r.correction,
        bypass=r.bypass,
        value_norm_decay=r.value_norm_decay,
    )
    actor = CompiledLoss(
        update.make_accumulate(actor_loss_of(models, r, **heads), mesh=mesh, options=options),
        actor_reads(r),
        load=make_router_load(models, r, mesh, options),
        before=make_before(algorithm, old_logprob),
    )
    return Passes(
        logprob=old_logprob,
        reference=compile_pass(reference),
        value=compile_pass(value),
        advantages=jax.jit(advantages, out_shardings=replicated),
        actor=actor,
        critic=critic,
    )


VALUE_READS = ("value", "returns")  # the arrays of the batch that a critic's loss reads


def actor_reads(r: Recipe) -> tuple[str, ...]:
    """Returns the names of the batch's arrays that the actor's loss reads, `weight` where there is one."""
    term_arrays = tuple(name for name in ("advantage", "positive", "given") if name in r.algorithm.loss_reads)
    sampled_kl = r.kl_loss_type is not None and r.kl_loss_type not in kl.EXACT
    ref_arrays = ("ref_logprob",) if sampled_kl or "ref_logprob" in r.algorithm.loss_reads else ()
    return ("old_logprob", "weight", *term_arrays, *ref_arrays)


def make_router_load(
    models: Models, r: Recipe, mesh: Mesh | None, options: dict[str, Any] | None
) -> Callable[[Weights, Rows], Array] | None:
    """Makes the compiled pass that counts the policy's tokens by expert; None without a load-balancing loss."""
    if not (_has_experts(models.policy) and "load" in r.algorithm.loss_reads):
        return None
    replicated = None if mesh is None else sharding.replicated(mesh)
    return jax.jit(score.make_router_load(*models.policy), out_shardings=replicated, compiler_options=options)


def actor_loss_of(models: Models, r: Recipe, *, by_token: bool = False, **heads: Any) -> update.Loss:
    """Makes the actor's loss of a recipe; `heads` are arguments of `score.make_logprob`, `by_token` is of `update`."""
    # Without a pass for the old log-probs the update computes the entropy, and compares replayed experts.
    algorithm = r.algorithm if _has_experts(models.policy) else r.algorithm.without_routers()
    reads = algorithm.loss_reads
    with_entropy = "entropy" in reads or (r.bypass and r.entropy_metric)
    options = dict[str, Any](compare=r.bypass, routed=_has_experts(models.policy), **heads)
    options |= dict(statistics=algorithm.statistics_of(reads))
    logprob = score.make_logprob(*models.policy, with_entropy=with_entropy, **options)
    correct = estimate.make_bypass_correction(r.correction) if r.bypass and r.correction is not None else None
    return update.make_actor_loss(
        score.make_logprob_kl(r.kl_loss_type, logprob, _make_exact_pass(models, r, r.kl_loss_type, **options)),
        algorithm,
        mean=r.mean,
        entropy_metric=with_entropy,
        bypass_correction=correct,
        by_token=by_token,
    )


def _has_experts(model: Model) -> bool:
    return model[1] is not None and model[1].experts is not None


def _make_exact_pass(models: Models, r: Recipe, kind: kl.Kind | None, **options: Any) -> score.Exact | None:
    """Makes the pass of an exact KL; None for another kind, or without a reference."""
    if not isinstance(kind, str) or kind not in kl.EXACT or models.reference is None:
        return None
    divergence = kl.EXACT[kind]
    if kind == "forward_kl_topk":
        divergence = functools.partial(kl.forward_kl_topk, **dict(r.kl_topk))
    return score.make_exact(divergence, models.policy, models.reference, **options)


def make_critic(model: Model, r: Recipe) -> tuple[score.Value, update.Loss]:
    """Returns two functions, the critic's values and its loss; the values are the expectation of a histogram head."""
    output, span = score.make_value(model[0]), r.value_range
    loss = update.make_critic_loss(output, r.algorithm, mean=r.value_mean, value_range=span)
    return output if span is None else lambda *args: values.histogram_value(output(*args), span), loss


@dataclasses.dataclass(frozen=True)
class Epochs:
    """How often, and in which mini-batches, a model goes over the batch of a step."""

    count: int
    mini_batch_size: int  # sequences
    shuffle: bool  # new mini-batches in every epoch
    most_sequences: int  # of any step, which one program orders
    warmup: int  # first steps, in which the policy does not learn
    in_warmup: int  # epochs over the batch of these

    def of_step(self, step: int) -> int:
        """Returns the number of epochs over the batch of a step."""
        return self.in_warmup if step < self.warmup else self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """The compiled passes, and the models that they use."""

    mesh: Any
    cfg: ModelConfig  # of the policy, its vocabulary padded for the mesh
    plan: packing.Plan
    recipe: Recipe
    passes: Passes
    actor: Trainable
    critic: Trainable | None
    reference: Params | None

    def policy(self, now: TrainState) -> Weights:
        """Returns the policy, its frozen base included."""
        return self.actor.model(now.policy)

    def value(self, now: TrainState) -> Weights | None:
        """Returns the critic in the same way."""
        return None if self.critic is None else self.critic.model(now.value)

    def spare(self) -> state.Spare:
        """Returns the rows of mesh padding by field of the train state; {} without any."""
        return state.spare_rows(policy=self.actor, value=self.critic)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLearner(Learner):
    """The learner of a run, whose steps are all alike."""

    shape: tuple[int, int]  # of a step's flat batch, [B, L]
    actor_epochs: Epochs
    critic_epochs: Epochs


class Clock(Protocol):
    """A stopwatch of the stages of a step, such as `runlog.timers.Timers`."""

    def __call__(self, stage: str) -> contextlib.AbstractContextManager[None]:
        """Measures the time of a `with` block."""

    def part(self, label: str, total: int) -> Callable[[], None]:
        """Begins a part of a stage that is done in `total` pieces; returns the function to call after each."""

    def counted(self, label: str, items: Iterable[batch.Mini], total: int) -> Iterator[batch.Mini]:
        """Yields the items, and counts them as pieces of a part."""


def silent() -> None:
    """Does nothing after a micro-batch: the default where progress is not shown."""


def _run_rows(run: Callable[[Rows], Any], data: Batch, micros: Sequence[batch.Micro], done: Callable[[], None]) -> Any:
    """Runs a pass over all micro-batches, at most two at once; returns its results in the layout of the batch.

    `done` is called after each micro-batch.
    """
    results = list[Any]()
    for micro in micros:
        results.append(run(micro.device))
        jax.block_until_ready(results[-2:-1])
        done()
    outputs = placing.fetch(results)
    return jax.tree.map(
        lambda *parts: batch.unpack_rows(data, [(m.host, x) for m, x in zip(micros, parts, strict=True)]), *outputs
    )


def with_old_logprob(
    passes: Passes,
    recipe: Recipe,
    data: Batch,
    micros: Sequence[batch.Micro],
    policy: Weights,
    done: Callable[[], None] = silent,
) -> Batch:
    """Adds the old log-probs: the trainer's, with their entropy, or the engine's with `bypass`."""
    scores = None
    if not recipe.bypass:
        policy = placing.to_device(policy)
        scores = _run_rows(lambda rows: passes.logprob(policy, rows), data, micros, done)
    return add_old_logprob(recipe, data, scores)


def add_old_logprob(recipe: Recipe, data: Batch, old_scores: score.Scores | None) -> Batch:
    """Adds the old policy's log-probs, entropy and statistics from its pass; without one the engine's log-probs."""
    if old_scores is None:
        return data.with_arrays(old_logprob=data.rollout_logprob)
    return data.with_arrays(
        old_logprob=old_scores.logprob,
        entropy=old_scores.entropy if recipe.entropy_metric or "entropy" in recipe.algorithm.reads else None,
        routing_differs=old_scores.routing_differs,
        **{f"{STATISTIC}{name}": x for name, x in (old_scores.statistics or {}).items()},
    )


def with_reference(
    passes: Passes,
    recipe: Recipe,
    data: Batch,
    micros: Sequence[batch.Micro],
    policy: Weights,
    reference: Weights | None,
    done: Callable[[], None] = silent,
) -> Batch:
    """Adds the reference's log-probs, or the exact KL to it, if a KL needs them."""
    if passes.reference is None or reference is None:
        return data
    run, models = passes.reference, placing.to_device((reference, recipe.policy_for_reward(policy)))
    ref_logprob, exact_kl = _run_rows(lambda rows: run(*models, rows), data, micros, done)
    return data.with_arrays(ref_logprob=ref_logprob, exact_kl=exact_kl)


def with_values(
    passes: Passes, data: Batch, micros: Sequence[batch.Micro], value: Weights | None, done: Callable[[], None] = silent
) -> Batch:
    """Adds the critic's value of every state, if there is a critic."""
    if passes.value is None:
        return data
    run, value = passes.value, placing.to_device(value)
    return data.with_arrays(value=_run_rows(lambda rows: run(value, rows), data, micros, done))


def with_advantages(
    passes: Passes, data: Batch, kl_coef: Array, mesh: Mesh, value_norm: Array | None = None
) -> tuple[Batch, dict[str, float]]:
    """Adds weights, advantages and returns, and removes rejected tokens; returns also the metrics of all these."""
    rows = placing.put(data, sharding.whole_rows_sharding(mesh))
    added, metrics = jax.device_get(passes.advantages(rows, kl_coef, value_norm))
    data = dataclasses.replace(data, mask=added.pop("mask")).with_arrays(**added)
    if math.isnan(metrics.get("critic/vf_explained_var", 0.0)):  # of equal returns
        del metrics["critic/vf_explained_var"]
    return data, {name: float(x) for name, x in metrics.items()}


def score_batch(learner: Learner, now: TrainState, data: Batch, micros: Sequence[batch.Micro], clock: Clock) -> Batch:
    """Adds the scores of the learner's models to the batch: log π_old, log π_ref or the exact KL, and V."""
    passes, policy = learner.passes, learner.policy(now)

    def count() -> Callable[[], None]:
        return clock.part("micro-batches", len(micros))

    with clock("old_log_prob"):
        data = with_old_logprob(passes, learner.recipe, data, micros, policy, count())
    if learner.reference is not None:
        with clock("ref"):
            data = with_reference(passes, learner.recipe, data, micros, policy, learner.reference, count())
    if learner.critic is not None:
        with clock("values"):
            data = with_values(passes, data, micros, learner.value(now), count())
    return data


def learn(
    learner: StepLearner,
    now: TrainState,
    data: Batch,
    trajectories: Sequence[Trajectory],
    clock: Clock,
    after_actor: Callable[[TrainState], None] = lambda _: None,
) -> tuple[TrainState, dict[str, float]]:
    """Updates actor and critic on the batch, each with its own mini-batches and epochs.

    `after_actor` is called between the two updates with the step's state, whose policy is final.
    """
    version, metrics = int(now.step), dict[str, float]()

    def epoch_mini_batches(epochs: Epochs, stream: Step, trainable: Trainable) -> Iterator[batch.Mini]:
        """Yields the mini-batches of all epochs of a model, ordered by its stream."""
        size, count, total = epochs.mini_batch_size, len(trajectories), epochs.of_step(version)
        for epoch in range(total):
            order = state.order(now, stream, epoch, count, shuffle=epochs.shuffle, max_count=epochs.most_sequences)
            minis = batch.mini_batches(
                data, trajectories, reads=trainable.loss.reads, order=order, mini_batch_size=size, plan=learner.plan,
                mesh=learner.mesh,
            )  # fmt: skip
            yield from clock.counted(
                f"mini-batches of epoch {epoch + 1} of {total}", minis, batch.mini_batch_count(count, size)
            )

    if (epochs := learner.actor_epochs).of_step(version):
        with clock("update_actor"):  # the schedule of the learning rate starts with the first step that has an epoch
            step = state.scalar(version - (0 if epochs.in_warmup else epochs.warmup), now.step)
            policy, policy_opt, metrics = learner.actor.learn(
                now.policy, now.policy_opt, step, epoch_mini_batches(epochs, Step.ACTOR_ORDER, learner.actor),
                learner.recipe.reference_for_loss(learner.reference), key=now.key,
            )  # fmt: skip
        now = dataclasses.replace(now, policy=policy, policy_opt=policy_opt)
        if "entropy" in data.arrays:  # of the policy that sampled, which the step reports
            metrics.pop("actor/entropy", None)
    if learner.critic is not None:
        after_actor(dataclasses.replace(now, step=state.scalar(version + 1, now.step)))
        with clock("update_critic"):
            minis = epoch_mini_batches(learner.critic_epochs, Step.CRITIC_ORDER, learner.critic)
            value, value_opt, critic_metrics = learner.critic.learn(now.value, now.value_opt, now.step, minis)
        now, metrics = dataclasses.replace(now, value=value, value_opt=value_opt), join_stages(critic_metrics, metrics)
    return now, metrics
