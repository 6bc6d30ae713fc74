"""PPO training, read from top to bottom: python -m jppo.train --config=configs/gsm8k.py --config.actor.lr=5e-7

Each step: sample with vLLM, grade, pack, score, estimate advantages, update actor and critic, publish the new
weights to vLLM, log, test, save. Settings are given as --config.SECTION.NAME=VALUE; --dry_run prints them all, with
what the run would be and the memory that it would take, and stops. --dry_run --machine=8xH100 does so for a machine
that is not there; --json=FILE and --rollout_tokens_per_s=N belong to it.
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jppo import assemble, validation
from jppo import config as settings
from jppo.agent import counts
from jppo.algorithms import kl
from jppo.assemble import Begun, Inputs, Learner, Source, auto, described, preview, waiting
from jppo.assemble.handover import Handover
from jppo.data.stream import Cursor
from jppo.io import whole
from jppo.io.checkpoint import Checkpoints, NonFinite, require
from jppo.io.hosts import Elsewhere, Hosts
from jppo.io.metrics import Logger, Silent
from jppo.io.owner import own
from jppo.io.profile import Profiler
from jppo.io.summary import summary
from jppo.io.timers import Laps, Timers
from jppo.io.watch import Stopped, Watch, ending
from jppo.learner import batch, devices, estimate, packing, ppo
from jppo.models import hf
from jppo.report import report_line
from jppo.rewards.compose import Panel
from jppo.rollout.sampler import RolloutError
from jppo.structs import Reward, TrainState, Trajectory
from jppo.supply import Supply
from jppo.validation import samples


class Diverged(Exception):
    """Losses or gradients that are no numbers, or graders that all fail; the run cannot go on."""


class Unwritten(Exception):
    """There is no room for the trained model; the last checkpoint has it."""


def train(config: ConfigDict) -> None:
    """Runs the whole of it; the state is on disk when it returns."""
    with assemble.join_hosts(config, (RolloutError, Diverged, Unwritten)) as hosts:
        train_on(hosts, config)


def train_on(hosts: Hosts, config: ConfigDict) -> None:
    """The same on each of the hosts, which are there."""
    c = config
    run = pathlib.Path(c.trainer.run_dir).expanduser()
    assemble.require_shareable(c, hosts)
    inputs = hosts.together(lambda: read(c))
    assemble.require_alike(c, hosts, inputs)
    logs = assemble.own_folder(hosts, run)
    profile = make_profiler(c, logs, inputs.total_steps)
    timer = Timers()
    with contextlib.ExitStack() as stack:
        only_look = c.trainer.val_only
        written = run / "val_only" if only_look else run  # what a run has written stays as it is
        hosts.together(lambda: stack.enter_context(own(written)) if hosts.first else None)
        limits = dict(stage_timeout_s=c.trainer.stage_timeout_s, stop_timeout_s=c.trainer.stop_timeout_s)
        ends = dict(hosts=hosts, stopped=c.trainer.stop_exit_code)
        watch = stack.enter_context(Watch(timer, stacks=logs / "stacks.txt", **ends, **limits))
        checkpoints = stack.enter_context(
            Checkpoints(run / "checkpoints", keep=c.trainer.max_ckpt_to_keep, read_only=only_look)
        )
        hosts.together(lambda: None)  # the folder of the checkpoints is there, and what was broken off is gone
        run = written
        if assemble.finished(c, checkpoints, inputs.total_steps):
            return summarise(hosts, run)
        if inputs.agent is not None:
            stack.callback(inputs.agent.close)
        mesh = assemble.make_mesh(c)
        assemble.require_models_fit(inputs, mesh)
        fits = functools.partial(preview.fits, inputs=inputs, mesh=mesh)
        c, chosen = (auto.first(c), "") if only_look else auto.settle(c, mesh, run, fits, hosts)
        panel = hosts.together(lambda: assemble.make_panel(c, inputs, mesh, hosts))
        stack.callback(panel.close)
        why = assemble.attention_kernel(c, inputs.policy, mesh)[1]  # refused before a server starts
        with timer("start"):
            laps = Laps()
            # It imports and loads while JAX compiles.
            engine = hosts.together(lambda: assemble.ENGINES[c.rollout.name](c, logs, hosts))
            stack.callback(engine.close)
            learner, begin = assemble.make_learner(c, inputs, mesh)
            laps("models")
            if not only_look:
                assemble.compile_passes(c, learner, begin)
                laps("compilation")
            origin = assemble.origin(c, inputs, learner)
            begun = assemble.resume(c, checkpoints, learner, begin, panel, origin)
            now, step = begun.state, int(begun.state.step)
            if not only_look:
                rehearse(c, now)
            del begin  # a resumed run must not hold two states
            laps("checkpoint")
            sampler = hosts.together(lambda: engine.ready(**assemble.speaking(inputs)))
            laps("waiting for the sampler")
            assemble.publish_base(c, learner, sampler, step, hosts)
            assemble.publish(c, learner, sampler, now, inputs.adapters, hosts)
            laps("publish")
            hosts.together(panel.ready)
            laps("graders")
        logged = begun.step
        if begun.step is not None and (begun.pending is not None or only_look):
            logged = begun.step - 1  # its line is written now
        logger = assemble.make_logger(c, run, hosts, total_steps=inputs.total_steps, resumed_step=logged)
        stack.enter_context(logger)
        supply = assemble.make_supply(c, inputs, learner, sampler, panel, begun.cursor, hosts)
        handover = stack.enter_context(
            Handover(
                lambda now: assemble.publish(c, learner, sampler, now, inputs.adapters, hosts),
                early=learner.critic is not None and assemble.may_overlap(c, hosts),
            )
        )
        made = (learner, sampler, supply, panel, handover)
        parts = Run(c, run, hosts, inputs, *made, checkpoints, logger, timer, profile, watch, assemble.Match(c), origin)
        if hosts.first:
            whole.write_text(run / "config.json", settings.dump(c))
        opening = [
            assemble.introduce_sandbox(c, inputs.sources, inputs.agent.toolbox if inputs.agent else None),
            *introduce(inputs, mesh, learner.plan, begun.step),
            *begun.said,
            why,
            waiting.introduce(c, inputs, mesh.devices.flat[0]),
            assemble.introduce_peak(c, mesh),
            chosen,
            f"seconds of the start: {laps}",
        ]
        for line in (*filter(None, opening), *profile.introduce(step)):
            logger.note(line)
        for finding in assemble.forewarn(c, step):
            logger.warn(finding)
        logger.note(assemble.agree(c, inputs, learner, now, sampler, step, hosts))
        if only_look or (begun.step is None and c.trainer.val_before_train):
            with timer("testing"):
                metrics = validate(parts, step)
            logger.log(step, metrics | timer.next_step())
        if only_look:
            return logger.note(f"nothing was trained; the samples and metrics of this test are in {run}")
        now = learn(parts, begun)
        with timer("save"):
            checkpoints.wait()  # `finished` compares when the two were written
            hosts.together(lambda: export(parts, now))
    summarise(hosts, run)


def read(c: ConfigDict) -> Inputs:
    """What a host reads before it touches a device."""
    assemble.require_loggers(c)
    assemble.share_gpu(c)
    inputs = assemble.read_inputs(c)
    if c.trainer.resume_mode not in ("auto", "disable"):
        require(pathlib.Path(c.trainer.resume_mode))
    return inputs


def summarise(hosts: Hosts, run: pathlib.Path) -> None:
    """What a finished run says; one host speaks."""
    if hosts.first:
        summary(run, report_line(run))


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, once all of them are there."""

    c: ConfigDict
    folder: pathlib.Path
    hosts: Hosts
    inputs: Inputs
    learner: Learner
    sampler: Source
    supply: Supply
    panel: Panel
    handover: Handover
    checkpoints: Checkpoints
    logger: Logger | Silent
    timer: Timers
    profile: Profiler
    watch: Watch
    match: assemble.Match
    origin: dict[str, Any]  # what it is, for those who go on from its checkpoints


