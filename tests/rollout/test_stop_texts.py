"""Where a response ends by its text: against the whole text at every token."""

import numpy as np
import pytest

from jppo.rollout.protocol import SPOILED, cut_at, may_end_in_stop


def first(tokens, decode, stop):
    """The rule, by decoding everything after every token that completes a character."""
    for n in range(1, len(tokens) + 1):
        text = decode(tokens[:n])
        if not text.endswith("\ufffd") and any(one in text for one in stop):
            return n
    return None


def by_looks(tokens, decode, stop, every):
    """What an engine finds that looks every so many tokens."""
    for seen in (*range(every, len(tokens), every), len(tokens)):
        if (found := cut_at(tokens[:seen], decode, stop, new=every)) is not None:
            return found
    return None


def of_bytes(ids):
    """A tokenizer of bytes: half a character is a replacement character, and a leading space is left out."""
    text = bytes(ids).decode("utf-8", errors="replace")
    return text[1:] if text.startswith(" ") else text


def of_words(ids):
    """A tokenizer of words, with some tokens that say nothing."""
    return "".join(("", "", "ab", "a", "b", "</", "answer", ">\n", "\n\n", " ", "x,y")[i] for i in ids)


@pytest.mark.parametrize("every", [1, 3, 32, 1000])
@pytest.mark.parametrize("stop", [("b</",), ("</answer>",), ("\n\n\n", "aaa"), ("y x",), ("ababab" * 3,), ("none",)])
def test_the_cut_is_at_the_first_token_however_often_the_text_is_looked_at(every, stop):
    rng = np.random.default_rng(len(stop[0]))
    found = []
    for _ in range(20):
        tokens = rng.integers(0, 11, 200).tolist()
        tokens[90:93] = [[5, 6, 7], [2, 2, 2], [10, 9, 10]][rng.integers(3)]
        found.append(first(tokens, of_words, stop))
        assert by_looks(tokens, of_words, stop, every) == found[-1]
    assert any(found) or stop in (("none",), ("ababab" * 3,))


@pytest.mark.parametrize("every", [1, 2, 7, 500])
@pytest.mark.parametrize("stop", [("é",), (" 漢 字",), ("🙂x",), ("l 漢", "🙂🙂")])
def test_half_characters_and_spaces_left_out_spoil_nothing(every, stop):
    text = "a é漢 字 l漢 🙂 🙂🙂 漢 字 🙂x l 漢 "
    for shift in range(12):
        tokens = list((" " * shift + text).encode())
        expected = first(tokens, of_bytes, stop)
        assert expected is not None and by_looks(tokens, of_bytes, stop, every) == expected


def test_a_token_that_ends_within_a_character_says_nothing_yet():
    pieces = (b"no", b": \xe6", b"\xbc", b"\xa2", b"!", b": \xff", b"\xff")

    def decode(ids):
        return b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")

    for every in (1, 2, 5):
        assert by_looks([0, 1, 2, 3, 4], decode, (": ",), every) == 4  # as vLLM, which holds back what may yet change
        assert by_looks([0, 1, 2], decode, (": ",), every) is None
        assert by_looks([0] * 40 + [5] + [6] * 40 + [4], decode, (": ",), every) == 82  # however long that takes


def test_only_a_piece_of_a_long_text_is_decoded():
    longest = []

    def decode(ids):
        longest.append(len(ids))
        return of_words(ids)

    tokens = [2] * 5000
    assert cut_at([*tokens, 5], decode, ("b</",), new=8) == 5001
    assert max(longest) < 8 + 2 * (3 + SPOILED) and len(longest) < 10


def test_nothing_to_look_for_and_nothing_to_look_at():
    assert cut_at([1, 2], lambda ids: pytest.fail("decoded"), (), new=2) is None
    assert cut_at([], of_words, ("a",), new=32) is None


def test_a_stop_text_that_has_begun():
    assert may_end_in_stop([2, 5], of_words, ("</answer>",)) and may_end_in_stop(
        [*[2] * 200, 5, 6], of_words, ("x", "</answer>")
    )
    assert not may_end_in_stop([5, 6, 2], of_words, ("</answer>",)) and not may_end_in_stop([5, 6], of_words, ())
    assert not may_end_in_stop([5, 6, 7], of_words, ("</answer>",)), "it is complete without the line break"
    assert may_end_in_stop(list("né".encode())[:2], of_bytes, ("x",)), "half a character may become anything"
    assert may_end_in_stop([5, *[0] * 50], of_words, ("</answer>",)), "tokens that say nothing lie between"
