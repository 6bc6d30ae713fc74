"""The order in which a device runs a compiled program: kernels one after another, collectives beside them.

XLA's text is in the scheduled order. An asynchronous collective runs from its start to its done, while the kernels
between them compute; a synchronous one makes the kernels wait. A `Collective` has its arrays, mesh axes and executions.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jppo.plugins.forecast import program_costs
from jppo.plugins.forecast.hlo import WRAPPERS, HloProgram, Instruction, Shape
from jppo.plugins.forecast.machines import Kind

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which a group extends; () without exchange
    groups: tuple[tuple[int, ...], ...]  # positions in the mesh, row by row
    times: int  # in one execution of the program
    bytes: int  # of the whole array, once: gathered, reduced, exchanged
    dtypes: tuple[str, ...]
    in_loop: bool
    source: str  # the traced program's operation

    @property
    def total(self) -> int:
        return self.bytes * self.times


def find_collectives(program: HloProgram, sizes: dict[str, int]) -> list[Collective]:
    """Returns all collectives of a program, fused ones too, the largest first; `sizes` are the mesh axes."""
    collectives = []
    for computation, instruction, times in program.executed():
        for collective in collectives_of(program, computation, instruction, sizes):
            collectives.append(dataclasses.replace(collective, times=times, in_loop=computation != program.entry))
    return sorted(collectives, key=lambda collective: -collective.total)


def collectives_of(
    program: HloProgram, computation: str, instruction: Instruction, sizes: dict[str, int]
) -> Iterator[Collective]:
    """Yields the collectives of one execution of an instruction, or of those that it wraps."""
    for kind, operation, operands in _unwrap_collectives(program, computation, instruction):
        groups = _device_groups(operation, math.prod(sizes.values()), kind)
        if not any(len(group) > 1 for group in groups):
            continue
        shapes = _full_arrays(kind, operation, operands)
        yield Collective(
            kind=kind,
            axes=_differing_axes(groups, sizes),
            groups=groups,
            times=1,
            bytes=sum(shape.bytes for shape in shapes),
            dtypes=tuple(dict.fromkeys(shape.dtype for shape in shapes)),
            in_loop=False,
            source=operation.source or instruction.source,
        )


def _unwrap_collectives(
    program: HloProgram, computation: str, instruction: Instruction
) -> list[tuple[str, Instruction, list[tuple[Shape, ...]]]]:
    """Returns (kind, instruction, operand shapes) of a collective, or of those that an instruction wraps."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        return [(kind, instruction, program.shapes_of(computation, instruction))]
    if instruction.opcode not in WRAPPERS or instruction.opcode == "call":
        return []
    wrapped = []
    for name in instruction.called:
        inner_instructions = program.computations.get(name, {})
        # A TPU writes a reduce-scatter as a fusion of an all-reduce and a slice.
        is_reduce_scatter = "reduce-scatter" in name or "reduce-scatter" in instruction.name
        for inner in inner_instructions.values():
            for kind, line, operands in _unwrap_collectives(program, name, inner):
                is_scatter = is_reduce_scatter and kind == "all-reduce"
                wrapped.append(("reduce-scatter" if is_scatter else kind, line, operands))
    return wrapped


def _full_arrays(kind: str, instruction: Instruction, operands: list[tuple[Shape, ...]]) -> Sequence[Shape]:
    """Returns the whole arrays that a collective works on: before a reduction, after a gather."""
    if kind in ("reduce-scatter", "all-reduce"):
        return [shape for shapes in operands for shape in shapes] or instruction.shapes
    if not instruction.opcode.endswith("-start"):
        return instruction.shapes
    if instruction.start_operands:  # ((operands), (results))
        return instruction.shapes[instruction.start_operands : 2 * instruction.start_operands]
    return instruction.shapes[1:2] if len(instruction.shapes) > 1 else instruction.shapes


