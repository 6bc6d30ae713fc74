import json

import pytest
import tokenizers
from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

from examples import arithmetic
from jppo.errors import UserError

SETTINGS = {"seed": 1, "test": 1000, "sloppy": 0.6, "demonstrations": 8}


@pytest.fixture(scope="module")
def made():
    return arithmetic.make(**SETTINGS)


def numbers(row):
    return tuple(int(n) for n in row["prompt"].removesuffix("=").split("+"))


def test_train_and_test_are_disjoint_and_whole(made):
    train, test = ({row["prompt"] for row in made[name]} for name in ("train", "test"))
    assert (len(made["train"]), len(made["test"])) == (5561, 1000)
    assert (len(train), len(test), len(train | test)) == (5561, 1000, 6561)
    assert {row["prompt"] for row in made["sft"]} == train and len(made["sft"]) == 8 * 5561


def test_every_answer_is_the_sum_and_no_digit_of_a_problem_is_zero(made):
    for row in made["train"] + made["test"]:
        assert int(row["ground_truth"]) == sum(numbers(row)) and "0" not in row["prompt"]
        assert len(row["prompt"]) == 6 and row["data_source"] == "arithmetic"


def test_the_teacher_forgets_carries_and_nothing_else(made):
    assert arithmetic.sloppy_sum(47, 85) == 122 and arithmetic.sloppy_sum(41, 85) == 126
    forgot = carried = 0
    for row in made["sft"]:
        a, b = numbers(row)
        wrong = int(row["response"]) != a + b
        forgot, carried = forgot + wrong, carried + (a % 10 + b % 10 >= 10)
        assert not wrong or int(row["response"]) == a + b - 10
    assert forgot / carried == pytest.approx(0.6, abs=0.02)


def test_the_habit_is_right_on_36_of_81_problems():
    right = sum(arithmetic.sloppy_sum(a, b) == a + b for a, b in arithmetic.problems())
    assert right * 81 == 36 * 6561


def test_the_seed_decides_all(made):
    assert arithmetic.make(**SETTINGS) == made
    assert arithmetic.make(**SETTINGS | {"seed": 2})["test"] != made["test"]


@pytest.mark.parametrize(("key", "value"), [("test", 0), ("test", 6561), ("sloppy", 1.5), ("demonstrations", 0)])
def test_bad_arguments_are_named(key, value):
    with pytest.raises(UserError, match=f"--{key}={value}"):
        arithmetic.make(**SETTINGS | {key: value})


def test_the_tokenizer_gives_one_token_a_character(character_model, made):
    tokenizer = AutoTokenizer.from_pretrained(str(character_model))
    file = tokenizers.Tokenizer.from_file(str(character_model / "tokenizer.json"))
    assert tokenizer.encode("47+85=") == [6, 9, 12, 10, 7, 13]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    for row in made["sft"][:200]:
        text = row["prompt"] + row["response"]
        ids = tokenizer.encode(text)
        assert len(ids) == len(text) and file.encode(text).ids == ids and tokenizer.decode(ids) == text


def test_the_tokenizer_keeps_spaces_and_newlines(tmp_path):
    arithmetic.write_model(tmp_path, "ab \n")
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    ids = tokenizer.encode("a b\n")
    assert ids == [2, 4, 3, 5] and tokenizer.decode(ids) == "a b\n"


def test_the_model_is_a_small_qwen2(character_model):
    config = AutoConfig.from_pretrained(str(character_model))
    model = Qwen2ForCausalLM(config)
    assert 0.9e6 < model.num_parameters() < 1.1e6
    assert config.hidden_size // config.num_attention_heads == 32
    generation = json.loads((character_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config.eos_token_id == 1


def test_the_command_writes_all_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["arithmetic", "--out", str(tmp_path / "new"), "--test", "10"])
    arithmetic.main()
    written = {str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*.json*")}
    assert {"train.jsonl", "test.jsonl", "sft.jsonl", "model/config.json", "model/tokenizer.json"} <= written
    assert "test.jsonl: 10 rows" in capsys.readouterr().out


def test_a_file_in_the_way_is_exit_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["arithmetic", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as e:
        arithmetic.main()
    assert e.value.code == 2 and "cannot be created" in capsys.readouterr().err


def test_a_bad_argument_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["arithmetic", "--out", str(tmp_path), "--sloppy", "2"])
    with pytest.raises(SystemExit) as e:
        arithmetic.main()
    assert e.value.code == 2 and capsys.readouterr().err.startswith("error: --sloppy=2.0")


@pytest.mark.parametrize(
    ("answer", "score", "by_character"),
    [
        ("146", 1, [1 / 3, 1 / 3, 1 / 3]),
        ("136", 0, [1 / 3, -1 / 3]),  # the carry is forgotten: nothing can be earned any more
        ("147", 0, [1 / 3, 1 / 3, -2 / 3]),
        ("14", 0, [1 / 3, 1 / 3]),  # the rest of the score, -2/3, is earned at the end
        ("1466", 0, [1 / 3, 1 / 3, 1 / 3, -1]),
        ("46", 0, [0]),
        ("", 0, []),
    ],
)
def test_a_sum_is_earned_digit_by_digit(answer, score, by_character):
    found = arithmetic.compute_score("arithmetic", answer, "146")
    assert found["score"] == score
    assert [(i, i + 1) for i in range(len(by_character))] == [span[:2] for span in found["spans"]]
    assert [amount for *_, amount in found["spans"]] == pytest.approx(by_character)
