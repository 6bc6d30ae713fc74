"""The samples of each step: asked for when the step needs them, or steps ahead, while the trainer learns.

    take(step)      the samples that the step learns from; on the way it asks for those of the steps to come
    settle()        waits for all that is under way, before an update that must not meet any
    forget(step)    the step is done
    state()         what is asked for and not yet learned from: a checkpoint keeps what of it is finished

With `staleness` 0 that is synchronous training: each step's prompts are asked for when the policy is there that learns
from them. With k, the prompts of up to k steps more are under way, sampled by weights that are up to k updates old.
With `partial` the first groups that are finished are taken, in whichever order; long ones go on meanwhile, until they
would be too old.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jppo.config import UserError
from jppo.data.prompts import PromptSet
from jppo.data.stream import Cursor, next_batch
from jppo.io import trajectories
from jppo.io.hosts import ALONE, Hosts
from jppo.rewards.compose import Grading, Panel
from jppo.rewards.parts import sample_of
from jppo.rollout.sampler import Sampler, greedy
from jppo.structs import Prompt, Reward, Sampling, Trajectory

POLL_S = 0.5  # a wait is looked up so often, so that a signal ends it


@dataclasses.dataclass(frozen=True)
class How:
    """How steps are supplied; the same for a whole run."""

    batch_size: int  # prompts of a step
    n: int
    seed: int
    shuffle: bool
    total_steps: int
    staleness: int
    partial: bool
    greedy: bool  # a greedy response to each prompt, as a baseline
    draw: Callable[[int], Sampling]  # of a step


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a step learns from."""

    prompts: list[Prompt]
    trajectories: list[Trajectory]  # n of each prompt, beside each other
    after: Cursor  # the place in the data when the step is done
    waited_s: float
    sampling_s: float  # from the first request for any of it to the last answer
    grade: Callable[[], tuple[list[Reward], list[Reward] | None]]  # waits for the rewards, and those of the baseline


