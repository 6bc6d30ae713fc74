"""Dynamic sampling (DAPO, arXiv:2503.14476): prompts whose samples all score the same are replaced by new prompts.

A step samples gen batches of `data.gen_batch_size` prompts until `data.train_batch_size` groups have samples that
differ in `algorithm.filter_groups_metric`, of which at least one is trained on. It trains on the first of these and
drops the rest, as verl does. After `algorithm.max_num_gen_batches` it trains on the groups it has. Only the position in
the data passes from one step to the next, so a checkpoint needs no more than that.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jppo.data.memory import Memory, Order
from jppo.data.stream import Cursor, remembered
from jppo.learner.batch import filtered_out
from jppo.rewards.parts import SCORE
from jppo.rollout.protocol import RolloutError
from jppo.runlog import trajectories
from jppo.runlog.timers import Count
from jppo.samples.given import mark_given_unusable
from jppo.samples.queue import Group, SampleQueue, StepSamples, Supply
from jppo.types import Reward, StepData, Trajectory


@dataclasses.dataclass(frozen=True)
class Filter:
    """The settings of dynamic sampling."""

    prompts: int  # of a step
    n: int
    metric: str
    most: int  # gen batches of a step; 0: no bound
    filter_truncated: bool = False  # truncated responses are not trained on
    with_dropped: bool = False  # the step's samples have the dropped groups too


def differs(rewards: Sequence[Reward], metric: str) -> bool:
    """Whether the usable samples of a prompt have two values of the metric, or of the score where none has it.

    Given responses count, as they do in the advantage: where no sample succeeds, they are all that one learns from.
    """
    usable = [r for r in rewards if r.unusable is None]
    scores = [r.parts[metric] for r in usable if metric in r.parts] or [r.score for r in usable]
    return len(set(scores)) > 1


def trains(trajectories: Sequence[Trajectory], rewards: Sequence[Reward], *, filter_truncated: bool) -> bool:
    """Whether any sample of a prompt is trained on."""
    return any(
        reward.unusable is None and any(not filtered_out(t, filter_truncated) for t in (episode, *episode.branches))
        for episode, reward in zip(trajectories, rewards, strict=True)
    )


class DynamicSampleQueue(Supply):
    """The samples of a synchronous run with dynamic sampling, in place of a `SampleQueue`."""

    def __init__(
        self,
        options: Filter,
        gen_batch: Callable[[int, Cursor], SampleQueue],
        cursor: Cursor,
        order_of: Order | Memory | None = None,
    ):
        """`gen_batch` makes the queue of one gen batch, from its index in the step and the position in the data."""
        self._options = options
        self._order_of = order_of
        self._gen_batch = gen_batch
        self._cursor = cursor
        self._gen_queue: SampleQueue | None = None  # the gen batch

    def take(self, step: int) -> StepSamples:
        """Raises RolloutError if no group is left to learn from."""
        options, after, waited_s, sampling_s = self._options, self._cursor, 0.0, 0.0
        useful, rewards, policy_rewards, lacking_metric = list[Group](), list[Reward](), list[Reward](), 0
        all_groups = list[Group]()
        for batches in itertools.count(1):
            gen_queue = self._gen_queue = self._gen_batch(batches - 1, after)
            samples = gen_queue.take(step)
            groups = _grade_groups(samples, options.n)
            all_groups += groups if options.with_dropped else []
            new_rewards = [r for group in groups for r in group.rewards]
            rewards, after = rewards + new_rewards, gen_queue.note_rewards(samples, new_rewards)
            policy_rewards += mark_given_unusable(samples.trajectories, new_rewards)
            waited_s, sampling_s = waited_s + samples.waited_s, sampling_s + samples.sampling_s
            # Where every grader failed, more batches would not help; without useful groups the step raises the error.
            if all(r.error is not None for r in new_rewards):
                useful = useful or groups
                break
            lacking_metric += sum(all(options.metric not in r.parts for r in group.rewards) for group in groups)
            trained_groups = [
                g for g in groups if trains(g.trajectories, g.rewards, filter_truncated=options.filter_truncated)
            ]
            useful += [group for group in trained_groups if differs(group.rewards, options.metric)]
            if len(useful) >= options.prompts or batches == options.most:
                break
        self._cursor = after
        count, used = len(rewards) // options.n, useful[: options.prompts]
        if not useful:
            raise RolloutError(
                f"step {step + 1}: none of the {count} prompts of {batches} gen batches has samples that differ in"
                f" algorithm.filter_groups_metric={options.metric}; raise algorithm.max_num_gen_batches={options.most},"
                " take easier or harder data, or set algorithm.filter_groups=False"
            )
        metrics = {
            "train/num_gen_batches": float(batches),
            "train/num_prompts": float(len(used)),
            "training/filter_groups/evicted_samples": float(count - len(useful)),
            "training/filter_groups/discarded_surplus_samples": float(len(useful) - len(used)),
            "training/filter_groups/without_metric": lacking_metric / count if options.metric != SCORE else 0.0,
            "train/sampled_score": _mean([r.score for r in policy_rewards if r.unusable is None]),
            "train/sampled_errors": float(sum(r.error is not None for r in rewards)),
        }
        used_rewards = [reward for group in used for reward in group.rewards]
        used_ids = set(map(id, used))
        baselines = [group.baseline for group in used if group.baseline is not None]
        return StepSamples(
            prompts=[group.prompt for group in used],
            trajectories=[t for group in used for t in group.trajectories],
            after=after,
            waited_s=waited_s,
            sampling_s=sampling_s,
            wait_for_rewards=lambda: (used_rewards, baselines or None),
            metrics=metrics,
            dropped=tuple(group for group in all_groups if id(group) not in used_ids),
        )

    def progress(self, step: int) -> Count:
        return Count("responses") if self._gen_queue is None else self._gen_queue.progress(step)

    def settle(self) -> None:
        """Does nothing: no request is in flight between steps."""

    @property
    def memory(self) -> str:
        return self._cursor.curriculum

    def note_rewards(self, drawn: StepSamples, rewards: Sequence[Reward], step: StepData | None = None) -> Cursor:
        """Leaves out a `Curriculum`, which has seen the rewards of each gen batch already."""
        self._cursor = remembered(drawn.after, self._order_of, step)
        return self._cursor

    def forget(self, step: int) -> None:
        """Does nothing: no sample is kept."""

    def state(self) -> dict[str, Any]:
        """Returns {}: a checkpoint has the position in the data, and no samples."""
        return {}

    def load(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Reports samples and prompts that a checkpoint of asynchronous training has."""
        if not state:
            return []
        lines = ["the samples that the checkpoint has of the next steps are drawn again, by dynamic sampling"]
        position = (self._cursor.epoch, self._cursor.index)
        passed = [s for s in trajectories.read_steps(state) if (s.after["epoch"], s.after["index"]) <= position]
        if count := sum(len(s.untrained) for s in passed):
            lines.append(f"{count} prompts that rollout.partial had put off are left out of this epoch")
        return lines


def _grade_groups(samples: StepSamples, n: int) -> list[Group]:
    """Waits for the rewards of a gen batch, and returns its samples by prompt."""
    rewards, baselines = samples.wait_for_rewards()
    return [
        Group(
            prompt,
            samples.trajectories[i * n : (i + 1) * n],
            rewards[i * n : (i + 1) * n],
            None if baselines is None else baselines[i],
        )
        for i, prompt in enumerate(samples.prompts)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
