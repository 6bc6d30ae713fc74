"""The protocol of rollout engines: prompts in, trajectories out, new weights in between.

An engine answers tokens with tokens (`Ask`); a `Talk` builds a trajectory from such answers: one turn
(`conversations.py`), or a conversation with tools. So each conversation runs on every engine.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from jppo.errors import RunEnded
from jppo.types import Prompt, Sampling, Trajectory

Done = Callable[[int, Trajectory], None]


class RolloutError(RunEnded):
    """The engine died, hung, or violated its protocol; the run cannot continue with it."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The policy's continuation of some tokens; at least one token."""

    tokens: list[int]
    logprob: list[float]  # per token, of the sampled distribution
    version: list[int]  # of the weights, per token
    finish: str  # 'stop' (an end token or text was sampled; it is kept) or 'length'
    server: str = ""  # that sampled the last token; '': the in-process engine
    experts: np.ndarray | None = None  # [n - 1, L, active] i16, of the request's tokens and these but the last


class Ask(Protocol):
    """An engine as a conversation sees it."""

    async def __call__(self, ids: Sequence[int], *, sampling: Sampling, seed: int, near: Hashable) -> Answer:
        """Returns an answer to `ids` of up to `sampling.max_tokens` tokens; ignores `sampling.n` and its seed.

        Requests with the same `near` share a prefix; they go to one server if that is no slower.
        """


class Talk(Protocol):
    """Turns a prompt into a trajectory."""

    async def __call__(self, ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        """`seed` is the sample's; the seeds of further answers are derived from it."""


class Sampler(Protocol):
    """An engine that samples from the last published policy. A subclass needs `version` and `start` alone."""

    version: int | None  # of the weights; None: it has none yet

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, done: Done | None = None
    ) -> list[Trajectory]:
        """Samples `sampling.n` responses per prompt, concurrently, with the weights `version`.

        `done` gets each response with its index when it is complete, in any order and from any thread.
        """
        if version != self.version:
            has = "none" if self.version is None else f"version {self.version}"
            raise RolloutError(f"version {version} of the weights was requested, but the engine has {has}")
        future = self.start(prompts, sampling, done=done)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        done: Done | None = None,
        only: Collection[int] | None = None,
    ) -> Future[list[Trajectory]]:
        """Like `generate`, with the current weights at each token; need not block.

        `only`: the indices of the wanted samples; None: all.
        """

    def sleep(self) -> None:
        """Frees memory: nothing will be sampled before the next weights."""
        return

    def metrics(self) -> dict[str, float]:
        """Returns the engine's counters since the last call."""
        return {}

    def close(self) -> None:
        """Stops the engine and frees its resources; may be called twice."""
        return


class Served(Sampler, Protocol):
    """An engine with its own copy of the model, in another process."""

    def load(self, tensors: Iterable[tuple[str, np.ndarray]], *, version: int, mode: str = "wait") -> None:
        """Replaces the whole model by `tensors` (HF names, a tied embedding once) and sets `version`.

        `mode` is what happens to responses in flight: wait for their end, abort them and continue with the new weights,
        or keep them in the engine, which continues them with the new weights.
        """

    def probe(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Trajectory]:
        """Samples one answer per prompt and server with the current weights, without tools or environments."""

    def load_adapter(self, save: Callable[[pathlib.Path], object], *, version: int, mode: str = "wait") -> None:
        """Adds adapters to the last loaded model and sets `version` for both; `save` writes peft's files."""


def joined(experts: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Returns the experts of tokens by the answer that read them first; `later` begins with the same tokens."""
    if experts is not None and later is not None:
        later = np.concatenate([experts, later[len(experts) :]])
    return experts if later is None else later  # an aborted answer without tokens has none


def of_tokens(experts: np.ndarray | None, count: int) -> np.ndarray | None:
    """Returns the experts of `count` tokens, -1 for those that no answer has read."""
    if experts is None:
        return None
    return np.pad(experts, ((0, count - len(experts)), (0, 0), (0, 0)), constant_values=-1)


def greedy(max_tokens: int, *, stop: tuple[str, ...] = (), ignore_eos: bool = False) -> Sampling:
    """Returns settings for one greedy response per prompt."""
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
    """Returns the 31-bit seed of one sample, independent of the other samples."""
    words = (seed, prompt, sample)
    entropy = words if max(words) >> 32 else np.array(words, np.uint32)  # the same, in half the time
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
