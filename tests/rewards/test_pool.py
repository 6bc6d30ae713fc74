"""Functions of users that do their worst, in real worker processes: each costs only its own sample."""

import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jppo.errors import UserError
from jppo.rewards import graders, pool_worker, rules
from jppo.rewards.graders import FormatPart, FunctionPart, RulePart
from jppo.rewards.pool import Pool
from tests.make import bytes_as_text, sample

NASTY = """
import os, subprocess, sys, threading, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.startswith("run "):
        exec(solution_str[4:])
    if solution_str.startswith("return "):
        return eval(solution_str[7:])
    return float(ground_truth)
"""
TIMEOUT_S = 3.0


@pytest.fixture
def pool():
    made = Pool(2, timeout_s=TIMEOUT_S, memory_bytes=2**28)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_pool():
    made = Pool(2, timeout_s=TIMEOUT_S, memory_bytes=2**30)
    yield made
    made.close()


def function(tmp_path, source, pool, name="compute_score"):
    path = tmp_path / "mine.py"
    path.write_text(source)
    return FunctionPart(f"{path}:{name}", pool=pool, decode=bytes_as_text)


def running(mark):
    """Processes whose command line holds the mark."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def soon(condition, within_s=60.0):
    end = time.monotonic() + within_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def gone(mark):
    return soon(lambda: not running(mark))


NASTY_THINGS = {
    "run raise KeyError('here')": r"KeyError: 'here' \(<string>:1\)",
    "run time.sleep(1000)": f"took longer than {TIMEOUT_S:g} s",
    "run while True: pass": f"took longer than {TIMEOUT_S:g} s",
    "run bomb = [0] * 10**9": "used more than 256 MiB of memory",
    "run bomb = bytearray(10**9)": "used more than 256 MiB of memory",
    "run exit(3)": r"it called exit\(3\)",
    "run os._exit(3)": "the process ended with exit code 3",
    "run os._exit(0)": "the process ended with exit code 0",
    "run os.kill(os.getpid(), 9)": r"signal 9 \(SIGKILL\)",
    "run os.abort()": r"signal 6 \(SIGABRT\)",
    "run os.kill(os.getpid(), 19)": f"took longer than {TIMEOUT_S:g} s",  # SIGSTOP
    "run os.closerange(0, 1000)": "process",
    "return None": "score None",
    "return float('nan')": "score nan",
    "return 'one'": "score 'one'",
    "return {'acc': 1.0}": "a dict without 'score'",
    "return {'score': 'x'}": "score 'x'",
    "return [1.0]": r"score \[1.0\]",
}
HARMLESS = {
    "run print('x' * 10**6); print('y', file=sys.stderr); os.write(1, b'z' * 10**5)": 0.5,
    "return sys.stdin.read() == ''": 1.0,
    "run os.fork()": 0.5,  # both come back: only one may answer
    "run sys.exit() if os.fork() == 0 else None": 0.5,
    "run threading.Thread(target=time.sleep, args=(1000,)).start()": 0.5,
    "return True": 1.0,
    "return 2": 2.0,
    "return any(m in sys.modules for m in ('jax', 'numpy', 'jppo.types', 'jppo.settings'))": 0.0,  # workers are light
    "return __import__('decimal').Decimal('0.25')": 0.25,
}


def test_whatever_a_function_does_costs_only_its_own_sample(tmp_path, pool, capfd):
    part = function(tmp_path, NASTY, pool)
    asked, futures = [], []
    for i, text in enumerate([*NASTY_THINGS, *HARMLESS]):
        asked += [text, f"good {i}"]
        futures += [part.submit(sample(text, "0.5")), part.submit(sample(f"good {i}", str(i)))]
    rewards = {text: future.result(60) for text, future in zip(asked, futures, strict=True)}
    for i in range(len(asked) // 2):
        good = rewards[f"good {i}"]
        assert good.score == i and good.error is None, (i, good)
    for text, wanted in HARMLESS.items():
        assert rewards[text].score == wanted and rewards[text].error is None, (text, rewards[text])
    for text, error in NASTY_THINGS.items():
        assert math.isnan(rewards[text].score), (text, rewards[text])
        assert re.search(error, rewards[text].error or "no error"), (text, rewards[text])
    assert capfd.readouterr() == ("", "")


def test_an_overrun_takes_the_processes_that_it_started_along(tmp_path, pool):
    part = function(tmp_path, NASTY, pool)
    start = "subprocess.Popen(['sleep', '{}'], start_new_session={})"
    late, left = (f"{10**6 + os.getpid()}.{i}" for i in (1, 2))  # seconds that nobody else sleeps
    text = f"run {start.format(late, False)}; {start.format(late, True)}; time.sleep(1000)"
    assert "took longer" in part.submit(sample(text)).result(60).error
    assert gone(late)
    assert part.submit(sample(f"run {start.format(left, True)}", "1")).result(60).score == 1.0
    assert soon(lambda: running(left))  # what a good sample leaves behind may go on; its command line comes late
    pool.close()
    assert gone(left)


def test_workers_end_when_the_trainer_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(NASTY)
    child = f"{10**6 + os.getpid()}.3"
    program = (
        "import sys, numpy as np\n"
        "from jppo.rewards.graders import FunctionPart\n"
        "from jppo.rewards.pool import Pool\n"
        "from jppo.rewards.parts import Sample\n"
        "from jppo.types import Prompt\n"
        f"part = FunctionPart({str(tmp_path / 'mine.py')!r} + ':compute_score', "
        "pool=Pool(1, timeout_s=100, memory_bytes=2**28), decode=str)\n"
        f"text = \"run subprocess.Popen(['sleep', '{child}'], start_new_session=True); time.sleep(1000)\"\n"
        "future = part.submit(Sample(Prompt('u', 's', 'q', np.zeros(1, np.int32), '0', {}), text, 1, 'stop'))\n"
        "print('going', flush=True)\n"
        "future.result()\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    mark = f"\0jppo.rewards.pool_worker\0{trainer.pid}\0"
    try:
        assert trainer.stdout.readline() == b"going\n"
        assert soon(lambda: running(child)) and running(mark)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
    assert gone(mark) and gone(child)


def test_close_is_prompt_and_answers_what_waits(tmp_path, pool):
    slow = Pool(1, timeout_s=100.0, memory_bytes=2**28)
    part = function(tmp_path, NASTY, slow)
    child = f"{10**6 + os.getpid()}.4"
    text = f"run subprocess.Popen(['sleep', '{child}'], start_new_session=True).wait()"
    futures = [part.submit(sample(text)) for _ in range(3)]
    assert soon(lambda: running(child))
    part.close()  # neither waits for the sample nor for its limit, whose errors are others
    part.close()
    late = part.submit(sample("good"))
    assert [f.result(0).error for f in [*futures, late]] == ["the pool was closed"] * 4
    assert gone(child)  # ended by the guard: a kill of the worker's group would leave it


def test_the_function_gets_verls_arguments_and_its_numbers_are_parts(tmp_path, shared_pool):
    source = """
