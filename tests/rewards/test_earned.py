"""Rewards earned inside a response: the forms that a custom function may return, and their tokens."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.rewards import pool_worker
from jppo.rewards.graders import FunctionPart
from jppo.rewards.parts import ConversationPart, RewardSum, at_characters, parse_weights, sample_of
from jppo.rewards.pool import Pool
from jppo.runlog import trajectories
from jppo.types import Exchange, Prompt, Reward, Trajectory
from tests.make import bytes_as_text

PROMPT = Prompt("p7", "s", "q", np.zeros(2, np.int32), "truth", {"note": "kept"})
SAMPLE = {"data_source": "s", "text": "ab\n\n \n\ncd", "truth": "", "extra": {}, "turns": 2}


def conversation(*turns, exchange=None):
    """A trajectory of two prompt tokens and turns of the policy (text) or of a tool (bytes)."""
    tokens, sampled = [1, 2], [False, False]
    for turn in turns:
        own = isinstance(turn, str)
        ids = [*turn.encode(), 0] if own else list(turn)
        tokens, sampled = tokens + ids, sampled + [own] * len(ids)
    n, text = len(tokens), bytes_as_text(tokens[2:])
    return Trajectory(
        "p7", np.int32(tokens), np.array(sampled), np.zeros(n, np.float32), np.zeros(n, np.int32), text, "stop", 1,
        exchange=exchange,
    )  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Grades a trajectory by a function that returns an expression in its arguments."""
    pool = Pool(1, timeout_s=60.0, memory_bytes=2**30)
    folder = tmp_path_factory.mktemp("functions")

    def grade(returned, *trajectories, batch=False):
        file = folder / f"f{len(list(folder.iterdir()))}.py"
        if batch:
            source = f"def f(data_sources, solution_strs, ground_truths, extra_infos):\n    return {returned}\n"
        else:
            source = f"def f(data_source, solution_str, ground_truth, extra_info=None):\n    return {returned}\n"
        file.write_text(source)
        part = FunctionPart(f"{file}:f", pool=pool, decode=bytes_as_text)
        reward_sum = RewardSum({"function_score": part}, parse_weights("", ["function_score"]), score_on_error=None)
        return reward_sum.grade(sample_of(PROMPT, t) for t in trajectories)

    yield grade
    pool.close()


# Placement on tokens


def test_each_form_is_placed_on_the_last_token_of_its_text(graded):
    t = conversation("one\n\ntwo\n\nthree")  # 15 characters and the end token
    (by_step,) = graded("{'steps': [0.5, -1, 2]}", t)
    assert by_step == Reward(1.5, {"function_score": 1.5}, None, earned=((2, 0.5), (7, -1.0), (14, 2.0)))
    (by_span,) = graded("{'score': 3, 'spans': [(0, 3, 0.5), (5, 8, -1)], 'words': 3}", t)
    assert by_span.score == 3.0 and by_span.earned == ((2, 0.5), (7, -1.0))
    assert by_span.parts == {"function_score": 3.0, "function_score/words": 3.0}
    (by_turn,) = graded("{'turns': [2.5]}", t)
    assert (by_turn.score, by_turn.earned) == (2.5, ((15, 2.5),))  # the end token is the turn's last
    (by_line,) = graded("{'steps': [1.0, 2.0], 'delimiter': 'two'}", t)
    assert by_line.earned == ((4, 1.0), (14, 2.0))


def test_turns_of_a_conversation_are_told_apart_and_placed_at_their_ends(graded):
    t = conversation("go", b"[said]", "further", b"[no]", "on", exchange=Exchange(2, 0, 0.0, 0.0, None))
    returned = "{'turns': [len(turn) for turn in extra_info['turns']], 'kept': extra_info['note'] == 'kept'}"
    (found,) = graded(returned, t)
    assert found.score == 11.0 and found.parts["function_score/kept"] == 1.0
    ends = [k for k in range(len(t.tokens) - 2) if t.sampled[2:][k] and not np.append(t.sampled[2:], False)[k + 1]]
    assert found.earned == tuple(zip(ends, (2.0, 7.0, 2.0), strict=True)) and ends == [2, 16, 23]
    (found,) = graded("{'spans': [(2, 8, 1.5)]}", t)  # characters of the tool's text
    assert found.earned == ((8, 1.5),) and not t.sampled[2:][8], "the trainer moves it"


