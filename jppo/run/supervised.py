"""The training loop of fine-tuning and reward models: one model, one optimizer, examples from files.

Checkpoints, resume, signals and metrics are shared with PPO. An interrupted run that resumes has the metrics and the
model of an uninterrupted one, bit for bit. `Objective` holds the differences between the two.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jppo import settings
from jppo.data.stream import Cursor, next_batch
from jppo.errors import expanded
from jppo.learner import batch, offloading, packing, ppo, state
from jppo.learner.make import Trained, load_trained, make_descent
from jppo.models import hf_write, placing
from jppo.models.config import ModelConfig
from jppo.models.lora import Lora
from jppo.models.params import Head
from jppo.run.resume import differences, finished, read_checkpoint, run_identity
from jppo.runlog import durable_files
from jppo.runlog.checkpoint import Checkpoints, NonFinite
from jppo.runlog.checkpoint_arrays import nonfinite
from jppo.runlog.console import Columns
from jppo.runlog.lock import own
from jppo.runlog.logger import Logger, Silent, read_metrics
from jppo.runlog.make import make_logger
from jppo.runlog.timers import Timers
from jppo.runlog.watchdog import Watch
from jppo.settings import Supervised, UserError
from jppo.types import Params


@dataclasses.dataclass(frozen=True)
class Task:
    """The inputs and the mesh of a run, before it loads the model."""

    steps: int
    mesh: Any
    plan: packing.Plan
    cfg: ModelConfig
    adapters: Lora | None
    accumulate: Any  # compiled gradient


@dataclasses.dataclass(frozen=True)
class Batch:
    """The packed examples of one step."""

    mini: batch.Mini
    tokens: int
    further: tuple[Any, ...] = ()  # arguments of the gradient, after the rows
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The examples of a run, its loss and its validation."""

    name: str  # prefix of metrics and optimizer: sft, rm
    head: Head
    examples: int
    checksum: int  # of the examples in order: a resume rejects others
    columns: Columns
    opening: str  # first console line
    draw: Callable[[ppo.ModelUpdate, Params, np.ndarray], Batch]  # returns the batch of these indices
    test: Callable[[ppo.ModelUpdate, Params], dict[str, float]] | None = None
    test_freq: int = -1
    changes: Mapping[str, Any] | None = None  # to the model's config.json


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """The arrays of a checkpoint, named as in PPO's: a policy, or a value model."""

    policy: Params | None = None
    policy_opt: Any = None
    value: Params | None = None
    value_opt: Any = None


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    learned: Params
    opt: Any
    cursor: Cursor = dataclasses.field(default_factory=Cursor)
    step: int = 0
    pending: dict[str, float] | None = None  # metrics of the last step, not logged yet


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, once all of them exist."""

    c: Supervised
    task: Task
    objective: Objective
    descent: ppo.ModelUpdate
    checkpoints: Checkpoints
    logger: Logger | Silent
    timer: Timers
    watch: Watch
    origin: dict[str, Any]


def train(c: Supervised, task: Task, objective: Objective) -> dict[str, float]:
    """Trains, or resumes, to the last step and writes the model to RUN_DIR/hf; returns the last step's metrics."""
    run = folder(c)
    timer, t = Timers(), c.trainer
    limits = dict[str, Any](stage_timeout_s=t.stage_timeout_s, stop_timeout_s=t.stop_timeout_s)
    with contextlib.ExitStack() as stack:
        stack.enter_context(own(run))
        watch = stack.enter_context(Watch(timer, stacks=run / "stacks.txt", stopped=t.stop_exit_code, **limits))
        checkpoints = stack.enter_context(Checkpoints(run / "checkpoints", keep=t.max_ckpt_to_keep))
        if finished(c, checkpoints, task.steps):
            print(f"all {task.steps} steps are done: nothing is left to train; trainer.resume_mode=disable restarts")
            return last_metrics(run)
        with timer("start"):
            key = jax.random.key(t.seed)
            how = dict[str, Any](head=objective.head, key=key, adapters=task.adapters)
            trained = load_trained(c, task.mesh, task.cfg, c.model.path, **how)
            descent, opt = make_descent(c.optim, objective.name, task.accumulate, trained, task.steps)
            origin = make_origin(c, task, objective, trained)
            begun, said, resumed = begin(c, checkpoints, objective, descent, Progress(trained.learned, opt), origin)
            del trained, opt  # a resumed run must not hold two states
        logged = resumed if begun.pending is None or resumed is None else resumed - 1  # its line is written now
        logger = make_logger(c, run, total_steps=task.steps, columns=objective.columns, resumed_step=logged)
        with logger:
            durable_files.write_text(run / "config.json", settings.dump(c))
            for line in (objective.opening, *said, offloading.describe_offload(c, None, task.mesh.devices.flat[0])):
                if line is not None:
                    logger.note(line)
            now = learn(Run(c, task, objective, descent, checkpoints, logger, timer, watch, origin), begun)
        checkpoints.wait()  # `finished` compares when the two were written
        hf_write.save(
            run / "hf", descent.model(now.learned), task.cfg, source=c.model.path, dtype=c.model.param_dtype,
            head=objective.head, changes=objective.changes,
        )  # fmt: skip
        return last_metrics(run)


