"""What `train.py` asks of any rollout engine: prompts in, trajectories out, and new weights between."""

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from jppo.structs import Prompt, Sampling, Trajectory

Done = Callable[[int, Trajectory], None]


class RolloutError(Exception):
    """The engine died, hung, or broke its word; the message says which. The run cannot go on with it."""


class Sampler(Protocol):
    """An engine that samples from the policy that it was last given."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, done: Done | None = None
    ) -> list[Trajectory]:
        """Samples `sampling.n` responses a prompt, side by side, by the weights `version`.

        Each is handed to `done` with its number as soon as it is there, in any order and from any thread.
        """
        ...

    def close(self) -> None:
        """Ends the engine and everything that it holds; may be called twice."""
        ...


class Served(Sampler, Protocol):
    """One that has a model of its own, in another process."""

    def load(self, tensors: Iterable[tuple[str, np.ndarray]], *, version: int) -> None:
        """Replaces the whole model by `tensors` (HF names, a tied embedding once) and names it `version`."""
        ...

    def load_adapter(self, save: Callable[[pathlib.Path], object], *, version: int) -> None:
        """Puts adapters beside the model that was loaded last and names both `version`; `save` writes peft's files."""
        ...


def respond(
    prompt: Prompt, tokens: Sequence[int], logprob: Sequence[float], *, version: int, text: str, finish: str
) -> Trajectory:
    """A prompt with one response to it, of one version."""
    before, after = len(prompt.ids), len(tokens)
    return Trajectory(
        uid=prompt.uid,
        tokens=np.concatenate([prompt.ids, tokens]).astype(np.int32),
        sampled=np.repeat([False, True], [before, after]),
        logprob=np.concatenate([np.zeros(before), logprob]).astype(np.float32),
        version=np.repeat([-1, version], [before, after]).astype(np.int32),
        text=text,
        finish=finish,
        turns=1,
    )


def greedy(max_tokens: int) -> Sampling:
    """One response a prompt, of the likeliest tokens."""
    return Sampling(temperature=0.0, top_p=1.0, top_k=-1, n=1, max_tokens=max_tokens, seed=0)


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """The 31-bit seed of one sample, the same whatever is sampled beside it."""
    return int(np.random.SeedSequence((seed, prompt, sample)).generate_state(1)[0] >> 1)