def learn(run: Run, begun: Begun) -> TrainState:
    """All steps that are left, each logged once, whatever ends the run; the last state."""
    c, timer, checkpoints = run.c, run.timer, run.checkpoints
    now, pending = begun.state, begun.pending
    step, place = int(now.step), assemble.kept(begun.cursor, run.panel)
    for line in run.hosts.together(lambda: run.supply.load(begun.queue, step)):
        run.logger.note(line)

    def save(metrics: dict[str, float], **more: Any) -> None:
        score = metrics.get(c.trainer.best_metric)
        meta = run.origin | place | {"queue": run.supply.state()} | more
        with timer("save"):
            run.match.require_finite(run.learner, now)
            run.logger.sync()
            assemble.save(
                c, checkpoints, run.learner, now, meta, score=score,
                export=lambda p: run.hosts.alike(lambda: write_model(run, p, now)),
            )  # fmt: skip

    try:
        while pending is not None or step < run.inputs.total_steps:
            if pending is None:  # else a step is done, but not yet tested and logged
                with run.profile(step + 1), timer("step"):
                    now, cursor, pending = ppo_step(run, now)
                    run.supply.forget(step)
                    step, place = step + 1, assemble.kept(cursor, run.panel)
                    run.watch.check()
                    if c.rollout.on_update == "wait":
                        with timer("gen"):
                            run.supply.settle()
                    with timer("update_weights"):
                        run.handover.finish(now)
            last = step == run.inputs.total_steps
            if last or due(step, c.trainer.test_freq):
                with timer("testing"):
                    pending |= validate(run, step)
            pending |= timer.next_step() | devices.memory()
            pending["perf/throughput"] = pending["perf/total_num_tokens"] / pending["timing_s/step"]
            run.logger.log(step, pending)
            metrics, pending = pending, None
            require_progress(run, now)
            if last or due(step, c.trainer.save_freq):
                try:
                    save(metrics)
                except NonFinite as e:
                    raise Diverged(
                        f"step {step}: {e}; nothing was saved, and the checkpoint before stands: lower actor.lr or"
                        " critic.lr, and give the command again"
                    ) from e
            run.watch.check()
    except (RolloutError, Diverged, Stopped) as e:
        checkpoints.wait()
        if run.hosts.gather(checkpoints.latest)[0] != step:
            # samples of a server that had other weights may wait in the queue
            more: dict[str, Any] = {"queue": []} if isinstance(e, assemble.Mismatch) else {}
            try:
                save({}, pending=None if pending is None else pending | timer.next_step(), **more)
            except NonFinite as odd:
                run.logger.note(f"step {step} is not saved: {odd}; the checkpoint before stands")
        raise
    return now


