"""The check of a reward reads data and reward, and nothing else of a run."""

import re

import pytest

from jppo.rewards import check
from tests.make import ROOT, one_line, write_rows

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth) if ground_truth else len(solution_str) / BY
"""


def printed(capsys):
    """What was printed, without the seconds of a busy machine."""
    return re.sub(r", \d+\.\d s for \d+ responses", "", capsys.readouterr().out)


def verdict(capsys, argv):
    """What a check prints, whose exit code is 1 if a source fails."""
    try:
        check.main(argv)
        code = 0
    except SystemExit as e:
        code = e.code
    out = printed(capsys)
    assert code == any(line.startswith("FAIL") for line in out.splitlines()), out
    return out


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def words(*rows, by=10, **more):
        write_rows(tmp_path / "rows.jsonl", *rows)
        (tmp_path / "mine.py").write_text(FUNCTION.replace("BY", str(by)))
        settings = {"data.train_files": "rows.jsonl", "reward.function": "mine.py"} | more
        return [f"--config.{name}={value}" for name, value in settings.items()]

    return words


def test_neither_model_nor_batches_are_read(words, capsys):
    rows = ({"prompt": "q", "ground_truth": truth} for truth in ("one", "two"))
    check.main(words(*rows, **{"actor.ppo_mini_batch_size": 7, "model.path": "nowhere"}))
    assert printed(capsys) == "OK   unknown: right answers earn 1, others' 0 (2 rows)\n"


def test_it_leaves_no_folder_and_a_failed_grader_has_no_score(words, capsys, tmp_path):
    with pytest.raises(SystemExit):
        check.main(words({"prompt": "q"}, by=0))
    assert "none of 4 responses could be graded (1 rows" in printed(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "rows.jsonl"]


def test_some_rows_without_an_answer_are_counted(words, capsys):
    rows = ({"prompt": "q", "ground_truth": truth} for truth in ("", "one", "two", ""))
    check.main(words(*rows))
    assert printed(capsys) == (
        "WARN unknown: right answers earn 1, others' 0 (2 rows)\n     2 other rows have no answer\n"
    )


def test_rows_without_an_answer_are_scored(words, capsys):
    check.main(words({"prompt": "12345"}, {"prompt": [{"role": "user", "content": "1"}]}))
    said = "no answers in the data; the prompt as the response earns 0.3, an empty response 0"
    assert printed(capsys) == f"OK   unknown: {said} (2 rows)\n"
    with pytest.raises(SystemExit) as e:
        check.main(words({"prompt": "12345"}, by=0))
    assert e.value.code == 1 and "     the first: function_score: ZeroDivisionError" in printed(capsys)


@pytest.mark.parametrize(
    ("rows", "body", "said"),
    [
        ([{"answer": "b"}, {"answer": "c"}], "float(solution_str == extra_info['answer'])", ""),
        ([{"answer": 7}, {"answer": 8}], "float(solution_str == str(extra_info['answer']))", ""),
        ([{}, {}], "float(len(solution_str.split()) > 100)", ""),
        ([{}, {}], "1.0", "every response that was tried earns 1: check that the reward reads the response\n"),
        ([{}, {}], "0.0", "every response that was tried earns 0: check that the reward reads the response"),
        ([{}, {}], "float('</answer>' in solution_str)", ""),
        (
            [{"correct": "b", "id": 1}, {"correct": "c", "id": 2}],
            "float(solution_str.endswith(ground_truth or 'the answer'))",
            "data.ground_truth_key names its column, perhaps 'correct' or 'id'\n",
        ),
        ([{"correct": "b"}, {"correct": "c"}], "float(solution_str.count('!'))", ""),
        ([{}, {}], "-float(len(solution_str))", "an empty response earns more"),
        ([{}, {}], "float(solution_str.count('!'))", ""),
        ([{"ground_truth": "b"}, {"ground_truth": "c"}], "float(solution_str.endswith(ground_truth))", ""),
    ],
)
def test_what_looks_wrong_without_a_ground_truth_is_a_warning(words, capsys, tmp_path, rows, body, said):
    argv = words(*({"prompt": "12345"} | row for row in rows))
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
    (tmp_path / "mine.py").write_text(head + body)
    check.main(argv)
    out = printed(capsys)
    assert out.startswith("WARN" if said else "OK") and said in out and out.count("\n") == 1 + bool(said)


def test_a_function_that_does_not_separate_answers_fails_with_and_without_a_ground_truth(words, capsys):
    rows = [{"prompt": "12345", "answer": text} for text in ("one", "two")]
    with pytest.raises(SystemExit) as e:
        check.main(words(*rows))  # scores the length
    said = printed(capsys)
    assert e.value.code == 1 and said.startswith("FAIL") and check.NO_TRUTH in said


def test_the_time_of_a_slow_reward_is_named(words, capsys, tmp_path):
    argv = words(*({"prompt": "1", "ground_truth": truth} for truth in ("one", "two")))
    head = "import time\ndef compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
    body = head + "    time.sleep(1.2)\n"
    (tmp_path / "mine.py").write_text(body + "    return [float(a == b) for a, b in zip(solution_strs, ground_truths)]")
    check.main(argv)
    found = re.fullmatch(r"OK   unknown: .* \(2 rows, (\d+\.\d) s for 18 responses\)\n", capsys.readouterr().out)
    assert found and float(found[1]) >= 1.2


ASK = """
import json, os, urllib.request

