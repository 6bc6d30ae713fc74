"""PPO training, read from top to bottom: python -m jppo.train --config=configs/gsm8k.py --config.actor.lr=5e-7

Each step: sample with vLLM, grade, pack, score, estimate advantages, update critic and actor, publish the new
weights to vLLM, log, test, save. Settings are given as --config.SECTION.NAME=VALUE; --dry_run prints them all, with
what the run would be and the memory that it would take, and stops.
"""

import contextlib
import dataclasses
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jppo import assemble
from jppo import config as settings
from jppo.algorithms import kl
from jppo.assemble import Inputs, Learner
from jppo.data.stream import Cursor, next_batch
from jppo.data.tokenizer import decode
from jppo.evaluate import evaluate, sample, samples
from jppo.io.checkpoint import Checkpoints, require, restore
from jppo.io.metrics import Logger, write_arrays, write_samples
from jppo.io.summary import summary
from jppo.io.timers import Timers
from jppo.learner import batch, estimate, packing, ppo
from jppo.models import hf
from jppo.rewards.compose import Panel
from jppo.rollout.sampler import RolloutError, Sampler, greedy
from jppo.structs import Reward, TrainState, Trajectory


class Diverged(Exception):
    """Losses or gradients that are no numbers, or graders that all fail; the run cannot go on."""


def train(config: ConfigDict) -> None:
    """Runs the whole of it; the state is on disk when it returns."""
    c = config
    run = pathlib.Path(c.trainer.run_dir).expanduser()
    assemble.share_gpu(c)
    inputs = assemble.read_inputs(c)
    if c.trainer.resume_mode not in ("auto", "disable"):
        require(pathlib.Path(c.trainer.resume_mode))
    timer = Timers()
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(run / "checkpoints", keep=c.trainer.max_ckpt_to_keep))
        if finished(c, checkpoints, inputs.total_steps):
            return summary(run)
        mesh = assemble.make_mesh(c)
        panel = assemble.make_panel(c, inputs, mesh)
        stack.callback(panel.close)
        why = assemble.attention_kernel(c, inputs.policy)[1]  # one that cannot be is refused before a server starts
        with timer("start"):
            engine = assemble.ENGINES[c.rollout.name](c, run)  # imports and loads while JAX compiles
            stack.callback(engine.close)
            learner, begin = assemble.make_learner(c, inputs, mesh)
            ppo.compile_all(
                learner.passes,
                learner.recipe,
                learner.plan,
                mesh,
                policy=begin.policy,
                reference=learner.reference,
                value=begin.value,
                actor=learner.actor,
                critic=learner.critic,
                sequences=assemble.sequences_of_step(c),
            )
            now, cursor, resumed = resume(c, checkpoints, begin, panel)
            del begin  # a resumed run must not hold two states
            step = int(now.step)
            sampler = engine.ready(eos_token_ids=inputs.end_tokens, decode=lambda ids: decode(inputs.tokenizer, ids))
            assemble.publish_base(c, learner, sampler, step)
            assemble.publish(c, learner, sampler, now, inputs.adapters)
            panel.ready()
        logger = stack.enter_context(Logger(run, total_steps=inputs.total_steps, resumed_step=resumed))
        (run / "config.json").write_text(settings.dump(c))
        for line in introduce(inputs, mesh, learner.plan, resumed):
            logger.note(line)
        if why is not None:
            logger.note(why)
        logger.note(assemble.agree(c, inputs, learner, now, sampler, step))
        if resumed is None and c.trainer.val_before_train:
            with timer("testing"):
                metrics = validate(c, run, inputs, sampler, panel, logger, step)
            logger.log(0, metrics | timer.next_step())
        logged = step
        try:
            while step < inputs.total_steps:
                with timer("step"):
                    now, cursor, metrics = ppo_step(c, inputs, learner, now, cursor, sampler, panel, timer, run)
                    step += 1
                    with timer("update_weights"):
                        assemble.publish(c, learner, sampler, now, inputs.adapters)
                last = step == inputs.total_steps
                if last or due(step, c.trainer.test_freq):
                    with timer("testing"):
                        metrics |= validate(c, run, inputs, sampler, panel, logger, step)
                metrics |= timer.next_step()
                metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
                logger.log(step, metrics)
                logged = step
                require_progress(c, run, now)
                if last or due(step, c.trainer.save_freq):
                    with timer("save"):
                        checkpoints.save(step, now, kept(cursor, panel))
        except (RolloutError, Diverged):
            if logged != step:  # the update was done, its publish or test was not
                logger.log(step, metrics | timer.next_step())
            checkpoints.wait()
            if checkpoints.latest() != step:
                checkpoints.save(step, now, kept(cursor, panel))
            raise
        with timer("save"):
            if inputs.adapters is not None:
                hf.save_adapter(run / "adapter", now.policy, learner.cfg, inputs.adapters, base=c.model.path)
            hf.save(run / "hf", learner.policy(now), learner.cfg, source=c.model.path, dtype=c.model.param_dtype)
    summary(run)


