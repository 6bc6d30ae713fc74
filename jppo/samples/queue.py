"""The samples of each step: requested on demand, or prefetched while the trainer learns.

    take(step)      returns the samples of a step and requests those of later steps
    settle()        waits for all requests, before an update that must not overlap any
    learned(...)    passes its rewards to the order of the prompts
    forget(step)    ends the step
    state()         requests that are not yet trained on, with finished responses, for a checkpoint

With `staleness` 0, training is synchronous: a step's prompts are requested with the policy that learns from them. With
k, up to k further steps are in flight, sampled by weights up to k updates old. With `partial`, a step takes the first
finished groups in any order; long ones continue until they would be too old.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jppo.data.prompts import PromptSet
from jppo.data.stream import Cursor, next_batch, remembered, seen
from jppo.distributed.hosts import ALONE, Hosts
from jppo.rewards.parts import Grading, RewardSum, sample_of
from jppo.rollout.protocol import Sampler, greedy
from jppo.runlog import trajectories
from jppo.runlog.timers import Count
from jppo.samples.given import Give, by_number, of_policy, without_others
from jppo.types import Prompt, Reward, Sampling, StepData, Trajectory


class Draws:
    """The responses to the prompts of one step, in flight; `done` may come from any thread."""

    def __init__(self, prompts: list[Prompt], n: int, reward_sum: RewardSum, changed: threading.Condition):
        self.n = n
        self.found: dict[int, Trajectory] = {}
        self._whole: set[int] = set()  # groups with all responses
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
            group = number // self.n
            if all(other in self.found for other in self.numbers(group)):
                self._whole.add(group)
                self._changed.notify_all()

    def has(self, group: int) -> bool:
        """Whether all responses to a prompt are complete."""
        return group in self._whole

    def numbers(self, group: int) -> range:
        """Returns the indices of a prompt's responses."""
        return range(group * self.n, (group + 1) * self.n)

    def rewards(self, numbers: Sequence[int]) -> list[Reward]:
        """Waits for the rewards of these responses, and returns them in the order of their numbers."""
        asked = sorted(number for number in numbers if number not in self.graded)
        rewards = self.graded | dict(zip(asked, self.grading.collect(asked), strict=True))
        return [rewards[number] for number in sorted(numbers)]

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
    held: tuple[trajectories.Step, ...] = ()  # from a checkpoint, not requested yet: before new prompts


def rewards_of(groups: Sequence[tuple[Draws, int]]) -> list[Reward]:
    """Waits for the rewards of groups, and returns them in the order of the groups; collects each grading once."""
    wanted: dict[int, tuple[Draws, list[int]]] = {}
    for draws, group in groups:
        wanted.setdefault(id(draws), (draws, []))[1].extend(draws.numbers(group))
    return [reward for draws, numbers in wanted.values() for reward in draws.rewards(numbers)]


_POLL_S = 0.5  # polling interval of waits, so that a signal ends them


@dataclasses.dataclass(frozen=True)
class SupplySettings:
    """The settings of the sample supply, for a whole run."""

    batch_size: int  # prompts per step
    n: int
    seed: int
    shuffle: bool
    total_steps: int
    staleness: int
    partial: bool
    greedy: bool  # a greedy response per prompt, as a baseline
    sampling: Callable[[int], Sampling]  # by step
    graders: dict[str, Any] = dataclasses.field(default_factory=dict)  # JSON; saved rewards are kept if it is equal
    give: Give | None = None  # the responses of a prompt that are not sampled


@dataclasses.dataclass(frozen=True)
class Group:
    """The graded samples of one prompt."""

    prompt: Prompt
    trajectories: list[Trajectory]
    rewards: list[Reward]
    baseline: Reward | None = None  # of the greedy response, if there is one


@dataclasses.dataclass(frozen=True)
class StepSamples:
    """The samples that a step trains on."""

    prompts: list[Prompt]
    trajectories: list[Trajectory]  # n consecutive ones per prompt
    after: Cursor  # the position in the data after the step
    waited_s: float
    sampling_s: float  # from the first request to the last answer
    wait_for_rewards: Callable[[], tuple[list[Reward], list[Reward] | None]]  # and the baseline's
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # of dynamic sampling
    dropped: tuple["Group", ...] = ()  # by dynamic sampling, where an algorithm asks for them


