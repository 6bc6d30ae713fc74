"""The protocol of reward parts, each of which scores samples as they arrive; the part of a conversation."""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from jppo.types import Exchange, Prompt, Reward, Trajectory


@dataclasses.dataclass(frozen=True)
class Sample:
    """A response to score."""

    prompt: Prompt
    text: str  # the response
    length: int  # tokens, tool output included
    finish: str  # as in Trajectory
    exchange: Exchange | None = None  # as in Trajectory
    tokens: np.ndarray | None = None  # of the response, from the first sampled one; None: a text without tokens
    turns: tuple[tuple[int, int], ...] = ((0, 0),)  # of the policy: the first token of each, and the one after it


def sample_of(prompt: Prompt, t: Trajectory) -> Sample:
    """Returns the sample of a trajectory."""
    edges = np.flatnonzero(np.diff(t.sampled, prepend=False, append=False)).tolist()
    first = edges[0] if edges else len(t.tokens)
    return Sample(
        prompt,
        t.text,
        len(t.tokens) - (len(prompt.ids) if np.array_equal(t.tokens[: len(prompt.ids)], prompt.ids) else first),
        t.finish,
        t.exchange,
        tokens=t.tokens[first:],
        turns=tuple((begin - first, end - first) for begin, end in zip(edges[::2], edges[1::2], strict=True)),
    )


class Part(Protocol):
    """One source of scores, created once per run: rules, a custom function, a judge, a reward model.

    A subclass needs `submit` alone.
    """

    def submit(self, sample: Sample) -> Future[Reward]:
        """Submits a sample, at any time and from any thread, and returns the future of its reward.

        The future never raises: a failure is a Reward with an error and a NaN score.
        """

    def ready(self) -> None:
        """Waits until the part has started."""
        return

    def flush(self) -> None:
        """Ends a batch: a part that waits for whole batches scores the rest."""
        return

    def testing(self) -> "Part":
        """Returns the part for held-out samples, which update no running statistics."""
        return self

    def metrics(self) -> dict[str, float]:
        """Returns counters since the last call."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """Returns the state for a checkpoint, {} without any."""
        return {}

    def load(self, state: Any) -> None:
        """Restores `state`."""
        return

    def close(self) -> None:
        """Stops processes and closes connections; may be called twice."""
        return


def graded(reward: Reward) -> Future[Reward]:
    """Returns the future of a reward that is there already."""
    future: Future[Reward] = Future()
    future.set_result(reward)
    return future


def failed(error: str) -> Reward:
    """Returns the reward of a sample that could not be scored."""
    return Reward(score=float("nan"), parts={}, error=error)


ENVIRONMENT, AGENT, INTERACTION, TOOLS = "environment_score", "agent_score", "interaction_score", "tool_score"
TURNS = (ENVIRONMENT, AGENT, INTERACTION)  # parts that read the scores of turns


class ConversationPart(Part):
    """Returns the sum of the scores of all turns, earned at their ends; an error if the environment or user failed."""

    def __init__(self, *, tools: bool = False):
        """Reads the rewards from tools, or else those from the environment or user."""
        self._tools = tools

    def submit(self, sample: Sample) -> Future[Reward]:
        """Returns the score at once."""
        found = sample.exchange
        if found is None:  # a sample without a conversation, as in checks
            return graded(Reward(0.0, {}, error=None))
        if found.fault is not None:
            return graded(failed(found.fault))
        score, earned = found.score, found.earned
        if self._tools:
            score, earned = sum(amount for _, amount in found.tool_earned), found.tool_earned
        return graded(Reward(score, {}, error=None, earned=earned))


def weighted(exchange: Exchange | None, weights: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Returns what a branch of an episode earned at its turns, scaled by the weights of the parts."""
    if exchange is None:
        return ()
    of_turns, of_tools = sum(weights.get(part, 0.0) for part in TURNS), weights.get(TOOLS, 0.0)
    pairs = [(of_turns, exchange.earned), (of_tools, exchange.tool_earned)]
    return tuple((k, weight * amount) for weight, earned in pairs for k, amount in earned)