def folder(c: Supervised) -> pathlib.Path:
    """Returns the run folder."""
    return expanded(c.trainer.run_dir)


def last_metrics(run: pathlib.Path) -> dict[str, float]:
    """Reads the last line of a run's metrics.jsonl."""
    lines = read_metrics(run)
    return lines[-1] if lines else {}


def make_origin(c: Supervised, task: Task, objective: Objective, trained: Trained) -> dict[str, Any]:
    """Returns a run's identity for its checkpoints."""
    frozen = {} if trained.base is None else {"model.path": trained.base.params}
    return run_identity(c, task.mesh, data={"train": objective.checksum}, frozen=frozen)


def begin(
    c: Supervised,
    checkpoints: Checkpoints,
    objective: Objective,
    descent: ppo.ModelUpdate,
    first: Progress,
    origin: dict[str, Any],
) -> tuple[Progress, list[str], int | None]:
    """Returns the first state, console lines on it, and the checkpoint's step; None: a new run."""
    found = read_checkpoint(c, checkpoints, arrays_of(objective, descent, first), origin)
    if found is None:
        return first, [], None
    opt_name = f"{field_of(objective)}_opt"
    pairs = (
        (getattr(found.state, field_of(objective)), first.learned),
        (getattr(found.state, opt_name), first.opt),
    )
    learned, opt = (
        state.placed(tree, spare, like) if any(jax.tree.leaves(spare)) else tree
        for (tree, like), spare in zip(pairs, descent.spare, strict=True)
    )
    said = [f"resuming from the checkpoint of step {found.step}", *differences(found.meta, origin)]
    now = Progress(learned, opt, Cursor(**found.meta["cursor"]), found.step, found.meta.get("pending"))
    return now, said, found.step


def field_of(objective: Objective) -> str:
    """Returns the field of `Saved` with the model."""
    return "policy" if objective.head == "lm" else "value"


def arrays_of(objective: Objective, descent: ppo.ModelUpdate, now: Progress) -> Saved:
    """Returns parameters and optimizer without mesh padding."""
    learned, opt = (
        state.portable(tree, spare) if any(jax.tree.leaves(spare)) else tree
        for tree, spare in zip((now.learned, now.opt), descent.spare, strict=True)
    )
    name = field_of(objective)
    return Saved(**{name: learned, f"{name}_opt": opt})