def _device_groups(instruction: Instruction, devices: int, kind: str) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that exchange in a collective, from any of XLA's notations."""
    text = instruction.attributes
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?\})\}", text)
        numbers = re.findall(r"\d+", pairs[1]) if pairs else []
        device_pairs = [(int(a), int(b)) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        return tuple(pair for pair in device_pairs if pair[0] != pair[1])
    if match := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        return tuple(tuple(map(int, re.findall(r"\d+", group))) for group in re.findall(r"\{([\d,]*)\}", match[1]))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?[^)]*)\))? \{([^}]*)\}", text):
        return _parse_mesh_groups(match[1], match[2], match[3])
    if match := re.search(r"replica_groups=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)", text):
        shape = [int(n) for n in match[1].split(",")]
        return _as_tuples(_parse_iota(match[2], math.prod(shape)).reshape(shape))
    if re.search(r"replica_groups=\{\}", text) or "replica_groups=" not in text:
        return (tuple(range(devices)),)
    raise ValueError(f"replica groups in a spelling that is not known: {text[:200]}")


def _parse_iota(text: str, count: int) -> np.ndarray:
    """Parses XLA's device list `[2,2,2]T(1,0,2)`: numbers in that shape, transposed, flattened."""
    dims = re.search(r"\[([\d,]+)\]", text)
    transposition = re.search(r"T\(([\d,]+)\)", text)
    numbers = np.arange(count)
    if dims:
        numbers = numbers.reshape([int(n) for n in dims[1].split(",")])
    if transposition:
        numbers = numbers.transpose([int(n) for n in transposition[1].split(",")])
    return numbers.reshape(-1)


def _parse_mesh_groups(mesh: str, devices: str | None, axes: str) -> tuple[tuple[int, ...], ...]:
    """Parses groups of devices in XLA's form `mesh['a'=4,'b'=2] {'a','b':(1)2}`, along axes or parts of them."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = {name: [size] for name, size in sizes.items()}  # each axis, split where a part of it is chosen
    chosen_parts: list[tuple[str, int]] = []
    for name, inner_size, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
        if inner_size:
            inner, width = int(inner_size), int(size)
            parts[name] = [inner, width, sizes[name] // inner // width]
            chosen_parts.append((name, 1))
        else:
            chosen_parts.append((name, 0))
    count = math.prod(sizes.values())
    numbers = _parse_iota(devices, count) if devices else np.arange(count)
    axis_of = {(name, i): at for at, (name, i) in enumerate((n, i) for n in parts for i in range(len(parts[n])))}
    device_cube = numbers.reshape([size for name in parts for size in parts[name]])
    group_axes = [axis_of[part] for part in chosen_parts]
    first_axes = [at for at in range(device_cube.ndim) if at not in group_axes]
    width = math.prod(device_cube.shape[at] for at in group_axes)
    return _as_tuples(device_cube.transpose(first_axes + group_axes).reshape(-1, width))


def _as_tuples(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(n) for n in group) for group in groups)


def _differing_axes(groups: Sequence[Sequence[int]], sizes: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which members of a group differ."""
    shape = tuple(sizes.values())
    differing: set[int] = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(list(group), shape))
        differing |= {axis for axis in range(len(shape)) if len(set(coordinates[axis].tolist())) > 1}
    names = list(sizes)
    return tuple(names[axis] for axis in sorted(differing))


def count_crossings(groups: Sequence[Sequence[int]], place_of: Sequence[int]) -> tuple[int, int]:
    """Returns (members of the largest group, most hosts or slices of a group); `place_of` is the one of each device."""
    largest = max(groups, key=len)
    most_places = max(len({place_of[device] for device in group}) for group in groups)
    return len(largest), most_places


