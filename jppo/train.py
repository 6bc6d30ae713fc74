"""PPO training, a step from top to bottom: python -m jppo.train --config=configs/gsm8k.py --config.actor.lr=5e-7

Each step: sample with the rollout engine, grade, score, estimate advantages, update actor and critic, publish the new
weights to the engine (`rollout/publish.py`), test, log, save. `run/loop.py` repeats it. Settings are given as
--config.SECTION.NAME=VALUE. --dry_run prints all of them, the derived sizes and the estimated memory, then exits.
--dry_run --machine=8xH100 does so for another machine; --json=FILE and --rollout_tokens_per_s=N go with it.
"""

import contextlib
import dataclasses
import functools
from typing import Any

from ml_collections import ConfigDict

from jppo import settings
from jppo.data.stream import Cursor
from jppo.errors import expanded
from jppo.learner import batch, ppo
from jppo.learner.episodes import Episodes, make_episodes, with_branches
from jppo.learner.ppo import StepLearner
from jppo.learner.state import next_step
from jppo.learner.stats import join_stages
from jppo.learner.utilisation import utilisation
from jppo.preflight.request import DryRun
from jppo.run import loop, resume, sample_log
from jppo.run.agreement import Mismatch, require_published
from jppo.run.command import run_training
from jppo.run.host_functions import call_host_functions, columns_of
from jppo.run.loop import Diverged, Progress
from jppo.run.out_of_memory import memory_explained
from jppo.run.start import Run, join_hosts, open_run
from jppo.run.trained_model import export_policy, write_model
from jppo.run.validation import validate
from jppo.runlog.logger import print_summary
from jppo.runlog.trajectories import unanswered
from jppo.samples.given import mark_given_unusable
from jppo.samples.make import mark_stale
from jppo.samples.queue import StepSamples
from jppo.settings import Settings
from jppo.types import Batch, Reward, TrainState


@dataclasses.dataclass(frozen=True)
class Step:
    """The result of a step."""

    state: TrainState
    cursor: Cursor  # of the data
    metrics: dict[str, float]


def ppo_step(run: Run, now: TrainState) -> Step:
    """Runs one step of PPO (Schulman et al., 2017), top to bottom.

    The publish ends in `finish` of `method`; it begins here, while the critic learns, if it may.
    """
    learner, timer, version = run.learner, run.timer, int(now.step)
    with timer("gen"):  # y ~ π(· | x)
        timer.watch(functools.partial(run.supply.progress, version))
        samples = run.supply.take(version)
        run.sampler.sleep()
    with timer("reward"):  # s(x, y), whose grading began with the first response
        rewards, baseline = samples.wait_for_rewards()
    episodes, episode_metrics = gather_episodes(run, samples, rewards, baseline, version)
    data = make_batch(run.c, learner, episodes, columns_of(run, episodes))  # [B, L]
    micros = batch.pack_micros(data, episodes.trajectories, plan=learner.plan, mesh=learner.mesh)  # for scoring only
    data = ppo.score_batch(learner, now, data, micros, timer)  # log π_old, log π_ref, V
    data, server_metrics = add_served_reference(run, data, episodes)
    with timer("adv"):  # r = s - β KL, A, R
        data, advantage_metrics = ppo.with_advantages(learner.passes, data, now.kl_coef, learner.mesh, now.value_norm)
    sample_log.record_tokens(run, version + 1, data, samples.trajectories, now.value_norm)
    run.match.require(advantage_metrics, data, micros, episodes.trajectories)  # the engine sampled from the policy
    so_far = join_stages(episode_metrics, advantage_metrics, server_metrics)
    # Before `now` changes: an error of a user's function leaves the state as it was.
    cursor, user_metrics = call_host_functions(run, version + 1, samples, rewards, data, so_far)
    recording = run.record(run, now, samples, rewards, baseline, data)  # of the steps of trainer.replay_steps
    now, update_metrics = ppo.learn(
        recording.learner, now, data, episodes.trajectories, timer, after_actor=run.publisher.begin
    )
    recording.end(now, update_metrics)
    metrics = join_stages(update_metrics, so_far, user_metrics)
    metrics["actor/reward_kl_penalty_coeff"] = float(now.kl_coef)
    now = end_step(run, now, data, episodes, metrics)
    mfu = utilisation(
        learner, run.inputs, episodes.trajectories, timer.so_far(), step=version, dtype=run.c.model.compute_dtype
    )
    return Step(now, cursor, join_stages(metrics, mfu, {"trainer/bad_steps": float(now.bad_steps)}))


