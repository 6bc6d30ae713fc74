"""The host functions of an algorithm, which run in Python and not in JAX: `columns`, `update` of the memory, `listen`.

Every host of a run calls `columns` and `update` with equal arguments, and they compare their results. The first host
calls `listen`.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jppo.data.memory import AlgorithmMemory
from jppo.data.stream import Cursor
from jppo.errors import UserError
from jppo.learner.episodes import Episodes
from jppo.learner.views import COLUMN
from jppo.registry import at_line, explain
from jppo.samples.queue import StepSamples
from jppo.settings import parts
from jppo.types import Batch, Reward, StepData, Trajectory

if TYPE_CHECKING:
    from jppo.run.start import Run

OF_LINES = ("step", "nonfinite")  # names of a line of metrics.jsonl


def columns_of(run: "Run", episodes: Episodes) -> dict[str, np.ndarray]:
    """Returns the columns of the memory that the algorithm reads by name, a number for each sequence, [B] f32."""
    names, memory = run.learner.recipe.algorithm.column_names, run.inputs.train.order_of
    if not names or not isinstance(memory, AlgorithmMemory):
        return {}
    places = run.inputs.train.places(episodes.prompts)
    columns = run.hosts.together(lambda: memory.columns(run.supply.memory, places, names))
    return dict(zip(names, columns.T, strict=True))


def call_host_functions(
    run: "Run", number: int, samples: StepSamples, rewards: list[Reward], data: Batch, taken: Collection[str]
) -> tuple[Cursor, dict[str, float]]:
    """Calls `update` and `listen`; returns the new position in the data and the metrics of `listen`, not in `taken`."""
    algorithm = run.learner.recipe.algorithm
    step = None
    if algorithm.update is not None or algorithm.listen is not None:
        step = step_data(run, number, samples, rewards, data)
    cursor = run.hosts.together(lambda: run.supply.note_rewards(samples, rewards, step))
    if run.hosts.count > 1 and algorithm.remembers:
        _require_alike(run, samples, data, cursor)
    if algorithm.listen is None or step is None:
        return cursor, {}
    order = run.inputs.train.order_of
    memory = order.read(cursor.curriculum) if isinstance(order, AlgorithmMemory) else None
    listen, setting = functools.partial(algorithm.listen, memory), parts.host_setting(run.c)
    taken = {*taken, *algorithm.metrics}
    return cursor, run.hosts.gather(lambda: call_listen(listen, step, taken, setting) if run.hosts.first else {})[0]


def step_data(run: "Run", number: int, samples: StepSamples, rewards: list[Reward], data: Batch) -> StepData:
    """Returns the step as host functions see it: the episodes that it trains on, then those that are dropped."""
    n = len(rewards) // len(samples.prompts)
    dropped = [group.prompt for group in samples.dropped]
    prompts = [prompt for prompt in (*samples.prompts, *dropped) for _ in range(n)]
    trajectories = [*samples.trajectories, *(t for group in samples.dropped for t in group.trajectories)]
    index = np.arange(len(prompts), dtype=np.int32)
    return StepData(
        number=number,
        folder=run.folder,
        prompts=prompts,
        places=run.inputs.train.places(prompts),
        trajectories=[_read_only(t) for t in trajectories],
        rewards=[*rewards, *(reward for group in samples.dropped for reward in group.rewards)],
        rows=np.where(index < len(rewards), index, -1).astype(np.int32),
        batch=jax.tree.map(_read_only_view, data),
    )


def _read_only_view(x: Any) -> np.ndarray:
    """Returns a view that cannot be written."""
    view = np.asarray(x).view()
    view.flags.writeable = False
    return view


def _read_only(t: Trajectory) -> Trajectory:
    arrays: dict[str, Any] = {name: _read_only_view(x) for name, x in vars(t).items() if isinstance(x, np.ndarray)}
    return dataclasses.replace(t, **arrays, branches=tuple(map(_read_only, t.branches)))


def call_listen(
    listen: Callable[[StepData], Mapping[str, float]], step: StepData, taken: Collection[str], setting: str
) -> dict[str, float]:
    """Calls `listen` and returns its metrics; raises UserError for other results, and for a metric name in `taken`."""
    try:
        metrics = {name: float(value) for name, value in dict(listen(step)).items()}
    except Exception as e:  # a user's function may raise anything
        raise UserError(
            f"{setting}: listen raises {explain(e)}; correct it, to return numbers by name{at_line(e)}"
        ) from e
    for name in metrics:
        if not isinstance(name, str) or not name or name in (*taken, *OF_LINES) or name.startswith(parts.OWN):
            raise UserError(
                f"{setting}: listen returns {name!r}, a name of the step's own metrics; use another, as in mine/NAME"
            )
    return metrics


def _require_alike(run: "Run", samples: StepSamples, data: Batch, cursor: Cursor) -> None:
    """Raises UserError where the calls of an algorithm's memory functions returned other values on another host."""
    places = run.inputs.train.places(samples.prompts)
    columns = [data[f"{COLUMN}{name}"] for name in run.learner.recipe.algorithm.column_names]
    checksum = zlib.crc32(np.asarray(columns).tobytes(), zlib.crc32(places.tobytes()))
    checksum = zlib.crc32(cursor.curriculum.encode(), checksum)
    for rank, other in enumerate(run.hosts.gather(lambda: checksum)):
        if other != checksum:
            raise UserError(
                f"{parts.host_setting(run.c)}: its functions of the memory return other values on host {rank} than on"
                f" host {run.hosts.rank}; let them depend on their arguments alone"
            )
