import json

import numpy as np
import pytest

from jppo.data import check
from tests.make import write_rows

CHAT = [{"role": "user", "content": "1+1="}]


def row(prompt, answer="2", source="arithmetic", **more):
    return {"prompt": prompt, "ground_truth": answer, "data_source": source, **more}


def lines(capsys, *args):
    check.main(list(args))
    return capsys.readouterr().out.splitlines()


def test_findings_of_bad_data_are_warned_of(tmp_path, capsys, character_model):
    train = write_rows(
        tmp_path / "train.jsonl",
        row("1+1="), row("2+2=", "", "strange"), row("1+1="), row("11111+2=", None), row("3+3=", level=1),
    )  # fmt: skip
    val = write_rows(tmp_path / "val.jsonl", row("3+3="), row("4+4="))
    out = lines(
        capsys, train, "--val", val, "--tokenizer", str(character_model), "--max_prompt_length", "5",
    )  # fmt: skip
    assert out[0] == "training set: 5 rows"
    assert out[1:7] == [
        "WARN  rows        train: 5; columns prompt, ground_truth, data_source, level; not every row has level",
        "OK    source      arithmetic: 4 rows, graded by exact",
        "WARN  source      strange: 1 rows, no grader: set reward.grader or reward.function",
        f"WARN  answers     2 of 5 rows without an answer, the first is {train}, line 2",
        f"WARN  duplicates  1 of 5 rows with the prompt of an earlier row, the first is {train}, line 3",
        f"WARN  over-long   1 of 5 rows with a prompt of more than 5 tokens, the first is {train}, line 4",
    ]
    assert "OK    lengths     4 to 8 tokens, mean 4.8" in out and "      | 1+1=" in out
    overlap = (
        f"WARN  overlap     1 of 2 rows of the test set with a prompt of the training set, the first is {val}, line 1"
    )
    assert out[out.index("test set: 2 rows") :].count(overlap) == 1


def test_rows_without_source_and_answer_are_warnings(tmp_path, capsys):
    out = lines(capsys, write_rows(tmp_path / "a.jsonl", {"prompt": "1+1="}, {"prompt": "2+2="}))
    assert [line for line in out if line.startswith("WARN")] == [
        "WARN  source      unknown: 2 rows, no grader: set reward.grader or reward.function",
        f"WARN  answers     2 of 2 rows without an answer, the first is {tmp_path / 'a.jsonl'}, line 1",
    ]


def test_good_data_are_ok(tmp_path, capsys):
    files = [write_rows(tmp_path / f"{name}.jsonl", row(name)) for name in "ab"]
    out = lines(capsys, *files)
    assert out[0] == "training set: 2 rows" and not [line for line in out if line.startswith("WARN")]
    assert "OK    lengths     1 to 1 characters, mean 1.0" in out
    assert "      the first prompt, raw: use --tokenizer to see it as the model reads it" in out


def test_the_first_prompt_of_gsm8k_as_the_model_sees_it(shared, capsys):
    out = lines(
        capsys,
        str(shared / "data/gsm8k-verl/train.parquet"),
        "--tokenizer", str(shared / "tokenizers/qwen2.5"),
        "--max_prompt_length", "255",
        "--system_prompt", "Add up.",
    )  # fmt: skip
    assert "OK    source      openai/gsm8k: 7473 rows, graded by gsm8k_strict" in out
    at = next(i for i, line in enumerate(out) if "the first prompt" in line)
    assert out[at + 1 : at + 4] == [
        "      | <|im_start|>system",
        "      | Add up.<|im_end|>",
        "      | <|im_start|>user",
    ]
    assert out[at + 5] == "      | <|im_start|>assistant"
    assert sum(int(line.split()[-1]) for line in out if " to " in line and "#" in line and "|" not in line) == 7473


def test_messages_that_a_model_may_not_see_are_warned_of(tmp_path, capsys):
    said = [{"role": "user", "content": "1"}, {"role": "critic", "content": "2"}, {"role": "assistant", "content": "3"}]
    write_rows(tmp_path / "rows.jsonl", row(said), row(CHAT))
    out = lines(capsys, str(tmp_path / "rows.jsonl"))
    assert any(line.startswith("WARN  roles       critic: a chat template may leave out") for line in out)
    assert any(line.startswith("WARN  messages    1 of 2 rows that end with an assistant's") for line in out)


def test_bars_count_every_value():
    values = np.array([5, 5, 6, 30])
    bars = check.histogram(values)
    assert [int(bar.split()[-1]) for bar in bars] == [3, 0, 0, 0, 0, 0, 0, 0, 1]  # 5 to 7, 8 to 10, ... 29 to 31
    assert bars[0].startswith("       5 to  7  " + "#" * 40) and bars[-1].startswith("      29 to 31  ###")
    assert len(check.histogram(np.array([4]))) == 1


@pytest.mark.parametrize(
    ("rows", "args", "said"),
    [
        ([row("1"), row(7)], [], "line 2: prompt is 7"),
        ([row("1"), row(CHAT)], [], "line 2: the prompt is in the form of chat messages"),
        ([row("1", [])], [], "line 1: ground_truth is []"),
        ([row(json.dumps(CHAT))], [], "line 1: prompt is the text of a list of chat messages"),
        ([row("1")], ["--max_prompt_length", "3"], "give --tokenizer"),
        ([row("1")], ["--tokenizer", "/none"], "no directory /none"),
        ([row("1")], ["--val", "none.jsonl"], "--val: no file none.jsonl"),
        ([row("1")], ["--system_prompt", "9"], "the prompt is text"),
    ],
)
def test_bad_input_is_exit_2(tmp_path, capsys, rows, args, said):
    with pytest.raises(SystemExit) as e:
        check.main([write_rows(tmp_path / "d.jsonl", *rows), *args])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and said in err
