"""Checks by themselves: one that fails, raises or hangs is one line, and what needs it is skipped."""

import contextlib
import io
import signal
import time

import pytest
import rich.console

from jppo.errors import UserError
from jppo.preflight.finding import Check, Finding, examine, print_findings
from jppo.rollout.protocol import RolloutError


def fine():
    yield Finding("fine", "OK", "as it should be")


def raising(error):
    def look():
        yield Finding("first", "OK", "so far so good")
        raise error

    return look


def test_an_error_is_a_failure_and_the_others_are_looked_at():
    checks = [
        Check("model", raising(UserError("a=1 must be 2; set it to 2"))),
        Check("data", fine, needs=("model",)),
        Check("reward", fine, needs=("data",)),
        Check("clock", fine),
    ]
    found = list(examine(checks))
    assert found == [
        Finding("first", "OK", "so far so good"),
        Finding("model", "FAIL", "a=1 must be 2", "set it to 2"),
        Finding("data", "WARN", "skipped: because of model"),
        Finding("reward", "WARN", "skipped: because of model"),  # not of data, which only waits as well
        Finding("fine", "OK", "as it should be"),
    ]


@pytest.mark.parametrize(
    "error, said",
    [
        (RolloutError("the server died"), "the server died"),
        (KeyError("lost"), "KeyError: 'lost'"),
        (ValueError("first line\nsecond"), "ValueError: first line"),
        (UserError("no remedy in it"), "no remedy in it"),
    ],
)
def test_every_failure_has_a_line_and_a_remedy(error, said):
    *_, found = examine([Check("it", raising(error))])
    assert (found.verdict, found.found) == ("FAIL", said) and found.remedy


def test_a_finding_that_fails_counts_as_a_failure():
    bad = Check("memory", lambda: [Finding("memory", "FAIL", "too little"), Finding("memory", "OK", "elsewhere")])
    assert [f.verdict for f in examine([bad, Check("server", fine, needs=("memory",))])] == ["FAIL", "OK", "WARN"]
    assert [f.verdict for f in examine([Check("server", fine, needs=("vLLM",))], failed=["vLLM"])] == ["WARN"]


def test_what_hangs_is_ended_also_where_it_swallows_exceptions():
    limits, ended = [], []

    def hang():
        while len(limits) < 3:
            limits.append(signal.getitimer(signal.ITIMER_REAL)[0])  # until the check is ended
            with contextlib.suppress(Exception):
                time.sleep(60)
                ended.append(1)
        return []

    found = list(examine([Check("slow", hang, limit_s=0.2), Check("next", fine)]))
    assert len(limits) < 2 and all(0 < limit <= 0.2 for limit in limits) and not ended, "in the first sleep"
    assert found[0].verdict == "FAIL" and found[0].found == "no result in 0 s" and found[1].verdict == "OK"


def test_each_line_is_printed_when_it_is_there():
    console = rich.console.Console(file=io.StringIO(), width=80)
    seen = []

    def findings():
        for name in ("one", "two"):
            seen.append(console.file.getvalue().count("\n"))
            yield Finding(name, "OK", "x")

    assert print_findings(findings(), console) == 0
    assert seen == [0, 1]


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal(width):
    console = rich.console.Console(file=io.StringIO(), width=width)
    command = "pip install" + " a-package" * 20
    print_findings([Finding("publish room", "FAIL", "/a/very/long/path" * 20, command)], console)
    *lines, remedy, _ = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    # continuation lines are below the text: verdict 4, gap 2, name 14, gap 2
    assert {len(line) - len(line.lstrip()) for line in lines[1:]} == {22}
    assert remedy == f"{'':22}→ {command}", "a command can be copied"
