"""The account of a compiled program: products, kernels, collectives; and a forecast of its seconds.

Kernels run one after another, each bound by its products or by memory, at the shares of the rates that `machines.py`
lists. Collectives run beside them where the compiler's schedule lets them; the wait for the rest counts.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args

import jax

from jppo.plugins.forecast import hlo, program_costs, schedule
from jppo.plugins.forecast.machines import HOST, Gpu, Kind, Machine, Tpu
from jppo.plugins.forecast.schedule import Collective, Kernel, Step, count_crossings, run_schedule, schedule_of


@dataclasses.dataclass(frozen=True)
class Account:
    """The work of one device in one execution of a program; bytes and FLOP from shapes."""

    flops: dict[str, int] = dataclasses.field(default_factory=dict)  # of products, by the dtype of their factors
    hbm: int = 0  # bytes read and written
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)  # calls of each custom kernel
    collectives: tuple[Collective, ...] = ()
    schedule: tuple[Step, ...] = ()  # kernels and collectives in the order of execution
    warnings: tuple[str, ...] = ()  # operations that the partitioner gathers whole on every device
    unknown_loops: tuple[str, ...] = ()  # loops that count once, for lack of a trip count

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def as_dict(self) -> dict[str, Any]:
        """Returns the account as JSON types, without the schedule; collectives are summed by kind and axes."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "schedule"}
        rows = schedule.totals(self.collectives)
        fields["collectives"] = [
            dict(kind=kind, axes=list(axes), executions=times, bytes=size) for kind, axes, times, size in rows
        ]
        fields["largest_collectives"] = [
            dict(
                kind=collective.kind, axes=list(collective.axes), executions=collective.times,
                bytes_each=collective.bytes, in_loop=collective.in_loop, dtypes=list(collective.dtypes),
                source=collective.source,
            )
            for collective in self.collectives[:8]
        ]  # fmt: skip
        return fields | {name: list(fields[name]) for name in ("warnings", "unknown_loops")}


def inspect(compiled: jax.stages.Compiled, sizes: dict[str, int], masked: float, warnings: list[str]) -> Account:
    """Returns the account of a compiled program; `sizes` are its mesh axes, in the mesh's order.

    The share `masked` of the tokens is in the mask: that share of a loop over them runs.
    """
    program = hlo.parse_hlo(compiled.as_text() or "", masked)
    return Account(
        flops=program_costs.flops(program),
        hbm=sum(
            times * program_costs.bytes_moved(program, position, instruction)
            for position, instruction, times in program.executed()
        ),
        kernels=program_costs.kernels(program),
        collectives=tuple(schedule.find_collectives(program, sizes)),
        schedule=schedule_of(program, sizes),
        warnings=tuple(dict.fromkeys(map(_operation, warnings))),
        unknown_loops=tuple(program.unknown_loops()),
    )


def _operation(warning: str) -> str:
    """Extracts the operation and its source from a partitioner's warning."""
    match = re.search(r"for HLO operation %?([\w.\-]+) = (\S+?)\{", warning)
    source = re.search(r'op_name="([^"]+)"', warning)
    operation = f"{match[1]} {match[2]}" if match else warning[:120]
    return f"{re.sub(r'[.][0-9]+', '', operation)} ({source[1]})" if source else re.sub(r"[.][0-9]+", "", operation)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Seconds of one execution by bottleneck."""

    compute: float  # in kernels that are bound by their products
    hbm: float  # in kernels that are bound by memory
    links: float  # of waiting for collectives
    sent: float = 0.0  # of collectives, if nothing overlapped them
    mfu: float | None = None  # upper bound at the vendor's rates; None if the useful FLOP are unknown

    @property
    def seconds(self) -> float:
        return self.compute + self.hbm + self.links

    @property
    def bound(self) -> str:
        """The bottleneck."""
        return max(("compute", "hbm", "links"), key=lambda name: getattr(self, name))

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"seconds": self.seconds, "bound": self.bound}


def forecast_account(account: Account, machine: Machine, mesh: Any, useful: int = 0) -> Forecast:
    """Forecasts the seconds of one execution; `useful` are the model's FLOP, without recomputation."""
    chip, devices = machine.chip, list(mesh.devices.flat)
    shares, program_share = chip.shares, chip.shares["program"].value

    def kernel_times(step: Kernel) -> tuple[float, float]:
        products = sum(count / chip.peak(dtype) for dtype, count in step.flops)
        memory = step.bytes / chip.hbm / shares["memory"].value
        return products / shares[step.kind].value / program_share, memory / program_share

    def exchange_time(collective: Collective) -> float:
        return seconds_of(collective, machine, devices, reached=True)

    clock = run_schedule(account.schedule, kernel_times, exchange_time)
    memory_s = account.hbm / chip.hbm / shares["memory"].value  # copies beside the kernels share the memory's rate
    bound_s = max(
        sum(count / chip.peak(dtype) for dtype, count in account.flops.items()),
        account.hbm / chip.hbm,
        sum(collective.times * seconds_of(collective, machine, devices) for collective in account.collectives),
    )
    useful_s = useful / machine.devices / chip.peak("bfloat16")
    return Forecast(
        compute=clock.compute,
        hbm=max(clock.memory, memory_s - clock.compute),
        links=clock.waited,
        sent=sum(collective.times * exchange_time(collective) for collective in account.collectives),
        mfu=useful_s / bound_s if useful and bound_s else None,
    )