def totals(collectives: Sequence[Collective]) -> list[tuple[str, tuple[str, ...], int, int]]:
    """Returns (kind, axes, executions, bytes) of the collectives, summed by kind and axes, most bytes first."""
    key = lambda collective: (collective.kind, collective.axes)  # noqa: E731
    rows = []
    for (kind, axes), equal_kind in itertools.groupby(sorted(collectives, key=key), key):
        group = list(equal_kind)
        rows.append(
            (kind, axes, sum(collective.times for collective in group), sum(collective.total for collective in group))
        )
    return sorted(rows, key=lambda row: -row[3])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that all later ones wait for."""

    kind: Kind  # 'product', 'attention' or 'memory'
    flops: tuple[tuple[str, int], ...]  # by dtype of the factors
    bytes: int  # read and written


@dataclasses.dataclass(frozen=True)
class CollectiveStart:
    """The start of collectives; `done` is the instruction that waits for them, '' if this one does."""

    collectives: tuple[Collective, ...]
    name: str
    waits: bool


@dataclasses.dataclass(frozen=True)
class Wait:
    """The end of an exchange."""

    name: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """Steps that are repeated."""

    times: int
    body: tuple["Step", ...]


Step = Kernel | CollectiveStart | Wait | Loop


def schedule_of(program: HloProgram, sizes: dict[str, int]) -> tuple[Step, ...]:
    """Returns the steps of a program, from its entry on; `sizes` are its mesh axes."""
    return tuple(_steps(program, program.entry, sizes))


def _steps(program: HloProgram, computation: str, sizes: dict[str, int]) -> Iterator[Step]:
    """Yields the schedule's steps of a computation, in the compiler's order."""
    for instruction in program.computations[computation].values():
        if instruction.opcode in ("while", "call", "conditional"):
            for name, times in program.bodies(instruction):
                steps = tuple(_steps(program, name, sizes))
                yield from (Loop(times, steps),) if instruction.opcode == "while" else steps
        elif instruction.opcode.endswith("-done"):
            yield from (Wait(name) for name in instruction.operands[:1])
        else:
            yield from _steps_of(program, computation, instruction, sizes)


def _steps_of(program: HloProgram, computation: str, instruction: Instruction, sizes: dict[str, int]) -> Iterator[Step]:
    """Yields the schedule's step of an instruction: the start of its collectives, or its kernel."""
    collectives = tuple(collectives_of(program, computation, instruction, sizes))
    if collectives:
        is_asynchronous = instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes
        yield CollectiveStart(collectives, instruction.name, waits=not is_asynchronous)
        return
    flops, attends = program_costs.flops_of(program, computation, instruction)
    if flops:
        bytes_moved = program_costs.bytes_moved(program, computation, instruction)
        yield Kernel("attention" if attends else "product", tuple(sorted(flops.items())), bytes_moved)
    elif not instruction.opcode.endswith("-start") and (
        bytes_moved := program_costs.bytes_moved(program, computation, instruction)
    ):
        yield Kernel("memory", (), bytes_moved)  # asynchronous copies run beside the kernels


@dataclasses.dataclass
class Clock:
    """The seconds of a device that runs a schedule."""

    compute: float = 0.0  # in kernels bound by their products
    memory: float = 0.0  # in kernels bound by memory
    waited: float = 0.0  # for collectives
    free: float = 0.0  # when the links have sent all that was started

    @property
    def now(self) -> float:
        return self.compute + self.memory + self.waited


def run_schedule(
    steps: Sequence[Step], kernel: Callable[[Kernel], tuple[float, float]], exchange: Callable[[Collective], float]
) -> Clock:
    """Simulates a device; `kernel` returns the seconds of products and of memory, `exchange` of a collective."""
    clock, end_of = Clock(), dict[str, float]()
    for step in steps:
        if isinstance(step, Kernel):
            products, memory = kernel(step)
            clock.compute += products if products >= memory else 0.0
            clock.memory += memory if memory > products else 0.0
        elif isinstance(step, CollectiveStart):
            clock.free = max(clock.free, clock.now) + sum(map(exchange, step.collectives))
            end_of[step.name] = clock.free
            clock.waited += clock.free - clock.now if step.waits else 0.0
        elif isinstance(step, Wait):
            clock.waited += max(0.0, end_of.get(step.name, 0.0) - clock.now)
        else:
            iteration = run_schedule(step.body, kernel, exchange)
            clock.compute += step.times * iteration.compute
            clock.memory += step.times * iteration.memory
            # What an iteration has started and not waited for is sent before the next one's.
            clock.waited += step.times * (iteration.waited + max(0.0, iteration.free - iteration.now))
    return clock
