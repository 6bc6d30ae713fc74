"""A run of one model on examples from files, for fine-tuning, reward models and DPO: its start, and its step.

The loop is PPO's, `loop.py`. `ExampleObjective` holds what the three commands differ in.
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
from jppo.distributed.hosts import ALONE
from jppo.errors import expanded
from jppo.learner import batch, make, packing
from jppo.learner.make import Trained, load_trained, make_trainable
from jppo.learner.state import begin_state, remove_padding, scalar, spare_rows
from jppo.learner.stats import join_stages
from jppo.learner.trainable import CompiledLoss, Trainable
from jppo.models import hf_write, placing
from jppo.models.config import ModelConfig
from jppo.models.lora import Lora
from jppo.models.params import Head
from jppo.run import loop
from jppo.run.loop import Diverged, Progress
from jppo.run.resume import Begun, finished, resume_or_begin, run_identity
from jppo.runlog import durable_files
from jppo.runlog.checkpoint import Checkpoints, NonFinite
from jppo.runlog.checkpoint_arrays import nonfinite
from jppo.runlog.console import Columns, Doing
from jppo.runlog.durable_files import own
from jppo.runlog.logger import read_metrics
from jppo.runlog.make import make_logger, open_display
from jppo.runlog.timers import Profiler, Timers
from jppo.runlog.watchdog import Watch
from jppo.settings import Supervised
from jppo.types import Params, TrainState


@dataclasses.dataclass(frozen=True)
class Task:
    """The inputs and the mesh of a run, before it loads the model."""

    steps: int
    mesh: Any
    plan: packing.Plan
    cfg: ModelConfig
    adapters: Lora | None
    loss: CompiledLoss


@dataclasses.dataclass(frozen=True)
class ExampleBatch:
    """The packed examples of one step."""

    mini: batch.Mini
    tokens: int
    further: tuple[Any, ...] = ()  # arguments of the gradient, after the rows
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ExampleObjective:
    """The examples of a run, its loss and its validation."""

    name: str  # prefix of metrics and optimizer: sft, rm
    head: Head
    examples: int
    checksum: int  # of the examples in order: a resume rejects others
    columns: Columns
    opening: str  # first console line
    draw: Callable[[Trainable, Params, np.ndarray], ExampleBatch]  # returns the batch of these indices
    begin: Callable[[Trainable, Params], None] | None = None  # sees the model before it is trained
    test: Callable[[Trainable, Params], dict[str, float]] | None = None
    test_freq: int = -1
    changes: Mapping[str, Any] | None = None  # to the model's config.json


@dataclasses.dataclass(frozen=True)
class SupervisedRun(loop.Opened):
    """The parts of a run, once all of them exist."""

    c: Supervised
    task: Task
    objective: ExampleObjective
    trainable: Trainable
    origin: dict[str, Any]


def train_on_examples(c: Supervised, task: Task, objective: ExampleObjective) -> dict[str, float]:
    """Trains, or resumes, to the last step and writes the model to RUN_DIR/hf; returns the last step's metrics."""
    run, timer, t = folder(c), Timers(), c.trainer
    limits = dict[str, Any](stage_timeout_s=t.stage_timeout_s, stop_timeout_s=t.stop_timeout_s)
    with contextlib.ExitStack() as stack:
        stack.enter_context(own(run))
        watch = stack.enter_context(Watch(timer, stacks=run / "stacks.txt", stopped=t.stop_exit_code, **limits))
        display = open_display(stack, c, timer)
        checkpoints = stack.enter_context(Checkpoints(run / "checkpoints", keep=t.max_ckpt_to_keep))
        if finished(c, checkpoints, task.steps):
            print(f"all {task.steps} steps are done: nothing is left to train; trainer.resume_mode=disable restarts")
            return _last_metrics(run)
        with timer("start"):
            timer.part("the model")
            options = dict[str, Any](head=objective.head, key=jax.random.key(t.seed), adapters=task.adapters)
            trained = load_trained(c, task.mesh, task.cfg, c.model.path, **options)
            trainable, opt = make_trainable(c.optim, objective.name, task.loss, trained, task.steps)
            origin = _make_origin(c, task, objective, trained)
            timer.part("the first pass")
            if objective.begin is not None:
                objective.begin(trainable, trained.learned)
            begun = resume_or_load(c, checkpoints, objective, trainable, trained.learned, opt, origin)
            del trained, opt  # a resumed run must not hold two states
        display.leave_terminal()
        logger = make_logger(
            c, run, total_steps=task.steps, columns=objective.columns, resumed_step=begun.logged, doing=Doing(timer)
        )
        with logger:
            durable_files.write_text(run / "config.json", settings.dump(c))
            resuming = None if begun.step is None else f"resuming from the checkpoint of step {begun.step}"
            offload_note = make.describe_offload(c, None, task.mesh.devices.flat[0])
            for line in filter(None, (objective.opening, resuming, *begun.console_lines, offload_note)):
                logger.note(line)
            opened = SupervisedRun(
                c, task.steps, ALONE, checkpoints, logger, timer, watch, Profiler(run / "profile", ()),
                task, objective, trainable, origin,
            )  # fmt: skip
            now = loop.learn(opened, _make_method(opened), begun.now)
        checkpoints.wait()  # `finished` compares when the two were written
        hf_write.save_model(
            run / "hf", trainable.model(params_and_optimizer(objective, now.state)[0]), task.cfg, source=c.model.path,
            dtype=c.model.param_dtype, head=objective.head, changes=objective.changes,
        )  # fmt: skip
        return _last_metrics(run)


def folder(c: Supervised) -> pathlib.Path:
    """Returns the run folder."""
    return expanded(c.trainer.run_dir)


