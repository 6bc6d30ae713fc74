import functools

import pytest

from jppo.data.sft import read_demonstrations
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError
from jppo.sft import as_trajectory
from tests.make import write_rows


def test_a_response_is_its_tokens_and_the_end_token(tmp_path, characters):
    files = write_rows(tmp_path / "sft.jsonl", {"prompt": "4+8=", "response": "12"})
    [pair] = read_demonstrations(files, tokenizer=characters, max_length=7).demonstrations
    assert pair.prompt.tolist() == [6, 12, 10, 13] and pair.response.tolist() == [3, 4, 1]


def test_columns_are_entries_of_a_dict_and_a_text_prompt_a_message(tmp_path, qwen):
    row = {"extra_info": {"question": "2+2=", "answer": "4"}}
    columns = {"prompt": "extra_info.question", "response": "extra_info.answer", "messages": "messages"}
    files = write_rows(tmp_path / "verl.jsonl", row)
    read = functools.partial(read_demonstrations, files, tokenizer=qwen, max_length=99, prompt_role="user")
    [pair] = read(columns=columns).demonstrations
    chat = [{"role": "user", "content": "2+2="}]
    text = qwen.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert pair.prompt.tolist() == qwen(text, add_special_tokens=False)["input_ids"]
    assert pair.response.tolist() == qwen("4" + qwen.eos_token, add_special_tokens=False)["input_ids"]
    with pytest.raises(UserError, match=r"which data\.response_key names"):
        read(columns=columns | {"response": "extra_info.solution"})


def test_what_others_say_in_a_response_is_not_learned_from(tmp_path, characters):
    response = [{"text": "4+", "learn": True}, {"text": "=8", "learn": False}, {"text": "12", "learn": True}]
    files = write_rows(
        tmp_path / "sft.jsonl", {"prompt": "4+8=", "response": response}, {"prompt": "1=", "response": "1"}
    )
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
    [pair] = read_demonstrations(
        write_rows(tmp_path / "sft.jsonl", {"messages": chat}), tokenizer=characters, max_length=7
    ).demonstrations
    assert pair.prompt.tolist() == [6, 12, 10, 13] and pair.response.tolist() == [3, 4, 1]


def test_overlong_pairs_are_counted(tmp_path, characters):
    files = write_rows(
        tmp_path / "sft.jsonl", {"prompt": "4+8=", "response": "12"}, {"prompt": "4+8=", "response": "123"}
    )
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
        ({"prompt": "1=", "response": []}, "must end with a text to train on"),
        ({"prompt": "1=", "response": [{"text": "1", "learn": False}]}, "must end with a text to train on"),
        ({"prompt": "1=", "response": ["1"]}, "must be {text, learn}"),
        ({"prompt": "1=", "response": [{"text": "1", "learn": 1}]}, "must be {text, learn}"),
        ({"prompt": "1=", "response": [{"text": " ", "learn": True}]}, "text in response is empty"),
    ],
)
def test_a_bad_row_is_named(tmp_path, characters, row, said):
    with pytest.raises(UserError, match=r"sft\.jsonl, line 1") as e:
        read_demonstrations(write_rows(tmp_path / "sft.jsonl", row), tokenizer=characters, max_length=10)
    assert said in str(e.value)


CHAT = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3, in words?"},
    {"role": "assistant", "content": "It is six.\nAnything else?"},
    {"role": "user", "content": "No."},
    {"role": "assistant", "content": "Bye, then!"},
]
# Around what the assistant says in Qwen2.5's template, for transformers' own mask of it.
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{{ '\\n' }}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def qwen(shared):
    """Qwen2.5's tokenizer, with its own template."""
    if not (shared / "tokenizers/qwen2.5").is_dir():
        pytest.skip("no tokenizer of Qwen2.5 is beside this checkout")
    return load_tokenizer(str(shared / "tokenizers/qwen2.5"))


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_every_turn_of_a_chat_has_the_mask_that_transformers_gives_it(tmp_path, qwen, system):
    messages = system + CHAT
    files = write_rows(tmp_path / "sft.jsonl", {"messages": messages})
    [found] = read_demonstrations(files, tokenizer=qwen, max_length=200, learn_turns="all").demonstrations
    whole = qwen.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    ours = [*found.prompt, *found.response]
    assert ours == whole[: len(ours)] and qwen.decode(whole[len(ours) :]) == "\n"  # nothing reads what follows the end
    made = as_trajectory(found, "0")
    learned = [qwen.decode(run) for run in runs(made)]
    assert learned == [f"{m['content']}<|im_end|>" for m in CHAT[1::2]]
    if system:  # without one Qwen's template brings its own, which the marked one does not
        marked = qwen.apply_chat_template(
            messages, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert marked["input_ids"] == whole
        assert marked["assistant_masks"][: len(ours)] == made.sampled.astype(int).tolist()
        assert sum(marked["assistant_masks"]) == made.sampled.sum() > 10


def runs(made):
    """The stretches of tokens that are learned from."""
    out, before = [], False
    for token, learn in zip(made.tokens.tolist(), made.sampled.tolist(), strict=True):
        if learn:
            out += [[]] if not before else []
            out[-1].append(token)
        before = learn
    return out


def test_the_last_turn_alone_has_the_same_tokens(tmp_path, qwen):
    files = write_rows(tmp_path / "sft.jsonl", {"messages": CHAT})
    [last] = read_demonstrations(files, tokenizer=qwen, max_length=200).demonstrations
    [every] = read_demonstrations(files, tokenizer=qwen, max_length=200, learn_turns="all").demonstrations
    assert [*last.prompt, *last.response] == [*every.prompt, *every.response]
    assert [qwen.decode(run) for run in runs(as_trajectory(last, "0"))] == ["Bye, then!<|im_end|>"]


def test_a_greeting_is_read_and_not_learned_from(tmp_path, characters):
    characters.chat_template = (
        "{% for m in messages %}{{ '=' if m.role == 'assistant' }}{{ m.content }}"
        "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    chat = [{"role": r, "content": c} for r, c in (("assistant", "9"), ("user", "1"), ("assistant", "2"))]
    chat += [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    [found] = read_demonstrations(
        write_rows(tmp_path / "sft.jsonl", {"messages": chat}), tokenizer=characters, max_length=20, learn_turns="all"
    ).demonstrations
    assert characters.decode(found.prompt) == "=9<eos>1="
    assert characters.decode(found.response) == "2<eos>3=4<eos>"
    assert found.learn.tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",  # no end
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' }}<eos>{% endfor %}",  # but the last
    ],
)
def test_a_template_that_changes_turns_is_refused(tmp_path, characters, template):
    characters.chat_template = template
    chat = [
        {"role": r, "content": c} for r, c in (("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    ]
    with pytest.raises(UserError, match=r"line 1: .* changes message 2 .* data\.learn_turns=last"):
        read_demonstrations(
            write_rows(tmp_path / "sft.jsonl", {"messages": chat}),
            tokenizer=characters,
            max_length=20,
            learn_turns="all",
        )