class SampleQueue:
    """The samples of a run."""

    def __init__(
        self,
        options: SupplySettings,
        train: PromptSet,
        sampler: Sampler,
        reward_sum: RewardSum,
        cursor: Cursor,
        hosts: Hosts = ALONE,
    ):
        self._how = options
        self._hosts = hosts
        self._groups = hosts.share(options.batch_size)  # the share of a step's prompts sampled here
        self._train = train
        self._sampler = sampler
        self._reward_sum = reward_sum
        self._now = Queue(cursor)
        self._taken: dict[int, list[tuple[Asked, int]]] = {}  # of unfinished steps
        self._changed = threading.Condition()
        self._settling_s = 0.0
        self._learned: str | None = None  # the memory after the step

    def take(self, step: int) -> StepSamples:
        """Returns the samples that `step` trains on; the rollout engine has the weights `step`."""
        return self._drawn(*self._hosts.together(lambda: self._take(step)))

    def _take(self, step: int) -> tuple[list[tuple[Asked, int]], float]:
        last = self._last(step)
        self._ask_through(last if self._how.partial else step, step)
        began = time.monotonic()
        groups = self._wait_for(lambda: self._choose(step)) if self._how.partial else self._wait_for_all(step)
        waited, self._settling_s = self._settling_s + time.monotonic() - began, 0.0
        self._taken[step] = groups
        self._ask_through(last, step)
        return groups, waited

    def progress(self, step: int) -> Count:
        """Returns how many responses of the step are there; for any thread."""
        asked = [draws for asked in self._now.queue if asked.step <= step for draws in asked.draws]
        responses = [dict(draws.found) for draws in asked]
        tokens = sum(int(t.sampled.sum()) for there in responses for t in there.values() if not t.given)
        return Count("responses", sum(draws.n for draws in asked) * len(self._groups), sum(map(len, responses)), tokens)

    def settle(self) -> None:
        """Waits until nothing is in flight."""
        began = time.monotonic()
        self._hosts.together(
            lambda: self._wait_for(
                lambda: all(self._has(asked, group) for asked in self._now.queue for group in asked.left)
            )
        )
        self._settling_s += time.monotonic() - began  # the next `_take` counts it as waiting

    @property
    def memory(self) -> str:
        """The memory that the next step trains with, as text."""
        return self._now.cursor.curriculum

    def note_rewards(self, drawn: StepSamples, rewards: Sequence[Reward], step: StepData | None = None) -> Cursor:
        """Passes the step's rewards to a memory that learns from them; returns the position in the data after it.

        `step` is all of the step, for the memory of an algorithm. `state` has them from `forget` on: a step that breaks
        off is repeated.
        """
        order_of, scored = self._train.order_of, of_policy(drawn.trajectories, rewards)
        cursor = remembered(seen(self._now.cursor, order_of, drawn.prompts, scored), order_of, step)
        self._learned = cursor.curriculum
        return dataclasses.replace(drawn.after, curriculum=self._learned)

    def forget(self, step: int) -> None:
        """Ends the step: its samples are not needed again."""
        for asked, group in self._taken.pop(step, []):
            asked.left.discard(group)
        cursor, self._learned, learned = self._now.cursor, None, self._learned
        cursor = cursor if learned is None else dataclasses.replace(cursor, curriculum=learned)
        queue = tuple(asked for asked in self._now.queue if asked.left)
        self._now = dataclasses.replace(self._now, cursor=cursor, queue=queue)

    def state(self) -> dict[str, Any]:
        """Returns requests that are not yet trained on, as JSON types; {} without prefetching."""
        return trajectories.merged(self._hosts.gather(self._state))

    def _state(self) -> dict[str, Any]:
        now = self._now
        if not self._how.staleness and not now.held and not any(asked.held for asked in now.queue):
            return {}
        while True:  # the graders' state must match the finished rewards
            reward = self._reward_sum.state()
            steps = [*(self._kept(asked) for asked in now.queue), *now.held]
            if reward == self._reward_sum.state():
                break
        about = {"next": now.next, "cursor": dataclasses.asdict(now.cursor), "reward": reward, **self._kind()}
        return trajectories.state(about, steps)

    def _kept(self, asked: Asked) -> trajectories.Step:
        with self._changed:
            responses = [dict(draws.found) for draws in asked.draws]
        ways = tuple(
            trajectories.Found(draws.n, there, draws.grading.finished() | draws.graded)
            for draws, there in zip(asked.draws, responses, strict=True)
        )
        after = dataclasses.asdict(dataclasses.replace(asked.after, curriculum=""))  # the cursor has the newest memory
        return trajectories.Step(asked.step, asked.version, asked.indices, after, frozenset(asked.left), ways)

    def load(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Restores `state` for a run that begins with `step`; missing responses are requested again.

        Responses that the run would sample differently, or with newer weights, are missing. Returns lines for the
        console.
        """
        if not state:
            return []
        kept, lines = trajectories.fitted(
            state, self._kind(), first=step, staleness=self._how.staleness, partial=self._how.partial
        )
        if any(way.rewards for one in kept for way in one.found):
            self._reward_sum.load(state["reward"])
        cursor = Cursor(**state["cursor"])
        if kept and len(kept[-1].indices) < self._how.batch_size and not self._how.partial:
            kept[-1], cursor = self._filled(kept[-1], cursor)
        following = state["next"] if self._how.partial else step + len(kept)
        self._now = Queue(cursor, following, held=tuple(kept))
        self._ask_held(self._last(step))
        return lines

    def _last(self, step: int) -> int:
        """Returns the last step whose prompts are requested during `step`."""
        options = self._how
        ahead = min(options.staleness, 1) if options.partial else options.staleness
        return min(step + ahead, options.total_steps - 1)

    def _kind(self) -> dict[str, Any]:
        """Returns the settings on which kept samples depend."""
        options = self._how
        sampling = {
            name: list(value) if isinstance(value, tuple) else value  # as JSON has it
            for name, value in dataclasses.asdict(options.sampling(0)).items()
            if name not in ("n", "seed")
        }
        return {
            "data.train_batch_size": options.batch_size,
            "rollout.n": options.n,
            "greedy": options.greedy,
            "sampling": sampling,
            "graders": options.graders,
        }

    def _ask_through(self, last: int, version: int) -> None:
        options = self._how
        self._ask_held(last)
        for step in range(max(version, self._now.next), last + 1):
            indices, cursor = self._next(self._now.cursor, options.batch_size)
            asked = self._begin(step, version, indices, cursor, frozenset(range(len(indices))))
            self._now = dataclasses.replace(self._now, cursor=cursor, next=step + 1, queue=(*self._now.queue, asked))

    def _next(self, cursor: Cursor, size: int) -> tuple[np.ndarray, Cursor]:
        """Returns the indices of the next prompts, and the position after them."""
        return next_batch(
            cursor, n=len(self._train.prompts), batch_size=size, seed=self._how.seed, shuffle=self._how.shuffle,
            parts=self._train.parts, order_of=self._train.order_of,
        )  # fmt: skip

    def _filled(self, one: trajectories.Step, cursor: Cursor) -> tuple[trajectories.Step, Cursor]:
        """Adds new prompts to the last ones that a run with `partial` left, which are no whole step."""
        size = self._how.batch_size
        indices, cursor = self._next(cursor, size - len(one.indices))
        indices, after = np.concatenate([one.indices, indices]), dataclasses.asdict(cursor)
        return dataclasses.replace(one, indices=indices, after=after, left=frozenset(range(size))), cursor

    def _ask_held(self, last: int) -> None:
        for one in self._now.held:
            if self._how.partial or one.step <= last:
                asked = self._begin(one.step, one.version, one.indices, Cursor(**one.after), one.left, one.found)
                rest = tuple(other for other in self._now.held if other is not one)
                self._now = dataclasses.replace(self._now, held=rest, queue=(*self._now.queue, asked))

    def _begin(
        self, step: int, version: int, indices: np.ndarray, after: Cursor, left: frozenset[int],
        saved: Sequence[trajectories.Found] = (),
    ) -> Asked:  # fmt: skip
        options = self._how
        prompts = [self._train.prompts[i] for i in indices]
        usual = options.sampling(step)
        best = greedy(usual.max_tokens, stop=usual.stop, ignore_eos=usual.ignore_eos)
        asked = []
        for i, way in enumerate([usual, best] if options.greedy else [usual]):
            draws = Draws(prompts, way.n, self._reward_sum, self._changed)
            there = saved[i] if saved else trajectories.Found(way.n, {}, {})
            groups = [group for group in sorted(left) if group in self._groups]
            own = [number for group in groups for number in draws.numbers(group)]
            given = by_number(None if i else options.give, prompts, groups, way.n)
            there = without_others(there, given)
            draws.graded |= there.rewards
            responses = {**given, **there.responses}
            for number in (number for number in own if number in responses):
                draws.done(number, responses[number])
            missing = [number for number in own if number not in responses]
            draws.future = self._sampler.start(prompts, way, done=draws.done, only=missing)
            asked.append(draws)
        return Asked(step, version, indices, after, tuple(asked), set(left), held=bool(saved))

    def _wait_for_all(self, step: int) -> list[tuple[Asked, int]]:
        """Returns the groups of the step, one after another, so that a response costs no look at all of them."""
        [asked] = [asked for asked in self._now.queue if asked.step == step]
        groups = sorted(asked.left)
        for group in groups:
            self._wait_for(functools.partial(self._has, asked, group))
        return [(asked, group) for group in groups]

    def _choose(self, step: int) -> list[tuple[Asked, int]] | None:
        """Returns the groups of a step that takes complete ones of several; None if they are too few."""
        options, queue = self._how, self._now.queue
        gone = {(id(asked), group) for groups in self._taken.values() for asked, group in groups}
        waiting = [(asked, g) for asked in queue for g in sorted(asked.left) if (id(asked), g) not in gone]
        complete = [pair for pair in waiting if self._has(*pair)]
        due = [(a, g) for a, g in waiting if a.version + options.staleness <= step][: options.batch_size]
        if len(complete) < options.batch_size or not all(pair in complete for pair in due):
            return None
        rest = [pair for pair in complete if pair not in due]
        return sorted([*due, *rest[: options.batch_size - len(due)]], key=lambda pair: (pair[0].step, pair[1]))

    def _has(self, asked: Asked, group: int) -> bool:
        return group not in self._groups or all(draws.has(group) for draws in asked.draws)

    def _wait_for(self, poll: Callable[[], Any]) -> Any:
        with self._changed:
            while not (outcome := poll()):
                for asked in self._now.queue:
                    for draws in asked.draws:
                        draws.require()
                self._changed.wait(_POLL_S)
        return outcome

    def _drawn(self, groups: list[tuple[Asked, int]], waited: float) -> StepSamples:
        own = [(a, g) for a, g in groups if g in self._groups]
        samples, best = ([(a.draws[i], g) for a, g in own if i < len(a.draws)] for i in (0, 1))
        used = [draws for a, _ in groups for draws in a.draws]
        responses = [draws.found[number] for draws, group in samples for number in draws.numbers(group)]
        return StepSamples(
            prompts=[self._train.prompts[asked.indices[group]] for asked, group in groups],
            trajectories=trajectories.of_all(self._hosts, responses),
            after=max((asked for asked, _ in groups), key=lambda asked: asked.step).after,
            waited_s=waited,
            sampling_s=max(draws.ended for draws in used) - min(draws.began for draws in used),
            wait_for_rewards=lambda: self._wait_for_rewards(samples, best),
        )

    def _wait_for_rewards(
        self, samples: Sequence[tuple[Draws, int]], best: Sequence[tuple[Draws, int]]
    ) -> tuple[list[Reward], list[Reward] | None]:
        rewards = trajectories.rewards_of_all(self._hosts, lambda: rewards_of(samples))
        if not self._how.greedy:
            return rewards, None
        return rewards, trajectories.rewards_of_all(self._hosts, lambda: rewards_of(best))


def ages(responses: Sequence[Trajectory], step: int) -> np.ndarray:
    """Returns the age in updates of each one's oldest sampled token, 0 without one, by the weights `step`, [B] i64."""
    every = [[other for other in (t, *t.branches) if other.sampled.any() and not other.given] for t in responses]
    return np.array([max((step - t.version[t.sampled].min() for t in some), default=0) for some in every], np.int64)
