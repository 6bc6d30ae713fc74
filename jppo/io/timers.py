"""Seconds by stage, under verl's stage names and one more, `start`; in a profiler's trace a stage has its name."""

import contextlib
import time
from collections.abc import Iterator

import jax

STAGES = (
    "start",  # servers, loading and compiling
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_actor",
    "update_critic",
    "update_weights",
    "testing",
    "save",
    "step",
)


class Timers:
    """Wall-clock seconds of each stage of the current step.

    JAX returns before the device is done: a stage is timed right only when its block waits for what it
    computes.
    """

    def __init__(self) -> None:
        self._step: dict[str, float] = {}
        self._running: list[str] = []
        self._since = time.perf_counter()  # a stage began or ended

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to `stage`, also when it raises."""
        if stage not in STAGES:
            raise ValueError(f"stage {stage!r} is not one of {', '.join(STAGES)}")
        start = self._since = time.perf_counter()
        self._running.append(stage)
        try:
            with jax.profiler.TraceAnnotation(stage):
                yield
        finally:
            self._since = time.perf_counter()
            self._running.pop()
            self._step[stage] = self._step.get(stage, 0.0) + self._since - start

    def stage(self) -> tuple[str, float]:
        """The innermost stage under way and for how many seconds, or since a stage within it ended; of any thread."""
        inner = self._running[-1:]
        return inner[0] if inner else "none", time.perf_counter() - self._since

    def so_far(self) -> dict[str, float]:
        """The seconds of each stage of the current step that has ended."""
        return dict(self._step)

    def next_step(self) -> dict[str, float]:
        """The step's seconds as metrics `timing_s/<stage>`; the next step starts from nothing."""
        step, self._step = self._step, {}
        return {f"timing_s/{stage}": seconds for stage, seconds in step.items()}


class Laps:
    """What one stage spends its seconds on, one part after the other."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._parts: list[str] = []

    def __call__(self, part: str) -> None:
        """The seconds since the lap before were this part's."""
        now = time.perf_counter()
        self._parts.append(f"{part} {now - self._last:.1f}")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._parts)
