"""Context trimming and text streaming for a chat with a person. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jppo.settings import UserError

Message = dict[str, str]
HALF = "\N{REPLACEMENT CHARACTER}"  # decoding of an incomplete character


def fitting(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], room: int
) -> tuple[list[Message], list[int]]:
    """Drops the oldest turns until the messages fit into `room` tokens; returns messages and tokens.

    An initial system message and the last message stay.
    """
    head = [message for message in messages[:1] if message["role"] == "system"]
    rest = list(messages[len(head) :])
    while len(ids := encode([*head, *rest])) > room:
        following = next((i for i, message in enumerate(rest) if i and message["role"] == "user"), None)
        if following is None:
            with_system = " with the system message" if head else ""
            raise UserError(
                f"the last message has {len(ids)} tokens{with_system}, but {room} fit with an answer; shorten it, or"
                " lower --max_tokens"
            )
        rest = rest[following:]
    return [*head, *rest], ids


def pieces(
    answer: Iterable[Sequence[int]], decode: Callable[[list[int]], str], *, before: Sequence[int] = ()
) -> Iterator[str]:
    """Yields the text of an answer piece by piece, continuing the tokens `before`, without incomplete characters."""
    ids = list(before)
    said = decode(ids) if ids else ""
    for new in answer:
        ids += new
        text = decode(ids).rstrip(HALF)
        if text.startswith(said) and text != said:  # otherwise later tokens will change its end
            yield text[len(said) :]
            said = text
    whole = decode(ids)
    same = next((i for i, (a, b) in enumerate(zip(whole, said, strict=False)) if a != b), min(len(whole), len(said)))
    if rest := whole[same:]:
        yield rest