class Draws:
    """The responses to the prompts of one step, on their way; `done` may come from any thread."""

    def __init__(self, prompts: list[Prompt], n: int, panel: Panel, changed: threading.Condition):
        self.found: dict[int, Trajectory] = {}
        self.grading: Grading = panel.begin()
        self.future: Future[Any] | None = None
        self.began = self.ended = time.monotonic()
        self._prompts = prompts
        self._n = n
        self._changed = changed

    def done(self, number: int, t: Trajectory) -> None:
        """A response is there; its grading begins."""
        self.grading.submit(number, sample_of(self._prompts[number // self._n], t))
        with self._changed:
            self.found[number] = t
            self.ended = time.monotonic()
            self._changed.notify_all()

    def has(self, group: int) -> bool:
        """Whether all responses to a prompt are there."""
        return all(number in self.found for number in self.numbers(group))

    def numbers(self, group: int) -> range:
        """Those of a prompt's responses."""
        return range(group * self._n, (group + 1) * self._n)

    def require(self) -> None:
        """Raises what ended the sampling, if anything did."""
        if self.future is not None and self.future.done():
            self.future.result()


@dataclasses.dataclass(eq=False)
class Asked:
    """The prompts of one step, from when they are asked for until the last of them is learned from."""

    step: int
    version: int  # of the weights when they were asked for
    indices: np.ndarray
    after: Cursor
    draws: list[Draws]  # the samples, and the greedy responses if there are any
    left: set[int]  # prompts that no step has taken


class Supply:
    """The samples of a run."""

    def __init__(
        self, how: How, train: PromptSet, sampler: Sampler, panel: Panel, cursor: Cursor, hosts: Hosts = ALONE
    ):
        self._how = how
        self._hosts = hosts
        self._groups = hosts.share(how.batch_size)  # of a step's prompts those that are drawn here
        self._train = train
        self._sampler = sampler
        self._panel = panel
        self._cursor = cursor
        self._queue: list[Asked] = []
        self._taken: dict[int, list[tuple[Asked, int]]] = {}  # of steps that are not done
        self._changed = threading.Condition()
        self._settling_s = 0.0

    def take(self, step: int) -> Drawn:
        """The samples that `step` learns from; the weights `step` are what the sampler has now."""
        return self._drawn(*self._hosts.together(lambda: self._take(step)))

    def _take(self, step: int) -> tuple[list[tuple[Asked, int]], float]:
        how = self._how
        ahead = min(how.staleness, 1) if how.partial else how.staleness
        last = min(step + ahead, how.total_steps - 1)
        if how.partial:
            self._ask_through(last, step)
        else:
            self._ask_through(step, step)
        began = time.monotonic()
        groups = self._wait_for(lambda: self._choose(step))
        waited, self._settling_s = self._settling_s + time.monotonic() - began, 0.0
        for asked, group in groups:
            asked.left.discard(group)
        self._taken[step] = groups
        self._ask_through(last, step)
        return groups, waited

    def settle(self) -> None:
        """Waits until nothing is under way."""
        began = time.monotonic()
        self._hosts.together(
            lambda: self._wait_for(
                lambda: all(self._has(asked, g) for asked in self._queue for g in range(len(asked.indices))) or None
            )
        )
        self._settling_s += time.monotonic() - began

    def forget(self, step: int) -> None:
        """The step is done: what it learned from is not needed again."""
        self._taken.pop(step, None)
        held = {id(asked) for groups in self._taken.values() for asked, _ in groups}
        self._queue = [asked for asked in self._queue if asked.left or id(asked) in held]

    def state(self) -> list[dict[str, Any]]:
        """What is asked for and not yet learned from, of JSON types; [] where nothing is asked for ahead."""
        if not self._how.staleness:
            return []
        out = []
        for asked in self._queue:
            mine = [group for groups in self._taken.values() for a, group in groups if a is asked]
            out.append(
                {
                    **self._kind(),
                    "step": asked.step,
                    "version": asked.version,
                    "indices": asked.indices.tolist(),
                    "after": dataclasses.asdict(asked.after),
                    "left": sorted({*asked.left, *mine}),
                    "numbers": [sorted(draws.found) for draws in asked.draws],
                    "found": [trajectories.pack([t for _, t in sorted(draws.found.items())]) for draws in asked.draws],
                }
            )
        return _merged(self._hosts.gather(lambda: out))

    def load(self, state: Sequence[dict[str, Any]]) -> int:
        """The inverse of `state`: what is missing is asked for again. Returns how many samples were kept."""
        kept = 0
        for one in state:
            self._require_kind(one)
            found = [
                dict(zip(numbers, trajectories.unpack(packed), strict=True))
                for numbers, packed in zip(one["numbers"], one["found"], strict=True)
            ]
            after = Cursor(**one["after"])
            asked = self._begin(one["step"], one["version"], np.array(one["indices"]), after, found)
            asked.left = set(one["left"])
            kept += sum(map(len, found))
            self._cursor = after
        return kept

    def _kind(self) -> dict[str, Any]:
        """What the numbers of kept samples mean."""
        return {"data.train_batch_size": self._how.batch_size, "rollout.n": self._how.n, "greedy": self._how.greedy}

    def _require_kind(self, one: dict[str, Any]) -> None:
        for name, now in self._kind().items():
            if one[name] != now:
                what = "algorithm.adv_estimator draws greedy responses" if name == "greedy" else name
                raise UserError(
                    f"{what}={now!r} was {one[name]!r} when the checkpoint was written, whose samples of the next steps"
                    " were drawn so; give the old value, or begin anew with another trainer.run_dir or"
                    " trainer.resume_mode=disable"
                )

    def _ask_through(self, last: int, version: int) -> None:
        how = self._how
        first = max([version - 1, *(asked.step for asked in self._queue)]) + 1
        for step in range(first, last + 1):
            indices, self._cursor = next_batch(
                self._cursor, n=len(self._train.prompts), batch_size=how.batch_size, seed=how.seed,
                shuffle=how.shuffle, parts=self._train.parts,
            )  # fmt: skip
            self._begin(step, version, indices, self._cursor, [{}, {}])

    def _begin(
        self, step: int, version: int, indices: np.ndarray, after: Cursor, found: list[dict[int, Trajectory]]
    ) -> Asked:
        how = self._how
        prompts = [self._train.prompts[i] for i in indices]
        drawn = how.draw(step)
        best = greedy(drawn.max_tokens, stop=drawn.stop, ignore_eos=drawn.ignore_eos)
        ways = [drawn, best] if how.greedy else [drawn]
        asked = Asked(step, version, indices, after, [], set(range(len(indices))))
        self._queue.append(asked)
        for way, there in zip(ways, found, strict=False):
            draws = Draws(prompts, way.n, self._panel, self._changed)
            asked.draws.append(draws)
            own = range(self._groups.start * way.n, self._groups.stop * way.n)
            for number in (number for number in own if number in there):
                draws.done(number, there[number])
            missing = [number for number in own if number not in there]
            draws.future = self._sampler.start(prompts, way, done=draws.done, only=missing)
        return asked

    def _choose(self, step: int) -> list[tuple[Asked, int]] | None:
        """The groups of the step; None: they are not all there."""
        how = self._how
        if not how.partial:
            [asked] = [asked for asked in self._queue if asked.step == step]
            groups = [(asked, group) for group in sorted(asked.left)]
            return groups if all(self._has(*pair) for pair in groups) else None
        waiting = [(asked, group) for asked in self._queue for group in sorted(asked.left)]
        there = [pair for pair in waiting if self._has(*pair)]
        due = [(a, g) for a, g in waiting if a.version + how.staleness <= step]
        if len(there) < how.batch_size or not all(pair in there for pair in due):
            return None
        rest = [pair for pair in there if pair not in due]
        return sorted([*due, *rest[: how.batch_size - len(due)]], key=lambda pair: (pair[0].step, pair[1]))

    def _has(self, asked: Asked, group: int) -> bool:
        return group not in self._groups or all(draws.has(group) for draws in asked.draws)

    def _wait_for(self, found: Callable[[], Any]) -> Any:
        with self._changed:
            while (what := found()) is None:
                for asked in self._queue:
                    for draws in asked.draws:
                        draws.require()
                self._changed.wait(POLL_S)
        return what

    def _drawn(self, groups: list[tuple[Asked, int]], waited: float) -> Drawn:
        own = [(a, g) for a, g in groups if g in self._groups]
        samples, best = ([(a.draws[i], g) for a, g in own if i < len(a.draws)] for i in (0, 1))
        used = [draws for a, _ in groups for draws in a.draws]
        found = [draws.found[number] for draws, group in samples for number in draws.numbers(group)]
        return Drawn(
            prompts=[self._train.prompts[asked.indices[group]] for asked, group in groups],
            trajectories=trajectories.of_all(self._hosts, found),
            after=max((asked for asked, _ in groups), key=lambda asked: asked.step).after,
            waited_s=waited,
            sampling_s=max(draws.ended for draws in used) - min(draws.began for draws in used),
            grade=lambda: self._grade(samples, best),
        )

    def _grade(
        self, samples: Sequence[tuple[Draws, int]], best: Sequence[tuple[Draws, int]]
    ) -> tuple[list[Reward], list[Reward] | None]:
        rewards = trajectories.rewards_of_all(self._hosts, lambda: _rewards(samples))
        if not self._how.greedy:
            return rewards, None
        return rewards, trajectories.rewards_of_all(self._hosts, lambda: _rewards(best))


def _rewards(groups: Sequence[tuple[Draws, int]]) -> list[Reward]:
    """In the order of the groups; each grading is collected once."""
    wanted: dict[int, tuple[Draws, list[int]]] = {}
    for draws, group in groups:
        wanted.setdefault(id(draws), (draws, []))[1].extend(draws.numbers(group))
    return [reward for draws, numbers in wanted.values() for reward in draws.grading.collect(numbers)]


def _merged(states: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What all hosts have of the same steps, as one."""
    if len(states) == 1:
        return states[0]
    out = []
    for of_hosts in zip(*states, strict=True):
        lists = zip(*(one["numbers"] for one in of_hosts), strict=True)
        numbers = [[number for some in of_all for number in some] for of_all in lists]
        texts = zip(*(one["found"] for one in of_hosts), strict=True)
        found = [trajectories.pack([t for text in some for t in trajectories.unpack(text)]) for some in texts]
        out.append(of_hosts[0] | {"numbers": numbers, "found": found})
    return out


def ages(found: Sequence[Trajectory], step: int) -> np.ndarray:
    """By how many updates the oldest sampled token of each is older than the weights `step` [B] i64."""
    return np.array([step - t.version[t.sampled].min() if t.sampled.any() else 0 for t in found], np.int64)
