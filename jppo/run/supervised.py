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
from jppo.learner import batch, make, packing, sharding, update
from jppo.learner.loss_scale import SMALLEST, scale_of
from jppo.learner.make import find_frozen, load_trained, make_adapters, make_trainable, plan_rows
from jppo.learner.state import begin_state, remove_padding, scalar, spare_rows
from jppo.learner.stats import join_stages
from jppo.learner.trainable import CompiledLoss, Trainable
from jppo.models import hf, hf_write, placing
from jppo.models.config import ModelConfig
from jppo.models.freeze import Frozen
from jppo.models.lora import Lora
from jppo.models.params import Head
from jppo.run import loop
from jppo.run.loop import Diverged, Progress, total_steps
from jppo.run.resume import describe_finished, finished, require_same_settings, resume_or_begin, run_identity
from jppo.run.tokenizer import read_tokenizer
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
from jppo.types import Array, Params, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The inputs and the mesh of a run, before it loads the model."""

    name: str  # prefix of metrics and optimizer: sft, rm, dpo
    head: Head
    steps: int
    mesh: Any
    plan: packing.Plan
    cfg: ModelConfig
    adapters: Lora | None
    frozen: Frozen
    loss: CompiledLoss
    scores: Callable[..., Array] | None = None  # compiled; the pass before a gradient of pairs
    changes: Mapping[str, Any] | None = None  # to the model's config.json

    @property
    def fields(self) -> tuple[str, str]:
        """Returns the fields of the train state that have the model and its optimizer."""
        return ("policy", "policy_opt") if self.head == "lm" else ("value", "value_opt")

    def trained(self, state: TrainState) -> tuple[Params, Any]:
        """Returns the trained parameters and the optimizer's state."""
        params, opt = (getattr(state, field) for field in self.fields)
        return params, opt

    def begin(self, params: Params, opt: Any, *, seed: int) -> TrainState:
        """Makes the state before the first step."""
        trained, none = (params, opt), (None, None)
        policy, value = (trained, none) if self.head == "lm" else (none, trained)
        return begin_state(*policy, *value, seed=seed)


@dataclasses.dataclass(frozen=True)
class ExampleBatch:
    """The packed examples of one step."""

    mini: batch.Mini
    tokens: int
    further: tuple[Any, ...] = ()  # arguments of the gradient, after the rows
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ExampleObjective:
    """The examples of a run and its validation."""

    examples: int
    checksum: int  # of the examples in order: a resume rejects others
    columns: Columns
    opening: str  # first console line
    draw: Callable[[Trainable, Params, np.ndarray], ExampleBatch]  # returns the batch of these indices
    begin: Callable[[Trainable, Params], None] | None = None  # sees the model before it is trained
    test: Callable[[Trainable, Params], dict[str, float]] | None = None
    test_freq: int = -1


@dataclasses.dataclass(frozen=True)
class SupervisedRun(loop.Opened):
    """The parts of a run, once all of them exist."""

    c: Supervised
    task: Task
    objective: ExampleObjective
    trainable: Trainable
    origin: dict[str, Any]


def read_model(c: Supervised, head: Head, *, weights: bool) -> tuple[dict[str, Any], ModelConfig, Any]:
    """Reads config.json, as it is and as a model's config, and the tokenizer; checks the headers of the `weights`."""
    config, cfg = hf.read_config(c.model.path, longest=c.data.longest_row, setting="model.path")
    if weights and c.model.init == "pretrained":
        hf.check_weights(c.model.path, cfg, head=head)
    return config, cfg, read_tokenizer(c, cfg)


