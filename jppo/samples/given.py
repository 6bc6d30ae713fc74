"""Given responses: texts of an algorithm that take the last places of a prompt's samples, such as demonstrations.

They are tokenised, ended and cut as the policy's own responses are. No weights sampled them: their tokens have version
-1 and log-prob 0, by which `Trajectory.given` knows them.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from jppo.data.rows import brief
from jppo.errors import UserError
from jppo.registry import explain
from jppo.rollout.protocol import Answer, cut_at
from jppo.runlog.trajectories import Found
from jppo.types import Prompt, Reward, Trajectory

Give = Callable[[Prompt], list[Trajectory]]


def given_texts(given: Callable[[Prompt], Sequence[str]], prompt: Prompt, *, n: int, setting: str) -> Sequence[str]:
    """Returns the texts that an algorithm gives for a prompt; UserError if they cannot take places of its `n`.

    `setting` is what names the algorithm, for errors.
    """
    try:
        texts = given(prompt)
    except Exception as e:  # a user's function may raise anything
        raise UserError(f"{setting}: `given` raises {explain(e)} for prompt {prompt.uid}; correct it") from e
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(
            f"{setting}: `given` returns {brief(texts)} for prompt {prompt.uid}; it must be a list of texts that are"
            " not blank, [] for none"
        )
    if len(texts) > n:
        raise UserError(
            f"{setting}: `given` returns {len(texts)} responses for prompt {prompt.uid}, and they take places of its"
            f" rollout.n={n} samples; return fewer, or raise rollout.n"
        )
    return texts


def answer_of(
    ids: Sequence[int], *, most: int, stop: Sequence[str], ends: Sequence[int], decode: Callable[[list[int]], str]
) -> Answer:
    """Returns a text's tokens as the policy would have sampled them: at most `most`, up to an end token or stop text.

    A text with neither gets the first of the end tokens; without `ends` they do not end a response.
    """
    stopped = cut_at(ids, decode, stop, new=len(ids))
    lengths = [i for i, token in enumerate(ids, 1) if token in ends] + ([] if stopped is None else [stopped])
    if not lengths and ends:
        ids, lengths = [*ids, ends[0]], [len(ids) + 1]
    n = min([*lengths, len(ids), most])
    return Answer([*ids[:n]], [0.0] * n, [-1] * n, "stop" if n in lengths else "length")


def by_number(give: Give | None, prompts: Sequence[Prompt], groups: Collection[int], n: int) -> dict[int, Trajectory]:
    """Returns the given responses of these groups by the numbers of the samples whose places they take."""
    given = {group: give(prompts[group]) for group in groups} if give is not None else {}
    return {(group + 1) * n - len(some) + j: t for group, some in given.items() for j, t in enumerate(some)}


def without_others(found: Found, given: Mapping[int, Trajectory]) -> Found:
    """Returns saved responses without those that the run samples where they were given, or gives otherwise."""

    def same(number: int, t: Trajectory) -> bool:
        now = given.get(number)
        return not t.given if now is None else np.array_equal(t.tokens, now.tokens)

    return found.only([number for number, t in found.responses.items() if same(number, t)])


def of_policy(trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> list[Reward]:
    """Returns the rewards with given responses marked unusable, because these say nothing about the policy."""
    return [
        dataclasses.replace(reward, unusable="the response was given") if t.given else reward
        for t, reward in zip(trajectories, rewards, strict=True)
    ]
