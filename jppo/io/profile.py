"""Traces of whole steps by JAX's profiler, one folder a step: for TensorBoard, and for Perfetto.

In a trace the stages have the names of `timers.py`. It has what the trainer's process and its devices do; a server in
another process is not in it.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

import jax

STEP = "train"  # the name of a step as a whole; its number stands beside it


class Profiler:
    """Traces the steps that were asked for."""

    def __init__(self, folder: pathlib.Path, steps: Sequence[range]) -> None:
        self._folder, self._steps = folder, steps

    @contextlib.contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Run the block as `step`; its trace is written, where it is asked for, also when it raises."""
        if not any(step in part for part in self._steps):
            yield
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python: it would push the rest out of the trace
        folder = self._folder / f"step_{step}"
        jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        try:
            with jax.profiler.StepTraceAnnotation(STEP, step_num=step):
                yield
        finally:
            jax.profiler.stop_trace()

    def introduce(self, done: int) -> list[str]:
        """What will be traced, for the console; `done` steps lie behind a resumed run."""
        steps = sorted({step for part in self._steps for step in part})
        left = [step for step in steps if step > done]
        said = [f"to be profiled into {self._folder}: {_listed(left)}"] if left else []
        gone = [step for step in steps if step <= done]
        return said + ([f"not profiled, because the run is past it: {_listed(gone)}"] if gone else [])


def _listed(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