def ppo_step(
    c: ConfigDict,
    inputs: Inputs,
    learner: Learner,
    now: TrainState,
    cursor: Cursor,
    sampler: Sampler,
    panel: Panel,
    timer: Timers,
    run: pathlib.Path,
) -> tuple[TrainState, Cursor, dict[str, float]]:
    """One step of PPO, all but the publish: the next state, the next place in the data, and the metrics."""
    version = int(now.step)
    passes, policy = learner.passes, learner.policy(now)
    indices, cursor = next_batch(
        cursor, n=len(inputs.train.prompts), batch_size=c.data.train_batch_size, seed=c.trainer.seed,
        shuffle=c.data.shuffle, parts=inputs.train.parts,
    )  # fmt: skip
    prompts = [inputs.train.prompts[i] for i in indices]
    with timer("gen"):
        trajectories, grading = sample(sampler, prompts, panel, assemble.sampling(c, version), version=version)
        best = None
        if learner.recipe.estimator.greedy:
            best = sample(sampler, prompts, panel, greedy(c.data.max_response_length), version=version)[1]
    asked = [p for p in prompts for _ in range(c.rollout.n)]
    with timer("reward"):
        rewards = grading.collect()  # what is left of it: it began with the first response
        baseline = None if best is None else best.collect()
    write_samples(run, f"step_{version + 1}", samples(asked, trajectories, rewards))
    metrics = describe(trajectories, rewards) | panel.metrics()
    compared = passes.sequences is not None
    outcome, usable = estimate.outcomes(rewards, baseline, n=c.rollout.n, compared=compared)
    trajectories = [estimate.trainable(*pair) for pair in zip(trajectories, usable, strict=True)]
    rows = batch.make(trajectories, plan=learner.plan, mesh=learner.mesh)
    with timer("old_log_prob"):
        scored, found = ppo.score_rows(passes, learner.recipe, rows, policy)
    metrics |= found
    penalty: list[Any] = [None] * len(scored)
    if learner.reference is not None:
        with timer("ref"):
            scored, penalty = ppo.refer(passes, scored, policy, learner.reference)
    if learner.critic is not None:
        with timer("values"):
            scored = ppo.with_values(passes, scored, learner.value(now))
    with timer("adv"):
        scored, found = estimate.advantages(passes, scored, penalty, outcome, now.kl_coef)
        metrics |= found | {"actor/reward_kl_penalty_coeff": float(now.kl_coef)}
        flat = batch.flatten(scored, len(trajectories))
    now, found = update_models(c, learner, now, flat, trajectories, timer)
    metrics = found | metrics
    bad = metrics.get("actor/skipped", 0.0) + metrics.get("critic/skipped", 0.0) > 0
    if bad:
        write_arrays(run, f"step_{version + 1}", flat.arrays)
    now = advance(c, now, metrics, bad=bad)
    return now, cursor, metrics | {"trainer/bad_steps": float(now.bad_steps)}


def advance(c: ConfigDict, now: TrainState, metrics: dict[str, float], *, bad: bool) -> TrainState:
    """The state after a step: its number, how many steps in a row were bad, the coefficient of the KL in the reward."""
    kl_coef = now.kl_coef
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
) -> tuple[TrainState, dict[str, float]]:
    """Critic and actor learn from the scored batch, each in its own mini-batches and epochs."""

    def minis(section: ConfigDict, size: int, number: int) -> Iterator[batch.Mini]:
        key = jax.random.fold_in(jax.random.fold_in(now.key, now.step), number)
        for epoch in range(section.ppo_epochs):
            order = np.arange(len(trajectories))
            if section.shuffle:
                order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), len(trajectories)))
            yield from batch.mini_batches(
                flat, trajectories, order=order, mini_batch_size=size, plan=learner.plan, mesh=learner.mesh
            )

    metrics = {}
    if learner.critic is not None:
        with timer("update_critic"):
            data = minis(c.critic, assemble.critic_mini_batch_size(c), 1)
            value, value_opt, found = ppo.descend(learner.critic, now.value, now.value_opt, now.step, data)
        now, metrics = dataclasses.replace(now, value=value, value_opt=value_opt), found
    warm = now.step - c.trainer.critic_warmup  # the actor's schedule begins with its first step
    if int(warm) >= 0:
        with timer("update_actor"):
            data = minis(c.actor, c.actor.ppo_mini_batch_size, 0)
            policy, policy_opt, found = ppo.descend(
                learner.actor, now.policy, now.policy_opt, warm, data, learner.reference
            )
        now, metrics = dataclasses.replace(now, policy=policy, policy_opt=policy_opt), metrics | found
    return now, metrics


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
    return {
        "reward_mean": float(scores.mean()),
        "critic/score/mean": float(scores.mean()),
        "critic/score/max": float(scores.max()),
        "critic/score/min": float(scores.min()),
        "reward/errors": float(failed),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float(np.mean([t.finish == "length" for t in trajectories])),
        "prompt_length/mean": float((whole - lengths).mean()),
        "perf/total_num_tokens": float(whole.sum()),
    } | part_means(rewards)