def test_a_function_of_the_batch_returns_either_form(graded):
    returned = "[1.0, {'steps': [2.0]}, {'turns': []}]"
    one, two, three = graded(returned, *[conversation("abc")] * 3, batch=True)
    assert (one.score, one.earned) == (1.0, ())
    assert (two.score, two.earned) == (2.0, ((2, 2.0),))
    assert "0 amounts for the 1 turns" in three.error
    one, two = graded(
        "[1.0, {'steps': [1e308] * solution_strs[1].count('x')}]", conversation("a"), conversation("x\n\nx"), batch=True
    )
    assert one.score == 1.0 and "the score inf" in two.error  # an error of its own sample


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\ufffd"), max_size=150), st.data())
def test_an_amount_is_on_the_token_that_completes_its_last_character(text, data):
    """Against the bytes of each prefix: characters have one to four tokens."""
    if not text:
        return
    ends = data.draw(st.lists(st.integers(1, len(text)), max_size=6))
    expected = tuple((len(text[:end].encode()) - 1, float(i)) for i, end in enumerate(ends))
    amounts = tuple((end, float(i)) for i, end in enumerate(ends))
    assert at_characters(amounts, [*text.encode(), 0], bytes_as_text) == expected
    beyond = at_characters(((len(text) + 9, 1.0),), list(text.encode()), bytes_as_text)
    assert beyond == ((len(text.encode()) - 1, 1.0),)  # on the last token


@pytest.mark.parametrize("behind", ["", "bb"])
def test_a_character_of_two_blocks_of_tokens_is_on_its_last_token(behind):
    """Tokens are bytes here and blocks have 32: the second of its two bytes is the first of the second block."""
    tokens = list(("a" * 31 + "é" + behind).encode())
    amounts = ((31, 1.0), (32, 2.0), *([(33, 3.0)] if behind else []))
    expected = ((30, 1.0), (32, 2.0), *([(33, 3.0)] if behind else []))
    assert at_characters(amounts, tokens, bytes_as_text) == expected


