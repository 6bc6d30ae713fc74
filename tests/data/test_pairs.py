"""Pairs from scored samples, and the story example's data."""

import pytest

from examples import stories
from jppo.data import pairs
from jppo.data.rows import read_rows
from jppo.rewards.graders import GRADERS
from tests.make import write_rows


def sample(uid, response, score, finish="stop"):
    return {"uid": uid, "prompt": f"p{uid} ", "response": response, "score": score, "finish": finish}


def test_the_better_of_a_prompts_responses_are_set_against_the_worse(tmp_path, capsys):
    rows = [sample("a", f"r{i}", score) for i, score in enumerate((1.0, 0.0, 0.5, 0.0, None))]
    rows += [sample("b", "r5", 1.0), sample("b", "r6", 1.0), sample("c", "r7", 0.0), sample("c", "r8", 2.0)]
    file = write_rows(tmp_path / "test.jsonl", *rows)
    pairs.main(["--samples", file, "--out", str(tmp_path / "out"), "--test", "0.5"])
    assert "2 pairs of 1 prompts" in capsys.readouterr().out
    made = {name: [r.columns for r in read_rows(tmp_path / f"out/{name}.jsonl")] for name in ("train", "test")}
    of = {rows[0]["prompt"]: rows for rows in made.values()}
    assert of.keys() == {"pa ", "pc "}  # of b all are alike
    assert [p["chosen"] for p in of["pa "]] == ["r0", "r2"] and {p["rejected"] for p in of["pa "]} == {"r1", "r3"}
    assert [p["margin"] for p in of["pa "]] == [1.0, 0.5]
    assert of["pc "] == [{"prompt": "pc ", "chosen": "r8", "rejected": "r7", "margin": 2.0}]


@pytest.mark.parametrize(
    ("rows", "more", "complaint"),
    [
        ([{"prompt": "p"}], [], "line 1 has no 'uid'"),
        ([sample("a", "r", 1.0)], [], "0 prompts have responses of different scores"),
        ([sample("a", "r", 1.0)], ["--test", "1"], "--test=1.0 is a share"),
        ([], [], "has no rows"),
        ([sample("a", "r", 1.0) | {"uid": {"a": 1}}], [], "line 1: uid is {'a': 1}, of type dict; it must be text"),
        ([sample("a", "r", 1.0) | {"response": [1]}], [], "line 1: response is [1], of type list; it must be text"),
        ([sample("a", "r", 1.0) | {"response": "\ud800"}], [], "half of a surrogate pair"),
        ([sample("a", "r", 1.0) | {"prompt": 3}], [], "line 1: prompt is 3, of type int; it must be text"),
        *(
            ([sample("a", "r", score)], [], "it must be a finite number")
            for score in (True, "1", float("nan"), float("-inf"), 10**400, [1.0])
        ),
    ],
)
def test_what_gives_no_pairs_is_one_line(tmp_path, capsys, rows, more, complaint):
    file = write_rows(tmp_path / "test.jsonl", *rows)
    with pytest.raises(SystemExit) as e:
        pairs.main(["--samples", file, "--out", str(tmp_path / "out"), *more])
    said = capsys.readouterr().err
    assert e.value.code == 2 and complaint in said and said.count("\n") == 1


def test_a_file_that_is_not_there_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        pairs.main(["--samples", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)])
    assert e.value.code == 2 and "none.jsonl cannot be read" in capsys.readouterr().err


def test_openings_are_begun_sentences_and_are_in_one_set_only():
    made = stories.make(seed=1, test=64, word="flower")
    prompts = [row["prompt"] for rows in made.values() for row in rows]
    assert len(made["test"]) == 64 and len(prompts) == len(set(prompts)) == len(stories.openings()) == 320
    assert not any(prompt.endswith((".", " ")) or "{" in prompt for prompt in prompts)
    assert stories.make(seed=1, test=64, word="flower") == made != stories.make(seed=2, test=64, word="flower")
    assert "One day, there was a shy girl named Lily" in prompts


def test_demonstrations_are_the_stories_that_their_model_ended(tmp_path, capsys):
    rows = [
        sample("a", " went home.<|end_story|>", 0.0),
        sample("a", " went on", 0.0, finish="length"),
        sample("b", "<|end_story|>", 1.0),
        sample("c", " saw < it > |.", None),
    ]
    file = write_rows(tmp_path / "samples.jsonl", *rows)
    stories.main(["--out", str(tmp_path), "--samples", file])
    assert [row.columns for row in read_rows(tmp_path / "demo.jsonl")] == [
        {"prompt": "pa ", "response": " went home."},
        {"prompt": "pc ", "response": " saw < it > |."},
    ]
    with pytest.raises(SystemExit):
        stories.main(["--out", str(tmp_path), "--samples", write_rows(tmp_path / "samples.jsonl", rows[1])])
    assert "none of 1 samples was ended by its model" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--test", "0"], ["--test", "320"], ["--word", "two words"], ["--word", ""]])
def test_openings_that_cannot_be_are_one_line(tmp_path, capsys, argv):
    with pytest.raises(SystemExit) as e:
        stories.main(["--out", str(tmp_path), *argv])
    assert e.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("story", "score"),
    [
        ("She saw a flower.", 1.0),
        ("Flowers!", 1.0),
        ("the flower's smell", 1.0),
        ("a sunflower", 0.0),
        ("flowery", 0.0),
        ("", 0.0),
    ],
)
def test_a_word_is_mentioned_as_a_word(story, score):
    assert GRADERS["mentions"](story, "flower").score == score
