import pytest

from jppo.data.preferences import read_pairs
from jppo.errors import UserError
from tests.make import write_rows


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def encode(messages, response):
    """What is read, letter by letter; a system message is s, a user's u, the assistant's a."""
    text = messages if isinstance(messages, str) else "".join(m["role"][0] + m["content"] for m in messages) + "|"
    return [ord(c) for c in text + response]


def read(tmp_path, *rows, **how):
    return read_pairs(write_rows(tmp_path / "pairs.jsonl", *rows), encode=encode, **{"max_length": 20, **how})


def text(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "1+1=2", "1+1=3"),
        ({"prompt": [user("1")], "chosen": "2", "rejected": "3"}, "u1|2", "u1|3"),
        ({"prompt": [user("1")], "chosen": [said("2")], "rejected": [said("3")]}, "u1|2", "u1|3"),
        ({"chosen": [user("1"), said("2")], "rejected": [user("1"), said("3")]}, "u1|2", "u1|3"),
        ({"prompt": "1", "chosen": [user("1"), said("2")], "rejected": [user("1"), said("3")]}, "u1|2", "u1|3"),
        (
            {
                "prompt": [user("1")],
                "chosen": [user("1"), said("2"), user("4"), said("5")],
                "rejected": [user("1"), said("3")],
            },
            "u1a2u4|5",
            "u1|3",
        ),
    ],
)
def test_every_form_of_a_pair(tmp_path, row, chosen, rejected):
    [pair] = read(tmp_path, row).pairs
    assert (text(pair.chosen), text(pair.rejected), pair.margin) == (chosen, rejected, 0.0)


def test_a_system_prompt_is_put_before_both_halves(tmp_path):
    [pair] = read(tmp_path, {"prompt": [user("1")], "chosen": "2", "rejected": "3"}, system_prompt="be").pairs
    assert (text(pair.chosen), text(pair.rejected)) == ("sbeu1|2", "sbeu1|3")


def test_margins_are_the_settings_or_the_columns(tmp_path):
    rows = [{"prompt": "1", "chosen": "2", "rejected": str(3 + i), "gap": i} for i in range(2)]
    assert [pair.margin for pair in read(tmp_path, *rows, margin=0.5).pairs] == [0.5, 0.5]
    assert [pair.margin for pair in read(tmp_path, *rows, margin_column="gap").pairs] == [0.0, 1.0]


def test_what_is_too_long_or_alike_is_counted(tmp_path):
    rows = [{"prompt": "1", "chosen": a, "rejected": b} for a, b in (("2", "3"), ("2", "2"), ("2", "3" * 20))]
    found = read(tmp_path, *rows)
    assert (len(found.pairs), found.overlong, found.alike) == (1, 1, 1)
    with pytest.raises(UserError, match=r"no pair is left: 1 are longer than 20 tokens.* and 1 have equal halves"):
        read(tmp_path, *rows[1:])


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "1", "chosen": "2"}, "has no 'rejected'; its columns are prompt, chosen"),
        ({"prompt": "1", "rejected": "2"}, "has no 'chosen'"),
        ({"chosen": "2", "rejected": "3"}, "has no 'prompt'"),
        ({"prompt": "1", "chosen": "2", "rejected": " "}, "rejected is empty"),
        ({"prompt": "1", "chosen": 2, "rejected": "3"}, "chosen is 2, of type int; it must be text"),
        ({"prompt": "1", "chosen": [said("2")], "rejected": "3"}, "prompt is text and chosen chat messages"),
        ({"chosen": [said("2")], "rejected": [said("3")]}, "chosen answers nothing"),
        ({"chosen": [user("2")], "rejected": [user("3")]}, "chosen must end with a non-empty turn of the assistant"),
        (
            {"chosen": [user("1"), said(" ")], "rejected": [said("3")]},
            "chosen must end with a non-empty turn of the assistant",
        ),
        ({"chosen": [], "rejected": []}, "chosen is empty"),
        (
            {"prompt": "9", "chosen": [user("1"), said("2")], "rejected": [user("1"), said("3")]},
            "chosen is a whole chat that does not begin with prompt",
        ),
        ({"prompt": "1", "chosen": "2", "rejected": "3", "gap": None}, "has no 'gap', which loss.margin_column names"),
        ({"prompt": "1", "chosen": "2", "rejected": "3", "gap": "1"}, "gap is '1'; a margin must be a finite number"),
        ({"prompt": "1", "chosen": "2", "rejected": "3", "gap": float("inf")}, "a margin must be a finite number"),
        ({"prompt": "1", "chosen": "2", "rejected": "3", "gap": True}, "a margin must be a finite number"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, complaint):
    with pytest.raises(UserError, match=r"pairs\.jsonl, line 1") as e:
        read(tmp_path, row, margin_column="gap" if "gap" in row else "")
    assert complaint in str(e.value) and "\n" not in str(e.value)


def test_a_template_that_refuses_is_one_line(tmp_path):
    def refuse(messages, response):
        raise ValueError("no\nway")

    row = {"prompt": "1", "chosen": "2", "rejected": "3"}
    with pytest.raises(UserError, match=r"line 1: the tokenizer or its chat template refuses .*: no$"):
        read_pairs(write_rows(tmp_path / "pairs.jsonl", row), encode=refuse, max_length=9)
