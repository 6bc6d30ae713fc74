"""Findings of checks, and the runner of checks with time limits."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import rich.console
import rich.table
import rich.text

from jppo.errors import UserError, escaped
from jppo.rollout.protocol import RolloutError

GIB = 2**30
STYLE = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}
NAME_WIDTH = 14  # characters
REPEAT_S = 5.0  # repeats the time-out if code swallowed it

Verdict = Literal["OK", "WARN", "FAIL"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report: what was checked, its verdict, what was found, and the remedy."""

    about: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """A check by its name, `about`; it is skipped if one of its `needs`, names of other checks, failed."""

    about: str
    run: Callable[[], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    limit_s: float = 120.0


class _TimeIsUp(BaseException):
    """Not an Exception, so the checked code does not handle it."""


def examine(checks: Sequence[Check], *, failed: Iterable[str] = ()) -> Iterator[Finding]:
    """Runs the checks in order and yields their findings; those that need a failed one are skipped."""
    cause = {name: name for name in failed}  # for each failed or skipped check: the check that failed first
    for check in checks:
        unmet = next((cause[name] for name in check.needs if name in cause), None)
        if unmet is not None:
            cause[check.about] = unmet
            yield Finding(check.about, "WARN", f"skipped: because of {unmet}")
            continue
        for finding in _run_check(check):
            if finding.verdict == "FAIL":
                cause[check.about] = check.about
            yield finding


def _run_check(check: Check) -> list[Finding]:
    """Returns the findings of a check; an exception or the end of its time becomes a failure."""
    findings: list[Finding] = []
    try:
        with _limit(check.limit_s):
            findings += check.run()
    except UserError as e:
        message, _, remedy = str(e).rpartition("; ")
        findings.append(
            Finding(check.about, "FAIL", message, remedy)
            if message
            else Finding(check.about, "FAIL", str(e), "fix that, and run the check again")
        )
    except RolloutError as e:
        findings.append(Finding(check.about, "FAIL", str(e), "fix what it names, and run the check again"))
    except _TimeIsUp:
        remedy = "check what blocks it, or use a less busy machine"
        findings.append(Finding(check.about, "FAIL", f"no result in {check.limit_s:.0f} s", remedy))
    except Exception as e:
        message = str(e).strip().partition("\n")[0]
        remedy = "unexpected: jppo.train with the same settings shows where"
        findings.append(Finding(check.about, "FAIL", f"{type(e).__name__}: {message}", remedy))
    return findings


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises _TimeIsUp in the block after `seconds`, by a signal, so only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_time_is_up(*_: Any) -> None:
        raise _TimeIsUp

    old_handler = signal.signal(signal.SIGALRM, raise_time_is_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)


def check_room(about: str, free: int, *, warn: int, fail: int, remedy: str) -> Finding:
    """Compares free bytes with those that a run needs."""
    verdict: Verdict = "FAIL" if free < fail else "WARN" if free < warn else "OK"
    room = f"{free / GIB:.1f} GiB free"
    return Finding(about, verdict, room, "" if verdict == "OK" else remedy)


def print_findings(findings: Iterable[Finding], console: rich.console.Console) -> int:
    """Prints findings as they come, and the result; returns the exit code."""
    failures = 0
    for finding in findings:
        row = rich.table.Table.grid(padding=(0, 2))
        for width in (4, NAME_WIDTH):
            row.add_column(width=width)
        row.add_column()
        verdict = rich.text.Text(finding.verdict, STYLE[finding.verdict])
        row.add_row(verdict, rich.text.Text(finding.about), rich.text.Text(escaped(finding.found), overflow="fold"))
        console.print(row)
        if finding.remedy:  # in one line, from which a command can be copied
            console.print(rich.text.Text(escaped(f"{'':{NAME_WIDTH + 8}}→ {finding.remedy}")), soft_wrap=True)
        failures += finding.verdict == "FAIL"
    console.print(f"{failures} to fix before training" if failures else "ready to train")
    return 1 if failures else 0
