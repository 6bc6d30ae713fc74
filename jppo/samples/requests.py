"""The prompts of a step in flight: their responses as they are sampled, and the rewards as they are graded."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jppo.data.stream import Cursor
from jppo.rewards.parts import sample_of
from jppo.rewards.reward_sum import Grading, RewardSum
from jppo.runlog import sample_queue
from jppo.types import Prompt, Reward, Trajectory


class Draws:
    """The responses to the prompts of one step, in flight; `done` may come from any thread."""

    def __init__(self, prompts: list[Prompt], n: int, reward_sum: RewardSum, changed: threading.Condition):
        self.n = n
        self.found: dict[int, Trajectory] = {}
        self.grading: Grading = reward_sum.begin()
        self.graded: dict[int, Reward] = {}  # before a resume
        self.future: Future[Any] | None = None
        self.began = self.ended = time.monotonic()
        self._prompts = prompts
        self._changed = changed

    def done(self, number: int, t: Trajectory) -> None:
        """Records a response and starts its grading, unless it is graded already."""
        if number not in self.graded:
            self.grading.submit(number, sample_of(self._prompts[number // self.n], t))
        with self._changed:
            self.found[number] = t
            self.ended = time.monotonic()
            self._changed.notify_all()

    def has(self, group: int) -> bool:
        """Whether all responses to a prompt are complete."""
        return all(number in self.found for number in self.numbers(group))

    def numbers(self, group: int) -> range:
        """Returns the indices of a prompt's responses."""
        return range(group * self.n, (group + 1) * self.n)

    def rewards(self, numbers: Sequence[int]) -> list[Reward]:
        """Waits for the rewards of these responses, in the given order."""
        asked = sorted(number for number in numbers if number not in self.graded)
        found = self.graded | dict(zip(asked, self.grading.collect(asked), strict=True))
        return [found[number] for number in sorted(numbers)]

    def require(self) -> None:
        """Raises the error that ended the sampling, if any."""
        if self.future is not None and self.future.done():
            self.future.result()


@dataclasses.dataclass(eq=False)
class Asked:
    """The prompts of one step, from their request until the last is trained on."""

    step: int
    version: int  # at the request
    indices: np.ndarray
    after: Cursor
    draws: tuple[Draws, ...]  # the samples, and the greedy responses if there are any
    left: set[int]  # prompts that no step has trained on
    held: bool = False  # from a checkpoint: the position in the data may be behind them


@dataclasses.dataclass(frozen=True)
class Queue:
    """The state of the requests, replaced as a whole in one statement, so a signal finds it consistent."""

    cursor: Cursor  # in the data
    next: int = 0  # the first step without prompts
    queue: tuple[Asked, ...] = ()
    held: tuple[sample_queue.Step, ...] = ()  # from a checkpoint, not requested yet: before new prompts


def rewards_of(groups: Sequence[tuple[Draws, int]]) -> list[Reward]:
    """Waits for the rewards of groups, and returns them in the order of the groups; collects each grading once."""
    wanted: dict[int, tuple[Draws, list[int]]] = {}
    for draws, group in groups:
        wanted.setdefault(id(draws), (draws, []))[1].extend(draws.numbers(group))
    return [reward for draws, numbers in wanted.values() for reward in draws.rewards(numbers)]