def task_fields(
    c: Supervised, mesh: Any, cfg: ModelConfig, loss: update.Loss, *, head: Head, examples: int, sequences: int = 1,
    extra: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Returns the fields of a Task that follow from the settings; an example has so many `sequences`.

    `extra` tokens are of a sequence beyond prompt and response.
    """
    steps, options = total_steps(c, examples), sharding.compiler_options(mesh, c.model.compiler_options)
    plan = plan_rows(
        c, mesh, tokens_per_device=c.optim.max_tokens_per_device, sequences=sequences * c.data.train_batch_size,
        steps=steps, policy=cfg, extra_tokens=extra,
    )  # fmt: skip
    compiled = CompiledLoss(update.make_accumulate(loss, mesh=mesh, options=options))
    learned = dict(adapters=make_adapters(c), frozen=find_frozen(c, "optim", cfg, head=head))
    return dict(head=head, mesh=mesh, cfg=cfg, steps=steps, plan=plan, loss=compiled, **learned)


def train_on_examples(c: Supervised, task: Task, objective: ExampleObjective) -> dict[str, float]:
    """Trains, or resumes, to the last step and writes the model to RUN_DIR/hf; returns the last step's metrics."""
    run, timer, t = folder(c), Timers(), c.trainer
    with contextlib.ExitStack() as stack:
        stack.enter_context(own(run))
        watch = Watch(
            timer, stage_timeout_s=t.stage_timeout_s, stop_timeout_s=t.stop_timeout_s, stacks=run / "stacks.txt",
            checkpoints=run / "checkpoints", stopped=t.stop_exit_code,
        )  # fmt: skip
        stack.enter_context(watch)
        display = open_display(stack, c, timer)
        checkpoints = stack.enter_context(Checkpoints(run / "checkpoints", keep=t.max_ckpt_to_keep))
        data = {"train": objective.checksum}
        require_same_settings(c, checkpoints, data)
        if finished(c, checkpoints, task.steps):
            print(describe_finished(c, task.steps))
            return _last_metrics(run)
        with timer("start"):
            timer.part("the model")
            options = dict[str, Any](head=task.head, adapters=task.adapters, frozen=task.frozen)
            trained = load_trained(c, task.mesh, task.cfg, c.model.path, key=jax.random.key(t.seed), **options)
            scaled = c.model.scales_loss
            trainable, opt = make_trainable(c.optim, task.name, task.loss, trained, task.steps, scaled=scaled)
            frozen = {} if trained.base is None else {"model.path": trained.base.params}
            if objective.begin is not None:  # its reference is the initial model
                frozen.setdefault("model.path", trained.learned)
            origin = run_identity(c, task.mesh, data=data, frozen=frozen)
            timer.part("the first pass")
            if objective.begin is not None:
                objective.begin(trainable, trained.learned)
            state, spare = task.begin(trained.learned, opt, seed=t.seed), spare_rows(**{task.fields[0]: trainable})
            begun = resume_or_begin(c, checkpoints, spare, state, origin)
            del trained, opt, state  # a resumed run must not hold two states
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
            run / "hf", trainable.model(task.trained(now.state)[0]), task.cfg, source=c.model.path,
            dtype=c.model.param_dtype, head=task.head, changes=task.changes,
        )  # fmt: skip
        return _last_metrics(run)


def folder(c: Supervised) -> pathlib.Path:
    return expanded(c.trainer.run_dir)


def _last_metrics(run: pathlib.Path) -> dict[str, float]:
    lines = read_metrics(run)
    return lines[-1] if lines else {}


def _make_method(run: SupervisedRun) -> loop.Method:
    """Returns the functions of the objective for the loop of every training, `loop.learn`."""
    c, task, objective = run.c, run.task, run.objective
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
                require_finite(run.trainable, *task.trained(now.state), batch)
            run.logger.sync()
            spare = spare_rows(**{task.fields[0]: run.trainable})
            run.checkpoints.save(now.step, remove_padding(now.state, spare), meta)

    def test_model(now: Progress) -> dict[str, float]:
        return {} if objective.test is None else objective.test(run.trainable, task.trained(now.state)[0])

    return loop.Method(
        step=step_on_batch,
        finish=lambda now: _require_learned(task.name, now, c),
        test=test_model,
        test_freq=objective.test_freq,
        require_progress=lambda _: None,
        save=save_checked,
        remedy=_remedy(c),
    )


def take_step(run: SupervisedRun, now: Progress) -> tuple[Progress, ExampleBatch]:
    """Takes one optimizer step on the next batch; one that is skipped leaves the run at its step."""
    c, task, objective, trainable = run.c, run.task, run.objective, run.trainable
    indices, cursor = next_batch(
        Cursor(**now.place["cursor"]),
        n=objective.examples,
        batch_size=c.data.train_batch_size,
        seed=c.trainer.seed,
        shuffle=c.data.shuffle,
    )
    params, opt = task.trained(now.state)
    drawn = objective.draw(trainable, params, indices)
    number = np.asarray(now.step, np.int32)
    params, opt, update_metrics = trainable.learn(params, opt, number, [drawn.mini], *drawn.further, key=now.state.key)
    bad = bool(update_metrics[f"{task.name}/skipped"])
    state = dataclasses.replace(
        now.state,
        step=scalar(now.step + (not bad), now.state.step),
        bad_steps=scalar(int(bad), now.state.bad_steps),
        **dict(zip(task.fields, (params, opt), strict=True)),
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


def require_finite(trainable: Trainable, learned: Params, opt: Any, example_batch: ExampleBatch) -> None:
    """Raises NonFinite where finite parameters give non-finite losses or gradients, for rows of the last step.

    The loss scale is the smallest, at which an overflow is the model's.
    """
    scale = None if scale_of(opt) is None else scalar(SMALLEST, placing.to_device(scale_of(opt)))
    params, base, further = placing.to_device((learned, trainable.base, example_batch.further))
    rows = placing.put(example_batch.mini.micros[0], example_batch.mini.place)
    counts = example_batch.mini.counts
    carry, _ = trainable.loss.accumulate(params, base, trainable.zeros(), rows, counts, scale, *further)
    leaves: Sequence[Any] = jax.tree.leaves(carry)
    if nonfinite({str(number): leaf for number, leaf in enumerate(leaves)}):
        raise NonFinite("the loss or its gradient is not a finite number")
