"""The order in which a device runs a compiled program: kernels one after another, collectives beside them.

XLA's text is in the scheduled order. An asynchronous collective runs from its start to its done, while the kernels
between them compute; a synchronous one makes the kernels wait.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jppo.forecast import collectives, program_costs
from jppo.forecast.collectives import Collective
from jppo.forecast.hlo import HloProgram, Instruction
from jppo.forecast.shares import Kind


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that all later ones wait for."""

    kind: Kind  # 'product', 'attention' or 'memory'
    flops: tuple[tuple[str, int], ...]  # by dtype of the factors
    bytes: int  # read and written


@dataclasses.dataclass(frozen=True)
class Exchange:
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


Step = Kernel | Exchange | Wait | Loop


def make_schedule(program: HloProgram, sizes: dict[str, int]) -> tuple[Step, ...]:
    """Returns the steps of a program, from its entry on; `sizes` are its mesh axes."""
    return tuple(_steps(program, program.entry, sizes))


def _steps(program: HloProgram, place: str, sizes: dict[str, int]) -> Iterator[Step]:
    for one in program.computations[place].values():
        if one.opcode == "while":
            body = one.attribute(r"body=%?([\w.\-]+)")
            if body in program.computations:
                yield Loop(program.trips(one) or 1, tuple(_steps(program, body, sizes)))
        elif one.opcode in ("call", "conditional"):  # all branches of a conditional: an upper bound
            for name in one.called:
                if name in program.computations:
                    yield from _steps(program, name, sizes)
        elif one.opcode.endswith("-done"):
            yield from (Wait(name) for name in one.operands[:1])
        else:
            yield from _of_instruction(program, place, one, sizes)


def _of_instruction(program: HloProgram, place: str, one: Instruction, sizes: dict[str, int]) -> Iterator[Step]:
    found = tuple(collectives.of_instruction(program, place, one, sizes))
    if found:
        started = one.opcode.endswith("-start") and '"is_sync":true' not in one.attributes
        yield Exchange(found, one.name, waits=not started)
        return
    flops, attends = program_costs.flops_of(program, place, one)
    if flops:
        moved = program_costs.bytes_moved(program, place, one)
        yield Kernel("attention" if attends else "product", tuple(sorted(flops.items())), moved)
    elif not one.opcode.endswith("-start") and (moved := program_costs.bytes_moved(program, place, one)):
        yield Kernel("memory", (), moved)  # asynchronous copies run beside the kernels


@dataclasses.dataclass
class Clock:
    """The seconds of a device that runs a schedule."""

    compute: float = 0.0  # in kernels bound by their products
    memory: float = 0.0  # in kernels bound by memory
    waited: float = 0.0  # for collectives
    free: float = 0.0  # when the links have sent all that was started

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.compute + self.memory + self.waited


def run_schedule(
    steps: Sequence[Step], kernel: Callable[[Kernel], tuple[float, float]], exchange: Callable[[Collective], float]
) -> Clock:
    """Runs the steps; `kernel` returns the seconds of products and of memory, `exchange` of a collective alone."""
    clock, ends = Clock(), dict[str, float]()
    for step in steps:
        if isinstance(step, Kernel):
            products, memory = kernel(step)
            clock.compute += products if products >= memory else 0.0
            clock.memory += memory if memory > products else 0.0
        elif isinstance(step, Exchange):
            clock.free = max(clock.free, clock.now) + sum(map(exchange, step.collectives))
            ends[step.name] = clock.free
            clock.waited += clock.free - clock.now if step.waits else 0.0
        elif isinstance(step, Wait):
            clock.waited += max(0.0, ends.get(step.name, 0.0) - clock.now)
        else:
            one = run_schedule(step.body, kernel, exchange)
            clock.compute += step.times * one.compute
            clock.memory += step.times * one.memory
            # What an iteration has started and not waited for is sent before the next one's.
            clock.waited += step.times * (one.waited + max(0.0, one.free - one.now))
    return clock
