"""A conversation in the terminal: what the model is asked, what is shown, how it ends."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
import torch
import transformers

from jppo import chat
from jppo.chat import ChatModel, Conversation, drop_oldest
from jppo.data.tokenizer import decode, end_token_ids, load_tokenizer
from jppo.errors import UserError
from jppo.rollout.inprocess import InprocessEngine
from jppo.types import Prompt, Sampling
from tests.make import one_line

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '+' }}{% endfor %}"


def by_transformers(path, text, *, max_tokens):
    """The text that transformers' model goes on with, greedily."""
    tokenizer = load_tokenizer(str(path))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ends = list(end_token_ids(str(path), tokenizer))
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=ends, pad_token_id=ends[0]
    )
    ids = tokenizer(text, return_tensors="pt")
    whole = model.generate(ids["input_ids"], attention_mask=torch.ones_like(ids["input_ids"]))[0].tolist()
    return decode(tokenizer, whole)[len(decode(tokenizer, ids["input_ids"][0].tolist())) :]


def said(capsys, *words):
    """What the command writes as its answer."""
    chat.main([str(word) for word in words])
    return capsys.readouterr().out


def test_it_goes_on_as_transformers_does(tiny_model, capsys):
    asked = ("--prompt", "13+50=", "--temperature", 0)
    expected = by_transformers(tiny_model, "13+50=", max_tokens=21)
    assert said(capsys, tiny_model, *asked, "--max_tokens", 21) == expected + "\n" and len(expected) > 4


@pytest.mark.parametrize("name", ["stories260k", pytest.param("tinystories-656k", marks=pytest.mark.slow)])
def test_it_goes_on_with_a_story_as_transformers_does(shared, capsys, name):
    model, text = shared / "models" / name, "Once upon a time there was a cat. The cat"
    asked = ("--prompt", text, "--temperature", 0, "--max_tokens", 30, "--context", 128)
    assert said(capsys, model, *asked) == by_transformers(model, text, max_tokens=30) + "\n"


def test_a_seed_gives_the_same_answer(tiny_model, capsys):
    asked = (tiny_model, "--prompt", "13+50=", "--temperature", 1.0, "--max_tokens", 30)
    one, again, other = (said(capsys, *asked, "--seed", seed) for seed in (1, 1, 2))
    assert one == again != other


def test_a_stream_has_the_tokens_of_the_engine(tiny_model):
    model = chat.load_model(
        chat.chat_arguments([str(tiny_model), "--seed", "3", "--temperature", "1", "--top_p", "0.9"])
    )
    ids = model.encode("13+50=")
    streamed = [list(piece) for piece in model.answer(ids, 0)]
    assert len(streamed) > 1 and max(map(len, streamed)) <= chat.AT_ONCE
    drawn = Sampling(1.0, 0.9, -1, 0.0, 1, model.longest, (), False, seed=3)
    sampler = InprocessEngine(chat.engine_settings(model.cfg, "float32", model.room + model.longest, model.room)).ready(
        eos_token_ids=model.ends, decode=model.decode
    )
    sampler.hold(chat.read_weights(str(tiny_model), model.cfg, "float32"), version=0)
    (one,) = sampler.generate([Prompt("a", "", "", np.asarray(ids, np.int32), "", {})], drawn, version=0)
    assert [token for piece in streamed for token in piece] == one.tokens[one.sampled].tolist()


def conversation(asked, answer=("an", "swer"), *, room=100, templated=True, system=None):
    """A conversation with a stand-in whose tokens are characters and whose end token is 0."""

    def encode(messages):
        text = messages if isinstance(messages, str) else "|".join(m["content"] for m in messages)
        return [ord(c) for c in text]

    def reply(ids, turn):
        asked.append(spell(ids))
        yield from ([ord(c) for c in piece] for piece in answer)
        yield [0]

    def spell(ids):
        return "".join(map(chr, ids))

    return Conversation(ChatModel(encode, spell, reply, (0,), room, 9, templated, None), system=system)


def lines(text):
    return iter(text.splitlines(keepends=True))


def test_turns_are_remembered_until_a_reset(capsys):
    asked = []
    chat.answer_lines(conversation(asked, system="s"), lines("a\n\nb\n/help\n/reset\nc\n/exit\nd\n"), terminal=False)
    assert asked == ["s|a", "s|a|answer|b", "s|c"]
    out, err = capsys.readouterr()
    assert out == "answer\n" * 3 and err == f"[{chat.HELP}]\n"


def test_the_oldest_turns_go_and_it_says_so(capsys):
    asked = []
    chat.answer_lines(conversation(asked, room=12), lines("a\nb\nc\n"), terminal=False)
    assert asked == ["a", "a|answer|b", "b|answer|c"]
    assert capsys.readouterr().err == "[the context is full: the oldest 2 messages were dropped]\n"


def test_without_a_template_each_line_stands_alone(capsys):
    asked = []
    chat.answer_lines(conversation(asked, templated=False), lines("a\nb\n"), terminal=False)
    assert asked == ["a", "b"]


