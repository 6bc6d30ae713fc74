"""What `train.py` asks of any rollout engine: prompts in, trajectories out, and new weights between.

An engine answers tokens with tokens (`Ask`); a `Talk` makes a whole trajectory of such answers: one turn
(`talks.py`), or a conversation with tools. So each conversation is written once and runs on every engine.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from jppo.structs import Prompt, Sampling, Trajectory

Done = Callable[[int, Trajectory], None]


class RolloutError(Exception):
    """The engine died, hung, or broke its word; the message says which. The run cannot go on with it."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the policy said after some tokens; at least one token."""

    tokens: list[int]
    logprob: list[float]  # each token's, in the distribution that it was drawn from
    version: list[int]  # of the weights that sampled each
    finish: str  # 'stop' (an end token or text was sampled; it is kept) or 'length'
    server: str = ""  # that sampled the last of them; '': the trainer's own engine


class Ask(Protocol):
    """An engine as a conversation sees it."""

    async def __call__(self, ids: Sequence[int], *, sampling: Sampling, seed: int, near: Hashable) -> Answer:
        """One answer to `ids` of up to `sampling.max_tokens` tokens; `sampling.n` and its seed are not read.

        What has the same `near` begins alike: its answers come from one server where that is no slower.
        """
        ...


class Talk(Protocol):
    """How a prompt becomes a trajectory."""

    async def __call__(self, ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        """`seed` is that of the sample; further answers draw from seeds made of it."""
        ...


class Sampler(Protocol):
    """An engine that samples from the policy that it was last given."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, done: Done | None = None
    ) -> list[Trajectory]:
        """Samples `sampling.n` responses a prompt, side by side, by the weights `version`.

        Each is handed to `done` with its number as soon as it is there, in any order and from any thread.
        """
        ...

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        done: Done | None = None,
        only: Collection[int] | None = None,
    ) -> Future[Any]:
        """As `generate`, by the weights that there are as each token is sampled; need not wait.

        `only`: the numbers of the samples that are wanted; None: all.
        """
        ...

    def rest(self) -> None:
        """Nothing will be asked before the next weights come."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the engine counts beside its samples, since it was last asked."""
        ...

    def close(self) -> None:
        """Ends the engine and everything that it holds; may be called twice."""
        ...


class Served(Sampler, Protocol):
    """One that has a model of its own, in another process."""

    def load(self, tensors: Iterable[tuple[str, np.ndarray]], *, version: int, mode: str = "wait") -> None:
        """Replaces the whole model by `tensors` (HF names, a tied embedding once) and names it `version`.

        `mode` says what becomes of responses under way: wait for their end, abort them, to go on by the new weights,
        or keep them as they are, which does the same without reading them anew.
        """
        ...

    def load_adapter(self, save: Callable[[pathlib.Path], object], *, version: int, mode: str = "wait") -> None:
        """Puts adapters beside the model that was loaded last and names both `version`; `save` writes peft's files."""
        ...


def greedy(max_tokens: int, *, stop: tuple[str, ...] = (), ignore_eos: bool = False) -> Sampling:
    """One response a prompt, of the likeliest tokens."""
    return Sampling(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        n=1,
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        seed=0,
    )


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """The 31-bit seed of one sample, the same whatever is sampled beside it."""
    return int(np.random.SeedSequence((seed, prompt, sample)).generate_state(1)[0] >> 1)