def write_model(run: Run, path: pathlib.Path, now: TrainState) -> None:
    """The policy as a model directory."""
    c, learner = run.c, run.learner
    dtype, write = c.model.param_dtype, run.hosts.first
    hf.save(path, learner.policy(now), learner.cfg, source=c.model.path, dtype=dtype, write=write)


def export(run: Run, now: TrainState) -> None:
    """What the run leaves for others: the policy, and its adapters where it has some."""
    adapters, cfg = run.inputs.adapters, run.learner.cfg
    try:
        if adapters is not None:
            path, write = run.folder / "adapter", run.hosts.first
            hf.save_adapter(path, now.policy, cfg, adapters, base=run.c.model.path, write=write)
        write_model(run, run.folder / "hf", now)
    except OSError as e:
        remedy = "make room, and give the same command again"
        raise Unwritten(f"the model cannot be written to {run.folder}: {e}; {remedy}") from e


def ppo_step(run: Run, now: TrainState) -> tuple[TrainState, Cursor, dict[str, float]]:
    """One step of PPO, all but the publish: the next state, the next place in the data, and the metrics."""
    c, learner, timer = run.c, run.learner, run.timer
    version = int(now.step)
    passes, policy = learner.passes, learner.policy(now)
    with timer("gen"):
        drawn = run.supply.take(version)
        run.sampler.rest()
    trajectories = drawn.trajectories
    asked = [p for p in drawn.prompts for _ in range(c.rollout.n)]
    with timer("reward"):
        rewards, baseline = drawn.grade()  # what is left of it: it began with the first response
    run.logger.samples(f"step_{version + 1}", samples(asked, trajectories, rewards))
    metrics = describe(trajectories, rewards) | counts.metrics(trajectories)
    metrics |= assemble.summed(run.hosts, run.panel.metrics() | run.sampler.metrics())
    compared = passes.sequences is not None
    outcome, usable = estimate.outcomes(rewards, baseline, n=c.rollout.n, compared=compared)
    usable, found = assemble.fresh(c, drawn, version, usable)
    metrics |= found
    trajectories = [estimate.trainable(*pair) for pair in zip(trajectories, usable, strict=True)]
    rows = batch.make(trajectories, plan=learner.plan, mesh=learner.mesh)
    with timer("old_log_prob"):
        scored, found = ppo.score_rows(passes, learner.recipe, rows, policy)
    metrics |= found
    run.match.require(metrics, scored, trajectories)
    penalty: list[Any] = [None] * len(scored)
    if learner.reference is not None:
        with timer("ref"):
            scored, penalty = ppo.refer(passes, learner.recipe, scored, policy, learner.reference)
    if learner.critic is not None:
        with timer("values"):
            scored = ppo.with_values(passes, scored, learner.value(now))
    with timer("adv"):
        scored, found = estimate.advantages(passes, scored, penalty, outcome, now.kl_coef)
        metrics |= found | {"actor/reward_kl_penalty_coeff": float(now.kl_coef)}
        flat = batch.flatten(scored, len(trajectories))
    now, found = update_models(c, learner, now, flat, trajectories, timer, run.handover.begin)
    metrics = found | metrics
    bad = metrics.get("actor/skipped", 0.0) + metrics.get("critic/skipped", 0.0) > 0
    if bad:
        run.logger.arrays(f"step_{version + 1}", flat.arrays)
    now = advance(c, now, metrics, bad=bad, learned=bool(flat.arrays["mask"].any()))
    metrics |= assemble.utilisation(c, run.inputs, learner.mesh, trajectories, timer.so_far())
    return now, drawn.after, metrics | {"trainer/bad_steps": float(now.bad_steps)}


