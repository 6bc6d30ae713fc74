"""The compiled programs of a run: XLA's memory account, the forecast on a described machine, and both as a table."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from jppo.forecast import account as accounts
from jppo.forecast import account as forecast
from jppo.forecast import schedule
from jppo.forecast.account import Account, Forecast
from jppo.forecast.machines import GIB, HOST, Machine
from jppo.learner import packing
from jppo.learner.programs import Program, Stage
from jppo.models import placing
from jppo.preflight.servers import ServerMemory, ServerWork, server_rates, server_seconds
from jppo.types import Prompt, Trajectory, given_text

NOTE = "forecast by the compiler, not measured"


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """A program while it runs; bytes on one device."""

    name: str
    gradients: int  # f32 gradient sums in memory
    temporaries: int  # XLA's account, including results that alias no argument
    brought: int = 0  # offloaded, copied here for it
    account: Account | None = None  # of its program; None if not compiled
    useful: int = 0  # FLOP that the model needs, on all devices
    entries: int = 0  # of its rows; 0 without rows
    stage: Stage = "other"
    model: str = ""

    @property
    def needs(self) -> int:
        return self.gradients + self.temporaries + self.brought


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The bytes of a run on one device: permanent parts, and per program."""

    parts: dict[str, int]
    moments: tuple[ProgramMemory, ...]
    host: dict[str, int] = dataclasses.field(default_factory=dict)  # offloaded from this device
    server: ServerMemory | None = None  # on the same GPU
    programs: int = 0  # that a start compiles

    @property
    def worst(self) -> ProgramMemory:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.needs)

    @property
    def refused(self) -> list[ProgramMemory]:
        """Programs that fail to compile; on a TPU also for lack of memory."""
        return [moment for moment in self.moments if moment.account is not None and moment.account.error is not None]

    @property
    def code(self) -> int:
        return sum(moment.account.code for moment in self.moments if moment.account is not None)

    @property
    def peak(self) -> int:
        return sum(self.parts.values()) + self.code + self.worst.needs


def size(tree: Any) -> int:
    """Returns the bytes on one device."""
    return sum(math.prod(array.sharding.shard_shape(array.shape)) * _itemsize(array) for array in jax.tree.leaves(tree))


def global_size(tree: Any) -> int:
    """Returns the arrays' global bytes, each counted once."""
    return sum(math.prod(array.shape) * _itemsize(array) for array in jax.tree.leaves(tree))


def _itemsize(x: Any) -> int:
    return int(np.dtype(x.dtype).itemsize)


_ANNOUNCED = ContextVar("_ANNOUNCED", default=False)


@contextlib.contextmanager
def programs_announced() -> Iterator[None]:
    """Prints each program on stderr before it is compiled, for a command that else prints nothing for minutes."""
    token = _ANNOUNCED.set(True)
    try:
        yield
    finally:
        _ANNOUNCED.reset(token)


def announce(line: str) -> None:
    """Prints a line on stderr within `programs_announced`."""
    if _ANNOUNCED.get():
        print(line, file=sys.stderr, flush=True)


def account(program: Program, *, useful: int = 0, masked: float = 1.0) -> ProgramMemory:
    """Compiles the program and returns its memory and work on one device.

    `useful` are the FLOP that its rows need, and `masked` is the share of them in the mask.
    """
    announce(f"compiling {program.name}")
    compiled = accounts.account_of_program(program.lower(), _mesh_axes(program.args), share=masked)
    copied = {id(x): x for x in jax.tree.leaves((program.args, program.beside)) if placing.is_offloaded(x)}
    gradients, engine_bytes = (size(program.scratch), 0) if program.stage != "engine" else (0, size(program.scratch))
    return ProgramMemory(
        name=program.name,
        gradients=gradients,
        temporaries=compiled.temporaries + compiled.results + engine_bytes,
        brought=size(list(copied.values())),
        account=compiled,
        useful=useful,
        entries=math.prod(program.rows) if program.rows else 0,
        stage=program.stage,
        model=program.model,
    )


def _mesh_axes(args: Any) -> dict[str, int]:
    """Returns the axis sizes of the arguments' mesh."""
    shardings = (getattr(array, "sharding", None) for array in jax.tree.leaves(args))
    mesh = next(sharding.mesh for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding))
    return dict(mesh.shape)


@dataclasses.dataclass(frozen=True)
class Executions:
    """Executions of each program per step, with all responses at full length."""

    by_program: Mapping[str, int]
    entries: Mapping[str, int] = dataclasses.field(default_factory=dict)  # total row entries, other shapes included
    sampled: int = 0  # tokens that the rollout generates
    servers: ServerWork | None = None

    def of(self, moment: ProgramMemory) -> float:
        """Returns how often a program runs in a step; rows of other shapes count by their entries."""
        times = self.by_program.get(moment.name, 0)
        return self.entries.get(moment.name, times * moment.entries) / moment.entries if moment.entries else times


@dataclasses.dataclass(frozen=True)
class Descents:
    """A model's updates per step."""

    epochs: int
    mini_batches: int  # of an epoch, each an optimizer step
    sequences: int  # of a mini-batch
    micro_batches: int  # of a mini-batch, with all responses at full length
    entries: int = dataclasses.field(default=0, compare=False)  # of the rows of an epoch, padding included


