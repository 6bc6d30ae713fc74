"""The protocol of reward parts: each scores samples as they arrive."""

import dataclasses
from concurrent.futures import Future
from typing import Protocol

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
        len(t.tokens) - len(prompt.ids),
        t.finish,
        t.exchange,
        tokens=t.tokens[first:],
        turns=tuple((begin - first, end - first) for begin, end in zip(edges[::2], edges[1::2], strict=True)),
    )


class Part(Protocol):
    """One source of scores, created once per run: rules, a custom function, a judge, a reward model."""

    def submit(self, sample: Sample) -> Future[Reward]:
        """Submits a sample, at any time and from any thread, and returns the future of its reward.

        The future never raises: a failure is a Reward with an error and a NaN score.
        """
        ...

    def flush(self) -> None:
        """Ends a batch: a part that waits for whole batches scores the rest."""
        ...

    def close(self) -> None:
        """Stops processes and closes connections; may be called twice."""
        ...


def failed(error: str) -> Reward:
    """Returns the reward of a sample that could not be scored."""
    return Reward(score=float("nan"), parts={}, error=error)
