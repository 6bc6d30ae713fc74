"""The account of a compiled program: memory, matrix products, kernels, collectives."""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from jppo.forecast import collectives, hlo, program_costs
from jppo.forecast.collectives import Collective
from jppo.forecast.schedule import Step, make_schedule

PARTITIONER = "Involuntary full rematerialization"
# XLA logs these on any host without a GPU, or of a program that does not fit, as the account already does.
NOISE = ("cudart_stub", "before absl::InitializeLog", "hlo_rematerialization.cc", "gpu_hlo_schedule.cc")


@dataclasses.dataclass(frozen=True)
class Account:
    """The work of one device in one execution of a program; bytes and FLOP from shapes."""

    compile_s: float = 0.0
    error: str | None = None  # the compiler's, in one line; all else is 0 then
    arguments: int = 0
    temporaries: int = 0
    results: int = 0  # bytes that alias no argument
    code: int = 0  # bytes of the program; XLA states none for CPUs
    flops: dict[str, int] = dataclasses.field(default_factory=dict)  # of products, by the dtype of their factors
    hbm: int = 0  # bytes read and written
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)  # calls of each custom kernel
    collectives: tuple[Collective, ...] = ()
    schedule: tuple[Step, ...] = ()  # kernels and collectives in the order of execution
    warnings: tuple[str, ...] = ()  # operations that the partitioner gathers whole on every device
    unknown_loops: tuple[str, ...] = ()  # loops that count once, for lack of a trip count

    @property
    def total_flops(self) -> int:
        """FLOP of all products."""
        return sum(self.flops.values())

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON types, without the schedule; collectives are summed by kind and axes."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "schedule"}
        rows = collectives.totals(self.collectives)
        found["collectives"] = [
            dict(kind=kind, axes=list(axes), executions=times, bytes=size) for kind, axes, times, size in rows
        ]
        found["largest_collectives"] = [
            dict(
                kind=one.kind, axes=list(one.axes), executions=one.times, bytes_each=one.bytes, in_loop=one.in_loop,
                dtypes=list(one.dtypes), source=one.source,
            )
            for one in self.collectives[:8]
        ]  # fmt: skip
        return found | {name: list(found[name]) for name in ("warnings", "unknown_loops")}


def of_program(lowered: Any, sizes: dict[str, int], *, share: float = 1.0) -> Account:
    """Compiles a lowered program and takes its account; `sizes` are its mesh axes, in the mesh's order.

    `share` of the tokens are in the mask: that share of a loop over them runs.
    """
    began = time.perf_counter()
    said: list[str] = []
    try:
        with heard(said):
            done = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        return Account(compile_s=time.perf_counter() - began, error=" ".join(str(e).split("\n\n")[0].split())[:400])
    seconds = time.perf_counter() - began
    memory: Any = done.memory_analysis()
    program = hlo.parse_hlo(done.as_text(), share)
    return Account(
        compile_s=seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        results=max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        code=memory.generated_code_size_in_bytes,
        flops=program_costs.flops(program),
        hbm=sum(times * program_costs.bytes_moved(program, place, one) for place, one, times in program.executed()),
        kernels=program_costs.kernels(program),
        collectives=tuple(collectives.find_collectives(program, sizes)),
        schedule=make_schedule(program, sizes),
        warnings=tuple(dict.fromkeys(_operation(line) for line in said if PARTITIONER in line)),
        unknown_loops=tuple(program.unknown_loops()),
    )


@contextlib.contextmanager
def heard(lines: list[str]) -> Iterator[None]:
    """Captures XLA's stderr in `lines`, then passes on all but the partitioner's warnings."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
            rest = [line for line in lines if not any(word in line for word in (PARTITIONER, *NOISE))]
            if rest:
                os.write(2, ("\n".join(rest) + "\n").encode())


def _operation(warning: str) -> str:
    """Returns the operation of a partitioner's warning, with its source."""
    named = re.search(r"for HLO operation %?([\w.\-]+) = (\S+?)\{", warning)
    source = re.search(r'op_name="([^"]+)"', warning)
    said = f"{named[1]} {named[2]}" if named else warning[:120]
    return f"{re.sub(r'[.][0-9]+', '', said)} ({source[1]})" if source else re.sub(r"[.][0-9]+", "", said)