def full_length(prompts: Sequence[Prompt], count: int, response: int, *, samples: int = 1) -> list[Trajectory]:
    """Returns `count` trajectories of the prompts in turn, `samples` of each, whose responses have `response` tokens.

    Those of equal lengths share arrays: a step of 8,192 long responses would take gigabytes.
    """
    lengths = [len(prompts[i // samples % len(prompts)].ids) for i in range(count)]
    by_length = {
        prompt: given_text(np.zeros(prompt + response, np.int32), np.arange(prompt + response) >= prompt)
        for prompt in set(lengths)
    }
    return [dataclasses.replace(by_length[prompt], uid=str(i // samples)) for i, prompt in enumerate(lengths)]


def count_descents(trajectories: Sequence[Trajectory], plan: packing.Plan, *, epochs: int, size: int) -> Descents:
    """Splits a step into mini-batches of `size` sequences; returns the numbers of updates and micro-batches."""
    mini_batches = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
    packed = [packing.micro_batch_shapes(mini_batch, plan) for mini_batch in mini_batches]
    entries = sum(math.prod(shape) for shapes in packed for shape in shapes)
    return Descents(epochs, len(mini_batches), size, max(map(len, packed)), entries)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a PPO step with all responses at full length."""

    scoring: int  # micro-batches of a scoring pass
    entries: int  # of their rows, padding included
    updates: dict[str, Descents]  # by model
    sampled: int  # tokens that the rollout generates
    servers: ServerWork | None = None

    def executions(self, estimate: Estimate) -> Executions:
        """Returns how often each program runs in a step."""
        times, entries = dict[str, int](), dict[str, int]()
        for moment in estimate.moments:
            if moment.stage == "scoring":
                times[moment.name], entries[moment.name] = self.scoring, self.entries
            elif moment.stage in ("gradient", "exchange", "step"):
                update = self.updates[moment.model]
                times[moment.name] = update.epochs * update.mini_batches
                if moment.stage == "gradient":
                    times[moment.name] *= update.micro_batches
                    entries[moment.name] = update.epochs * update.entries
        return Executions(times, entries, self.sampled, self.servers)


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The forecast of each program on a machine, and of a step."""

    machine: Machine
    programs: tuple[tuple[ProgramMemory, Forecast], ...]
    executions: Executions
    rollout_tokens_per_s: float = 0.0  # of all engines, set by the user; 0: unknown

    @property
    def rollout(self) -> float | None:
        """Seconds of sampling per step."""
        rate = self.rollout_tokens_per_s
        return self.executions.sampled / rate if rate else None

    def stages(self) -> dict[str, float]:
        """Returns seconds per step by program; of several row shapes, the slowest counts."""
        stages: dict[str, float] = {}
        for moment, prediction in self.programs:
            times = self.executions.of(moment)
            brought = moment.brought / HOST[0]  # models are copied once per stage, optimizers both ways per step
            copies = (2 * times if moment.stage == "step" else 1) * brought if times else 0.0
            stages[moment.name] = max(stages.get(moment.name, 0.0), times * prediction.seconds + copies)
        return {name: seconds for name, seconds in stages.items() if seconds}

    def with_servers(self) -> dict[str, float]:
        """Returns seconds per step in which servers sleep, wake, get the weights and are checked."""
        scoring = max(
            (prediction.seconds for moment, prediction in self.programs if moment.name == "log-probs"), default=0.0
        )
        critic = sum(seconds for name, seconds in self.stages().items() if name.startswith("critic "))
        return server_seconds(self.executions.servers, self.machine, scoring, critic)

    @property
    def busy(self) -> float:
        """Seconds per step if collectives did not overlap with kernels at all."""
        return sum(
            self.executions.of(moment) * (prediction.compute + prediction.hbm + prediction.sent)
            for moment, prediction in self.programs
        )

    @property
    def step(self) -> float:
        """Seconds per step, without the rollout if its rate is unknown."""
        return sum(self.stages().values()) + sum(self.with_servers().values()) + (self.rollout or 0.0)


def make_outlook(estimate: Estimate, machine: Machine, mesh: Any, executions: Executions, rate: float = 0.0) -> Outlook:
    """Forecasts all compiled programs, and a step from their executions."""
    programs = tuple(
        (moment, forecast.forecast_account(moment.account, machine, mesh, moment.useful))
        for moment in estimate.moments
        if moment.account is not None and moment.account.error is None
    )
    return Outlook(machine, programs, executions, rate)


def program_lines(estimate: Estimate, outlook: Outlook | None) -> list[str]:
    """Formats the programs: compile time, attention kernel, peak memory, FLOP, bytes; on a machine the forecast."""
    predictions = {} if outlook is None else {id(moment): prediction for moment, prediction in outlook.programs}
    permanent = sum(estimate.parts.values())
    header = ["program", "compiled", "peak GiB", "temp. GiB", "TFLOP", "HBM GB", "sent GiB"]
    header += ["seconds", "bound by", "MFU at most"] if outlook is not None else []
    rows = [[*header, "kernels"]]
    for moment in estimate.moments:
        compiled, predicted = moment.account, predictions.get(id(moment))
        if compiled is None:
            rows.append(
                [moment.name, "estimated", _gib(permanent + moment.needs), _gib(moment.temporaries)]
                + [""] * (len(header) - 3)
            )
            continue
        if compiled.error is not None:
            rows.append([moment.name, "refused"] + [""] * (len(header) - 2) + [compiled.error[:120]])
            continue
        sent_bytes = sum(collective.total for collective in compiled.collectives)
        cells = [moment.name, f"{compiled.compile_s:.1f} s", _gib(permanent + moment.needs), _gib(moment.temporaries)]
        cells += [f"{compiled.total_flops / 1e12:,.3g}", f"{compiled.hbm / 1e9:,.3g}", _gib(sent_bytes)]
        if outlook is not None:
            mfu = "" if predicted is None or predicted.mfu is None else f"{predicted.mfu:.0%}"
            cells += ["", "", ""] if predicted is None else [_seconds(predicted.seconds), predicted.bound, mfu]
        kernels = ", ".join(f"{name.removeprefix('__')} x{times}" for name, times in compiled.kernels.items())
        rows.append([*cells, kernels or "-"])
    title = "programs, of one device" + ("" if outlook is None else f" of {outlook.machine.name}; {NOTE}")
    return [title, *_align_columns(rows)]


def exchange_lines(estimate: Estimate) -> list[str]:
    """Formats each program's collectives by kind and mesh axes, and the partitioner's warnings."""
    lines = []
    for moment in estimate.moments:
        if moment.account is None:
            continue
        rows = [
            [f"    {kind}", "+".join(axes), f"{times:,} times", f"{_gib(size)} GiB"]
            for kind, axes, times, size in schedule.totals(moment.account.collectives)
            if size >= GIB // 1000
        ]
        warnings = [f"    warning: the partitioner gathers whole: {operation}" for operation in moment.account.warnings]
        loops = moment.account.unknown_loops
        warnings += [f"    {len(loops)} loop(s) of unknown length count once"] if loops else []
        if rows or warnings:
            lines += [f"  {moment.name}", *_align_columns(rows), *warnings]
    return ["exchanges between devices, loops multiplied out", *lines] if lines else []


def step_lines(outlook: Outlook) -> list[str]:
    """Formats a step's forecast and the assumed rates."""
    lines = [f"a step with all responses as long as they may be; {NOTE}"]
    rows = [
        [f"  {name}", f"{outlook.executions.by_program[name]:,} times", f"{_seconds(seconds)} s"]
        for name, seconds in outlook.stages().items()
    ]
    rows += [[f"  {name}", "servers", f"{_seconds(seconds)} s"] for name, seconds in outlook.with_servers().items()]
    if outlook.rollout is not None:
        rows.append(["  rollout", f"{outlook.executions.sampled:,} tokens", f"{_seconds(outlook.rollout)} s"])
    rows.append(["  together", "", f"{_seconds(outlook.step)} s"])
    lines += _align_columns(rows)
    if outlook.rollout is None and outlook.executions.sampled:
        lines.append("  without the rollout; --rollout_tokens_per_s=N adds it")
    rates = forecast.rates(outlook.machine) + server_rates(outlook.executions.servers)
    return [*lines, "", "assumed rates, of one device", *(f"  {line}" for line in rates)]


def report_dict(estimate: Estimate, outlook: Outlook | None) -> dict[str, Any]:
    """Returns the dry run's report as JSON types."""
    predictions = {} if outlook is None else {id(moment): prediction for moment, prediction in outlook.programs}
    permanent = sum(estimate.parts.values())
    programs = []
    for moment in estimate.moments:
        row: dict[str, Any] = dict(name=moment.name, peak=permanent + moment.needs, temporaries=moment.temporaries)
        row |= {} if moment.account is None else {"account": moment.account.as_dict()}
        row |= {"forecast": predictions[id(moment)].as_dict()} if id(moment) in predictions else {}
        programs.append(row)
    report: dict[str, Any] = dict(
        parts=estimate.parts, peak=estimate.peak, worst=estimate.worst.name, programs=programs
    )
    if outlook is not None:
        report |= dict(machine=outlook.machine.name, note=NOTE, step_s=outlook.step, stages_s=outlook.stages())
        report |= dict(rollout_s=outlook.rollout, servers_s=outlook.with_servers())
        report |= dict(rates=forecast.rates(outlook.machine) + server_rates(outlook.executions.servers))
    return report


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3g}"


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns rows: the first column to the left, the others to the right, the last of five or more to the left."""
    if not rows:
        return []
    widths = [max(len(row[i]) if i < len(row) else 0 for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for i, cell in enumerate(row[1:], 1):
            is_last = i == len(widths) - 1 and len(widths) > 4
            cells.append(cell if is_last else cell.rjust(widths[i]))
        lines.append("  ".join(cells).rstrip())
    indent = "" if rows[0][0].startswith(" ") else "  "
    return [indent + line for line in lines]
