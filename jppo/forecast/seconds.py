"""Forecast of a program's seconds on a described machine, from XLA's own program and the vendors' rates; not measured.

Kernels run one after another, each bound by its products or by memory, at the shares of the rates that `shares.py`
lists. Collectives run beside them where the compiler's schedule lets them; the wait for the rest counts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jppo.forecast.account import Account
from jppo.forecast.collectives import Collective, crossings
from jppo.forecast.machines import HOST, Gpu, Machine, Tpu
from jppo.forecast.schedule import Kernel, run_schedule


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
        """All together."""
        return self.compute + self.hbm + self.links

    @property
    def bound(self) -> str:
        """The bottleneck."""
        return max(("compute", "hbm", "links"), key=lambda name: getattr(self, name))

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON types."""
        return dataclasses.asdict(self) | {"seconds": self.seconds, "bound": self.bound}


def of_account(account: Account, machine: Machine, mesh: Any, useful: int = 0) -> Forecast:
    """Forecasts one execution; `useful` FLOP are the model's on all devices, without recomputation."""
    chip, devices = machine.chip, list(mesh.devices.flat)
    shares, whole = chip.shares, chip.shares["program"].value

    def kernel(one: Kernel) -> tuple[float, float]:
        products = sum(count / chip.peak(dtype) for dtype, count in one.flops)
        return products / shares[one.kind].value / whole, one.bytes / chip.hbm / shares["memory"].value / whole

    def exchange(one: Collective) -> float:
        return seconds_of(one, machine, devices, reached=True)

    clock = run_schedule(account.schedule, kernel, exchange)
    streamed = account.hbm / chip.hbm / shares["memory"].value  # copies beside the kernels share the memory's rate
    longest = max(
        sum(count / chip.peak(dtype) for dtype, count in account.flops.items()),
        account.hbm / chip.hbm,
        sum(one.times * seconds_of(one, machine, devices) for one in account.collectives),
    )
    needed = useful / machine.devices / chip.peak("bfloat16")
    return Forecast(
        compute=clock.compute,
        hbm=max(clock.memory, streamed - clock.compute),
        links=clock.waited,
        sent=sum(one.times * exchange(one) for one in account.collectives),
        mfu=needed / longest if useful and longest else None,
    )


def seconds_of(one: Collective, machine: Machine, devices: Sequence[Any], *, reached: bool = False) -> float:
    """Returns seconds of one execution of a collective at the vendor's rates, or at the shares that are reached."""
    chip = machine.chip
    members, groups = crossings(one.groups, [_group(device, chip) for device in devices])
    near = members // groups  # members of a group in one host, or slice
    link = chip.link if isinstance(chip, Gpu) else _torus(one, machine, devices)
    network = chip.network
    if reached:
        link, network = link * chip.shares["link"].value, network * chip.shares["network"].value
    if one.kind == "collective-permute":
        return one.bytes / (network if groups > 1 else link)
    if one.kind in ("all-to-all", "ragged-all-to-all"):
        inside = one.bytes * (near - 1) / members / link
        if isinstance(chip, Tpu):  # each ring hop carries it: a quarter of gathering all of it
            inside = one.bytes * near / 4 / link
        return max(inside, one.bytes * (members - near) / members / network)
    passes = 2 if one.kind == "all-reduce" else 1
    inside = one.bytes * (near - 1) / near / link
    across = one.bytes * (groups - 1) / groups / near / network
    return passes * max(inside, across)


def _group(device: Any, chip: Any) -> int:
    """Returns the host of a GPU or the slice of a TPU."""
    if isinstance(chip, Gpu):
        return int(device.process_index)
    return int(getattr(device, "slice_index", None) or 0)


def _torus(one: Collective, machine: Machine, devices: Sequence[Any]) -> float:
    """Returns bytes/s into a chip along the torus axes of a group; both ways on a closed axis."""
    assert isinstance(machine.chip, Tpu)
    group = max(one.groups, key=len)
    places = [tuple(devices[i].coords) for i in group]
    rate = 0.0
    for axis, size in enumerate(machine.shape):
        if len({place[axis] for place in places}) > 1:
            rate += machine.chip.link * (2 if size % machine.chip.wrapped == 0 else 1)
    return rate or machine.chip.link


def rates(machine: Machine) -> list[str]:
    """Formats the assumed rates."""
    chip = machine.chip
    near, far = ("NVLink or PCIe", "between hosts") if isinstance(chip, Gpu) else ("ICI, an axis", "between slices")
    lines = [
        f"peak, bfloat16   {chip.peak('bfloat16') / 1e12:,.1f} TFLOP/s",
        f"HBM              {chip.hbm / 1e12:,.3g} TB/s",
        f"links            {chip.link / 1e9:,.3g} GB/s one way ({near}), {chip.network / 1e9:,.3g} GB/s ({far})",
        f"source           {chip.source}",
        f"host memory      {HOST[0] / 1e9:,.3g} GB/s, {HOST[1]}",
    ]
    return lines + [f"reached share    {kind}: {one.value:.0%}, {one.source}" for kind, one in chip.shares.items()]
