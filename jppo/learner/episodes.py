"""A step's graded episodes, on the host: which samples are compared, and the branches of each."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jppo.types import Prompt, Reward, Trajectory

Earned = tuple[tuple[int, float], ...]  # amounts by position, as in Reward


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The sequences of a step, one entry of each field for one: the samples, `n` in turn of a prompt, then branches."""

    prompts: list[Prompt]
    trajectories: list[Trajectory]
    rewards: list[Reward]  # a branch has its episode's
    group: np.ndarray  # [N] i32, equal for sequences that are compared; a further branch is alone in its group
    first: np.ndarray  # [N] i32, the index of the first branch of its episode
    greedy: np.ndarray | None  # [N] f32, the score of its prompt's greedy response; None: none is drawn

    @property
    def sources(self) -> list[str]:
        """The data source of each sequence."""
        return [prompt.data_source for prompt in self.prompts]


def make_episodes(
    prompts: Sequence[Prompt],
    trajectories: list[Trajectory],
    rewards: list[Reward],
    baseline: list[Reward] | None,
    *,
    compares: bool,
) -> Episodes:
    """Makes the episodes of graded samples, as many in turn for each prompt; `baseline` grades greedy responses.

    A sample becomes unusable if its prompt's greedy response was not graded or, if the algorithm `compares` the samples
    of a prompt, if no other sample of its prompt was.
    """
    n = len(trajectories) // len(prompts)
    group = comparison_groups(np.array([r.unusable is not None for r in rewards]), n)
    greedy = None if baseline is None else [r for r in baseline for _ in range(n)]
    group_size = np.bincount(group, minlength=len(group))[group]

    def explain_unusable(i: int) -> str | None:
        if rewards[i].unusable is not None:
            return rewards[i].unusable
        if greedy is not None and greedy[i].unusable is not None:
            return f"its prompt's greedy response is {greedy[i].unusable}"
        return "no other response to its prompt was graded" if compares and group_size[i] == 1 else None

    return Episodes(
        prompts=[prompt for prompt in prompts for _ in range(n)],
        trajectories=trajectories,
        rewards=[dataclasses.replace(r, unusable=explain_unusable(i)) for i, r in enumerate(rewards)],
        group=group,
        first=np.arange(len(trajectories), dtype=np.int32),
        greedy=None if greedy is None else np.array([0.0 if r.unusable else r.score for r in greedy], np.float32),
    )


def comparison_groups(unusable: np.ndarray, n: int) -> np.ndarray:  # [B] bool -> [B] i32
    """Groups the `n` consecutive samples of each prompt for comparison; an unusable one is alone.

    A group's number is the index of its first usable member.
    """
    index = np.arange(len(unusable)).reshape(-1, n)
    first = np.where(unusable.reshape(-1, n), len(unusable), index).min(1, keepdims=True)
    return np.where(unusable, index.reshape(-1), np.repeat(first, n)).astype(np.int32)


def with_branches(episodes: Episodes, earned: Callable[[str], Callable[[Trajectory], Earned]]) -> Episodes:
    """Appends the other branches of episodes, each with its episode's reward and greedy score.

    `earned` is (data source) -> (branch) -> the rewards that the branch earned inside it, by position. Those of an
    episode with an error are dropped, as in its first branch: its score is not their sum.
    """
    branches = [(i, branch) for i, t in enumerate(episodes.trajectories) for branch in t.branches]
    if not branches:
        return episodes
    amounts = {source: earned(source) for source in set(episodes.sources)}
    first = np.concatenate([episodes.first, np.array([i for i, _ in branches], np.int32)])

    def branch_reward(i: int, branch: Trajectory) -> Reward:
        reward, earn = episodes.rewards[i], amounts[episodes.prompts[i].data_source]
        return dataclasses.replace(reward, earned=earn(branch) if reward.error is None else ())

    branch_groups = np.arange(len(episodes.group), len(first), dtype=episodes.group.dtype)
    return Episodes(
        prompts=[episodes.prompts[i] for i in first],
        trajectories=[*episodes.trajectories, *(branch for _, branch in branches)],
        rewards=[*episodes.rewards, *(branch_reward(i, branch) for i, branch in branches)],
        group=np.concatenate([episodes.group, branch_groups]),
        first=first,
        greedy=None if episodes.greedy is None else episodes.greedy[first],
    )