def play(task):
    print("the question is", task["prompt"])
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", method="POST")
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    request.add_header("Content-Type", "application/json")
    messages = [{"role": "user", "content": task["prompt"]}]
    with urllib.request.urlopen(request, json.dumps(OPTIONS | {"messages": messages}).encode()) as answered:
        said = json.load(answered)["choices"][0]["message"]["content"]
    return {"reward": float(said == task["TRUTH"])}
"""
PLAYED = {"reward.function": "", "rollout.agent_reward": "reported", "rollout.agent_format": "plain"}


@pytest.mark.parametrize(
    ("truth", "options", "said"),
    [
        ("ground_truth", "{}", ["OK   unknown: right answers earn 1, others' 0, each said in every turn (2 rows)"]),
        (
            "answer",
            "{}",
            [
                "FAIL unknown: none of 18 responses could be graded (2 rows)",
                "agent exited with 70: KeyError: 'answer'",
                "| the question is 1+1=",
                'agent.py", line',
            ],
        ),
        ("ground_truth", "{'logit_bias': {'1': 5}}", ["FAIL", "| a request was refused: logit_bias"]),
    ],
)
def test_an_agent_program_is_run_with_right_and_wrong_answers(
    words, capsys, tmp_path, tiny_model, truth, options, said
):
    (tmp_path / "agent.py").write_text(ASK.replace("TRUTH", truth).replace("OPTIONS", options))
    agent = PLAYED | {"rollout.agent": "agent.py:play", "model.path": str(tiny_model)}
    argv = words({"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "1+2=", "ground_truth": "3"}, **agent)
    out = verdict(capsys, argv)
    assert all(text in out for text in said), out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.py", "mine.py", "rows.jsonl"]


REFUSED_AND_CAUGHT = """
    try:
        urllib.request.urlopen(request, json.dumps({"messages": messages, "logit_bias": {"1": 5}}).encode())
    except OSError:
        pass
    return"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('os.environ["OPENAI_API_KEY"]', '"mine"', "| a request was refused: the key is of no episode that runs; send"),
        ("    return", REFUSED_AND_CAUGHT, "19 of 19 episodes had a request refused, the first: logit_bias"),
    ],
)
def test_a_refused_request_is_named_whatever_the_agent_makes_of_it(words, capsys, tmp_path, tiny_model, old, new, said):
    text = ASK.replace("TRUTH", "ground_truth").replace("OPTIONS", "{}").replace(old, new)
    (tmp_path / "agent.py").write_text(text)
    agent = PLAYED | {"rollout.agent": "agent.py:play", "model.path": str(tiny_model)}
    argv = words({"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "1+2=", "ground_truth": "3"}, **agent)
    out = verdict(capsys, argv)
    assert out.startswith("FAIL" if said.startswith("|") else "WARN") and said in out, out


def test_the_agent_of_the_page_is_run(words, capsys, tmp_path, tiny_model):
    page = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
    (tmp_path / "agent.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    agent = PLAYED | {"rollout.agent": "agent.py:play", "model.path": str(tiny_model)}
    check.main(words({"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "1+2=", "ground_truth": "3"}, **agent))
    assert printed(capsys).startswith("OK   unknown: right answers earn 1, others' 0")


def test_an_agent_that_cannot_be_imported_and_a_missing_model_are_one_line(words, capsys, tmp_path, tiny_model):
    (tmp_path / "agent.py").write_text("import no_such_module\ndef play(task): pass\n")
    argv = words({"prompt": "1+1="}, **PLAYED | {"rollout.agent": "agent.py:play"})
    assert "model.path is missing" in one_line(capsys, check.main, *argv)
    said = one_line(capsys, check.main, *argv, f"--config.model.path={tiny_model}")
    assert said.count("cannot be run") == 1 and "No module named 'no_such_module'" in said


ENVIRONMENT = """
class Echo:
    def reset(self, prompt):
        self.truth, self.turns = prompt.ground_truth, 0
        return ""

    def step(self, text):
        self.turns += 1
        return "again", float(text == self.truth) WORTH, self.turns == 2
"""


@pytest.mark.parametrize(
    ("worth", "said"),
    [
        ("", "OK   unknown: right answers earn 2, others' 0, each said in every turn"),
        ("* 0", "WARN unknown: right answers earn 0, others' 0, each said in every turn (2 rows)\n     right answers"),
        (
            "/ 0",
            "FAIL unknown: none of 18 responses could be graded (2 rows)\n     the first: environment_score: step"
            " raised ZeroDivisionError: float division by zero (",
        ),
    ],
)
def test_an_environment_answers_right_and_wrong_turns(words, capsys, tmp_path, tiny_model, worth, said):
    (tmp_path / "world.py").write_text(ENVIRONMENT.replace("WORTH", worth))
    talk = {"reward.function": "", "model.path": str(tiny_model), "rollout.multi_turn.enable": True}
    talk |= {"rollout.multi_turn.format": "plain", "rollout.multi_turn.environment": "world.py:Echo"}
    argv = words({"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "1+2=", "ground_truth": "3"}, **talk)
    assert verdict(capsys, argv).startswith(said)


def test_data_must_be_named(capsys):
    assert "data.train_files='' names no file" in one_line(capsys, check.main)


CODE = [
    {"prompt": "q", "data_source": "code", "ground_truth": tests, "answer": f"```python\ndef f(x): return {value}\n```"}
    for tests, value in (("assert f(1) == 2", 2), ("assert f(1) == 3", 3), ("assert eval(f(1)) == 3", 3))
]
ALLOWED = {"reward.function": "", "reward.allow_code": True}


def test_rows_whose_asserts_are_not_graded_are_left_out_and_counted(words, capsys):
    check.main(words(*CODE, **ALLOWED))
    left_out, found = printed(capsys).splitlines()
    assert left_out.startswith("1 rows left out, whose asserts reward.code.tests=strict cannot grade; the first, rows")
    assert "line 1 uses eval" in left_out and found == "OK   code: right answers earn 1, others' 0 (2 rows)"
    assert "no row is left" in one_line(capsys, check.main, *words(CODE[2], **ALLOWED))
    check.main(words(*CODE, **ALLOWED, **{"reward.code.tests": "native"}))
    assert printed(capsys) == "OK   code: right answers earn 0.667, others' 0.333 (3 rows)\n"


ANSWERS = [{"prompt": f"{i}+{i}=", "ground_truth": str(2 * i)} for i in range(1, 9)]
LABELS = [{"prompt": "x", "ground_truth": label} for label in ["safe"] * 9 + ["unsafe"] * 9]
TARGETS = [{"prompt": "x", "ground_truth": {"target": [city]}} for city in ("Paris", "Rome", "Oslo")]
PUZZLES = [{"prompt": "x", "ground_truth": {"target": n, "numbers": [n, 1]}} for n in (3, 5, 7)]
ONE_LOOP = """
loops = set()
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    loops.add(asyncio.get_running_loop())
    return float(len(loops) == 1 and ground_truth in solution_str)
"""
OBJECT = """
class Score:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)
compute_score = Score()
"""


@pytest.mark.parametrize(
    ("rows", "body", "said"),
    [
        (ANSWERS, "float(f'<answer>{ground_truth}</answer>' in solution_str)", "OK"),
        (ANSWERS, "float(solution_str == json.dumps({'answer': ground_truth}))", "OK"),
        (ANSWERS, "float(solution_str.startswith(f'Final Answer: {ground_truth}'))", "OK"),
        (TARGETS, "float(json.loads(ground_truth)['target'][0] in solution_str)", "OK"),
        (
            [{"prompt": "x", "ground_truth": [[kind, {}]]} for kind in ("digits", "caps")],
            "float(json.loads(ground_truth)[0][0] == ('caps' if solution_str.isupper() else 'digits'))",
            "WARN the ground truth is a list or an object",
        ),
        (
            [{"prompt": "x", "ground_truth": [city, city.lower()]} for city in ("Paris", "Rome")],
            "float(any(city in solution_str for city in json.loads(ground_truth)))",
            "OK",
        ),
        (ANSWERS, ONE_LOOP, "OK"),
        (ANSWERS, OBJECT, "OK"),
        (
            PUZZLES,
            "float(eval('0' + solution_str) if '+' in solution_str else 0)",
            "WARN the ground truth is a list or an object",
        ),
        (
            ANSWERS,
            "float(re.match(r'^<think>.*?</think><answer>.*?</answer>$', solution_str) is not None)",
            "WARN as if the reward did not read it",
        ),
        (
            ANSWERS,
            "float(f'</think>\\n<answer>\\n{ground_truth}\\n</answer>' in solution_str)",
            "OK",
        ),
        (ANSWERS, "min(1.0, len(solution_str) / 20)", "WARN as if the reward did not read it"),
        (LABELS, "float(bool(solution_str))", "WARN as if the reward did not read it"),
        (ANSWERS, "0.0", "FAIL does not separate right from wrong answers"),
        (ANSWERS, "float(ground_truth not in solution_str)", "FAIL a column 'answer' with right responses"),
        (ANSWERS, "float(solution_str.split('####')[1] == ground_truth)", "FAIL 0 without an answer"),
        (ANSWERS, "float(re.search('.', solution_str).group() == ground_truth)", "FAIL 1 of 66 could not be graded"),
        (ANSWERS, "time.sleep(60)", "FAIL none of 1 responses could be graded"),
    ],
)
def test_verdicts_on_rewards_that_people_write(words, capsys, tmp_path, rows, body, said):
    argv = words(*rows, **{"reward.timeout_s": 1})
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
    body = body if "compute_score" in body else head + body
    (tmp_path / "mine.py").write_text(f"import asyncio, json, re, time\n{body}")
    kind, _, text = said.partition(" ")
    out = verdict(capsys, argv)
    assert out.startswith(kind) and text in out, out
