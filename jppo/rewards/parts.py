"""The protocol of reward parts, which score samples and place amounts on tokens; the part of a conversation; the sum.

Samples are submitted as they are generated, so that slow parts overlap with sampling:

    grading = reward_sum.begin()
    grading.submit(number, sample)      # from any thread, in any order
    rewards = grading.collect()         # [B], in the order of the numbers
"""

import bisect
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from jppo import traces
from jppo.errors import UserError
from jppo.rewards.earned import Amounts
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
    """Returns the sample of a trajectory: its response from the first sampled token on."""
    edges = np.flatnonzero(np.diff(t.sampled, prepend=False, append=False)).tolist()
    start = edges[0] if edges else len(t.tokens)
    return Sample(
        prompt,
        t.text,
        len(t.tokens) - (len(prompt.ids) if np.array_equal(t.tokens[: len(prompt.ids)], prompt.ids) else start),
        t.finish,
        t.exchange,
        tokens=t.tokens[start:],
        turns=tuple((begin - start, end - start) for begin, end in zip(edges[::2], edges[1::2], strict=True)),
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


def pending() -> Future[Any]:
    """Returns a new future that cannot be cancelled, to be resolved later."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def graded(reward: Reward) -> Future[Reward]:
    """Returns a future that is resolved already, by this reward."""
    future: Future[Reward] = Future()
    future.set_result(reward)
    return future


def failed(error: str) -> Reward:
    """Returns the reward of a sample that could not be scored."""
    return Reward(score=float("nan"), parts={}, error=error)


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoding of an incomplete character
_BLOCK_TOKENS = 32  # tokens that are decoded at once


def at_characters(amounts: Amounts, tokens: Sequence[int], decode: Callable[[list[int]], str]) -> Amounts:
    """Moves amounts from places in the text, as character counts, to the tokens that complete these characters."""
    if not amounts or not tokens:
        return ()
    blocks = _split_into_blocks(tokens, decode)

    def token_at(end: int) -> int:
        """Returns the token that completes the first `end` characters."""
        block = blocks[min(bisect.bisect_left(blocks, end, key=lambda b: b.characters), len(blocks) - 1)]

        def characters_up_to(token: int) -> int:
            return block.offset + len(decode(list(tokens[block.window : token + 1])).rstrip(_REPLACEMENT))

        token_range = range(block.first, block.end)
        return min(block.first + bisect.bisect_left(token_range, end, key=characters_up_to), block.end - 1)

    return tuple((token_at(end), amount) for end, amount in amounts)


class _Block(NamedTuple):
    """Some consecutive tokens. A token's text may depend on the one before, so they are decoded with earlier ones."""

    first: int
    end: int
    window: int  # the first token that is decoded
    offset: int  # characters before the window
    characters: int  # characters up to the end of the block


def _split_into_blocks(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[_Block]:
    """Splits tokens into blocks of about `_BLOCK_TOKENS` that end with a complete character."""
    blocks: list[_Block] = []
    window = start = before = 0
    for end in (*range(_BLOCK_TOKENS, len(tokens), _BLOCK_TOKENS), len(tokens)):
        window_text, text = decode(list(tokens[window:start])), decode(list(tokens[window:end]))
        is_complete = len(text) > len(window_text) and not text.endswith(_REPLACEMENT)  # otherwise the block grows
        if is_complete or end == len(tokens):
            blocks.append(_Block(start, end, window, before - len(window_text), before - len(window_text) + len(text)))
            window, start, before = start, end, blocks[-1].characters
    return blocks


ENVIRONMENT, AGENT, INTERACTION, TOOLS = "environment_score", "agent_score", "interaction_score", "tool_score"
SCORE = "score"  # the weighted sum of all parts, as a metric
TURNS = (ENVIRONMENT, AGENT, INTERACTION)  # parts that read the scores of turns


class ConversationPart(Part):
    """Returns the sum of the scores of all turns, earned at their ends; an error if the environment or user failed."""

    def __init__(self, *, tools: bool = False):
        """Reads the rewards from tools, or else those from the environment or user."""
        self._tools = tools

    def submit(self, sample: Sample) -> Future[Reward]:
        """Returns the sum of the amounts that the conversation has earned; an error if its environment failed."""
        exchange = sample.exchange
        if exchange is None:  # a sample without a conversation, as in checks
            return graded(Reward(0.0, {}, error=None))
        if exchange.fault is not None:
            return graded(failed(exchange.fault))
        score, earned = exchange.score, exchange.earned
        if self._tools:
            score, earned = sum(amount for _, amount in exchange.tool_earned), exchange.tool_earned
        return graded(Reward(score, {}, error=None, earned=earned))


_FLOAT32 = float(np.finfo(np.float32).max)
_OFF = "off"  # weight of a part that is not computed for a source


@dataclasses.dataclass(frozen=True)
class PartWeights:
    """The weight of each part, for all data sources and for single ones; None: not computed."""

    general: Mapping[str, float | None]
    of_source: Mapping[tuple[str, str], float | None]  # by (data source, part)

    def of(self, source: str) -> dict[str, float]:
        """Returns the parts that score a source, with their weights."""
        weights = {part: self.of_source.get((source, part), weight) for part, weight in self.general.items()}
        return {part: weight for part, weight in weights.items() if weight is not None}


def parse_weights(text: str, parts: Sequence[str], *, optional: Sequence[str] = ()) -> PartWeights:
    """Parses reward.weights: 'judge_score=0.5', 'SOURCE:judge_score=off', separated by commas.

    An empty text gives every part weight 1. Otherwise every part must be named, except those in `optional`.
    """
    if not text.strip():
        return PartWeights(dict.fromkeys(parts, 1.0), {})
    general: dict[str, float | None] = {}
    of_source: dict[tuple[str, str], float | None] = {}
    for item in (item.strip() for item in text.split(",") if item.strip()):
        name, equals, value = item.partition("=")
        source, colon, part = name.rpartition(":")
        prefix = f"reward.weights={text!r}: {item!r}"
        if not equals or part not in parts:
            raise UserError(
                f"{prefix} must be PART=NUMBER or SOURCE:PART=NUMBER, and the parts of this run are {', '.join(parts)}"
            )
        key = (source, part) if colon else part
        if key in of_source or key in general:
            raise UserError(f"{prefix} has a duplicate; remove one")
        if colon:
            of_source[source, part] = _parse_weight(value, prefix)
        else:
            general[part] = _parse_weight(value, prefix)
    named = {*general, *optional, *(part for _, part in of_source)}
    for part in parts:
        if part not in named:
            raise UserError(
                f"reward.weights={text!r} has no weight for {part}, which is configured; add one (0 computes and"
                " logs it only)"
            )
    return PartWeights({part: general.get(part) for part in parts}, of_source)


def _parse_weight(value: str, prefix: str) -> float | None:
    """Parses the number of a weight; None for 'off', UserError for other texts."""
    if value.strip() == _OFF:
        return None
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"{prefix} must end with a number, or with {_OFF}")
    return weight


class RewardSum:
    """All parts of a run's reward."""

    def __init__(self, parts: Mapping[str, Part], weights: PartWeights, *, score_on_error: float | None):
        self.parts = parts
        self.weights = weights
        self.score_on_error = score_on_error

    def begin(self) -> "Grading":
        return Grading(self)

    def grade(self, samples: Iterable[Sample]) -> list[Reward]:
        """Grades samples that are all there and returns their rewards in order."""
        grading = self.begin()
        for number, sample in enumerate(samples):
            grading.submit(number, sample)
        return grading.collect()

    def earned(self, source: str) -> Callable[[Trajectory], tuple[tuple[int, float], ...]]:
        """Makes the function that returns a branch's weighted (token, amount) pairs, earned at its turns."""
        weights = self.weights.of(source)
        turn_weight, tool_weight = sum(weights.get(part, 0.0) for part in TURNS), weights.get(TOOLS, 0.0)

        def weighted_amounts(branch: Trajectory) -> tuple[tuple[int, float], ...]:
            if branch.exchange is None:
                return ()
            pairs = [(turn_weight, branch.exchange.earned), (tool_weight, branch.exchange.tool_earned)]
            return tuple((token, weight * amount) for weight, earned in pairs for token, amount in earned)

        return weighted_amounts

    def ready(self) -> None:
        for part in self.parts.values():
            part.ready()

    def testing(self) -> "RewardSum":
        """Returns the same sum for held-out samples, without updating running statistics."""
        parts = {name: part.testing() for name, part in self.parts.items()}
        return RewardSum(parts, self.weights, score_on_error=self.score_on_error)

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for part in self.parts.values():
            metrics |= part.metrics()
        return metrics

    def state(self) -> dict[str, Any]:
        return {name: state for name, part in self.parts.items() if (state := part.state())}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, part_state in state.items():
            if name in self.parts:
                self.parts[name].load(part_state)

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


class Grading:
    """The samples of one batch that are being graded."""

    def __init__(self, reward_sum: RewardSum):
        self._reward_sum = reward_sum
        self._waiting: dict[int, dict[str, tuple[float, Future[Reward]]]] = {}
        self._lock = threading.Lock()

    def submit(self, number: int, sample: Sample) -> None:
        """Submits a sample to every part that scores its source."""
        weights, parts = self._reward_sum.weights.of(sample.prompt.data_source), self._reward_sum.parts
        fault = None if sample.exchange is None else sample.exchange.fault
        if fault is not None:  # an error, whatever other parts say
            weights = {name: x for name, x in weights.items() if isinstance(parts[name], ConversationPart)}
        futures = {name: (weight, parts[name].submit(sample)) for name, weight in weights.items()}
        if fault is not None and not futures:  # no part reads the conversation
            futures["conversation"] = (0.0, graded(failed(fault)))
        for name, (_, future) in futures.items():
            traces.until_done(name, future)
        with self._lock:
            if number in self._waiting:
                raise ValueError(f"sample {number} was submitted twice")
            self._waiting[number] = futures

    def finished(self) -> dict[int, Reward]:
        """Returns the rewards that are ready and without an error, by number, without waiting for others."""
        with self._lock:
            waiting = dict(self._waiting)
        done = {number: futures for number, futures in waiting.items() if all(f.done() for _, f in futures.values())}
        rewards = {number: _compose(futures, self._reward_sum.score_on_error) for number, futures in done.items()}
        return {number: reward for number, reward in rewards.items() if reward.error is None}

    def collect(self, numbers: Iterable[int] | None = None) -> list[Reward]:
        """Waits for the rewards of `numbers` (None: all) and returns them in the order of their numbers."""
        for part in self._reward_sum.parts.values():
            part.flush()
        with self._lock:  # more samples may be submitted meanwhile
            sorted_numbers = sorted(self._waiting if numbers is None else numbers)
            waiting = [self._waiting[number] for number in sorted_numbers]
        return [_compose(futures, self._reward_sum.score_on_error) for futures in waiting]


def _compose(futures: Mapping[str, tuple[float, Future[Reward]]], score_on_error: float | None) -> Reward:
    """Sums weight · score over a sample's parts and keeps each part's score; an error of one is the sample's error.

    Waits for the parts. Amounts earned inside the response have their part's weight. The answer comes from the rule or
    the custom function. A number beyond float32, in which the trainer computes, is an error, too.
    """
    rewards = {name: (weight, future.result()) for name, (weight, future) in futures.items()}
    parts = {name: reward.score for name, (_, reward) in rewards.items()}
    for name, (_, reward) in rewards.items():
        parts |= {f"{name}/{key}": value for key, value in reward.parts.items()}
    answer = next((reward.answer for _, reward in rewards.values() if reward.answer is not None), None)
    errors = [f"{name}: {why}" for name, weighted in rewards.items() if (why := _error_of(*weighted)) is not None]
    if errors:
        error = "; ".join(errors)
        finite_parts = {key: value for key, value in parts.items() if math.isfinite(value)}
        if score_on_error is None:
            return Reward(math.nan, finite_parts, error, answer, unusable=f"not graded: {error}")
        return Reward(score_on_error, finite_parts, error, answer)
    score = math.fsum(weight * reward.score for weight, reward in rewards.values())
    earned = [(token, weight * amount) for weight, reward in rewards.values() for token, amount in reward.earned]
    return Reward(score, parts, None, answer, earned=tuple((token, amount) for token, amount in earned if amount))


def _error_of(weight: float, reward: Reward) -> str | None:
    """Returns the error of a part's reward, also if its weighted numbers exceed float32; None without one."""
    if reward.error is not None:
        return reward.error
    numbers = [weight * number for number in (reward.score, *(amount for _, amount in reward.earned))]
    too_large = next((number for number in numbers if not abs(number) <= _FLOAT32), None)
    return None if too_large is None else f"the weighted reward {too_large:g} must be finite in float32; scale it down"