import helper_beside

def score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs
    said = None if solution_str == "abc" else [solution_str, 1]
    return {"score": helper_beside.HALF, "pred": said, "length": len(solution_str),
            "right": solution_str == ground_truth, "index": extra_info["index"],
            "source": data_source, "nan": float("nan")}
"""
    (tmp_path / "helper_beside.py").write_text("HALF = 0.5\n")
    part = function(tmp_path, source, shared_pool, "score")
    one = part.submit(sample("abc", "abc", index=7)).result(60)
    assert one.score == 0.5 and one.parts == {"length": 3.0, "right": 1.0, "index": 7.0}  # texts and NaN are none
    column = part.submit(sample("abc", "abc", extra_info={"index": 8}, other=1)).result(60)
    assert column.parts["index"] == 8.0
    assert one.answer == "" and part.submit(sample("d", "d", index=1)).result(60).answer == "['d', 1]"


BATCH = """
calls = 0

def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    global calls
    calls += 1
    assert all(type(x) is list for x in (data_sources, solution_strs, ground_truths, extra_infos))
    if "hang" in solution_strs:
        while True: pass
    if "short" in solution_strs:
        return [1.0]
    return [{"score": len(t), "calls": calls} if t != "junk" else None for t in solution_strs]
"""


def test_the_batch_form_gets_all_samples_of_a_flush_at_once(tmp_path):
    pool = Pool(1, timeout_s=2.0, memory_bytes=2**28)
    part = function(tmp_path, BATCH, pool)

    def scored(*texts):
        futures = [part.submit(sample(text)) for text in texts]
        assert not any(future.done() for future in futures)
        part.flush()
        return [future.result(60) for future in futures]

    a, b, junk = scored("a", "bb", "junk")
    assert (a.score, b.score) == (1.0, 2.0) and a.parts == b.parts == {"calls": 1.0}
    assert "score None" in junk.error
    part.flush()  # nothing waits
    assert scored("ccc")[0].parts == {"calls": 2.0}
    assert {r.error for r in scored("short", "a")} == {"ValueError: the function returned 1 scores for 2 samples"}
    assert {r.error for r in scored("hang", "a", "b")} == {
        "it took longer than 6 s; reward.timeout_s is the limit of a sample"
    }
    assert scored("a")[0].score == 1.0
    late = part.submit(sample("a"))
    part.close()
    assert late.result(0).error == "the pool was closed"


TRL = """
def compute_score(prompts, completions, level, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert set(kwargs) >= {"ground_truth", "data_source"}
    assert all(c[0]["role"] == "assistant" for c in completions)
    return [len(text) + 10 * lv + 100 * (p[-1]["content"] == t) for text, lv, p, t in
            zip(texts, level, prompts, kwargs["ground_truth"])]
"""


def test_trls_form_gets_prompts_completions_and_columns(tmp_path, shared_pool):
    part = function(tmp_path, TRL, shared_pool)
    chat = [{"role": "user", "content": "7"}]
    futures = [part.submit(sample(text, "7", messages=chat, level=level)) for text, level in (("a", 1), ("bb", 2))]
    part.flush()
    assert [future.result(60).score for future in futures] == [111.0, 122.0]
    plain = function(
        tmp_path, "def compute_score(completions, level=0): return [float(c) for c in completions]", shared_pool
    )
    one, other = plain.submit(sample("2.5", level=None)), plain.submit(sample("4"))
    plain.flush()
    assert (one.result(60).score, other.result(60).score) == (2.5, 4.0)
    lost = function(tmp_path, "def compute_score(completions, answer): return [1.0]", shared_pool)
    one = lost.submit(sample("2", level=1))
    lost.flush()
    assert (
        "the parameter 'answer' is no column of the data; it has data_source, ground_truth, level"
        in one.result(60).error
    )


def test_an_async_function_of_one_sample_and_of_a_batch(tmp_path, shared_pool):
    head = "import asyncio\nasync def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    one = head + "    await asyncio.sleep(0)\n    return float(solution_str)"
    assert function(tmp_path, one, shared_pool).submit(sample("2.5")).result(60).score == 2.5
    arguments = "data_sources, solution_strs, ground_truths, extra_infos"
    text = f"async def compute_score({arguments}): return [float(text) for text in solution_strs]"
    batch = function(tmp_path, text, shared_pool)
    futures = [batch.submit(sample("2")), batch.submit(sample("4"))]
    batch.flush()
    assert [future.result(60).score for future in futures] == [2.0, 4.0]


def test_a_file_alone_means_its_compute_score(tmp_path, shared_pool):
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 3"
    )
    part = FunctionPart(str(tmp_path / "mine.py"), pool=shared_pool, decode=bytes_as_text)
    assert part.submit(sample("a")).result(60).score == 3.0


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def compute_score(completions, completion_ids): pass", "asks for 'completion_ids', which jppo does not pass"),
        ("def other(): pass", "the file has no 'compute_score'; it has other; give FILE.py:other"),
        ("compute_score = 3", "'compute_score' is of type int; it must be a function"),
        ("def compute_score(text): pass", r"has the signature \(text\); it must be a function of \(data_source"),
        ("def compute_score(solution_strs, ground_truths): pass", "for all samples at once"),
        ("x = 1\nimport no_such_package", r"raises at import: ModuleNotFoundError.*\(mine.py:2\)"),
        ("def f(:", "raises at import: SyntaxError"),
        ("exit(1)", r"raises at import: it called exit\(1\)"),
        ("import os\nos._exit(5)", "the process ended with exit code 5"),
        ("x = [0] * 10**9", r"used more than 1024 MiB of memory; raise reward\.memory_bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_before_training(source, complaint, tmp_path, shared_pool):
    with pytest.raises(UserError, match=r"reward\.function='.*mine.py:compute_score'.*" + complaint):
        function(tmp_path, source, shared_pool)


def test_an_error_in_a_library_names_the_line_of_the_users_file(tmp_path, shared_pool):
    (tmp_path / "theirs.py").write_text("import json\n\n\ndef read(text):\n    return json.loads(text)\n")
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
    calls = f"import theirs\n\n\n{head}\n    return theirs.read('{{')"
    part = function(tmp_path, calls, shared_pool)
    assert part.submit(sample("a")).result(60).error.endswith("(theirs.py:5)")


def test_a_file_that_never_ends_or_is_not_there(tmp_path):
    pool = Pool(1, timeout_s=1.0, memory_bytes=2**28, start_timeout_s=2.0)
    with pytest.raises(UserError, match="longer than 2 s"):
        function(tmp_path, "while True: pass", pool)
    pool.close()
    (tmp_path / "score.txt").write_text("def f(solution_str): return 1.0")
    for spec, complaint in (
        ("nowhere.py:f", "no such file"),
        ("nowhere.py", "no such file"),
        ("nowhere", r"must be PATH\.py, or PATH\.py:NAME"),
        (f"{tmp_path}/score.txt:f", r"must be PATH\.py, or PATH\.py:NAME"),
        ("", "must be"),
    ):
        with pytest.raises(UserError, match=complaint):
            FunctionPart(spec, pool=pool, decode=bytes_as_text)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "odd.py").write_bytes(b"# coding: nothing\n")
    for name in ("folder", "odd"):
        with pytest.raises(UserError, match="cannot be read"):
            FunctionPart(f"{tmp_path}/{name}.py:f", pool=pool, decode=bytes_as_text)


@pytest.mark.parametrize("start,letter", [(b"\xef\xbb\xbf", b"\xc3\xa4"), (b"# coding: latin-1\n", b"\xe4")])
def test_a_file_is_read_in_its_encoding(tmp_path, start, letter, shared_pool):
    line = b"def f(data_source, solution_str, ground_truth, extra_info=None): return ord('%b') / 228.0\n" % letter
    (tmp_path / "score.py").write_bytes(start + line)
    part = FunctionPart(f"{tmp_path}/score.py:f", pool=shared_pool, decode=bytes_as_text)
    assert part.submit(sample("x")).result(60).score == 1.0


def test_a_run_keeps_the_file_that_it_began_with(tmp_path, pool):
    part = function(tmp_path, NASTY, pool)
    (tmp_path / "mine.py").write_text("def compute_score(*_): return 99")
    for _ in range(3):  # also in the workers that take the place of dead ones
        assert part.submit(sample("run os._exit(1)")).result(60).error is not None
        assert part.submit(sample("good", "1")).result(60).score == 1.0


def test_rules_that_may_hang_run_in_the_pool_and_the_others_do_not(shared_pool):
    idle = Pool(1, timeout_s=1.0, memory_bytes=2**28)
    quick = RulePart(["gsm8k", "aqua", "exact"], pool=idle)
    future = quick.submit(sample("#### 18", "18", source="gsm8k"))
    assert future.done() and future.result().score == 1.0 and idle._threads == []
    assert "is not one of the sources" in quick.submit(sample("1", source="else")).result(0).error
    assert quick.submit(sample("#### 18", "x", source="gsm8k")).result(0).error.startswith("ValueError")
    idle.close()

    part = RulePart(["math_verify"], pool=shared_pool)
    tower, half = r"\boxed{9^{9^{9^{9}}}+x}", r"\boxed{1/2}"
    futures = [part.submit(sample(text, "0.5", source="math_verify")) for text in [half, tower, half, r"\boxed{3}"]]
    first, hard, second, wrong = [future.result(60) for future in futures]
    assert (first.score, second.score, wrong.score) == (1.0, 1.0, 0.0)
    assert hard.score == 0.0 or hard.error is not None
    assert part.submit(sample(half, "", source="math_verify")).result(60).error.startswith("ValueError")


def test_each_rule_that_may_hang_is_graded_as_itself(shared_pool, monkeypatch):
    monkeypatch.setitem(graders._MAY_HANG, rules.exact, "exact")
    part = RulePart(["exact"], pool=shared_pool)
    texts = (" 132\n", r"\boxed{132}")  # which math_verify takes, too
    assert [part.submit(sample(text, "132", source="exact")).result(60).score for text in texts] == [1.0, 0.0]


def test_programs_run_only_where_that_is_allowed(shared_pool):
    with pytest.raises(UserError, match=r"data_source='code' runs .* reward\.allow_code=True"):
        RulePart(["code"], pool=shared_pool)
    with pytest.raises(UserError, match=r"reward\.grader='code'"):
        RulePart(["gsm8k"], override="code", pool=shared_pool)
    roomy = Pool(1, timeout_s=30.0, memory_bytes=2**30)  # a busy machine starts programs slowly
    part = RulePart(["code"], allow_code=True, pool=roomy)
    texts = ["def f(x): return 2", "def f(x): return 3"]
    futures = [part.submit(sample(f"```python\n{t}\n```", "assert f(1) == 2", source="code")) for t in texts]
    assert [future.result(60).score for future in futures] == [1.0, 0.0]
    roomy.close()


def test_a_pattern_that_takes_years_costs_only_its_own_sample(shared_pool):
    part = FormatPart(r"<think>(a+)+</think>", pool=shared_pool)
    futures = [part.submit(sample(t)) for t in ("<think>aa</think>", "<think>" + "a" * 60, "x<think>a</think>")]
    good, years, bad = [future.result(60) for future in futures]
    assert (good.score, bad.score) == (1.0, 0.0) and years.error.startswith(f"it took longer than {TIMEOUT_S:g} s;")
    assert FormatPart("a.b", pool=shared_pool).submit(sample("a\nb")).result(60).score == 1.0
    with pytest.raises(UserError, match=r"reward\.format_regex='\(' is not a regular expression"):
        FormatPart("(", pool=shared_pool)


def test_two_thousand_samples_take_seconds(tmp_path):
    pool = Pool(2, timeout_s=60.0, memory_bytes=2**30)
    rule, mine = RulePart(["gsm8k"], pool=pool), function(tmp_path, NASTY, pool)
    solution = "She sells 9 eggs for $2 each. " * 20 + "#### 18"
    begun = time.perf_counter()
    futures = [part.submit(sample(solution, "18", source="gsm8k")) for _ in range(1000) for part in (rule, mine)]
    assert sum(future.result(60).score for future in futures) == 1000 * (1 + 18)
    took = time.perf_counter() - begun
    pool.close()
    assert took < 12


@pytest.mark.parametrize("returned", ["12", b"12", {"a": 1.0, "b": 2.0}, 3.0])
def test_only_a_list_holds_the_scores_of_a_batch(returned):
    samples = [dict(data_source="s", text=text, truth="", extra={}) for text in "ab"]

    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        return returned

    with pytest.raises(ValueError, match=f"the function returned {type(returned).__name__}; it must be a list of"):
        pool_worker.call_function(compute_score, samples)
