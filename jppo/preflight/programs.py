"""The compiled programs of a run, with XLA's account of their memory, and how often a step runs them."""

import contextlib
import dataclasses
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from jppo.learner import packing
from jppo.learner.programs import Program, Stage
from jppo.models import placing
from jppo.preflight.servers import ServerMemory
from jppo.types import Prompt, Trajectory, given_text

PARTITIONER = "Involuntary full rematerialization"
# XLA logs these on any host without a GPU, or of a program that does not fit, as its account already says.
NOISE = ("cudart_stub", "before absl::InitializeLog", "hlo_rematerialization.cc", "gpu_hlo_schedule.cc")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A compilation, and XLA's account of its program: bytes on one device."""

    seconds: float = 0.0
    error: str | None = None  # the compiler's, in one line; all else is 0 then
    arguments: int = 0
    temporaries: int = 0
    results: int = 0  # bytes that alias no argument
    code: int = 0  # bytes of the program; XLA states none for CPUs
    work: Any = None  # what `Inspect` returned


# Reads a compiled program: (program, sizes of its mesh axes in the mesh's order, the share of its tokens in the mask,
# the partitioner's warnings). Only the reports of dry runs need more than memory.
Inspect = Callable[[jax.stages.Compiled, dict[str, int], float, list[str]], Any]


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """A program while it runs; bytes on one device."""

    name: str
    gradients: int  # f32 gradient sums in memory
    temporaries: int  # XLA's account, including results that alias no argument
    brought: int = 0  # offloaded, copied here for it
    compiled: Compilation = Compilation()
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
        return [moment for moment in self.moments if moment.compiled.error is not None]

    @property
    def code(self) -> int:
        return sum(moment.compiled.code for moment in self.moments)

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


def compile_program(
    lowered: Any, sizes: dict[str, int], *, masked: float = 1.0, inspect: Inspect | None = None
) -> Compilation:
    """Compiles a lowered program; `sizes` are its mesh axes, in the mesh's order."""
    start = time.perf_counter()
    log: list[str] = []
    try:
        with capture_stderr(log):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        error = " ".join(str(e).split("\n\n")[0].split())[:400]
        return Compilation(time.perf_counter() - start, error=error)
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    return Compilation(
        seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        results=max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        code=memory.generated_code_size_in_bytes,
        work=inspect and inspect(compiled, sizes, masked, [line for line in log if PARTITIONER in line]),
    )


@contextlib.contextmanager
def capture_stderr(lines: list[str]) -> Iterator[None]:
    """Appends XLA's stderr to `lines`, then passes on all but the partitioner's warnings and known noise."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
            passed_on = [line for line in lines if not any(word in line for word in (PARTITIONER, *NOISE))]
            if passed_on:
                os.write(2, ("\n".join(passed_on) + "\n").encode())


def account(program: Program, *, useful: int = 0, masked: float = 1.0, inspect: Inspect | None = None) -> ProgramMemory:
    """Compiles the program and returns its memory and work on one device.

    `useful` are the FLOP that its rows need, and `masked` is the share of them in the mask.
    """
    announce(f"compiling {program.name}")
    compiled = compile_program(program.lower(), _mesh_axes(program.args), masked=masked, inspect=inspect)
    copied = {id(x): x for x in jax.tree.leaves((program.args, program.beside)) if placing.is_offloaded(x)}
    gradients, engine_bytes = (size(program.scratch), 0) if program.stage != "engine" else (0, size(program.scratch))
    return ProgramMemory(
        name=program.name,
        gradients=gradients,
        temporaries=compiled.temporaries + compiled.results + engine_bytes,
        brought=size(list(copied.values())),
        compiled=compiled,
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
