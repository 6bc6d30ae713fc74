"""The seconds of a step on a described machine: each program's forecast by how often it runs, and the servers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jppo.plugins.forecast.account import Forecast, forecast_account
from jppo.plugins.forecast.machines import HOST, Machine
from jppo.plugins.forecast.servers import ServerWork, server_seconds
from jppo.preflight.programs import Estimate, ProgramMemory, Work

NOTE = "forecast by the compiler, not measured"


@dataclasses.dataclass(frozen=True)
class Executions:
    """Executions of each program per step, with all responses at full length."""

    by_program: Mapping[str, int]
    entries: Mapping[str, int] = dataclasses.field(default_factory=dict)  # total row entries, other shapes included
    sampled: int = 0  # tokens that the rollout generates

    def of(self, moment: ProgramMemory) -> float:
        """Returns how often a program runs in a step; rows of other shapes count by their entries."""
        times = self.by_program.get(moment.name, 0)
        return self.entries.get(moment.name, times * moment.entries) / moment.entries if moment.entries else times


def count_executions(work: Work, estimate: Estimate) -> Executions:
    """Returns how often each program runs in a step."""
    times, entries = dict[str, int](), dict[str, int]()
    for moment in estimate.moments:
        if moment.stage == "scoring":
            times[moment.name], entries[moment.name] = work.scoring, work.entries
        elif moment.stage in ("gradient", "exchange", "step"):
            update = work.updates[moment.model]
            times[moment.name] = update.epochs * update.mini_batches
            if moment.stage == "gradient":
                times[moment.name] *= update.micro_batches
                entries[moment.name] = update.epochs * update.entries
    return Executions(times, entries, work.sampled)


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The forecast of each program on a machine, and of a step."""

    machine: Machine
    programs: tuple[tuple[ProgramMemory, Forecast], ...]
    executions: Executions
    rollout_tokens_per_s: float = 0.0  # of all engines, set by the user; 0: unknown
    servers: ServerWork | None = None

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
        return server_seconds(self.servers, self.machine, scoring, critic)

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


def make_outlook(
    estimate: Estimate,
    machine: Machine,
    mesh: Any,
    executions: Executions,
    rate: float = 0.0,
    servers: ServerWork | None = None,
) -> Outlook:
    """Forecasts all compiled programs, and a step from their executions."""
    programs = tuple(
        (moment, forecast_account(moment.compiled.work, machine, mesh, moment.useful))
        for moment in estimate.moments
        if moment.compiled.error is None
    )
    return Outlook(machine, programs, executions, rate, servers)
