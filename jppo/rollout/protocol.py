"""The protocol of rollout engines: prompts in, trajectories out, new weights in between.

An engine answers tokens with tokens (`Ask`); a `Talk` builds a trajectory from such answers: one turn, or a
conversation with tools (`agent/conversation.py`). So each conversation runs on every engine: `converse` runs many
concurrently, on one event loop. `cut_at` finds stop texts for engines that decode tokens only now and then.
"""

import asyncio
import bisect
import dataclasses
import pathlib
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from jppo import traces
from jppo.errors import RunEnded
from jppo.types import OVERFLOW, Prompt, Sampling, Trajectory

Done = Callable[[int, Trajectory], None]
Kept = list[np.ndarray]


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
    # of each token, the ids from which it was sampled, i32; none: the whole vocabulary; OVERFLOW alone: too many
    kept: "Kept | None" = None


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


def require_kept(tokens: Sequence[int], kept: Kept | None, most: int, source: str) -> None:
    """Raises RolloutError if `kept`, up to `most` ids of each token, is missing or lacks a token that was sampled."""
    if kept is None or len(kept) != len(tokens):
        count = "none" if kept is None else len(kept)
        raise RolloutError(f"{source} returned the kept tokens of {count} samples in place of {len(tokens)}")
    for token, ids in zip(tokens, kept, strict=True):
        if len(ids) > most:
            raise RolloutError(f"{source} returned {len(ids)} kept tokens of a sample, and {most} were requested")
        if len(ids) and ids[0] != OVERFLOW and token not in ids:
            raise RolloutError(
                f"{source} sampled token {token}, which is not among its {len(ids)} kept tokens {ids[:8].tolist()}...:"
                " its sampling mask is of another token"
            )


def kept_array(kept: Kept | None, sampled: np.ndarray) -> np.ndarray | None:
    """Returns the kept tokens of the tokens `sampled` [n] in the layout of `Trajectory`."""
    if kept is None:
        return None
    out = np.full((len(sampled), max([1, *map(len, kept)])), -1, np.int32)
    for i, ids in zip(np.flatnonzero(sampled), kept, strict=True):
        out[i, : len(ids)] = ids
    return out


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


T = TypeVar("T")


def one_turn(decode: Callable[[list[int]], str]) -> Talk:
    """Returns the single-turn talk."""

    async def talk(ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        answer = await ask(prompt.ids.tolist(), sampling=sampling, seed=seed, near=near)
        return respond(prompt, answer, text=decode(answer.tokens))

    return talk


def respond(prompt: Prompt, answer: Answer, *, text: str) -> Trajectory:
    """Returns the trajectory of a prompt with one answer."""
    before, after = len(prompt.ids), len(answer.tokens)
    sampled = np.repeat([False, True], [before, after])
    return Trajectory(
        uid=prompt.uid,
        tokens=np.concatenate([prompt.ids, answer.tokens]).astype(np.int32),
        sampled=sampled,
        logprob=np.concatenate([np.zeros(before), answer.logprob]).astype(np.float32),
        version=np.concatenate([np.full(before, -1), answer.version]).astype(np.int32),
        text=text,
        finish=answer.finish,
        turns=1,
        server=answer.server,
        experts=of_tokens(answer.experts, before + after),
        kept=kept_array(answer.kept, sampled),
    )


async def converse(
    ask: Ask,
    talk: Talk,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    done: Done | None,
    only: Collection[int] | None = None,
) -> list[Trajectory]:
    """Runs `sampling.n` talks per prompt concurrently; the first failure ends all.

    `only`: the indices of the wanted talks; None: all.
    """
    wanted = range(len(prompts) * sampling.n) if only is None else sorted(only)

    async def hold(number: int) -> Trajectory:
        i, j = divmod(number, sampling.n)
        seed = sample_seed(sampling.seed, i, j)
        with traces.span("sample", prompt=prompts[i].uid, number=j) as note:
            t = await talk(ask, prompts[i], sampling=sampling, seed=seed, near=i)
            versions = sorted({*t.version[t.sampled].tolist()})
            note(versions=versions, server=t.server, turns=t.turns, tokens=int(t.sampled.sum()), finish=t.finish)
            if done is not None:
                done(number, t)
        return t

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(hold(number)) for number in wanted]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first; the others were cancelled or are alike
    return [task.result() for task in tasks]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end on its own event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:  # a notebook already has a loop
        return pool.submit(asyncio.run, work).result()


# Characters at the start of a piece that may differ from the whole text: half a character, a dropped space.
SPOILED = 8
HALF = "\N{REPLACEMENT CHARACTER}"  # decoding of an incomplete character


def cut_at(tokens: Sequence[int], decode: Callable[[list[int]], str], stop: Sequence[str], *, new: int) -> int | None:
    """Returns the number of tokens up to the one that completes one of `stop`; None without a match.

    All but the last `new` tokens were checked before, so only matches that end in these are searched, in a piece of
    text as long as needed. A token that ends inside a character counts with the one that completes it.
    """
    if not stop:
        return None
    known = max(0, len(tokens) - new)
    first, back, room = known, new, max(map(len, stop)) + SPOILED
    while first > 0 and len(decode(list(tokens[first:known])).rstrip(HALF)) < room:
        first, back = max(0, known - back), 2 * back

    def holds(end: int) -> bool:
        while (text := decode(list(tokens[first:end]))).endswith(HALF):
            end -= 1
        return any(ending in text for ending in stop)

    ends = range(known + 1, len(tokens) + 1)
    if not ends or not holds(len(tokens)):
        return None
    return ends[bisect.bisect_left(ends, True, key=holds)]


def begun(tokens: Sequence[int], decode: Callable[[list[int]], str], stop: Sequence[str]) -> bool:
    """Whether the text ends inside a possible stop text, or inside a character."""
    if not stop:
        return False
    back = max(map(len, stop)) + SPOILED
    first = max(0, len(tokens) - back)
    while first > 0 and len(decode(list(tokens[first:])).rstrip(HALF)) < back:
        first = max(0, first - back)
    text = decode(list(tokens[first:]))
    return text.endswith((HALF, *(ending[:length] for ending in stop for length in range(1, len(ending)))))