def learn(run: Run, now: Progress) -> Progress:
    """Runs all remaining steps and logs each once; whatever ends the run, a complete state is saved."""
    c, timer, steps, drawn = run.c, run.timer, run.task.steps, None
    try:
        while now.pending is not None or now.step < steps:
            if now.pending is None:  # else a step is done, but not yet validated and logged
                after, found = take_step(run, now)
                now = dataclasses.replace(now, learned=after.learned, opt=after.opt)  # of a skipped step unchanged
                require_learned(run.objective.name, after, c)
                now, drawn = after, found
                run.watch.check()
            metrics, last = dict(now.pending or {}), now.step == steps
            if run.objective.test is not None and (last or due(now.step, run.objective.test_freq)):
                with timer("testing"):
                    metrics |= run.objective.test(run.descent, now.learned)
            run.logger.log(now.step, metrics | timer.next_step())
            now = dataclasses.replace(now, pending=None)
            if last or due(now.step, c.trainer.save_freq):
                try:
                    save(run, now, drawn)
                except NonFinite as e:
                    raise UserError(f"step {now.step}: {e}; nothing was saved: {remedy(c)}") from e
            run.watch.check()
    except BaseException:  # the state may be fit, whatever ends the run
        run.checkpoints.save_last(now.step, (now.learned, now.opt), lambda: save(run, now, drawn), run.logger.note)
        raise
    return now


def take_step(run: Run, now: Progress) -> tuple[Progress, Batch]:
    """Takes one optimizer step on the next batch."""
    c, objective, descent = run.c, run.objective, run.descent
    with run.timer("step"):
        indices, cursor = next_batch(
            now.cursor,
            n=objective.examples,
            batch_size=c.data.train_batch_size,
            seed=c.trainer.seed,
            shuffle=c.data.shuffle,
        )
        drawn = objective.draw(descent, now.learned, indices)
        number = np.asarray(now.step, np.int32)
        learned, opt, found = ppo.descend(descent, now.learned, now.opt, number, [drawn.mini], *drawn.further)
    metrics = drawn.metrics | found
    metrics["perf/throughput"] = drawn.tokens / run.timer.so_far()["step"]
    return Progress(learned, opt, cursor, now.step + 1, metrics), drawn


def require_learned(name: str, now: Progress, c: Supervised) -> None:
    """Raises UserError where the last update was skipped."""
    metrics = now.pending or {}
    if metrics[f"{name}/skipped"]:
        loss, norm = metrics[f"{name}/loss"], metrics[f"{name}/grad_norm"]
        said = f"{name}/loss={loss} {name}/grad_norm={norm} must be finite numbers"
        raise UserError(f"step {now.step}: {said}; {remedy(c)}")


def remedy(c: Supervised) -> str:
    """Returns the remedy for non-finite losses, gradients or weights."""
    return f"lower optim.lr={c.optim.lr}, and give the command again: it resumes from the last checkpoint"


def save(run: Run, now: Progress, drawn: Batch | None) -> None:
    """Starts writing a checkpoint; raises NonFinite where the state is unfit to resume from."""
    meta = run.origin | {"cursor": dataclasses.asdict(now.cursor)}
    if now.pending is not None:
        meta["pending"] = now.pending | run.timer.next_step()
    with run.timer("save"):
        if drawn is not None:
            require_finite(run.descent, now.learned, drawn)
        run.logger.sync()
        run.checkpoints.save(now.step, arrays_of(run.objective, run.descent, now), meta)


def require_finite(descent: ppo.ModelUpdate, learned: Params, drawn: Batch) -> None:
    """Raises NonFinite where finite parameters give non-finite losses or gradients, for rows of the last step."""
    params, base, further = placing.to_device((learned, descent.base, drawn.further))
    rows = placing.put(drawn.mini.micros[0], drawn.mini.place)
    carry, _ = descent.accumulate(params, base, descent.zeros(), rows, drawn.mini.counts, *further)
    leaves: Sequence[Any] = jax.tree.leaves(carry)
    if nonfinite({str(number): leaf for number, leaf in enumerate(leaves)}):
        raise NonFinite("the loss or its gradient is not a finite number")


def due(step: int, every: int) -> bool:
    """Whether a periodic action is due at `step`; -1 disables it."""
    return every > 0 and step % every == 0