def end_step(run: Run, now: TrainState, data: Batch, episodes: Episodes, metrics: dict[str, float]) -> TrainState:
    """Ends a step whose updates are in `now`: next number, β, value statistics, bad steps.

    If an update was skipped, writes its batch to bad_steps/.
    """
    bad = metrics.get("actor/skipped", 0.0) + metrics.get("critic/skipped", 0.0) > 0
    if bad:
        run.logger.arrays(f"step_{int(now.step) + 1}", batch.arrays(data, episodes.trajectories))
    return next_step(
        now,
        metrics["actor/reward_kl_penalty"],
        bad=bad,
        learned=bool(data.mask.any()),
        adapt_kl=run.learner.recipe.adapt_kl if data.sampled.any() else None,  # given tokens have no KL
        value_norm=data.get("value_norm"),
    )


def gather_episodes(
    run: Run, samples: StepSamples, rewards: list[Reward], baseline: list[Reward] | None, version: int
) -> tuple[Episodes, dict[str, float]]:
    """Makes and logs the episodes of graded samples, with their metrics; `baseline` grades greedy responses."""
    compares = run.learner.recipe.algorithm.compares
    unmarked = make_episodes(samples.prompts, samples.trajectories, rewards, baseline, compares=compares)
    marked, stale = mark_stale(run.c, samples, version, unmarked.rewards)
    episodes = dataclasses.replace(unmarked, rewards=marked)
    run.logger.samples(f"step_{version + 1}", sample_log.sample_rows(episodes.prompts, episodes.trajectories, marked))
    require_graded(marked)
    scored = mark_given_unusable(samples.trajectories, rewards)
    metrics = join_stages(
        stale,
        samples.metrics,
        sample_log.sample_metrics(samples.trajectories, rewards, baseline),
        sample_log.kept_token_metrics(samples.trajectories),
        sample_log.source_means(scored, episodes.sources),
        sample_log.conversation_metrics(samples.trajectories),
        run.hosts.summed(join_stages(run.reward_sum.metrics(), run.sampler.metrics())),
    )
    return with_branches(episodes, run.reward_sum.earned), metrics


def make_batch(c: Settings, learner: StepLearner, episodes: Episodes, columns: dict[str, Any]) -> Batch:
    """Returns the flat batch of a step's episodes; `columns` are those of the memory, by name."""
    recipe = learner.recipe
    return batch.flatten(
        episodes.trajectories,
        episodes.rewards,
        episodes.group,
        episodes.greedy,
        shape=learner.shape,
        filter_truncated=c.algorithm.filter_truncated,
        has_earned=recipe.earns,
        has_given=recipe.algorithm.given is not None,
        episode=episodes.first if recipe.branches else None,
        parts=recipe.algorithm.parts,
        columns=columns,
    )


def require_graded(rewards: list[Reward]) -> None:
    """Raises Diverged if every grader failed."""
    if all(r.error is not None for r in rewards):
        raise Diverged(f"every grader of the step failed; the first said: {rewards[0].error}")


def add_served_reference(run: Run, data: Batch, episodes: Episodes) -> tuple[Batch, dict[str, float]]:
    """Adds the log-probs of a reference that servers hold, if any does; returns also metrics of the servers."""
    if run.reference is None:
        return data, {}
    with run.timer("ref"):
        logprobs, metrics = run.reference.logprobs(episodes.trajectories, episodes.sources)
        return batch.with_reference_logprobs(data, logprobs), metrics


