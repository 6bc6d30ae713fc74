"""Programs in responses: right, wrong and harmful ones, each in a real child process."""

import functools
import json
import os
import types

import pytest

from jppo.plugins.sandbox import launcher
from jppo.plugins.sandbox.choice import probe
from jppo.plugins.sandbox.code import code, read_tests, refusal_reason
from jppo.plugins.sandbox.program import PASSED

SUMS = json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "3 4", "output": "7"}])
RIGHT = "def f(x):\n    return x + 1\n"
ASSERTS = "assert f(1) == 2\nassert f(2) == 3"


def score(program, truth=ASSERTS, *, time_s=60.0, runner=None):
    response = f"So:\n```python\n{program}\n```\nDone."
    return code(response, truth, time_s=time_s, memory_bytes=2**29, runner=runner).score


@pytest.mark.parametrize(
    ("program", "truth", "wanted"),
    [
        ("print(sum(map(int, input().split())))", SUMS, 1),
        ("a, b = map(int, input().split())\nprint(a + b, end='  ')\nexit()", SUMS, 1),
        ("print(3)", SUMS, 0),
        ("print(sum(map(int, input().split())))", '{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}', 1),
        ("print(3)", '{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}', 0),
        ("print(sum(map(int, input().split())))\n1 / 0", SUMS, 0),
        (RIGHT, ASSERTS, 1),
        (RIGHT, json.dumps(ASSERTS.splitlines()), 1),
        ("def f(x): return 2", ASSERTS, 0),
        ("def f(", ASSERTS, 0),
        ("import os\nos._exit(0)", ASSERTS, 0),  # ends well, but before the asserts
        ("exit()", ASSERTS, 0),
        ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\n" + RIGHT, ASSERTS, 1),
        ("open('here', 'w').write('1')\nimport os\nos.remove('here')\n" + RIGHT, ASSERTS, 1),
        ("import numpy\n" + RIGHT, ASSERTS, 1),
        ("import numpy\ndef f(x): return numpy.int64(x + 1)", ASSERTS, 1),
        (
            "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
            "def f(x): return P(x + 1)",
            "assert f(1).x == 2",
            1,
        ),
        (
            "from collections import Counter\ndef f(x): return Counter(x)",
            "def check(candidate):\n    assert candidate('aab') == {'a': 2, 'b': 1}\ncheck(f)",
            1,
        ),
        ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]", 1),
        ("def f(x): raise TypeError", "try:\n    f(1)\n    assert False\nexcept TypeError:\n    pass", 1),
        ("def f(x): return x", "try:\n    f(1)\n    assert False\nexcept TypeError:\n    pass", 0),
        ("def f(x): yield from range(x)", "assert list(f(2)) == [0, 1] and sum(f(3)) == 3", 1),
        ("def f(x): exit(97)", ASSERTS, 0),
    ],
)
def test_programs_are_worth_what_their_tests_say(program, truth, wanted):
    assert score(program, truth) == wanted


def test_the_last_block_counts_and_without_one_there_is_no_answer():
    two = f"```python\n{RIGHT}```\nor\n```python\ndef f(x): return 0\n```"
    assert code(two, ASSERTS, time_s=60, memory_bytes=2**29).score == 0.0
    assert code(RIGHT, ASSERTS, time_s=60, memory_bytes=2**29) == (0.0, {"exact": 0.0, "answered": 0.0}, None)


@pytest.mark.parametrize("waits", ["time.sleep(0.1)", "pass"])
def test_a_loop_is_wrong_once_its_time_is_over(waits):
    """After five seconds it would be right."""
    loop = f"import time\nend = time.monotonic() + SECONDS\nwhile time.monotonic() < end: {waits}\n"
    for program, truth in ((RIGHT, ASSERTS), ("print(sum(map(int, input().split())))", SUMS)):
        assert score(loop.replace("SECONDS", "0") + program, truth) == 1.0
        assert score(loop.replace("SECONDS", "5") + program, truth, time_s=1.0) == 0.0


@pytest.mark.parametrize("truth, runs", [(ASSERTS, 1), (SUMS, 2)])
def test_a_test_may_take_half_of_the_time(truth, runs):
    given = []

    def runner(program, *, time_s, **_):
        given.append(time_s)
        return types.SimpleNamespace(replies=(PASSED,), status=0, printed="3\n7\n"[2 * len(given) - 2 :][:2], retries=0)

    assert score(RIGHT, truth, time_s=3.0, runner=runner) == 1.0 and given == [1.5] * runs


def test_many_tests_that_do_not_end_in_time_are_an_error_and_no_zero():
    many = json.dumps([{"input": "", "output": "1"}] * 9)  # of which each may take half of the time
    with pytest.raises(TimeoutError, match=r"9 tests .* raise reward\.timeout_s"):
        score("import time\ntime.sleep(0.7)\nprint(1)", many, time_s=4.0)


@pytest.mark.parametrize(
    "truth",
    ["", "42", "assert f(", '["assert f("]', "[", "[]", "{}", '["assert 1", 2]', '[{"input": "1"}]',
     '{"inputs": null, "outputs": null}', "[" * 100_000, "assert f() == " + "+".join("1" * 5000)],
    ids=range(12),
)  # fmt: skip
def test_a_truth_without_tests_is_an_error_and_no_row_is_left_out_for_it(truth):
    with pytest.raises(ValueError, match="ground_truth="):
        read_tests(truth)
    assert refusal_reason(truth) == ""


def test_a_program_sees_neither_the_environment_nor_its_arguments(monkeypatch):
    monkeypatch.setitem(os.environ, "SOME_API_KEY", "secret")
    probe = "import os, sys\nassert 'SOME_API_KEY' not in os.environ and len(sys.argv) == 1\n"
    assert score(probe + RIGHT) == 1.0


@pytest.mark.parametrize(
    "harm", ["import socket\nsocket.socket()", "import os\nos.fork()", "while True: pass", "b = [0] * 10**9"]
)
def test_harm_is_stopped_where_unshare_is_not_permitted(harm):
    runner = functools.partial(launcher.run_program, guards=probe(frozenset({"namespaces"})))
    assert score(f"{harm}\n{RIGHT}", time_s=2.0, runner=runner) == 0.0 and score(RIGHT, runner=runner) == 1.0
