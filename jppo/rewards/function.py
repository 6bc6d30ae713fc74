"""Parts of the reward for the length, the format, and a custom function, `reward.function='path.py:name'`.

Functions are checked before training, and run in worker processes.

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": float, ...}
    compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list of those
    compute_score(completions, **kwargs) -> list of those; TRL's

The parameter names select the form (`forms.py`). The last two get all samples submitted before `flush` at once. A dict
may have amounts that are earned inside the response (`earned.py`).
"""

import functools
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from jppo.errors import expanded
from jppo.rewards.earned import at_characters
from jppo.rewards.parts import Part, Sample, graded
from jppo.rewards.pool import Pool, Read, Target, as_plain, ready
from jppo.settings import UserError
from jppo.types import Reward

NAME = "compute_score"  # of the function, where the setting names only the file


class FunctionPart(Part):
    """A custom function as a part of the reward; loads the file at once, and closes the pool with itself.

    Invalid files and functions are UserErrors here. In training, a failure is an error of its sample, or of all samples
    of the batch in the second form.
    """

    def __init__(self, function: str, *, pool: Pool, decode: Callable[[list[int]], str]):
        target = _target(function)
        self.batch = ready(pool, target, f"reward.function={function!r}")
        self._target, self._pool, self._decode = target, pool, decode
        self._waiting: list[tuple[Sample, Future[Reward]]] = []
        self._lock = threading.Lock()

    def submit(self, sample: Sample) -> Future[Reward]:
        """Submits the sample to a worker, or keeps it for the batch."""
        if not self.batch:
            return self._pool.submit(self._target, self._plain(sample), self._read(sample))
        future: Future[Reward] = Future()
        with self._lock:
            self._waiting.append((sample, future))
        return future

    def flush(self) -> None:
        """Submits the waiting samples to one worker as a batch."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        asked, reads = [self._plain(sample) for sample, _ in waiting], [self._read(sample) for sample, _ in waiting]
        scored = self._pool.submit_batch(self._target, asked, reads)
        for inner, (_, future) in zip(scored, waiting, strict=True):
            inner.add_done_callback(functools.partial(_pass_on, future))

    def _plain(self, sample: Sample) -> dict[str, Any]:
        """Adds prompt, columns, the number of turns, and the turns' texts to the `extra_info` of a conversation."""
        of_row = {"prompt": sample.prompt.messages, "columns": sample.prompt.extra}
        asked = as_plain(sample) | of_row | {"turns": len(sample.turns)}
        if sample.exchange is None or sample.tokens is None or not isinstance(asked["extra"], Mapping):
            return asked
        texts = [self._decode(sample.tokens[begin:end].tolist()) for begin, end in sample.turns]
        return asked | {"extra": {**asked["extra"], "turns": texts}}

    def _read(self, sample: Sample) -> Read:
        return functools.partial(_reward, sample, self._decode)

    def close(self) -> None:
        """Stops the pool's processes; waiting samples become errors."""
        self._pool.close()
        self.flush()


def _pass_on(future: Future[Reward], done: Future[Reward]) -> None:
    future.set_result(done.result())


def _reward(sample: Sample, decode: Callable[[list[int]], str], answer: dict[str, Any]) -> Reward:
    """Returns the reward of a worker's answer, with its amounts on the tokens of the sample."""
    unit, amounts = answer.pop("earned", ("", ()))
    if sample.tokens is None:  # a text without tokens, as in checks
        amounts = ()
    elif unit == "turns":
        amounts = [(sample.turns[turn][1] - 1, amount) for turn, amount in amounts]
    else:
        amounts = at_characters(amounts, sample.tokens.tolist(), decode)
    return Reward(**answer, earned=tuple(amounts))


def _target(function: str) -> Target:
    file, colon, name = (function, ":", NAME) if function.endswith(".py") else function.rpartition(":")
    if not (colon and file and name):
        raise UserError(f"reward.function={function!r} must be PATH.py, or PATH.py:NAME, as in mine.py:{NAME}")
    path = expanded(file).resolve()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        why = "there is no such file" if isinstance(e, FileNotFoundError) else f"the file cannot be read: {e}"
        raise UserError(f"reward.function={function!r}: {why} ({path}); give the path of a Python file") from e
    return ("function", str(path), name, source)


def overlong(length: int, *, max_response_length: int, buffer_tokens: int) -> float:
    """DAPO's soft length penalty (arXiv 2503.14476, eq. 13; verl's overlong buffer), with L tokens and buffer b.

    0 while length <= L - b, then (L - b - length) / b, which is -1 at L.
    """
    return min(0.0, (max_response_length - buffer_tokens - length) / buffer_tokens)


class OverlongPart(Part):
    """`overlong` as a part of the reward."""

    def __init__(self, *, max_response_length: int, buffer_tokens: int):
        if not 0 < buffer_tokens <= max_response_length:
            raise UserError(
                f"reward.overlong_buffer_tokens={buffer_tokens} must be above 0 and at most "
                f"data.max_response_length={max_response_length}"
            )
        self._limits = dict(max_response_length=max_response_length, buffer_tokens=buffer_tokens)

    def submit(self, sample: Sample) -> Future[Reward]:
        """Returns the score at once."""
        return graded(Reward(overlong(sample.length, **self._limits), {}, error=None))


class FormatPart(Part):
    """1 if a pattern matches the whole response, line breaks included, else 0.

    It runs in the pool, because some patterns take extremely long on some texts; such a sample is an error. The pool is
    closed with it.
    """

    def __init__(self, pattern: str, *, pool: Pool):
        try:
            re.compile(pattern, re.DOTALL)
        except (re.error, OverflowError, RecursionError) as e:
            raise UserError(f"reward.format_regex={pattern!r} is not a regular expression: {e}; fix it") from e
        self._target: Target = ("format", pattern)
        self._pool = pool

    def submit(self, sample: Sample) -> Future[Reward]:
        """Submits the sample to a worker."""
        return self._pool.submit(self._target, as_plain(sample) | {"extra": None})

    def close(self) -> None:
        """Stops the pool's processes."""
        self._pool.close()