def part_means(rewards: list[Reward]) -> dict[str, float]:
    """The mean of every part of the reward, over the samples that have it."""
    found: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.parts.items():
            found.setdefault(f"reward/{name}/mean", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def require_progress(c: ConfigDict, run: pathlib.Path, now: TrainState) -> None:
    """Stops the run where too many steps in a row had an update that was skipped."""
    if int(now.bad_steps) >= c.trainer.max_bad_steps:
        raise Diverged(
            f"step {int(now.step)}: {int(now.bad_steps)} steps in a row had a loss or gradient that is no finite"
            f" number (trainer.max_bad_steps={c.trainer.max_bad_steps}); their updates were skipped and their batches"
            f" are in {run / 'bad_steps'}; lower actor.lr or critic.lr, or go on with the same command"
        )


def validate(
    c: ConfigDict, run: pathlib.Path, inputs: Inputs, sampler: Sampler, panel: Panel, logger: Logger, version: int
) -> dict[str, float]:
    """Greedy accuracy on the validation prompts; its samples go to the run folder, a few to the console."""
    metrics, rows = evaluate(
        sampler,
        inputs.val.prompts,
        panel.testing(),
        max_tokens=c.data.max_response_length,
        version=version,
        batch_size=c.data.val_batch_size,
    )
    write_samples(run, f"test_{version}", rows)
    for row in rows[: c.trainer.log_val_generations]:
        mark = row["error"] if row["score"] is None else f"score {row['score']:g}"
        logger.note(f"  {_short(row['prompt'])} → {_short(row['response'])}   ({mark}; truth {row['ground_truth']})")
    return metrics


def _short(text: str | list[dict[str, str]], limit: int = 60) -> str:
    line = " ".join((text if isinstance(text, str) else text[-1]["content"]).split())
    return line if len(line) <= limit else "…" + line[-limit:]


def finished(c: ConfigDict, checkpoints: Checkpoints, total_steps: int) -> bool:
    """Whether the same command has already run to its end in this folder."""
    done = checkpoints.latest()
    whole = (pathlib.Path(c.trainer.run_dir).expanduser() / "hf").is_dir()
    return c.trainer.resume_mode == "auto" and done is not None and done >= total_steps and whole


def kept(cursor: Cursor, panel: Panel) -> dict[str, Any]:
    """What a checkpoint keeps beside the train state."""
    return {"cursor": dataclasses.asdict(cursor), "reward": panel.state()}


def resume(
    c: ConfigDict, checkpoints: Checkpoints, begin: TrainState, panel: Panel
) -> tuple[TrainState, Cursor, int | None]:
    """The state to go on from, the place in the data, and the step of the checkpoint (None: a new run)."""
    mode = c.trainer.resume_mode
    if mode == "disable":
        checkpoints.discard_after(-1)
        return begin, Cursor(), None
    found = checkpoints.restore_latest(begin) if mode == "auto" else restore(pathlib.Path(mode), begin)
    if found is None:
        return begin, Cursor(), None
    checkpoints.discard_after(found.step)
    state = found.state
    if c.algorithm.kl_ctrl_type == "fixed":  # it is the config's, also when it was changed between two starts
        state = dataclasses.replace(state, kl_coef=begin.kl_coef)
    if int(state.bad_steps) >= c.trainer.max_bad_steps:  # the run had stopped; whoever goes on wants to
        state = dataclasses.replace(state, bad_steps=begin.bad_steps)
    panel.load(found.meta.get("reward", {}))
    return state, Cursor(**found.meta["cursor"]), found.step


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


def _terminate(number: int, _: Any) -> None:
    raise SystemExit(128 + number)  # unwinds, so that servers stop and files close


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, switches = settings.parse(sys.argv[1:] if argv is None else argv, __doc__, settings.default())
    settings.check(config)
    if switches["dry_run"]:
        print(settings.dump(config), flush=True)
        print(assemble.dry_run(config), end="")
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        train(config)
    except (RolloutError, Diverged) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(
            f"interrupted; the same command goes on from the last of {config.trainer.run_dir}/checkpoints",
            file=sys.stderr,
        )
        sys.exit(130)


if __name__ == "__main__":
    main()