def advance(
    c: ConfigDict, now: TrainState, metrics: dict[str, float], *, bad: bool, learned: bool = True
) -> TrainState:
    """The state after a step: its number, how many steps in a row were bad, the coefficient of the KL in the reward.

    A step that had no token to learn from changes its number alone.
    """
    kl_coef = now.kl_coef
    if not learned:
        return dataclasses.replace(now, step=now.step + 1)
    if c.algorithm.kl_ctrl_type == "adaptive" and not bad:  # a KL that is no number would stay in the coefficient
        kl_coef = kl.adaptive(
            now.kl_coef,
            metrics["actor/reward_kl_penalty"],
            steps=assemble.sequences_of_step(c),
            target=c.algorithm.target_kl,
            horizon=c.algorithm.horizon,
        )
    return dataclasses.replace(now, step=now.step + 1, kl_coef=kl_coef, bad_steps=(now.bad_steps + 1) * bad)


def update_models(
    c: ConfigDict,
    learner: Learner,
    now: TrainState,
    flat: batch.Flat,
    trajectories: list[Trajectory],
    timer: Timers,
    between: Callable[[TrainState], None] = lambda _: None,
) -> tuple[TrainState, dict[str, float]]:
    """Actor and critic learn from the scored batch, each in its own mini-batches and epochs.

    Between the two updates `between` sees the step's state, whose policy is what it will be.
    """

    def minis(section: ConfigDict, size: int, number: int) -> Iterator[batch.Mini]:
        for epoch in range(section.ppo_epochs):
            order = order_of(section, now, number, epoch, len(trajectories))
            yield from batch.mini_batches(
                flat, trajectories, order=order, mini_batch_size=size, plan=learner.plan, mesh=learner.mesh
            )

    metrics = {}
    warm = now.step - c.trainer.critic_warmup  # the actor's schedule begins with its first step
    if int(warm) >= 0:
        with timer("update_actor"):
            data = minis(c.actor, c.actor.ppo_mini_batch_size, 0)
            policy, policy_opt, found = ppo.descend(
                learner.actor, now.policy, now.policy_opt, warm, data, learner.recipe.in_loss(learner.reference)
            )
        now, metrics = dataclasses.replace(now, policy=policy, policy_opt=policy_opt), found
    if learner.critic is not None:
        between(dataclasses.replace(now, step=now.step + 1))
        with timer("update_critic"):
            data = minis(c.critic, assemble.critic_mini_batch_size(c), 1)
            value, value_opt, found = ppo.descend(learner.critic, now.value, now.value_opt, now.step, data)
        now, metrics = dataclasses.replace(now, value=value, value_opt=value_opt), found | metrics
    return now, metrics


def order_of(section: ConfigDict, now: TrainState, number: int, epoch: int, count: int) -> np.ndarray:
    """The order in which a model's update takes the step's trajectories in an epoch."""
    if not section.shuffle:
        return np.arange(count)
    key = jax.random.fold_in(jax.random.fold_in(now.key, now.step), number)
    return np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), count))


def rehearse(c: ConfigDict, now: TrainState) -> None:
    """The little that a step computes beside its passes, so that it is compiled as they are."""
    for bad in (True, False):
        advance(c, now, {"actor/reward_kl_penalty": 0.0}, bad=bad)
    for section in (c.actor, c.critic):
        order_of(section, now, 0, 0, assemble.sequences_of_step(c))
    jax.block_until_ready(now.step - c.trainer.critic_warmup)


