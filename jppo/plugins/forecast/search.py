"""The search for the fastest settings of a run on a described machine, for `jppo.plan`.

Tries meshes, model.remat, actor.max_tokens_per_device, data.packing and offload, in this order, each on the best
settings so far.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from jppo import settings
from jppo.errors import UserError
from jppo.learner.make import make_mesh
from jppo.learner.sharding import AXES
from jppo.models.config import Experts
from jppo.plugins.forecast import compilers
from jppo.plugins.forecast.account import inspect
from jppo.plugins.forecast.budgets import estimate_fits
from jppo.plugins.forecast.machines import GIB, Machine
from jppo.plugins.forecast.outlook import Outlook, count_executions, make_outlook
from jppo.plugins.forecast.report import find_server_work, report_dict
from jppo.preflight import memory_budget, preview
from jppo.preflight.programs import Estimate
from jppo.rollout.make import with_servers
from jppo.run.inputs import Inputs
from jppo.settings import Settings

PACKING = ("buckets", "segments")
HEADING = f"{'s a step':>9}  {'peak GiB':>8}  {'':<12}  {'slowest stage, bound by':<26}  settings"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A tried setting and its result."""

    changes: dict[str, Any]  # by setting name; {} is the unchanged config
    estimate: Estimate | None = None
    outlook: Outlook | None = None
    fits: bool = False  # all programs compile within a device's memory, beside the servers
    reason: str = ""  # why there is no forecast

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key: the fastest that fits first, ties by less overlap; without a forecast last."""
        if self.outlook is None:
            return True, math.inf, math.inf
        return not self.fits, float(f"{self.outlook.step:.3g}"), self.outlook.busy

    @property
    def slowest(self) -> str:
        """The stage that takes most of a step, and its bottleneck."""
        if self.outlook is None:
            return ""
        stages = self.outlook.stages()
        name = max(stages, key=lambda stage: stages[stage])
        bound = next(program.bound for moment, program in self.outlook.programs if moment.name == name)
        return f"{name}: {bound}"


def search(
    c: Settings, inputs: Inputs, machine: Machine, *, rate: float, report: Callable[[str], None]
) -> list[Candidate]:
    """Tries meshes, then recomputation, tokens, packing and offload; returns all candidates, the best first."""
    devices = compilers.devices_of(machine)
    tried: dict[str, Candidate] = {}

    def attempt(changes: dict[str, Any]) -> None:
        if str(changes) not in tried:
            candidate = tried[str(changes)] = try_settings(c, changes, inputs, machine, devices, rate)
            report(candidate_line(candidate))

    def best() -> Candidate:
        return min(tried.values(), key=lambda candidate: candidate.rank)

    def repair(start: dict[str, Any], *, offload: bool) -> None:
        """Tries changes that need less memory, one after another, until the settings fit."""
        for changes in memory_budget.remedies(settings.changed(c, start)):
            if offload or not any(name.endswith("offload") for name in changes):
                attempt(start | changes)
                if tried[str(start | changes)].fits:
                    return

    attempt({})
    for mesh in candidate_meshes(machine, inputs.policy.experts):
        attempt({} if _mesh_of(c, machine.devices) == mesh else mesh)
    fastest = min(tried.values(), key=lambda candidate: candidate.rank[1:])
    if not fastest.fits and fastest.outlook is not None:
        repair(fastest.changes, offload=False)
    for others in (other_remats, other_tokens, other_packings):
        for change in others(settings.changed(c, best().changes)):
            attempt(best().changes | change)
    if not best().fits:
        repair(best().changes, offload=True)
    return sorted(tried.values(), key=lambda candidate: candidate.rank)


def try_settings(
    c: Settings, changes: dict[str, Any], inputs: Inputs, machine: Machine, devices: list[Any], rate: float
) -> Candidate:
    """Compiles all programs of the run with these changes for the machine, and forecasts a step."""
    changed = settings.changed(c, changes)
    try:
        settings.check(changed)
        mesh = make_mesh(changed, devices)
        changed = with_servers(changed, mesh)
        _, work, estimate = preview.derive_sizes(changed, inputs, mesh, inspect)
    except UserError as e:
        return Candidate(changes, reason=str(e))
    if estimate.refused:
        return Candidate(changes, estimate, reason=str(estimate.refused[0].compiled.error))
    fits = estimate_fits(changed, machine, estimate)
    servers = find_server_work(changed, inputs, mesh)
    outlook = make_outlook(estimate, machine, mesh, count_executions(work, estimate), rate, servers)
    return Candidate(changes, estimate, outlook, fits)


def candidate_meshes(machine: Machine, experts: Experts | None) -> Iterator[dict[str, int]]:
    """Yields meshes to try: parameters over all devices or a group, and rows or experts over two, four or eight."""
    n, each = machine.devices, machine.each
    shapes = [(1, n, 1, 1, 1)]
    shapes += [(machine.groups, each, 1, 1, 1)] if machine.groups > 1 else []
    shapes += [(2, n // 2, 1, 1, 1), (n, 1, 1, 1, 1)] if n > 1 and machine.groups == 1 else []
    for width in (2, 4, 8):
        if each % width == 0 and n > 1:
            shapes += [(1, n // width, width, 1, 1), (1, n // width, 1, width, 1)]
            shapes += [(1, n // width, 1, 1, width)] if experts and experts.count % width == 0 else []
    for sizes in dict.fromkeys(shapes):
        yield {f"mesh.{axis}": size for axis, size in zip(AXES, sizes, strict=True)}


def _mesh_of(c: Settings, devices: int) -> dict[str, int]:
    """Returns the sizes of the config's mesh, with the devices that are left in place of -1."""
    sizes = {f"mesh.{axis}": int(getattr(c.mesh, axis)) for axis in AXES}
    product = math.prod(size for size in sizes.values() if size > 0)
    return {name: devices // product if size == -1 else size for name, size in sizes.items()}


def other_remats(c: Settings) -> list[dict[str, Any]]:
    return [{"model.remat": remat} for remat in memory_budget.REMATS if remat != c.model.remat]


def other_tokens(c: Settings) -> list[dict[str, Any]]:
    """Returns other micro-batch sizes to try: twice and half the tokens per device, if a row fits."""
    tokens, fewest = c.actor.max_tokens_per_device, memory_budget.fewest_tokens(c)
    return [{"actor.max_tokens_per_device": n} for n in (tokens * 2, tokens // 2) if n >= fewest]


def other_packings(c: Settings) -> list[dict[str, Any]]:
    return [{"data.packing": packing} for packing in PACKING if packing != c.data.packing]


def candidate_line(candidate: Candidate) -> str:
    """Formats a candidate as a table row."""
    changes = memory_budget.as_arguments(candidate.changes).replace("--config.", "") or "(the config as it is)"
    if candidate.outlook is None or candidate.estimate is None:
        return f"{'-':>9}  {'-':>8}  {'not possible':<12}  {'':<26}  {changes}: {candidate.reason[:160]}"
    peak, verdict = candidate.estimate.peak / GIB, "fits" if candidate.fits else "does not fit"
    return f"{candidate.outlook.step:9,.4g}  {peak:8,.1f}  {verdict:<12}  {candidate.slowest:<26}  {changes}"


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    report = report_dict(candidate.estimate, candidate.outlook) if candidate.estimate is not None else {}
    return dict(changes=candidate.changes, fits=candidate.fits, reason=candidate.reason, **report)
