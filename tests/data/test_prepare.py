"""Preparation commands, on small files in their publishers' layouts."""

import gzip
import importlib
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jppo.data.preferences import read_pairs
from jppo.data.prompts import read_prompts
from jppo.data.tokenizer import load_tokenizer
from jppo.rewards.graders import graders_for

MATH = {"problem": "Add 1 and 1.", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{4}{2}}$."}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve: 2+2. Remember to put your answer on its own line.", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
TALK = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: A joke?\n\nAssistant:"
HH = {"chosen": f"{TALK} Yes: ...", "rejected": f"{TALK} No."}


@pytest.fixture
def put(tmp_path):
    """(path below the directory of --from, rows) -> that file, in the form that its name says."""

    def write(name, *rows):
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows[0], indent=4))
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    return write


@pytest.fixture
def run(tmp_path, capsys):
    """(command, path below the directory of --from) -> the rows of each file that it writes; or its line of error."""

    def one(command, below=""):
        main = importlib.import_module(f"jppo.data.{command}").main
        out = tmp_path / "out"
        try:
            main(["--from", str(tmp_path / "from" / below), "--out", str(out)])
        except SystemExit as e:
            assert e.code == 2 and not out.exists()
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            return error
        return {str(p.relative_to(out)): pq.read_table(p).to_pylist() for p in sorted(out.rglob("*.parquet"))}

    return one


def graded(row, response):
    return graders_for([row["data_source"]])[row["data_source"]](response, row["reward_model"]["ground_truth"]).score


def test_math_as_verl_prepares_it(put, run):
    put("data/train-00000-of-00001.parquet", MATH, MATH | {"solution": r"\boxed{1} or $\boxed 3$."})
    put("data/test-00000-of-00001.parquet", MATH)
    put("README.json", {"problem": "not of a split"})
    made = run("math")
    assert list(made) == ["test.parquet", "train.parquet"]
    first, second = made["train.parquet"]
    assert first["prompt"] == [
        {
            "role": "user",
            "content": r"Add 1 and 1. Let's think step by step and output the final answer within \boxed{}.",
        }
    ]
    assert first["data_source"] == "DigitalLearningGmbH/MATH-lighteval" and first["ability"] == "math"
    assert first["reward_model"] == {"style": "rule", "ground_truth": r"\frac{4}{2}"}
    assert first["extra_info"]["split"] == "train" and second["extra_info"]["index"] == 1
    assert second["reward_model"]["ground_truth"] == "3"
    assert graded(first, r"\boxed{4/2}") == 1.0 and graded(first, first["extra_info"]["solution"]) == 1.0


def test_the_first_math_has_a_file_for_each_problem(put, run):
    for name in ("train/algebra/1.json", "train/geometry/7.json", "test/algebra/1.json"):
        put(name, MATH)
    assert {name: len(rows) for name, rows in run("math").items()} == {"test.parquet": 1, "train.parquet": 2}


def test_dapo_has_each_question_once(put, run):
    again = DAPO | {"extra_info": {"index": "other"}}
    other = DAPO | {"reward_model": {"ground_truth": "34", "style": "rule"}}
    put("data/dapo-math-17k.parquet", DAPO, again, other, DAPO)
    rows = run("dapo_math")["train.parquet"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["4", "34"]
    assert rows[0]["extra_info"] == {"split": "train", "index": "9a9b6eb4"}
    assert rows[0]["prompt"] == [{"role": "user", "content": DAPO["prompt"][0]["content"]}]
    assert graded(rows[0], "Answer: $4$") == 1.0 and graded(rows[0], "Answer: 5") == -1.0


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("data/aime-2024.parquet", DAPO),
        ("data/train-00000-of-00001.parquet", {"id": 60, "problem": "2+2?", "answer": "004", "year": "2024"}),
        ("aime_2024_problems.parquet", {"ID": "2024-II-4", "Problem": "2+2?", "Solution": "so", "Answer": 4}),
        ("test.jsonl", {"problem": "2+2?", "answer": "4", "id": "0"}),
    ],
    ids=["verl", "id", "upper", "jsonl"],
)
def test_aime_in_each_of_its_layouts(put, run, name, row):
    put(name, row, row)
    [found] = run("aime", name)["test.parquet"]
    assert found["reward_model"]["ground_truth"] == "4" and found["extra_info"]["split"] == "test"
    assert "its own line" in found["prompt"][0]["content"] and "2+2" in found["prompt"][0]["content"]
    assert graded(found, "so\nAnswer: 4") == 1.0


