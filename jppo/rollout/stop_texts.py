"""Stop texts for an engine that decodes tokens only now and then. Pure."""

import bisect
from collections.abc import Callable, Sequence

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
        return any(one in text for one in stop)

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
    return text.endswith((HALF, *(one[:length] for one in stop for length in range(1, len(one)))))