def _last_metrics(run: pathlib.Path) -> dict[str, float]:
    """Reads the last line of a run's metrics.jsonl."""
    lines = read_metrics(run)
    return lines[-1] if lines else {}


def _make_origin(c: Supervised, task: Task, objective: ExampleObjective, trained: Trained) -> dict[str, Any]:
    """Returns a run's identity for its checkpoints."""
    frozen = {} if trained.base is None else {"model.path": trained.base.params}
    return run_identity(c, task.mesh, data={"train": objective.checksum}, frozen=frozen)


def resume_or_load(
    c: Supervised,
    checkpoints: Checkpoints,
    objective: ExampleObjective,
    trainable: Trainable,
    params: Params,
    opt: Any,
    origin: dict[str, Any],
) -> Begun:
    """Resumes from a checkpoint, or begins with the loaded `params`: the policy of the train state, or its value."""
    if objective.head == "lm":
        state, spare = begin_state(params, opt, None, None, seed=c.trainer.seed), spare_rows(policy=trainable)
    else:
        state, spare = begin_state(None, None, params, opt, seed=c.trainer.seed), spare_rows(value=trainable)
    return resume_or_begin(c, checkpoints, spare, state, origin)


def params_and_optimizer(objective: ExampleObjective, state: TrainState) -> tuple[Params, Any]:
    """Returns the trained parameters and the optimizer's state, from the fields of policy or value."""
    return (state.policy, state.policy_opt) if objective.head == "lm" else (state.value, state.value_opt)


def _make_method(run: SupervisedRun) -> loop.Method:
    """Returns the functions of the objective for the loop of every training, `loop.learn`."""
    c, objective = run.c, run.objective
    last_batch: list[ExampleBatch] = []  # the last step's, for the check before a save

    def step_on_batch(now: Progress) -> Progress:
        after, batch = take_step(run, now)
        last_batch[:] = [batch]
        return after

    def save_checked(now: Progress, _: dict[str, float], ended_by: BaseException | None) -> None:
        """Writes a checkpoint; raises NonFinite if the model gives non-finite numbers for the last batch."""
        meta = run.origin | now.place
        if now.unlogged is not None and not int(now.state.bad_steps):
            meta["pending"] = now.unlogged | run.timer.next_step()
        with run.timer("save"):
            for batch in last_batch:
                require_finite(run.trainable, params_and_optimizer(objective, now.state)[0], batch)
            run.logger.sync()
            spare = spare_rows(**{"policy" if objective.head == "lm" else "value": run.trainable})
            run.checkpoints.save(now.step, remove_padding(now.state, spare), meta)

    def test_model(now: Progress) -> dict[str, float]:
        if objective.test is None:
            return {}
        return objective.test(run.trainable, params_and_optimizer(objective, now.state)[0])

    return loop.Method(
        step=step_on_batch,
        finish=lambda now: _require_learned(objective.name, now, c),
        test=test_model,
        test_freq=objective.test_freq,
        require_progress=lambda _: None,
        save=save_checked,
        remedy=_remedy(c),
    )


def take_step(run: SupervisedRun, now: Progress) -> tuple[Progress, ExampleBatch]:
    """Takes one optimizer step on the next batch; one that is skipped leaves the run at its step."""
    c, objective, trainable = run.c, run.objective, run.trainable
    indices, cursor = next_batch(
        Cursor(**now.place["cursor"]),
        n=objective.examples,
        batch_size=c.data.train_batch_size,
        seed=c.trainer.seed,
        shuffle=c.data.shuffle,
    )
    params, opt = params_and_optimizer(objective, now.state)
    drawn = objective.draw(trainable, params, indices)
    number = np.asarray(now.step, np.int32)
    params, opt, update_metrics = trainable.learn(params, opt, number, [drawn.mini], *drawn.further, key=now.state.key)
    bad = bool(update_metrics[f"{objective.name}/skipped"])
    names = ("policy", "policy_opt") if objective.head == "lm" else ("value", "value_opt")
    state = dataclasses.replace(
        now.state,
        step=scalar(now.step + (not bad), now.state.step),
        bad_steps=scalar(int(bad), now.state.bad_steps),
        **dict(zip(names, (params, opt), strict=True)),
    )
    metrics = join_stages(drawn.metrics, update_metrics, {"perf/total_num_tokens": float(drawn.tokens)})
    return Progress(state, now.place if bad else {"cursor": dataclasses.asdict(cursor)}, metrics), drawn


def _require_learned(name: str, now: Progress, c: Supervised) -> None:
    """Raises Diverged where the last update was skipped."""
    if int(now.state.bad_steps):
        metrics = now.unlogged or {}
        loss, norm = metrics[f"{name}/loss"], metrics[f"{name}/grad_norm"]
        message = f"{name}/loss={loss} {name}/grad_norm={norm} must be finite numbers"
        raise Diverged(f"step {now.step + 1}: {message}; {_remedy(c)}")


def _remedy(c: Supervised) -> str:
    """Returns the remedy for non-finite losses, gradients or weights."""
    return f"lower optim.lr={c.optim.lr}, and give the command again: it resumes from the last checkpoint"


def require_finite(trainable: Trainable, learned: Params, example_batch: ExampleBatch) -> None:
    """Raises NonFinite where finite parameters give non-finite losses or gradients, for rows of the last step."""
    params, base, further = placing.to_device((learned, trainable.base, example_batch.further))
    rows = placing.put(example_batch.mini.micros[0], example_batch.mini.place)
    carry, _ = trainable.loss.accumulate(params, base, trainable.zeros(), rows, example_batch.mini.counts, *further)
    leaves: Sequence[Any] = jax.tree.leaves(carry)
    if nonfinite({str(number): leaf for number, leaf in enumerate(leaves)}):
        raise NonFinite("the loss or its gradient is not a finite number")
