"""Checks of servers' answers: what cannot be an answer of a sampler or scorer becomes a ServerFault, never a sample.

The readers of all kinds of servers use these. Inside `reading` they raise plain errors, which it explains.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.api import Completion, end_ids
from jppo.rollout.servers.endpoint import ServerFault
from jppo.rollout.servers.http_client import brief
from jppo.types import Sampling

LEAST, MOST = -9998.0, 1e-3  # log-probs: vLLM writes -9999 for minus infinity; rounding may exceed 0
LONGEST = 1 << 31  # tokens
ROOM, TOKEN = 1 << 20, 1 << 12  # bytes of an answer, and of each token in it: many times what servers send


def max_answer_bytes(sampling: Sampling) -> int | None:
    """Returns the most bytes of an answer; None with experts or kept tokens, whose size is not known here."""
    return None if sampling.experts or sampling.kept else ROOM + TOKEN * sampling.max_tokens


@contextlib.contextmanager
def reading(source: str, answer: Any) -> Iterator[None]:
    """Makes any error in reading an answer, within the block, a ServerFault with the answer's source."""
    try:
        yield
    except ServerFault:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, RolloutError) as e:
        reason = f"{e} is missing" if isinstance(e, KeyError) else str(e)
        raise ServerFault(f"{source} answered unexpectedly: {reason}, in {brief(answer)}") from e


def whole(value: Any, name: str, limit: int = LONGEST) -> int:
    """Returns an integer from 0 to `limit`; ValueError for anything else."""
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{name}={brief(value)} is no integer from 0 to {limit}")
    return value


def number(value: Any) -> float:
    """Returns a finite number; ValueError for anything else."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{brief(value)} is no finite number")
    return float(value)


def text(value: Any, name: str) -> str:
    """Returns a text; ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={brief(value)} is no text")
    return value


def version(name: Any) -> int | None:
    """Returns a version by its name; None if the trainer gave no such name."""
    known = isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 20
    return int(name) if known else None


def single_entry(values: Any, name: str) -> Any:
    """Returns the only entry of a list; ValueError if it has another number of them."""
    if not isinstance(values, list) or len(values) != 1:
        count = len(values) if isinstance(values, list) else brief(values)
        raise ValueError(f"{name} must be a list of one, not of {count}")
    return values[0]


def token_ids(values: Any, vocab_size: int) -> list[int]:
    """Returns a list of token ids; ValueError if one is no integer, or outside of the vocabulary."""
    if not isinstance(values, list):
        raise ValueError(f"{brief(values)} is no list of token ids")
    if not set(map(type, values)) <= {int} or (values and not (min(values) >= 0 and max(values) < vocab_size)):
        invalid = next(x for x in values if type(x) is not int or not 0 <= x < vocab_size)
        raise ValueError(f"{brief(invalid)} is no token id from 0 to {vocab_size - 1}")
    return values


def log_probs(values: Sequence[Any]) -> list[float]:
    """Returns log-probs; ValueError if one is no number, not finite or above 0."""
    are_numbers = set(map(type, values)) <= {float, int}
    # the order of a NaN is not defined, but their sum would be one
    if not are_numbers or (values and not (min(values) > LEAST and max(values) <= MOST and math.isfinite(sum(values)))):
        invalid = next(x for x in values if type(x) not in (float, int) or not LEAST < x <= MOST)
        raise ValueError(f"{brief(invalid)} is no log-prob of a sampled token: a finite number that is at most 0")
    return list(values)


def span_versions(spans: Any, count: int) -> list[str]:
    """Returns the version of each of `count` tokens; ValueError unless spans cover each once, in order."""
    versions: list[str] = []
    for span in spans:
        begin, end = whole(span["start"], "start", count), whole(span["end"], "end", count)
        if begin != len(versions) or end < begin:
            raise ValueError(f"a span of tokens {begin}..{end} follows {len(versions)} tokens with a version")
        versions += [text(span["version"], "version")] * (end - begin)
    if len(versions) != count:
        raise ValueError(f"{len(versions)} of {count} tokens have a version")
    return versions


def completion(
    tokens: Any,
    logprob: Sequence[Any],
    version: Sequence[str],
    finish: Any,
    *,
    sampling: Sampling,
    eos_token_ids: Sequence[int],
    vocab_size: int,
) -> Completion:
    """Returns the checked answer to a request with this `sampling`; ValueError if it cannot be one."""
    tokens, logprob = token_ids(tokens, vocab_size), log_probs(logprob)
    if finish not in ("stop", "length", "abort") or not (tokens or finish == "abort"):
        raise ValueError(f"a response of {len(tokens)} tokens ended with {brief(finish)}")
    if not len(tokens) == len(logprob) == len(version) or len(tokens) > sampling.max_tokens:
        counts = f"{len(tokens)} tokens, {len(logprob)} log-probs and {len(version)} versions"
        raise ValueError(f"it has {counts}, of at most {sampling.max_tokens} tokens")
    end_tokens = frozenset(end_ids(sampling, eos_token_ids))
    if not end_tokens.isdisjoint(tokens[:-1]):
        raise ValueError(f"tokens follow the end token {next(x for x in tokens if x in end_tokens)}")
    if tokens and tokens[-1] in end_tokens:
        finish = "stop"  # SGLang checks the length first
    elif finish == "stop" and not sampling.stop:
        raise ValueError(f"it stopped at token {tokens[-1]}, which ends no response here")
    return Completion(tokens, logprob, list(version), finish)
