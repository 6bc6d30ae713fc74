import json

import pytest

from jppo.config import UserError
from jppo.data.sft import read_demonstrations
from jppo.sft import as_trajectory


def write(tmp_path, *rows):
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_response_is_its_tokens_and_the_end_token(tmp_path, characters):
    files = write(tmp_path, {"prompt": "4+8=", "response": "12"})
    [pair] = read_demonstrations(files, tokenizer=characters, max_length=7).demonstrations
    assert pair.prompt.tolist() == [6, 12, 10, 13] and pair.response.tolist() == [3, 4, 1]


def test_what_others_say_in_a_response_is_not_learned_from(tmp_path, characters):
    response = [{"text": "4+", "learn": True}, {"text": "=8", "learn": False}, {"text": "12", "learn": True}]
    files = write(tmp_path, {"prompt": "4+8=", "response": response}, {"prompt": "1=", "response": "1"})
    pair, plain = read_demonstrations(files, tokenizer=characters, max_length=20).demonstrations
    assert pair.response.tolist() == [6, 12, 1, 13, 10, 3, 4, 1]  # an end token behind what is learned from
    assert pair.learn.tolist() == [True, True, True, False, False, True, True, True]
    assert plain.learn.all() and len(plain.learn) == 2
    made = as_trajectory(pair, "0")
    assert made.sampled.tolist() == [False] * 4 + pair.learn.tolist()
    assert made.tokens.tolist() == pair.prompt.tolist() + pair.response.tolist()


def test_the_last_turn_of_a_chat_is_the_response(tmp_path, characters):
    characters.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    chat = [{"role": "user", "content": "4+8"}, {"role": "assistant", "content": "12"}]
    [pair] = read_demonstrations(write(tmp_path, {"messages": chat}), tokenizer=characters, max_length=7).demonstrations
    assert pair.prompt.tolist() == [6, 12, 10, 13] and pair.response.tolist() == [3, 4, 1]


def test_overlong_pairs_are_counted(tmp_path, characters):
    files = write(tmp_path, {"prompt": "4+8=", "response": "12"}, {"prompt": "4+8=", "response": "123"})
    read = read_demonstrations(files, tokenizer=characters, max_length=7)
    assert len(read.demonstrations) == 1 and read.overlong == 1
    with pytest.raises(UserError, match="all 2 demonstrations are longer than 6"):
        read_demonstrations(files, tokenizer=characters, max_length=6)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1="}, "has no 'response'"),
        ({"response": "1"}, "has no 'prompt'"),
        ({"prompt": "1=", "response": ""}, "response is empty"),
        ({"messages": [{"role": "user", "content": "1"}]}, "must end with a turn of the assistant"),
        ({"messages": [{"role": "user", "content": "1"}], "response": "2"}, "keep one of the two forms"),
        ({"messages": "1"}, "must be text or chat messages"),
        ({"prompt": "1=", "response": []}, "must end with a text that is learned from"),
        ({"prompt": "1=", "response": [{"text": "1", "learn": False}]}, "must end with a text that is learned from"),
        ({"prompt": "1=", "response": ["1"]}, "must be {text, learn}"),
        ({"prompt": "1=", "response": [{"text": "1", "learn": 1}]}, "must be {text, learn}"),
        ({"prompt": "1=", "response": [{"text": " ", "learn": True}]}, "text in response is empty"),
    ],
)
def test_a_bad_row_is_named(tmp_path, characters, row, said):
    with pytest.raises(UserError, match=r"sft\.jsonl, line 1") as e:
        read_demonstrations(write(tmp_path, row), tokenizer=characters, max_length=10)
    assert said in str(e.value)