def test_a_space_that_a_decoder_drops_at_the_start_does_not_shift_later_tokens():
    words = [f"▁w{i}" for i in range(100)]  # as a sentencepiece decoder, which strips the first space

    def decode(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    text = decode(range(100))
    amounts = tuple((text.index(f"w{i}") + len(f"w{i}"), float(i)) for i in (11, 31, 32, 33, 64, 99))
    placed = at_characters(amounts, list(range(100)), decode)
    assert placed == tuple((i, float(i)) for i in (11, 31, 32, 33, 64, 99))


# Bad input


@pytest.mark.parametrize(
    "returned, said",
    [
        ("{'steps': [1.0]}", "1 amounts for the 2 steps of the response; return one for each text between delimiter="),
        ("{'turns': [1.0, 2.0]}", "2 amounts for the 1 turns of the response; return one for each"),
        ("{'spans': [(0, 99, 1.0)]}", r"the span \(0, 99, 1.0\) of a response of 6 characters; a span is"),
        ("{'spans': [(3, 3, 1.0)]}", "0 <= start < end"),
        ("{'spans': [(0, float('inf'), 1.0)]}", "whole numbers"),
        ("{'spans': [(0, 1.5, 1.0)]}", "whole numbers"),
        ("{'spans': [3]}", "the span 3 of a response"),
        ("{'steps': [1.0, float('nan')]}", "the amount nan in steps; it must be a finite number"),
        ("{'turns': ['good']}", "the amount 'good' in turns"),
        ("{'steps': [1, 2], 'turns': [3]}", "steps and turns; return one of spans, steps, turns"),
        ("{'steps': [1, 2], 'delimiter': ''}", "delimiter=''; it must be a text"),
        ("{'steps': [1, 2], 'score': float('inf')}", "the score inf"),
        ("{'steps': 3}", "a dict without 'score'"),
        ("{'steps': [1e308, 1e308]}", "the score inf; it must be a finite number"),
        ("{'steps': [1e39, -1e39], 'score': 0}", r"the weighted reward 1e\+39 must be finite in float32"),
        ("{'score': 10**5000}", "the score int; it must be"),
        ("1e300", r"the weighted reward 1e\+300 must be"),
    ],
)
def test_a_wrong_result_is_an_error_of_its_sample(graded, returned, said):
    wrong, right = graded(f"{returned} if 'b' in solution_str else 1.0", conversation("a\n\nbcd"), conversation("x"))
    assert math.isnan(wrong.score) and wrong.earned == () and wrong.unusable
    assert re.search(said, wrong.error), wrong.error
    assert right == Reward(1.0, {"function_score": 1.0}, None)


def test_numbers_under_the_names_of_forms_stay_extra_values():
    found = pool_worker.answer_of({"score": 1, "steps": 3, "turns": np.float32(2), "spans": None}, SAMPLE)
    assert found == {"score": 1.0, "parts": {"steps": 3.0, "turns": 2.0}, "error": None}


def test_blank_texts_are_no_steps_and_arrays_are_lists():
    found = pool_worker.answer_of({"steps": np.float32([0.5, 0.25])}, SAMPLE)
    assert found["score"] == 0.75 and found["earned"] == ("characters", ((2, 0.5), (9, 0.25)))
    assert json.loads(json.dumps(found))["earned"] == ["characters", [[2, 0.5], [9, 0.25]]]


# Conversations, weights, and every place where a reward is stored


def test_scores_of_partners_are_earned_at_the_ends_of_their_turns():
    t = conversation("a", b"x", "b", exchange=Exchange(0, 0, 0.0, 0.75, None, earned=((1, 0.5), (4, 0.25))))
    found = ConversationPart().submit(sample_of(PROMPT, t)).result(0)
    assert found == Reward(0.75, {}, None, earned=((1, 0.5), (4, 0.25)))


def test_amounts_have_the_weight_of_their_part(graded):
    exchange = Exchange(0, 0, 0.0, 0.75, None, earned=((1, 0.5), (4, 0.25)))
    part = ConversationPart()
    reward_sum = RewardSum(
        {"a": part, "b": part, "c": part}, parse_weights("a=2,b=-1,c=0", ["a", "b", "c"]), score_on_error=0.0
    )
    t = conversation("a", b"x", "b", exchange=exchange)
    (found,) = reward_sum.grade([sample_of(PROMPT, t)])
    assert found.score == 0.75
    assert found.earned == ((1, 1.0), (4, 0.5), (1, -0.5), (4, -0.25))
    failed = dataclasses.replace(t, exchange=dataclasses.replace(exchange, fault="gone"))
    (found,) = reward_sum.grade([sample_of(PROMPT, failed)])
    assert (found.score, found.earned) == (0.0, ()) and found.error


def test_earned_amounts_survive_json_and_other_hosts():
    reward = Reward(1.0, {"p": 1.0}, None, earned=((3, 0.1), (5, -2.0)))
    assert trajectories.reward_of(json.loads(json.dumps(dataclasses.asdict(reward)))) == reward
    old = {name: value for name, value in dataclasses.asdict(reward).items() if name != "earned"}
    assert trajectories.reward_of(old) == dataclasses.replace(reward, earned=())  # of an earlier version

    class Two:
        count = 2

        def gather(self, own):
            return json.loads(json.dumps([own(), own()]))

    assert trajectories.rewards_of_all(Two(), lambda: [reward]) == [reward, reward]
    t = conversation("a", exchange=Exchange(0, 0, 0.0, 0.5, None, earned=((1, 0.5),)))
    (back,) = trajectories.deserialise(trajectories.serialise([t]))
    assert back.exchange == t.exchange
