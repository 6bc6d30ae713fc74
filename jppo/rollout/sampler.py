"""What `train.py` asks of any rollout engine: prompts in, trajectories out, and new weights between.

An engine answers tokens with tokens (`Ask`); a `Talk` makes a whole trajectory of such answers: `one_turn` here, or a
conversation with tools. So each conversation is written once and runs on every engine.
"""

import dataclasses
import pathlib
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Protocol

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


def one_turn(decode: Callable[[list[int]], str]) -> Talk:
    """The talk that asks once."""

    async def talk(ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        answer = await ask(prompt.ids.tolist(), sampling=sampling, seed=seed, near=near)
        return respond(prompt, answer, text=decode(answer.tokens))

    return talk


def respond(prompt: Prompt, answer: Answer, *, text: str) -> Trajectory:
    """A prompt with one answer to it."""
    before, after = len(prompt.ids), len(answer.tokens)
    return Trajectory(
        uid=prompt.uid,
        tokens=np.concatenate([prompt.ids, answer.tokens]).astype(np.int32),
        sampled=np.repeat([False, True], [before, after]),
        logprob=np.concatenate([np.zeros(before), answer.logprob]).astype(np.float32),
        version=np.concatenate([np.full(before, -1), answer.version]).astype(np.int32),
        text=text,
        finish=answer.finish,
        turns=1,
    )


def greedy(max_tokens: int) -> Sampling:
    """One response a prompt, of the likeliest tokens."""
    return Sampling(temperature=0.0, top_p=1.0, top_k=-1, n=1, max_tokens=max_tokens, seed=0)


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """The 31-bit seed of one sample, the same whatever is sampled beside it."""
    return int(np.random.SeedSequence((seed, prompt, sample)).generate_state(1)[0] >> 1)
