"""Seconds by stage, with verl's stage names plus `start`; traces of steps by JAX, whose stages have the same names."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from jppo import traces

T = TypeVar("T")
IN_STAGE = "in the stage "  # of the note on an error of XLA
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

DOING = {"gen": "sampling", "reward": "grading", "old_log_prob": "log-probs", "adv": "advantages"}
DOING |= {"ref": "reference", "update_weights": "publishing", "testing": "test"}


@dataclasses.dataclass
class Count:
    """How far a stage is: its finished parts of all, and the tokens that were sampled for them."""

    what: str
    total: int = 0  # 0: unknown
    done: int = 0
    tokens: int = 0


class Timers:
    """Wall-clock seconds of each stage of the current step, and how far the running one is.

    JAX returns before the device is done: a stage's time is right only if its block waits for its results.
    """

    def __init__(self) -> None:
        self._step: dict[str, float] = {}
        self._running: list[str] = []
        self._since = time.perf_counter()  # start or end of the last stage
        self._part_since = self._since  # start of the running stage's part
        self._number = ""  # of the step
        self._count: Callable[[], Count] | None = None

    @contextlib.contextmanager
    def __call__(self, stage: str, **attributes: Any) -> Iterator[None]:
        """Runs the block as a stage and adds its time, also if it raises; `attributes` are those of its span.

        The attribute `number`, the step's, also begins what the console says of the running stage.
        """
        if stage not in STAGES:
            raise ValueError(f"stage {stage!r} is not one of {', '.join(STAGES)}")
        start = self._since = time.perf_counter()
        self._running.append(stage)
        self._part_since = start
        self._count = None
        if "number" in attributes:
            self._number = f"step {attributes['number']}: "
        try:
            with jax.profiler.TraceAnnotation(stage), traces.span(stage, **attributes):
                yield
        except jax.errors.JaxRuntimeError as e:  # XLA does not say where it was
            e.add_note(f"{IN_STAGE}{stage}")
            raise
        finally:
            self._since = time.perf_counter()
            self._running.pop()
            self._count = None
            self._step[stage] = self._step.get(stage, 0.0) + self._since - start

    def stage(self) -> tuple[str, float]:
        """Returns the innermost running stage and its seconds so far; may be called from any thread."""
        innermost = self._running[-1:]
        return innermost[0] if innermost else "none", time.perf_counter() - self._since

    def watch(self, count: Callable[[], Count]) -> None:
        """Sets the function that returns how far the running stage is; other threads call it until the stage ends."""
        self._count = count

    def part(self, label: str, total: int = 0) -> Callable[[], None]:
        """Begins a labelled part of the running stage; returns the function that counts one of its `total` items."""
        count = Count(label, total)
        self._part_since = time.perf_counter()
        self.watch(lambda: count)

        def finish() -> None:
            count.done += 1

        return finish

    def counted(self, label: str, items: Iterable[T], total: int) -> Iterator[T]:
        """Yields the items and counts those that are done."""
        finish = self.part(label, total)
        for item in items:
            yield item
            finish()

    def line(self) -> str:
        """Formats the running stage, its part, progress and seconds; '' between stages."""
        stage, seconds = self.stage()[0], time.perf_counter() - self._part_since
        if stage in ("none", "step"):
            return ""
        words = [f"{'' if stage == 'start' else self._number}{DOING.get(stage, stage).replace('_', ' ')}"]
        count = self._count
        if count is not None:
            now = count()
            progress = f"{now.done:,} of {now.total:,} {now.what}" if now.total else now.what
            rate = [f"{now.tokens / seconds:,.0f} tokens/s"] if now.tokens and seconds > 1 else []
            words += [progress, *rate]
        return f"{', '.join(words)}, {seconds:.0f} s"

    def so_far(self) -> dict[str, float]:
        """Returns the seconds of the current step's finished stages."""
        return dict(self._step)

    def next_step(self) -> dict[str, float]:
        """Returns the step's seconds as metrics `timing_s/<stage>` and resets them."""
        step, self._step = self._step, {}
        return {f"timing_s/{stage}": seconds for stage, seconds in step.items()}


class Laps:
    """The seconds of consecutive parts of a stage of `timer`."""

    def __init__(self, timer: Timers) -> None:
        self._timer = timer
        self._parts: list[str] = []

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Times the block as a part of this name."""
        self._timer.part(part)
        start = time.perf_counter()
        yield
        self._parts.append(f"{part} {time.perf_counter() - start:.1f}")

    def __str__(self) -> str:
        return ", ".join(self._parts)


STEP = "train"  # name of a whole step, next to its number


class Profiler:
    """Traces the selected steps for TensorBoard and Perfetto, one folder each.

    A trace covers the trainer's process and devices, not servers in other processes.
    """

    def __init__(self, folder: pathlib.Path, steps: Sequence[range]) -> None:
        self._folder, self._steps = folder, steps

    @contextlib.contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Runs the block as `step`, and traces it by JAX's profiler if the step is selected."""
        if not any(step in part for part in self._steps):
            yield
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # without Python calls, which would displace everything else
        folder = self._folder / f"step_{step}"
        jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        try:
            with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
                yield
        finally:
            jax.profiler.stop_trace()

    def introduce(self, done: int) -> list[str]:
        """Returns console lines on the steps that will be traced; a resumed run has `done` steps already."""
        steps = sorted({step for part in self._steps for step in part})
        later = [step for step in steps if step > done]
        lines = [f"to be profiled into {self._folder}: {_list_steps(later)}"] if later else []
        past = [step for step in steps if step <= done]
        return lines + ([f"not profiled, because the run has passed them: {_list_steps(past)}"] if past else [])


def _list_steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
