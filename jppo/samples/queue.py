"""The samples of each step: requested on demand, or prefetched while the trainer learns.

`Supply` is what a run calls. `SampleQueue` is one, and `dynamic_sampling.py` has the other.

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
from typing import Any, Protocol, TypeVar

import numpy as np

from jppo.data.prompts import PromptSet
from jppo.data.stream import Cursor, next_batch, remembered, seen
from jppo.distributed.hosts import ALONE, Hosts
from jppo.rewards.parts import Grading, RewardSum, sample_of
from jppo.rollout.protocol import Sampler, greedy
from jppo.runlog import trajectories
from jppo.runlog.timers import Count
from jppo.samples.given import Give, given_for, keep_current, mark_given_unusable
from jppo.types import Prompt, Reward, Sampling, StepData, Trajectory

T = TypeVar("T")


class Draws:
    """The responses to the prompts of one step, while they are sampled and graded: `n` for each prompt, its group."""

    def __init__(self, prompts: list[Prompt], n: int, reward_sum: RewardSum, changed: threading.Condition):
        self.n = n
        self.found: dict[int, Trajectory] = {}  # finished responses by number
        self.complete: set[int] = set()  # groups with all responses
        self.grading: Grading = reward_sum.begin()
        self.graded: dict[int, Reward] = {}  # before a resume
        self.future: Future[Any] | None = None
        self.began = self.ended = time.monotonic()
        self._prompts = prompts
        self._changed = changed

    def record(self, number: int, t: Trajectory) -> None:
        """Records a response and starts its grading, unless it is graded already; for any thread."""
        if number not in self.graded:
            self.grading.submit(number, sample_of(self._prompts[number // self.n], t))
        with self._changed:
            self.found[number] = t
            self.ended = time.monotonic()
            group = number // self.n
            if all(other in self.found for other in self.numbers(group)):
                self.complete.add(group)
                self._changed.notify_all()

    def numbers(self, group: int) -> range:
        return range(group * self.n, (group + 1) * self.n)

    def rewards(self, numbers: Sequence[int]) -> list[Reward]:
        """Waits for the rewards of these responses, and returns them in the order of their numbers."""
        ungraded = sorted(number for number in numbers if number not in self.graded)
        rewards = self.graded | dict(zip(ungraded, self.grading.collect(ungraded), strict=True))
        return [rewards[number] for number in sorted(numbers)]


@dataclasses.dataclass(eq=False)
class StepRequest:
    """The requested prompts of one step, from their request until the last is trained on."""

    step: int
    version: int  # at the request
    indices: np.ndarray
    after: Cursor
    draws: tuple[Draws, ...]  # the samples, and the greedy responses if there are any
    untrained: set[int]  # prompts that no step has trained on
    restored: bool = False  # from a checkpoint: the position in the data may be behind them


@dataclasses.dataclass(frozen=True)
class Queue:
    """The state of the requests, replaced as a whole in one statement, so a signal finds it consistent."""

    cursor: Cursor  # in the data
    next: int = 0  # the first step without prompts
    queue: tuple[StepRequest, ...] = ()
    restored: tuple[trajectories.Step, ...] = ()  # from a checkpoint, not requested yet: before new prompts


def collect_rewards(groups: Sequence[tuple[Draws, int]]) -> list[Reward]:
    """Waits for the rewards of groups, and returns them in the order of the groups; collects each grading once."""
    by_draws: dict[int, tuple[Draws, list[int]]] = {}
    for draws, group in groups:
        by_draws.setdefault(id(draws), (draws, []))[1].extend(draws.numbers(group))
    return [reward for draws, numbers in by_draws.values() for reward in draws.rewards(numbers)]


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


class Supply(Protocol):
    """The samples of a run, whose calls come from one thread and in this order, but for `progress` from any:

        load -> in each step: take -> memory -> note_rewards -> update -> forget -> settle -> publish

    `state` may come between any two of them: a step that has not come to `forget` is repeated when the run resumes.
    """

    def load(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Restores `state` for a run that begins with `step`, {} of a new run; returns lines for the console."""

    def take(self, step: int) -> StepSamples:
        """Returns the samples that `step` trains on; the rollout engine has the weights `step`."""

    def progress(self, step: int) -> Count:
        """Returns the number of finished and of requested responses up to the step."""

    @property
    def memory(self) -> str:
        """The memory that the step trains with, as text."""

    def note_rewards(self, drawn: StepSamples, rewards: Sequence[Reward], step: StepData | None = None) -> Cursor:
        """Passes the step's rewards to a memory that learns from them; returns the position in the data after it.

        `step` is all of the step, for the memory of an algorithm.
        """

    def forget(self, step: int) -> None:
        """Ends the step: its samples are not needed again, and the memory is the new one."""

    def settle(self) -> None:
        """Waits until nothing is in flight; called where a publish must not overlap requests."""

    def state(self) -> dict[str, Any]:
        """Returns requests that are not yet trained on, with finished responses, as JSON types."""


