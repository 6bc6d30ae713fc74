"""A conversation with a person: what of it the model still sees, and its answers as text while they come. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jppo.config import UserError

Message = dict[str, str]
HALF = "\N{REPLACEMENT CHARACTER}"  # what a character that is not complete is decoded to


def fitting(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], room: int
) -> tuple[list[Message], list[int]]:
    """The messages that fit into `room` tokens, and these: without the oldest turns of both sides.

    A system message at the beginning stays, and so does what was said last.
    """
    head = [message for message in messages[:1] if message["role"] == "system"]
    rest = list(messages[len(head) :])
    while len(ids := encode([*head, *rest])) > room:
        following = next((i for i, message in enumerate(rest) if i and message["role"] == "user"), None)
        if following is None:
            with_system = " with the system message" if head else ""
            raise UserError(
                f"what was said last is {len(ids)} tokens{with_system}, and {room} fit beside an answer; say less, or"
                " lower --max_tokens"
            )
        rest = rest[following:]
    return [*head, *rest], ids


def pieces(
    answer: Iterable[Sequence[int]], decode: Callable[[list[int]], str], *, before: Sequence[int] = ()
) -> Iterator[str]:
    """The text of an answer piece by piece, as it goes on from the tokens `before`; no half characters."""
    ids = list(before)
    said = decode(ids) if ids else ""
    for new in answer:
        ids += new
        text = decode(ids).rstrip(HALF)
        if text.startswith(said) and text != said:  # else what comes will change the end of it
            yield text[len(said) :]
            said = text
    whole = decode(ids)
    same = next((i for i, (a, b) in enumerate(zip(whole, said, strict=False)) if a != b), min(len(whole), len(said)))
    if rest := whole[same:]:
        yield rest
