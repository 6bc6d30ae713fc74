"""Recomputes a recorded step with the functions of the run: `Replay` has its models, `run_step` is the step."""

import dataclasses
import tempfile
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jppo import settings
from jppo.data.stream import Cursor
from jppo.errors import UserError
from jppo.learner import batch, make, ppo, state
from jppo.learner.episodes import Episodes, make_episodes, with_branches
from jppo.learner.ppo import StepLearner
from jppo.learner.views import COLUMN
from jppo.plugins.replay import bundle as bundles
from jppo.plugins.replay.bundle import Bundle, Computed
from jppo.plugins.replay.record import observed, update_row
from jppo.rewards.make import make_reward_sum, plan_parts
from jppo.rewards.parts import RewardSum, sample_of
from jppo.rollout.protocol import RolloutError
from jppo.run import resume
from jppo.run.make import make_learner, read_models_of_run
from jppo.run.tokenizer import read_tokenizer
from jppo.runlog.checkpoint_arrays import Damaged, restore_field
from jppo.runlog.timers import Timers
from jppo.samples.make import mark_stale
from jppo.samples.queue import StepSamples
from jppo.settings import Settings, table
from jppo.settings.options import PREFIX
from jppo.train import make_batch
from jppo.types import Batch, Reward, TrainState


@dataclasses.dataclass(frozen=True)
class Replay:
    """The parts of a recorded step's run: no engine, no servers."""

    c: Settings
    bundle: Bundle
    tokenizer: Any
    learner: StepLearner
    begin: TrainState  # before the first step, or its shapes
    models: dict[str, str]  # as in `Computed`
    machine: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """A step that was computed again."""

    computed: Computed
    data: Batch
    episodes: Episodes
    after: TrainState
    gradient: Any  # of the policy's loss, over the first mini-batch; None without an update of it
    value_norm: np.ndarray | None  # before the step
    metrics: dict[str, float]  # of advantages and updates


def settings_of(bundle: Bundle) -> ConfigDict:
    """Returns the recorded settings as a command line changes them; UserError for those of another version.

    The run had chosen some by itself, such as the number of servers; those that nothing reads get their defaults.
    """
    config, saved = settings.default(), settings.by_name(bundle.settings)
    known = settings.by_name(config)
    unknown = [name for name in saved if name not in known and not name.startswith(PREFIX)]
    if unknown:
        raise UserError(f"{bundle.folder} has {unknown[0]}, no setting of this version; use the version of the run")
    config.update_from_flattened_dict({name: saved[name] for name in known if name in saved})
    read = settings.by_name(settings.without_unread(table.sections(config, Settings), ()))
    config.update_from_flattened_dict({name: read[name] for name in known})
    with config.algorithm.options.unlocked():
        config.algorithm.options.update(bundle.settings["algorithm"]["options"])
    return config


def open_replay(bundle: Bundle, c: Settings) -> Replay:
    """Makes models and passes as the run did; reads weights only where the step reads some that no step changes."""
    models = dataclasses.replace(read_models_of_run(c, weights=False), total_steps=bundle.total_steps)
    tokenizer, mesh = read_tokenizer(c, *models.configs), make.open_mesh(c)
    unlearned = (models.reference, models.adapters, models.critic_adapters, models.frozen, models.critic_frozen)
    reads_weights = any(unlearned)
    learner, begin = make_learner(c, models, mesh, sketch=not reads_weights)
    if learner.spare() and not reads_weights:  # shapes have no padding to remove
        learner, begin = make_learner(c, models, mesh)
    identity = resume.run_identity(c, mesh, data={}, frozen=resume.frozen_weights(learner))
    described = bundles.describe_models(models, identity["frozen"])
    machine = bundles.describe_machine(mesh, identity["versions"])
    return Replay(c, bundle, tokenizer, learner, begin, described, machine)


def read_state(replay: Replay) -> TrainState:
    """Reads the state before the step; UserError for a critic that was not recorded."""
    c, begin, spare = replay.c, replay.begin, replay.learner.spare()
    if begin.value is not None and "value" not in replay.bundle.computed.batch:
        raise UserError("the algorithm reads values, and the recorded step has no critic; take one that reads none")
    folder = replay.bundle.folder / "state" / str(replay.bundle.number - 1)
    try:
        fields = {
            name: restore_field(folder, name, lambda _, like=like: like).state  # type: ignore[misc]
            for name, like in vars(state.remove_padding(begin, spare)).items()
            if jax.tree.leaves(like)  # SGD without momentum has an optimizer state without arrays
        }
    except Damaged as e:
        raise UserError(f"{e}: record the step again") from e
    now = state.restore_padding(dataclasses.replace(begin, **fields), spare, begin)
    if c.algorithm.kl_ctrl_type != "fixed":
        return now
    kl_coef = state.scalar(c.algorithm.kl_coef, now.kl_coef)  # the settings' coefficient, as a resumed run has
    return dataclasses.replace(now, kl_coef=kl_coef)