def make_method(run: Run) -> loop.Method:
    """Returns PPO's functions for the loop of every training, `loop.learn`."""
    c = run.c

    def step_and_forget(now: Progress) -> Progress:
        after = ppo_step(run, now.state)
        run.supply.forget(now.step)
        place = {"cursor": dataclasses.asdict(after.cursor), "reward": run.reward_sum.state()}
        return Progress(after.state, place, after.metrics)

    def publish_weights(now: Progress) -> None:
        if c.rollout.on_update == "wait":
            with run.timer("gen"):
                run.supply.settle()
        with run.timer("update_weights"):
            run.publisher.finish(now.state)
            require_published(c, run.inputs, run.learner, now.state, run.sampler, run.hosts)

    return loop.Method(
        step=step_and_forget,
        finish=publish_weights,
        test=lambda now: validate(run, now.step),
        test_freq=c.trainer.test_freq,
        require_progress=lambda now: require_progress(run, now.state),
        save=functools.partial(save_run, run),
        remedy="lower the learning rate, and give the command again",
    )


def save_run(run: Run, now: Progress, metrics: dict[str, float], ended_by: BaseException | None) -> None:
    """Starts writing a checkpoint; raises NonFinite if a model has NaN or infinities."""
    with run.timer("save"):
        run.match.require_finite(run.learner, now.state)
        run.logger.sync()
        queue = run.supply.state()
        if isinstance(ended_by, Mismatch):  # the queue may hold samples of a server with other weights
            queue = unanswered(queue)
        export = functools.partial(write_model, run.c, run.learner, now=now.state, write=run.hosts.first)
        unlogged = {} if now.unlogged is None else {"pending": now.unlogged | run.timer.next_step()}
        resume.save_checkpoint(
            run.c, run.checkpoints, run.learner, now.state, run.origin | now.place | {"queue": queue} | unlogged,
            score=metrics.get(run.c.trainer.best_metric),
            export=lambda path: run.hosts.alike(lambda: export(path)),
        )  # fmt: skip


def require_progress(run: Run, now: TrainState) -> None:
    """Raises Diverged after too many consecutive skipped updates."""
    max_bad_steps = run.c.trainer.max_bad_steps
    if int(now.bad_steps) >= max_bad_steps:
        raise Diverged(
            f"step {int(now.step)}: {int(now.bad_steps)} steps in a row had a non-finite loss or gradient"
            f" (trainer.max_bad_steps={max_bad_steps}); their updates were skipped, and their batches are in"
            f" {run.folder / 'bad_steps'}; lower the learning rate, or resume with the same command"
        )


def train(config: Settings | ConfigDict) -> None:
    """Trains, or with trainer.val_only tests; a run that has already finished is only summarised."""
    c = settings.typed(config, Settings)
    with join_hosts(c) as hosts, memory_explained(c, hosts=hosts.count):
        with contextlib.ExitStack() as stack:
            opened = open_run(stack, hosts, c)
            if opened is not None:
                run, begun = opened
                step = begun.now.step
                if c.trainer.val_only or (begun.step is None and c.trainer.val_before_train):
                    with run.timer("testing"):
                        metrics = validate(run, step)
                    run.logger.log(step, metrics | run.timer.next_step())
                if c.trainer.val_only:
                    run.logger.note(f"nothing was trained; the samples and metrics of this test are in {run.folder}")
                    return
                for line in hosts.together(lambda: run.supply.load(begun.queue, step)):
                    run.logger.note(line)
                now = loop.learn(run, make_method(run), begun.now)
                with run.timer("save"):
                    run.checkpoints.wait()  # a finished run is one whose export is newer than its last checkpoint
                    parts = (run.c, run.inputs, run.learner, run.folder)
                    hosts.together(lambda: export_policy(*parts, now.state, write=hosts.first))
        if hosts.first:
            from jppo.plugins.report import report_line

            folder = expanded(c.trainer.run_dir)
            print_summary(folder, report_line(folder))


def dry_run(c: Settings, request: DryRun) -> str:
    """Reports on a run with these settings; reads no weight."""
    from jppo.preflight.checks import dry_run_of_ppo

    return dry_run_of_ppo(c, request)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    run_training(argv, "jppo.train", __doc__, Settings, dry_run=dry_run, train=train)


if __name__ == "__main__":
    main()
