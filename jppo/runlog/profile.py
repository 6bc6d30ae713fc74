"""Traces of steps by JAX's profiler, one folder per step, for TensorBoard and Perfetto.

Stages have the names of `timers.py`. A trace covers the trainer's process and devices, not servers in other processes.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

import jax

STEP = "train"  # name of a whole step, next to its number


class Profiler:
    """Traces the selected steps."""

    def __init__(self, folder: pathlib.Path, steps: Sequence[range]) -> None:
        self._folder, self._steps = folder, steps

    @contextlib.contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Runs the block as `step` and traces it if selected, also if it raises."""
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
        """Returns lines for the console about traced steps; a resumed run has `done` steps already."""
        steps = sorted({step for part in self._steps for step in part})
        left = [step for step in steps if step > done]
        said = [f"to be profiled into {self._folder}: {_listed(left)}"] if left else []
        gone = [step for step in steps if step <= done]
        return said + ([f"not profiled, because the run has passed them: {_listed(gone)}"] if gone else [])


def _listed(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
