"""What of a conversation the model still sees, and text out of tokens while they come."""

import pytest

from jppo.agent.dialogue import fitting, pieces
from jppo.config import UserError


def talk(*said, system=None):
    """Messages of user and assistant in turn."""
    roles = ["user", "assistant"] * len(said)
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]


def encode(messages):
    """A token for each character, and one between messages."""
    return [ord(c) for c in "|".join(message["content"] for message in messages)]


@pytest.mark.parametrize(
    "room,kept",
    [
        (14, "aa|bb|cc|dd|ee"),
        (13, "cc|dd|ee"),
        (8, "cc|dd|ee"),
        (7, "ee"),
        (2, "ee"),
    ],
)
def test_the_oldest_turns_of_both_sides_go(room, kept):
    messages, ids = fitting(talk("aa", "bb", "cc", "dd", "ee"), encode, room)
    assert "".join(map(chr, ids)) == kept == "|".join(m["content"] for m in messages)
    assert messages[0]["role"] == "user"


def test_a_system_message_stays():
    messages, ids = fitting(talk("aa", "bb", "cc", system="s"), encode, 5)
    assert [m["content"] for m in messages] == ["s", "cc"] and len(ids) == 4


def test_what_was_said_last_must_fit():
    with pytest.raises(UserError, match="3 tokens, but 2 fit"):
        fitting(talk("aa", "bb", "ccc"), encode, 2)
    with pytest.raises(UserError, match="4 tokens with the system message, but 3 fit"):
        fitting(talk("aa", "bb", "cc", system="s"), encode, 3)


def spell(ids):
    """Bytes as text, as a tokenizer of bytes decodes."""
    return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_are_whole_characters():
    text = "né €5"
    answer = [[byte] for byte in text.encode()]
    assert list(pieces(answer, spell)) == ["n", "é", " ", "€", "5"]
    assert list(pieces([list(text.encode())[:5]], spell)) == ["né ", "\N{REPLACEMENT CHARACTER}"]  # cut in the middle
    assert list(pieces([], spell)) == []


def test_an_answer_goes_on_from_what_was_before():
    def strip(ids):  # as tokenizers that mark the beginning of words do: the text has no space at its beginning
        return spell(ids).lstrip(" ")

    assert list(pieces([[*b" a"], [*b" b"]], strip, before=[*b"x"])) == [" a", " b"]
    assert list(pieces([[*b" a"], [*b" b"]], strip)) == ["a", " b"]
