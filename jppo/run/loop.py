"""The loop of every training: step, finish, test, log, save, stop.

A command brings a `Method`: its step, how it is finished (PPO publishes), its test and what its checkpoints hold. The
state is `TrainState`. A run that ended early and resumes has the metrics and the models of an uninterrupted one, bit
for bit on a CPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jppo.data.stream import steps_per_epoch
from jppo.distributed.hosts import Hosts, Stopped
from jppo.errors import RunEnded
from jppo.learner import sharding
from jppo.runlog.checkpoint import Checkpoints, NonFinite
from jppo.runlog.logger import Logger, Silent
from jppo.runlog.timers import Profiler, Timers
from jppo.runlog.watchdog import Watch
from jppo.settings import Training
from jppo.types import TrainState


class Diverged(RunEnded):
    """Non-finite losses, gradients or weights, or failure of every grader."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is."""

    state: TrainState
    place: dict[str, Any]  # what changes outside the train state, as JSON types: the data cursor, for one
    unlogged: dict[str, float] | None = None  # metrics of the last step, until it is tested and logged

    @property
    def step(self) -> int:
        return int(self.state.step)


@dataclasses.dataclass(frozen=True)
class Opened:
    """The parts that every run has, whatever it trains."""

    c: Training
    steps: int  # of the whole run
    hosts: Hosts
    checkpoints: Checkpoints
    logger: Logger | Silent
    timer: Timers
    watch: Watch
    profile: Profiler


@dataclasses.dataclass(frozen=True)
class Method:
    """The functions of a command that the loop calls, and their settings."""

    step: Callable[[Progress], Progress]  # takes a step; its metrics are `unlogged`
    finish: Callable[[Progress], None]  # ends a step: PPO publishes, the others raise if it was skipped
    test: Callable[[Progress], dict[str, float]]
    test_freq: int
    require_progress: Callable[[Progress], None]  # after a step is logged; raises Diverged
    save: Callable[[Progress, dict[str, float], BaseException | None], None]  # also as an error ends the run
    remedy: str  # for values that are not finite


def learn(run: Opened, method: Method, now: Progress) -> Progress:
    """Runs all remaining steps of `method` and logs each once; at an early end saves `now`, the last complete state.

    A stop, such as by SIGTERM, is raised at once in a stage that only waits, else by `check` (`runlog/watchdog.py`):

    | stop in               | raised                    | checkpoint                   | the resumed run           |
    |-----------------------|---------------------------|------------------------------|---------------------------|
    | sampling, grading     | at once                   | of the step before           | repeats the step          |
    | scores, updates       | before the publish        | of the step, with `unlogged` | publishes, tests and logs |
    | the test              | at once                   | of the step, with `unlogged` | tests and logs            |
    | publish, log and save | in the next test or check | of the step                  | continues from there      |
    """
    timer = run.timer
    try:
        run.watch.check()  # a stop since the start
        while now.unlogged is not None or now.step < run.steps:
            if now.unlogged is None:  # else it resumes a step that is not yet tested and logged
                with run.profile(now.step + 1), timer("step", number=now.step + 1):
                    now = method.step(now)
                    run.watch.check()
                    method.finish(now)
            metrics, is_last = dict(now.unlogged or {}), now.step == run.steps
            if is_last or due(now.step, method.test_freq):
                with timer("testing"):
                    metrics |= method.test(now)
            metrics |= timer.next_step() | sharding.memory()
            metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
            run.logger.log(now.step, metrics)
            now = dataclasses.replace(now, unlogged=None)
            method.require_progress(now)
            if is_last or due(now.step, run.c.trainer.save_freq):
                try:
                    method.save(now, metrics, None)
                except NonFinite as e:
                    message = f"step {now.step}: {e}; nothing was saved"
                    raise Diverged(f"{message}: {method.remedy}") from e
            run.watch.check()
    except BaseException as e:  # `save_last` finds out whether `now` is complete
        if isinstance(e, RunEnded | Stopped) or run.hosts.shared(e):  # else the other hosts are elsewhere
            saved, error = now, e
            run.checkpoints.save_last(
                saved.step, saved.state, lambda: method.save(saved, {}, error), run.logger.note, run.hosts
            )  # fmt: skip
        raise
    return now


def due(step: int, every: int) -> bool:
    """Whether a periodic action is due at `step`; -1 disables it."""
    return every > 0 and step % every == 0


def total_steps(c: Training, examples: int) -> int:
    """Returns the steps of a run: `trainer.total_training_steps`, or all epochs' steps."""
    steps = c.trainer.total_training_steps
    return steps if steps != -1 else steps_per_epoch(examples, c.data.train_batch_size) * c.trainer.total_epochs