def make_profiler(c: ConfigDict, run: pathlib.Path, total_steps: int) -> Profiler:
    """The profiler for the steps that the settings name, all of them steps of this run."""
    steps = settings.parse_steps(c.trainer.profile_steps, "trainer.profile_steps")
    settings.check_within(steps, total_steps, f"trainer.profile_steps={c.trainer.profile_steps!r}")
    return Profiler(run / "profile", steps)


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens now; -1 is never."""
    return every > 0 and step % every == 0


def describe(trajectories: list[Trajectory], rewards: list[Reward]) -> dict[str, float]:
    """The metrics that need no device, under verl's names."""
    failed = sum(r.error is not None for r in rewards)
    if failed == len(rewards):
        raise Diverged(f"every grader of the step failed; the first said: {rewards[0].error}")
    scores = np.array([r.score for r in rewards if not np.isnan(r.score)])
    lengths = np.array([t.sampled.sum() for t in trajectories])
    whole = np.array([len(t.tokens) for t in trajectories])
    prompts = np.array([np.argmax(t.sampled) for t in trajectories])
    return {
        "reward_mean": float(scores.mean()),
        "critic/score/mean": float(scores.mean()),
        "critic/score/max": float(scores.max()),
        "critic/score/min": float(scores.min()),
        "reward/errors": float(failed),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float(np.mean([t.finish == "length" for t in trajectories])),
        "prompt_length/mean": float(prompts.mean()),
        "perf/total_num_tokens": float(whole.sum()),
    } | part_means(rewards)


def part_means(rewards: list[Reward]) -> dict[str, float]:
    """The mean of every part of the reward, over the samples that have it."""
    found: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.parts.items():
            found.setdefault(f"reward/{name}/mean", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def require_progress(run: Run, now: TrainState) -> None:
    """Stops the run where too many steps in a row had an update that was skipped."""
    most = run.c.trainer.max_bad_steps
    if int(now.bad_steps) >= most:
        raise Diverged(
            f"step {int(now.step)}: {int(now.bad_steps)} steps in a row had a loss or gradient that is no finite"
            f" number (trainer.max_bad_steps={most}); their updates were skipped and their batches"
            f" are in {run.folder / 'bad_steps'}; lower actor.lr or critic.lr, or go on with the same command"
        )


def validate(run: Run, version: int) -> dict[str, float]:
    """The test on the validation prompts; its samples go to the run folder, a few to the console and the loggers."""
    c = run.c
    tested = validation.evaluate(
        run.sampler,
        run.inputs.val.prompts,
        run.panel.testing(),
        sampling=assemble.val_sampling(c),
        version=version,
        batch_size=c.data.val_batch_size,
        hosts=run.hosts,
    )
    run.logger.samples(f"test_{version}", validation.rows(tested))
    some = validation.shown(tested, c.trainer.log_val_generations)
    for row in some:
        run.logger.note(validation.line(row))
    run.logger.generations(version, some)
    return validation.metrics(tested)


def introduce(inputs: Inputs, mesh: Mesh, plan: packing.Plan, resumed: int | None) -> list[str]:
    """What the run is about to do, for the console."""
    cut = inputs.train.truncated + inputs.val.truncated
    left_out = inputs.train.overlong + inputs.val.overlong
    return [
        f"{len(inputs.train.prompts)} prompts to train on, {len(inputs.val.prompts)} to test on"
        f" ({left_out} over-long ones left out, {cut} cut)",
        f"{mesh.devices.size} {mesh.devices.flat[0].platform} device(s), mesh {dict(mesh.shape)},"
        f" rows of shape {', '.join(f'{r}x{t}' for r, t in plan.shapes)}",
        "a new run" if resumed is None else f"going on from the checkpoint of step {resumed}",
    ]


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    config, switches = settings.parse(argv, __doc__, settings.default(), describes=True)
    settings.check(config)
    request = described.read(switches, "jppo.train", argv)
    if switches["dry_run"]:
        print(settings.dump(config), flush=True)
        print(assemble.dry_run(config, request), end="")
        return
    try:
        with ending(config.trainer.run_dir, within_s=config.trainer.stop_timeout_s):
            train(config)
    except (RolloutError, Diverged, Unwritten, Elsewhere) as e:
        print(settings.one_line(e), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
