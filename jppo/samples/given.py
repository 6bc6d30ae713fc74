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


def given_texts(give: Callable[[Prompt], Sequence[str]], prompt: Prompt, *, n: int, setting: str) -> Sequence[str]:
    """Returns the texts that an algorithm gives for a prompt; UserError if they cannot replace some of its `n` samples.

    `setting` names the algorithm in errors.
    """
    try:
        texts = give(prompt)
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
    ids: Sequence[int], *, limit: int, stop: Sequence[str], ends: Sequence[int], decode: Callable[[list[int]], str]
) -> Answer:
    """Returns a given text's tokens as the policy would have sampled them: `limit` at most, up to an end or stop text.

    `ends` are the end tokens, and a text without an end gets the first; () if they do not end a response.
    """
    stop_length = cut_at(ids, decode, stop, new=len(ids))
    lengths = [i for i, token in enumerate(ids, 1) if token in ends] + ([] if stop_length is None else [stop_length])
    if not lengths and ends:
        ids, lengths = [*ids, ends[0]], [len(ids) + 1]
    length = min([*lengths, len(ids), limit])
    return Answer([*ids[:length]], [0.0] * length, [-1] * length, "stop" if length in lengths else "length")


def given_for(give: Give | None, prompts: Sequence[Prompt], groups: Collection[int], n: int) -> dict[int, Trajectory]:
    """Returns the given responses of these `groups` (indices of prompts) by the indices of the samples they replace."""
    by_group = {group: give(prompts[group]) for group in groups} if give is not None else {}
    return {(group + 1) * n - len(given) + j: t for group, given in by_group.items() for j, t in enumerate(given)}


def keep_current(saved: Found, given_now: Mapping[int, Trajectory]) -> Found:
    """Returns a checkpoint's responses without those that this run would sample or give differently."""

    def is_current(number: int, t: Trajectory) -> bool:
        current = given_now.get(number)
        return not t.given if current is None else np.array_equal(t.tokens, current.tokens)

    return saved.only([number for number, t in saved.responses.items() if is_current(number, t)])


def mark_given_unusable(trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> list[Reward]:
    """Returns the rewards with given responses marked unusable, because these say nothing about the policy."""
    return [
        dataclasses.replace(reward, unusable="the response was given") if t.given else reward
        for t, reward in zip(trajectories, rewards, strict=True)
    ]
