"""The protocol of rollout engines: prompts in, trajectories out, new weights in between.

An engine answers tokens with tokens (`Ask`); a `Talk` builds a trajectory from such answers: one turn, or a
conversation with tools (the plugin `agents`). So each conversation runs on every engine: `converse` runs many
concurrently, on one event loop. `cut_at` finds stop texts for engines that decode tokens only now and then.
"""

import asyncio
import bisect
import dataclasses
import pathlib
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from jppo import traces
from jppo.errors import RunEnded
from jppo.types import OVERFLOW, Prompt, Sampling, Trajectory

Done = Callable[[int, Trajectory], None]  # takes a finished sample's index, and the sample
Kept = list[np.ndarray]  # kept tokens: for each sampled token, the ids that top_p, top_k and min_p left to sample from


class RolloutError(RunEnded):
    """The engine died, hung, or violated its protocol; the run cannot continue with it."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The policy's continuation of some tokens; at least one token."""

    tokens: list[int]
    logprob: list[float]  # per token, of the sampled distribution
    version: list[int]  # of the weights, per token
    finish: str  # 'stop' (an end token or stop text was sampled; `tokens` have it) or 'length'
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


@dataclasses.dataclass(frozen=True)
class Agent:
    """What leads the conversations of a run, next to the policy."""

    talk: Talk
    schemas: Sequence[Mapping[str, Any]]  # of tools, rendered by the chat template
    rewards: bool  # tools give rewards
    runs_programs: bool  # of the model, by tools
    close: Callable[[], None]  # stops programs, tools and partners; idempotent


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
        """Samples `sampling.n` answers per prompt and server by the current weights, without tools or environments."""

    def load_adapter(self, save: Callable[[pathlib.Path], object], *, version: int, mode: str = "wait") -> None:
        """Adds adapters to the last loaded model and sets `version` for both; `save` writes peft's files."""


def join_experts(experts: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """Returns the experts of all tokens so far: earlier ones from `experts`, further ones from the answer's `later`."""
    if experts is not None and later is not None:
        later = np.concatenate([experts, later[len(experts) :]])
    return experts if later is None else later  # an aborted answer without tokens has none


def pad_experts(experts: np.ndarray | None, count: int) -> np.ndarray | None:
    """Returns `experts` padded to `count` tokens, with -1 for those that no answer has read."""
    if experts is None:
        return None
    return np.pad(experts, ((0, count - len(experts)), (0, 0), (0, 0)), constant_values=-1)


def require_kept(tokens: Sequence[int], kept: Kept | None, most_kept: int, source: str) -> None:
    """Raises RolloutError unless every sampled token is among its at most `most_kept` kept tokens."""
    if kept is None or len(kept) != len(tokens):
        count = "none" if kept is None else len(kept)
        raise RolloutError(f"{source} returned the kept tokens of {count} samples in place of {len(tokens)}")
    for token, kept_ids in zip(tokens, kept, strict=True):
        if len(kept_ids) > most_kept:
            raise RolloutError(
                f"{source} returned {len(kept_ids)} kept tokens of a sample, and {most_kept} were requested"
            )
        if len(kept_ids) and kept_ids[0] != OVERFLOW and token not in kept_ids:
            raise RolloutError(
                f"{source} sampled token {token}, which is not among its {len(kept_ids)} kept tokens"
                f" {kept_ids[:8].tolist()}...: its sampling mask is of another token"
            )


def pad_kept(kept: Kept | None, sampled: np.ndarray) -> np.ndarray | None:
    """Returns the kept tokens of the tokens `sampled` [n], padded with -1 to the layout of `Trajectory`."""
    if kept is None:
        return None
    padded = np.full((len(sampled), max([1, *map(len, kept)])), -1, np.int32)
    for i, kept_ids in zip(np.flatnonzero(sampled), kept, strict=True):
        padded[i, : len(kept_ids)] = kept_ids
    return padded


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
    numbers = (seed, prompt, sample)
    entropy = numbers if max(numbers) >> 32 else np.array(numbers, np.uint32)  # the same, in half the time
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)


T = TypeVar("T")


def one_turn(decode: Callable[[list[int]], str]) -> Talk:
    """Returns the talk of one turn: a prompt and one answer."""

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
        experts=pad_experts(answer.experts, before + after),
        kept=pad_kept(answer.kept, sampled),
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

    async def run_talk(index: int) -> Trajectory:
        prompt_index, sample_index = divmod(index, sampling.n)
        seed = sample_seed(sampling.seed, prompt_index, sample_index)
        with traces.span("sample", prompt=prompts[prompt_index].uid, number=sample_index) as annotate:
            t = await talk(ask, prompts[prompt_index], sampling=sampling, seed=seed, near=prompt_index)
            versions = sorted({*t.version[t.sampled].tolist()})
            annotate(versions=versions, server=t.server, turns=t.turns, tokens=int(t.sampled.sum()), finish=t.finish)
            if done is not None:
                done(index, t)
        return t

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_talk(index)) for index in wanted]
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
    checked = max(0, len(tokens) - new)
    start, step, needed_chars = checked, new, max(map(len, stop)) + SPOILED
    while start > 0 and len(decode(list(tokens[start:checked])).rstrip(HALF)) < needed_chars:
        start, step = max(0, checked - step), 2 * step

    def has_stop(end: int) -> bool:
        while (text := decode(list(tokens[start:end]))).endswith(HALF):
            end -= 1
        return any(stop_text in text for stop_text in stop)

    candidates = range(checked + 1, len(tokens) + 1)
    if not candidates or not has_stop(len(tokens)):
        return None
    return candidates[bisect.bisect_left(candidates, True, key=has_stop)]


def may_end_in_stop(tokens: Sequence[int], decode: Callable[[list[int]], str], stop: Sequence[str]) -> bool:
    """Whether the decoded text ends in the beginning of a stop text, or inside a character."""
    if not stop:
        return False
    needed_chars = max(map(len, stop)) + SPOILED
    start = max(0, len(tokens) - needed_chars)
    while start > 0 and len(decode(list(tokens[start:])).rstrip(HALF)) < needed_chars:
        start = max(0, start - needed_chars)
    text = decode(list(tokens[start:]))
    return text.endswith((HALF, *(ending[:length] for ending in stop for length in range(1, len(ending)))))