class SampleQueue(Supply):
    """The samples of a run, requested up to `staleness` steps ahead."""

    def __init__(
        self, options: SupplySettings, train: PromptSet, sampler: Sampler, reward_sum: RewardSum, cursor: Cursor,
        hosts: Hosts = ALONE,
    ):  # fmt: skip
        self._c = options
        self._hosts = hosts
        self._groups = hosts.share(options.batch_size)  # the share of a step's prompts sampled here
        self._train = train
        self._sampler = sampler
        self._reward_sum = reward_sum
        self._queue = Queue(cursor)
        self._groups_by_step: dict[int, list[tuple[StepRequest, int]]] = {}  # of unfinished steps
        self._changed = threading.Condition()
        self._settling_s = 0.0
        self._new_curriculum: str | None = None  # the cursor's after the step: `note_rewards` makes it

    def take(self, step: int) -> StepSamples:
        return self._make_samples(*self._hosts.together(lambda: self._take_groups(step)))

    def _take_groups(self, step: int) -> tuple[list[tuple[StepRequest, int]], float]:
        """Waits for the groups that `step` trains on, and requests later ones; returns them and the seconds waited."""
        last_step = self._last_step(step)
        self._request_steps(last_step if self._c.partial else step, step)
        began = time.monotonic()
        groups = self._wait_for(lambda: self._choose(step)) if self._c.partial else self._wait_for_all(step)
        waited, self._settling_s = self._settling_s + time.monotonic() - began, 0.0
        self._groups_by_step[step] = groups
        self._request_steps(last_step, step)
        return groups, waited

    def progress(self, step: int) -> Count:
        draws = [d for request in self._queue.queue if request.step <= step for d in request.draws]
        responses = [dict(d.found) for d in draws]
        tokens = sum(int(t.sampled.sum()) for by_number in responses for t in by_number.values() if not t.given)
        return Count("responses", sum(d.n for d in draws) * len(self._groups), sum(map(len, responses)), tokens)

    def settle(self) -> None:
        began = time.monotonic()
        self._hosts.together(
            lambda: self._wait_for(lambda: all(self._has_all(a, g) for a in self._queue.queue for g in a.untrained))
        )
        self._settling_s += time.monotonic() - began  # the next `_take_groups` counts it as waiting

    @property
    def memory(self) -> str:
        return self._queue.cursor.curriculum

    def note_rewards(self, drawn: StepSamples, rewards: Sequence[Reward], step: StepData | None = None) -> Cursor:
        order_of, scored = self._train.order_of, mark_given_unusable(drawn.trajectories, rewards)
        cursor = remembered(seen(self._queue.cursor, order_of, drawn.prompts, scored), order_of, step)
        self._new_curriculum = cursor.curriculum
        return dataclasses.replace(drawn.after, curriculum=self._new_curriculum)

    def forget(self, step: int) -> None:
        for request, group in self._groups_by_step.pop(step, []):
            request.untrained.discard(group)
        cursor = self._queue.cursor
        if self._new_curriculum is not None:
            cursor = dataclasses.replace(cursor, curriculum=self._new_curriculum)
            self._new_curriculum = None
        queue = tuple(request for request in self._queue.queue if request.untrained)
        self._queue = dataclasses.replace(self._queue, cursor=cursor, queue=queue)

    def state(self) -> dict[str, Any]:
        """Returns {} without prefetching."""
        return trajectories.merged(self._hosts.gather(self._host_state))

    def _host_state(self) -> dict[str, Any]:
        """Returns `state` with this host's responses."""
        queue = self._queue
        if not self._c.staleness and not queue.restored and not any(request.restored for request in queue.queue):
            return {}
        while True:  # the graders' state must match the finished rewards
            reward = self._reward_sum.state()
            steps = [*(self._save_request(request) for request in queue.queue), *queue.restored]
            if reward == self._reward_sum.state():
                break
        facts = {"next": queue.next, "cursor": dataclasses.asdict(queue.cursor), "reward": reward, **self._identity()}
        return trajectories.state(facts, steps)

    def _save_request(self, request: StepRequest) -> trajectories.Step:
        """Returns a request with its finished responses and rewards, for a checkpoint."""
        with self._changed:
            responses = [dict(draws.found) for draws in request.draws]
        found = tuple(
            trajectories.Found(draws.n, there, draws.grading.finished() | draws.graded)
            for draws, there in zip(request.draws, responses, strict=True)
        )
        after = dataclasses.asdict(dataclasses.replace(request.after, curriculum=""))  # the cursor has the newest one
        untrained = frozenset(request.untrained)
        return trajectories.Step(request.step, request.version, request.indices, after, untrained, found)

    def load(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Requests missing responses again, also those that the run would sample differently or with newer weights."""
        if not state:
            return []
        steps, lines = trajectories.fitted(
            state, self._identity(), first=step, staleness=self._c.staleness, partial=self._c.partial
        )
        if any(found.rewards for saved in steps for found in saved.found):
            self._reward_sum.load(state["reward"])
        cursor = Cursor(**state["cursor"])
        if steps and len(steps[-1].indices) < self._c.batch_size and not self._c.partial:
            steps[-1], cursor = self._fill_step(steps[-1], cursor)
        next_step = state["next"] if self._c.partial else step + len(steps)
        self._queue = Queue(cursor, next_step, restored=tuple(steps))
        self._request_saved(self._last_step(step))
        return lines

    def _last_step(self, step: int) -> int:
        """Returns the last step whose prompts are requested during `step`."""
        options = self._c
        steps_ahead = min(options.staleness, 1) if options.partial else options.staleness
        return min(step + steps_ahead, options.total_steps - 1)

    def _identity(self) -> dict[str, Any]:
        """Returns the settings on which a checkpoint's samples depend, as JSON types."""
        options = self._c
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

    def _request_steps(self, last_step: int, version: int) -> None:
        """Requests the prompts of all steps up to the last, a checkpoint's first."""
        options = self._c
        self._request_saved(last_step)
        for step in range(max(version, self._queue.next), last_step + 1):
            indices, cursor = self._choose_prompts(self._queue.cursor, options.batch_size)
            request = self._start(step, version, indices, cursor, frozenset(range(len(indices))))
            queue = (*self._queue.queue, request)
            self._queue = dataclasses.replace(self._queue, cursor=cursor, next=step + 1, queue=queue)

    def _choose_prompts(self, cursor: Cursor, size: int) -> tuple[np.ndarray, Cursor]:
        """Returns the indices of the next prompts, and the position after them."""
        return next_batch(
            cursor, n=len(self._train.prompts), batch_size=size, seed=self._c.seed, shuffle=self._c.shuffle,
            parts=self._train.parts, order_of=self._train.order_of,
        )  # fmt: skip

    def _fill_step(self, saved: trajectories.Step, cursor: Cursor) -> tuple[trajectories.Step, Cursor]:
        """Adds new prompts to a checkpoint's last step, which a run with `partial` left with too few."""
        size = self._c.batch_size
        indices, cursor = self._choose_prompts(cursor, size - len(saved.indices))
        indices, after = np.concatenate([saved.indices, indices]), dataclasses.asdict(cursor)
        return dataclasses.replace(saved, indices=indices, after=after, untrained=frozenset(range(size))), cursor

    def _request_saved(self, last_step: int) -> None:
        """Requests the missing responses of a checkpoint's steps up to the last."""
        for s in self._queue.restored:
            if self._c.partial or s.step <= last_step:
                request = self._start(s.step, s.version, s.indices, Cursor(**s.after), s.untrained, s.found)
                others = tuple(other for other in self._queue.restored if other is not s)
                self._queue = dataclasses.replace(self._queue, restored=others, queue=(*self._queue.queue, request))

    def _start(
        self, step: int, version: int, indices: np.ndarray, after: Cursor, untrained: frozenset[int],
        saved_responses: Sequence[trajectories.Found] = (),
    ) -> StepRequest:  # fmt: skip
        """Starts the sampling of a step's prompts, without given responses and those of a checkpoint."""
        options = self._c
        prompts = [self._train.prompts[i] for i in indices]
        policy_sampling = options.sampling(step)
        greedy_sampling = greedy(
            policy_sampling.max_tokens, stop=policy_sampling.stop, ignore_eos=policy_sampling.ignore_eos
        )
        all_draws = []
        for i, sampling in enumerate([policy_sampling, greedy_sampling] if options.greedy else [policy_sampling]):
            draws = Draws(prompts, sampling.n, self._reward_sum, self._changed)
            found = saved_responses[i] if saved_responses else trajectories.Found(sampling.n, {}, {})
            groups = [group for group in sorted(untrained) if group in self._groups]
            own_numbers = [number for group in groups for number in draws.numbers(group)]
            given_responses = given_for(None if i else options.give, prompts, groups, sampling.n)
            found = keep_current(found, given_responses)
            draws.graded |= found.rewards
            responses = {**given_responses, **found.responses}
            for number in (number for number in own_numbers if number in responses):
                draws.record(number, responses[number])
            missing = [number for number in own_numbers if number not in responses]
            draws.future = self._sampler.start(prompts, sampling, done=draws.record, only=missing)
            all_draws.append(draws)
        return StepRequest(
            step, version, indices, after, tuple(all_draws), set(untrained), restored=bool(saved_responses)
        )

    def _wait_for_all(self, step: int) -> list[tuple[StepRequest, int]]:
        """Waits for all groups of a step, one after another, and returns them."""
        [request] = [request for request in self._queue.queue if request.step == step]
        groups = sorted(request.untrained)
        for group in groups:
            self._wait_for(functools.partial(self._has_all, request, group))
        return [(request, group) for group in groups]

    def _choose(self, step: int) -> list[tuple[StepRequest, int]] | None:
        """Returns the groups of a step with `partial`: those that are due, then complete ones; None if too few."""
        options, queue = self._c, self._queue.queue
        taken = {(id(request), group) for groups in self._groups_by_step.values() for request, group in groups}
        pending = [(a, g) for a in queue for g in sorted(a.untrained) if (id(a), g) not in taken]
        complete = [pair for pair in pending if self._has_all(*pair)]
        due = [(a, g) for a, g in pending if a.version + options.staleness <= step][: options.batch_size]
        if len(complete) < options.batch_size or not all(pair in complete for pair in due):
            return None
        others = [pair for pair in complete if pair not in due]
        return sorted([*due, *others[: options.batch_size - len(due)]], key=lambda pair: (pair[0].step, pair[1]))

    def _has_all(self, request: StepRequest, group: int) -> bool:
        return group not in self._groups or all(group in draws.complete for draws in request.draws)

    def _wait_for(self, poll: Callable[[], T | None]) -> T:
        """Waits until `poll` returns something true, which it returns; raises an error that ended the sampling."""
        with self._changed:
            while not (outcome := poll()):
                for request in self._queue.queue:
                    for draws in request.draws:
                        if draws.future is not None and draws.future.done():
                            draws.future.result()
                self._changed.wait(_POLL_S)
        return outcome

    def _make_samples(self, groups: list[tuple[StepRequest, int]], waited: float) -> StepSamples:
        """Gathers the responses of complete groups from all hosts; `waited` is in seconds."""
        own_groups = [(a, g) for a, g in groups if g in self._groups]
        samples, greedy_draws = ([(a.draws[i], g) for a, g in own_groups if i < len(a.draws)] for i in (0, 1))
        all_draws = [draws for a, _ in groups for draws in a.draws]
        responses = [draws.found[number] for draws, group in samples for number in draws.numbers(group)]
        return StepSamples(
            prompts=[self._train.prompts[request.indices[group]] for request, group in groups],
            trajectories=trajectories.of_all(self._hosts, responses),
            after=max((request for request, _ in groups), key=lambda request: request.step).after,
            waited_s=waited,
            sampling_s=max(draws.ended for draws in all_draws) - min(draws.began for draws in all_draws),
            wait_for_rewards=lambda: self._wait_for_rewards(samples, greedy_draws),
        )

    def _wait_for_rewards(
        self, samples: Sequence[tuple[Draws, int]], greedy_draws: Sequence[tuple[Draws, int]]
    ) -> tuple[list[Reward], list[Reward] | None]:
        """Waits for the rewards of samples and, where there are any, of greedy responses, on all hosts."""
        rewards = trajectories.rewards_of_all(self._hosts, lambda: collect_rewards(samples))
        if not self._c.greedy:
            return rewards, None
        return rewards, trajectories.rewards_of_all(self._hosts, lambda: collect_rewards(greedy_draws))


def ages(responses: Sequence[Trajectory], step: int) -> np.ndarray:
    """Returns the age of each response's oldest sampled token in updates of the weights, now `step`; [B] i64."""
    sampled = [[other for other in (t, *t.branches) if other.sampled.any() and not other.given] for t in responses]
    return np.array([max((step - t.version[t.sampled].min() for t in parts), default=0) for parts in sampled], np.int64)
