"""Where a response ends by its text, for an engine that samples tokens and looks at their text now and then. Pure."""

import bisect
from collections.abc import Callable, Sequence

# Characters at the beginning of a piece that may not be those of the whole text: half a character, a space left out.
SPOILED = 8
HALF = "\N{REPLACEMENT CHARACTER}"  # what a character that is not complete is decoded to


def cut_at(tokens: Sequence[int], decode: Callable[[list[int]], str], stop: Sequence[str], *, new: int) -> int | None:
    """How many tokens there are up to the first with which the text holds one of `stop`; None where it holds none.

    All tokens but the last `new` were looked at before, so that only what ends in these is sought, in a piece of the
    text that is as long as that takes. A token that ends within a character counts with the one that completes it.
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
        return any(one in text for one in stop)

    ends = range(known + 1, len(tokens) + 1)
    if not ends or not holds(len(tokens)):
        return None
    return ends[bisect.bisect_left(ends, True, key=holds)]


def begun(tokens: Sequence[int], decode: Callable[[list[int]], str], stop: Sequence[str]) -> bool:
    """Whether the text ends within what may become one of `stop`, or within a character."""
    if not stop:
        return False
    back = max(map(len, stop)) + SPOILED
    first = max(0, len(tokens) - back)
    while first > 0 and len(decode(list(tokens[first:])).rstrip(HALF)) < back:
        first = max(0, first - back)
    text = decode(list(tokens[first:]))
    return text.endswith((HALF, *(one[:length] for one in stop for length in range(1, len(one)))))
