"""What a reward is made of: every part scores samples as they come, and says when the last one has come."""

import dataclasses
from concurrent.futures import Future
from typing import Protocol

from jppo.structs import Exchange, Prompt, Reward, Trajectory


@dataclasses.dataclass(frozen=True)
class Sample:
    """A response to be scored."""

    prompt: Prompt
    text: str  # the response
    length: int  # its tokens, those of tools among them
    finish: str  # as in Trajectory
    exchange: Exchange | None = None  # as in Trajectory


def sample_of(prompt: Prompt, t: Trajectory) -> Sample:
    """A trajectory as it is scored."""
    return Sample(prompt, t.text, len(t.tokens) - len(prompt.ids), t.finish, t.exchange)


class Part(Protocol):
    """One source of scores: rules, a user's function, a judge, a reward model. Made once a run."""

    def submit(self, sample: Sample) -> Future[Reward]:
        """Takes a sample, at any time and from any thread; its reward comes when it comes.

        The future never raises: whatever goes wrong is a Reward with an error, NaN for its score.
        """
        ...

    def flush(self) -> None:
        """No more samples come for now: a part that waits for whole batches scores what it has."""
        ...

    def close(self) -> None:
        """Ends processes and connections; may be called twice."""
        ...


def failed(error: str) -> Reward:
    """The reward of a sample that could not be scored."""
    return Reward(score=float("nan"), parts={}, error=error)