def test_hh_rlhf_as_transcripts(put, run):
    apart = HH | {"rejected": "\n\nHuman: Bye\n\nAssistant: Bye."}
    empty, twice = HH | {"chosen": TALK}, dict.fromkeys(HH, "\n\nHuman: a\n\nHuman: b\n\nAssistant: c")
    for folder in ("harmless-base", "helpful-base"):
        put(f"{folder}/train.jsonl.gz", HH, apart, empty, twice)
        put(f"{folder}/test.jsonl.gz", HH)
    put("red-team-attempts/red_team_attempts.jsonl.gz", {"transcript": "..."})
    made = run("hh_rlhf")
    turns = [("user", "Hello"), ("assistant", "Hi."), ("user", "A joke?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert made["pairs/train.parquet"] == [{"prompt": messages, "chosen": "Yes: ...", "rejected": "No."}] * 2
    [prompt] = made["prompts/test.parquet"]
    assert prompt["prompt"] == messages and prompt["data_source"] == "Anthropic/hh-rlhf"


def test_hh_rlhf_in_the_layout_that_verl_reads(put, run, tmp_path):
    row = {"prompt": TALK, "response": " Yes: ...", "chosen": " Yes: ...", "rejected": " No."}
    for split in ("train", "test"):
        put(f"data/{split}-00000-of-00001-8349d0765e6718df.parquet", row)
    made = run("hh_rlhf")
    assert made["pairs/test.parquet"][0]["rejected"] == "No."
    assert made["prompts/train.parquet"][0]["data_source"] == "Dahoas/full-hh-rlhf"

    def encode(prompt, response):
        return [ord(c) for m in prompt for c in m["content"]] + [ord(c) for c in response]

    pairs = read_pairs(str(tmp_path / "out/pairs/train.parquet"), encode=encode, max_length=100)
    assert len(pairs.pairs) == 1


def test_what_is_written_is_read_as_prompts(put, run, tmp_path, shared):
    put("train.jsonl", MATH)
    put("test.jsonl", MATH)
    run("math")
    tokenizer = load_tokenizer(str(shared / "tokenizers/qwen2.5"))
    files = str(tmp_path / "out/train.parquet")
    [prompt] = read_prompts(files, tokenizer=tokenizer, max_prompt_length=99, filter_overlong=True).prompts
    assert prompt.ground_truth == r"\frac{4}{2}" and prompt.extra["extra_info"]["level"] == "Level 1"


@pytest.mark.parametrize(
    ("command", "files", "said"),
    [
        ("math", {}, "does not exist; name the directory"),
        ("math", {"notes.txt": "x"}, "has none of train.parquet, .*; name the directory"),
        ("math", {"train.jsonl": MATH}, "has none of test.parquet"),
        (
            "math",
            {"train.jsonl": MATH | {"solution": "It is 5."}},
            r"line 1: solution must hold .*ends with 'It is 5\.'",
        ),
        ("math", {"train.jsonl": {"question": "1+1"}}, "line 1 has no 'problem'; its columns are question"),
        ("dapo_math", {"a.jsonl": {"problem": "1+1"}}, "line 1: prompt is None"),
        ("dapo_math", {"a.jsonl": DAPO | {"reward_model": {}}}, "line 1 has no answer"),
        ("aime", {"a.jsonl": {"problem": "1+1", "answer": "two"}}, "answer is 'two'; AIME's are integers"),
        ("aime", {"a.jsonl": {"problem": "1+1", "answer": 1000}}, "answer is 1000; AIME's are integers"),
        ("aime", {"a.jsonl": {"problem": "1+1"}}, "answer is None; AIME's are integers"),
        ("hh_rlhf", {"train.jsonl.gz": {"chosen": "Hello"}}, "must begin with .*Human:'; it begins with 'Hello'"),
        ("hh_rlhf", {"train.jsonl.gz": {"chosen": TALK}}, "has no 'rejected'"),
        ("hh_rlhf", {"train.jsonl": HH | {"chosen": TALK}}, "none of the 1 rows of train is a pair"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(put, run, command, files, said):
    for name, content in files.items():
        put(name, content)
    error = run(command)
    assert error.startswith("error: ")
    assert re.search(said, error), error


def test_a_broken_gzip_file_is_named(put, run):
    path = put("train.jsonl.gz", HH)
    path.write_bytes(path.read_bytes()[:-12])
    assert "train.jsonl.gz is not a whole gzip file" in run("hh_rlhf")
    path.write_bytes(b"text")
    assert "train.jsonl.gz cannot be read" in run("hh_rlhf")