def seconds_of(collective: Collective, machine: Machine, devices: Sequence[Any], *, reached: bool = False) -> float:
    """Returns seconds of one execution of a collective at the vendor's rates, or at the shares that are reached."""
    chip = machine.chip
    place = "process_index" if isinstance(chip, Gpu) else "slice_index"
    members, groups = count_crossings(collective.groups, [int(getattr(d, place, None) or 0) for d in devices])
    members_inside = members // groups  # members of a group in one host, or slice
    link = chip.link if isinstance(chip, Gpu) else _torus_rate(collective, machine, devices)
    network = chip.network
    if reached:
        link, network = link * chip.shares["link"].value, network * chip.shares["network"].value
    if collective.kind == "collective-permute":
        return collective.bytes / (network if groups > 1 else link)
    if collective.kind in ("all-to-all", "ragged-all-to-all"):
        inside_s = collective.bytes * (members_inside - 1) / members / link
        if isinstance(chip, Tpu):  # each ring hop carries it: a quarter of gathering all of it
            inside_s = collective.bytes * members_inside / 4 / link
        return max(inside_s, collective.bytes * (members - members_inside) / members / network)
    passes = 2 if collective.kind == "all-reduce" else 1
    inside_s = collective.bytes * (members_inside - 1) / members_inside / link
    across_s = collective.bytes * (groups - 1) / groups / members_inside / network
    return passes * max(inside_s, across_s)


def _torus_rate(collective: Collective, machine: Machine, devices: Sequence[Any]) -> float:
    """Returns the bytes/s into a TPU chip along the torus axes that a collective uses."""
    assert isinstance(machine.chip, Tpu)
    group = max(collective.groups, key=len)
    coordinates = [tuple(devices[i].coords) for i in group]
    rate = 0.0
    for axis, size in enumerate(machine.shape):
        if len({coordinate[axis] for coordinate in coordinates}) > 1:
            rate += machine.chip.link * (2 if size % machine.chip.wrapped == 0 else 1)
    return rate or machine.chip.link


def rates(machine: Machine) -> list[str]:
    """Formats the rates that forecasts assume, with their sources."""
    chip = machine.chip
    near, far = ("NVLink or PCIe", "between hosts") if isinstance(chip, Gpu) else ("ICI, an axis", "between slices")
    lines = [
        f"peak, bfloat16   {chip.peak('bfloat16') / 1e12:,.1f} TFLOP/s",
        f"HBM              {chip.hbm / 1e12:,.3g} TB/s",
        f"links            {chip.link / 1e9:,.3g} GB/s one way ({near}), {chip.network / 1e9:,.3g} GB/s ({far})",
        f"source           {chip.source}",
        f"host memory      {HOST[0] / 1e9:,.3g} GB/s, {HOST[1]}",
    ]
    shares = [(kind, chip.shares[kind]) for kind in get_args(Kind)]
    return lines + [f"reached share    {kind}: {share.value:.0%}, {share.source}" for kind, share in shares]