def test_a_line_that_is_too_long_ends_a_pipe_and_no_terminal(capsys):
    asked = []
    with pytest.raises(UserError, match="7 tokens, but 6 fit"):
        chat.answer_lines(conversation(asked, room=6), lines("toolong\nb\n"), terminal=False)
    chat.answer_lines(conversation(asked, room=6, templated=False), lines("toolong\nb\n"), terminal=True)
    assert asked == ["b"] and "7 tokens, but 6 fit" in capsys.readouterr().err


def test_an_answer_that_is_cut_is_said(capsys):
    asked = []
    made = conversation(asked)
    endless = ChatModel(**{**vars(made._model), "answer": lambda ids, turn: iter([[ord("x")] * 9])})
    Conversation(endless, system=None).say("a", show=chat.show, tell=chat.tell)
    assert capsys.readouterr() == ("xxxxxxxxx", "[stopped at 9 tokens: see --max_tokens]\n")


def test_an_interrupted_answer_is_kept_as_far_as_it_came(capsys, monkeypatch):
    asked, heard = [], []

    def interrupted(piece):
        heard.append(piece)
        if len(heard) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "show", interrupted)
    made = conversation(asked, ("one", "two", "three"))
    chat.answer_lines(made, lines("a\nb\n"), terminal=True)
    assert asked == ["a", "a|onetwo|b"] and heard == ["one", "two", "one", "two", "three"]
    assert "[stopped]" in capsys.readouterr().err
    heard.clear()
    with pytest.raises(KeyboardInterrupt):
        chat.answer_lines(made, lines("c\n"), terminal=False)


def test_a_template_is_what_the_model_is_spoken_to_by(tiny_model, tmp_path, capsys, monkeypatch):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    alone = by_transformers(tiny_model, "13+50=", max_tokens=5)
    then = by_transformers(tiny_model, f"13+50={alone}+2=", max_tokens=5)
    monkeypatch.setattr(sys, "stdin", io.StringIO("13+50\n2\n"))
    arguments = ("--temperature", 0, "--max_tokens", 5)
    assert said(capsys, tmp_path / "model", *arguments) == f"{alone}\n{then}\n"
    raw = by_transformers(tiny_model, "13+50", max_tokens=5)
    assert said(capsys, tmp_path / "model", *arguments, "--raw", "--prompt", "13+50") == f"{raw}\n"


@pytest.mark.parametrize(
    "words,why",
    [
        (["{none}", "--prompt", "1"], "is not a directory"),
        (["{model}", "--temperature", "-1", "--prompt", "1"], "--temperature=-1.0"),
        (["{model}", "--temperature", "nan", "--prompt", "1"], "--temperature=nan"),
        (["{model}", "--top_p", "0", "--prompt", "1"], "--top_p=0.0"),
        (["{model}", "--seed", "-1", "--prompt", "1"], "--seed=-1"),
        (["{model}", "--max_tokens", "0", "--prompt", "1"], "--max_tokens=0 must be from 1 to 63"),
        (["{model}", "--max_tokens", "64", "--prompt", "1"], "--max_tokens=64 must be from 1 to 63"),
        (["{model}", "--context", "65", "--prompt", "1"], "--context=65 must be from 2 to the 64 tokens"),
        (["{model}", "--system", "s", "--prompt", "1"], "this model has no chat messages"),
        (["{model}", "--prompt", "1" * 33], "33 tokens, but 32 fit"),
        (["{model}", "--prompt", ""], "is empty"),
        (["{model}", "--prompt", "a"], "returns no tokens"),
        (["{adapters}", "--prompt", "1"], "--merge_lora"),
        (["{empty}", "--prompt", "1"], "config.json is missing"),
    ],
)
def test_what_cannot_be_is_one_line(tiny_model, tmp_path, capsys, words, why):
    for name in ("empty", "adapters"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps({}))
    places = {"none": tmp_path / "none", "model": tiny_model, **{n: tmp_path / n for n in ("empty", "adapters")}}
    err = one_line(capsys, chat.main, *(word.format(**places) for word in words))
    assert why in err and err.startswith("error: ")


def turns(*said, system=None):
    """Messages of user and assistant in turn."""
    roles = ["user", "assistant"] * len(said)
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]


def joined(messages):
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
    messages, ids = drop_oldest(turns("aa", "bb", "cc", "dd", "ee"), joined, room)
    assert "".join(map(chr, ids)) == kept == "|".join(m["content"] for m in messages)
    assert messages[0]["role"] == "user"


def test_a_system_message_stays():
    messages, ids = drop_oldest(turns("aa", "bb", "cc", system="s"), joined, 5)
    assert [m["content"] for m in messages] == ["s", "cc"] and len(ids) == 4


def test_what_was_said_last_must_fit():
    with pytest.raises(UserError, match="3 tokens, but 2 fit"):
        drop_oldest(turns("aa", "bb", "ccc"), joined, 2)
    with pytest.raises(UserError, match="4 tokens with the system message, but 3 fit"):
        drop_oldest(turns("aa", "bb", "cc", system="s"), joined, 3)