def grade(replay: Replay) -> tuple[list[Reward], str]:
    """Grades the samples again; returns the recorded rewards, and why, if a model or a judge gave them."""
    c, samples, r = replay.c, replay.bundle.samples, replay.c.reward
    if r.judge.api_type or r.model.path:
        return samples.rewards, "a judge or a reward model gave the rewards, which are not graded again"
    with tempfile.TemporaryDirectory() as folder:
        reward_sum = make_reward_sum(
            settings.changed(c, {"trainer.run_dir": folder}), replay.learner.mesh, tokenizer=replay.tokenizer,
            sources=replay.bundle.sources, tool_rewards=replay.bundle.tool_rewards,
        )  # fmt: skip
        try:
            reward_sum.ready()
            n = len(samples.trajectories) // len(samples.prompts)
            pairs = enumerate(samples.trajectories)
            return reward_sum.grade(sample_of(samples.prompts[i // n], t) for i, t in pairs), ""
        finally:
            reward_sum.close()


def run_step(replay: Replay, now: TrainState, rewards: list[Reward]) -> Recomputed:
    """Computes the step from its samples and `rewards`, as `ppo_step` does; donates `now`."""
    c, learner, bundle, timers = replay.c, replay.learner, replay.bundle, Timers()
    episodes = gather_episodes(replay, rewards)
    data = make_batch(c, learner, episodes, _read_columns(replay))
    micros = batch.pack_micros(data, episodes.trajectories, plan=learner.plan, mesh=learner.mesh)
    data = ppo.score_batch(learner, now, data, micros, timers)
    if c.ref.url:  # the log-probs that servers gave
        padding = (0, len(data.mask) - len(episodes.trajectories)), (0, 0)
        data = data.with_arrays(ref_logprob=np.pad(bundle.computed.batch["ref_logprob"], padding))
    data, metrics = ppo.with_advantages(learner.passes, data, now.kl_coef, learner.mesh, now.value_norm)
    value_norm = None if now.value_norm is None else np.asarray(now.value_norm)
    rows, gradients = list[dict[str, Any]](), dict[str, Any]()

    def observe(name: str, carry: Any, params: Any, stats: dict[str, Any]) -> None:
        rows.append(update_row(name, carry, params, stats))
        gradients.setdefault(name, carry[0])

    after, update_metrics = ppo.learn(observed(learner, observe), now, data, episodes.trajectories, timers)
    computed = Computed(
        models=replay.models,
        rewards=bundles.reward_arrays(rewards),
        batch=bundles.batch_arrays(data, episodes.trajectories),
        updates=rows,
        metrics=update_metrics,
        weights=bundles.weight_values(learner, after),
    )
    return Recomputed(computed, data, episodes, after, gradients.get("actor"), value_norm, metrics | update_metrics)


def gather_episodes(replay: Replay, rewards: list[Reward]) -> Episodes:
    """Makes the episodes of the step, with the marks of samples that cannot be trained on."""
    c, samples, bundle = replay.c, replay.bundle.samples, replay.bundle
    algorithm = replay.learner.recipe.algorithm
    if algorithm.greedy and samples.baseline is None:
        raise UserError("the algorithm reads greedy responses, and the recorded step has none; take one without")
    baseline = samples.baseline if algorithm.greedy else None
    episodes = make_episodes(samples.prompts, samples.trajectories, rewards, baseline, compares=algorithm.compares)
    drawn = StepSamples(samples.prompts, samples.trajectories, Cursor(), 0.0, 0.0, lambda: (rewards, baseline))
    try:
        marked, _ = mark_stale(c, drawn, bundle.number - 1, episodes.rewards)
    except RolloutError as e:
        raise UserError(f"{bundle.folder / 'samples.json'}: {e}; record the step again") from e
    weights = plan_parts(c, bundle.sources, bundle.tool_rewards)[1]
    earned = RewardSum({}, weights, score_on_error=None).earned
    return with_branches(dataclasses.replace(episodes, rewards=marked), earned)


def _read_columns(replay: Replay) -> dict[str, np.ndarray]:
    """Returns the recorded columns of the memory that the algorithm reads; UserError for others."""
    names, arrays = replay.learner.recipe.algorithm.column_names, replay.bundle.computed.batch
    lacking = [name for name in names if f"{COLUMN}{name}" not in arrays]
    if lacking:
        raise UserError(
            f"the algorithm reads the column {lacking[0]!r} of a memory, which the step has not"
            " recorded; take one without a memory"
        )
    return {name: arrays[f"{COLUMN}{name}"] for name in names}


def updated_logprob(replay: Replay, step: Recomputed) -> np.ndarray:  # [B, L]
    """Returns the log-probs of the step's tokens by the updated policy."""
    learner, sequences = replay.learner, step.episodes.trajectories
    micros = batch.pack_micros(step.data, sequences, plan=learner.plan, mesh=learner.mesh)
    recipe = dataclasses.replace(learner.recipe, bypass=False)
    data = ppo.with_old_logprob(learner.passes, recipe, step.data, micros, learner.policy(step.after))
    return np.asarray(data["old_logprob"])
