"""Reward parts for the length and the format of a response."""

import re
from concurrent.futures import Future

from jppo.rewards.parts import Part, Sample, graded
from jppo.rewards.pool import Pool, Target, as_plain
from jppo.settings import UserError
from jppo.types import Reward


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
