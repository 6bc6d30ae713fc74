"""Dynamic sampling (DAPO, arXiv:2503.14476): prompts whose samples all score the same are replaced by new prompts.

A step samples gen batches of `data.gen_batch_size` prompts until `data.train_batch_size` groups have samples that
differ in `algorithm.filter_groups_metric`. It trains on the first of these and drops the rest, as verl does. After
`algorithm.max_num_gen_batches` it trains on the groups it has. Only the position in the data passes from one step to
the next, so a checkpoint needs no more than that.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jppo.data.stream import Cursor
from jppo.prefetch import Drawn, Supply
from jppo.rollout.protocol import RolloutError
from jppo.settings import UserError
from jppo.types import Prompt, Reward, Trajectory

SCORE = "score"  # the metric that is the weighted sum of all parts


@dataclasses.dataclass(frozen=True)
class Filter:
    """The settings of dynamic sampling."""

    prompts: int  # of a step
    n: int
    metric: str
    most: int  # gen batches of a step; 0: no bound


@dataclasses.dataclass(frozen=True)
class Group:
    """The graded samples of one prompt."""

    prompt: Prompt
    trajectories: list[Trajectory]
    rewards: list[Reward]
    baseline: Reward | None  # of the greedy response, if there is one


def differs(rewards: Sequence[Reward], metric: str) -> bool:
    """Whether the usable samples of a prompt have at least two values of the metric; without it, scores count."""
    return len({r.parts.get(metric, r.score) for r in rewards if r.unusable is None}) > 1


def require_metric(metric: str, parts: Collection[str]) -> None:
    """Raises UserError where the metric is neither the score nor one of these parts of the reward."""
    if metric != SCORE and metric not in parts:
        known = ", ".join(map(repr, (SCORE, *parts)))
        raise UserError(
            f"algorithm.filter_groups_metric={metric!r} is no part of this run's reward; it is one of {known}"
        )


class DynamicSupply:
    """The samples of a synchronous run with dynamic sampling, in place of a `Supply`."""

    def __init__(self, how: Filter, gen_batch: Callable[[int, Cursor], Supply], cursor: Cursor):
        """`gen_batch` makes the supply of one gen batch from its index within the step and the position in the data."""
        self._how = how
        self._gen_batch = gen_batch
        self._cursor = cursor

    def take(self, step: int) -> Drawn:
        """Samples and grades the groups of a step; raises RolloutError if none is left to learn from."""
        how, after = self._how, self._cursor
        kept, drawn, rewards = list[Group](), list[Drawn](), list[Reward]()
        for index in itertools.count():
            drawn.append(self._gen_batch(index, after).take(step))
            found = _groups(drawn[-1], how.n)
            new = [r for group in found for r in group.rewards]
            rewards, after = rewards + new, drawn[-1].after
            if all(r.error is not None for r in new):  # more batches would not help; the step raises it
                kept = kept or found
                break
            if index == 0:
                require_metric(how.metric, sorted({name for r in new for name in r.parts}))
            kept += [group for group in found if differs(group.rewards, how.metric)]
            if len(kept) >= how.prompts or index + 1 == how.most:
                break
        self._cursor = after
        count = len(rewards) // how.n
        if not kept:
            raise RolloutError(
                f"step {step + 1}: none of the {count} prompts of {len(drawn)} gen batches has samples that differ in"
                f" algorithm.filter_groups_metric={how.metric}; raise algorithm.max_num_gen_batches={how.most}, take"
                " easier or harder data, or set algorithm.filter_groups=False"
            )
        metrics = {
            "train/num_gen_batches": float(len(drawn)),
            "train/num_prompts": float(min(len(kept), how.prompts)),
            "training/filter_groups/evicted_samples": float(count - len(kept)),
            "training/filter_groups/discarded_surplus_samples": float(max(0, len(kept) - how.prompts)),
            "train/sampled_score": _mean([r.score for r in rewards if r.unusable is None]),
            "train/sampled_errors": float(sum(r.error is not None for r in rewards)),
        }
        return _joined(kept[: how.prompts], drawn, metrics)

    def settle(self) -> None:
        """Does nothing: no request is in flight between steps."""

    def forget(self, step: int) -> None:
        """Does nothing: no sample is kept."""

    def state(self) -> dict[str, Any]:
        """Returns {}: a checkpoint keeps the position in the data, and no samples."""
        return {}

    def load(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Returns a line for the console if a checkpoint of asynchronous training has samples."""
        said = "the samples that the checkpoint has of the next steps are drawn again, by dynamic sampling"
        return [said] if state else []


def _groups(drawn: Drawn, n: int) -> list[Group]:
    """Waits for the rewards of a gen batch."""
    rewards, best = drawn.grade()
    return [
        Group(
            prompt,
            drawn.trajectories[i * n : (i + 1) * n],
            rewards[i * n : (i + 1) * n],
            None if best is None else best[i],
        )
        for i, prompt in enumerate(drawn.prompts)
    ]


def _joined(groups: Sequence[Group], drawn: Sequence[Drawn], metrics: dict[str, float]) -> Drawn:
    rewards = [reward for group in groups for reward in group.rewards]
    best = [group.baseline for group in groups if group.baseline is not None]
    return Drawn(
        prompts=[group.prompt for group in groups],
        trajectories=[t for group in groups for t in group.trajectories],
        after=drawn[-1].after,
        waited_s=sum(one.waited_s for one in drawn),
        sampling_s=sum(one.sampling_s for one in drawn),
        grade=lambda: (rewards, best or None),
        metrics=metrics,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
