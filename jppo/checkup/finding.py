"""What a check finds, and how checks are run: each by itself, within its time, whatever the others came to."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import rich.console
import rich.table
import rich.text

from jppo.config import UserError
from jppo.rollout.sampler import RolloutError

GIB = 2**30
STYLE = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}
ABOUT = 14  # characters
REPEAT_S = 5.0  # the time is said to be up again, where somebody swallowed it

Verdict = Literal["OK", "WARN", "FAIL"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report."""

    about: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """Something to be looked at; not where what it `needs` failed."""

    about: str
    look: Callable[[], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    limit_s: float = 120.0


class _TimeIsUp(BaseException):
    """No Exception: what a check calls must not take it for an error of its own."""


def examine(checks: Sequence[Check], *, failed: Iterable[str] = ()) -> Iterator[Finding]:
    """The findings of each check; one that raises has failed, in its own line. `failed` are those before."""
    cause = {name: name for name in failed}  # of what failed or was skipped: the check that failed first
    for check in checks:
        unmet = next((cause[name] for name in check.needs if name in cause), None)
        if unmet is not None:
            cause[check.about] = unmet
            yield Finding(check.about, "WARN", f"skipped: because of {unmet}")
            continue
        for finding in _findings(check):
            if finding.verdict == "FAIL":
                cause[check.about] = check.about
            yield finding


def _findings(check: Check) -> list[Finding]:
    found: list[Finding] = []
    try:
        with _limit(check.limit_s):
            found += check.look()
    except UserError as e:
        said, _, remedy = str(e).rpartition("; ")
        found.append(
            Finding(check.about, "FAIL", said, remedy)
            if said
            else Finding(check.about, "FAIL", str(e), "mend that, and look again")
        )
    except RolloutError as e:
        found.append(Finding(check.about, "FAIL", str(e), "mend what it says, and look again"))
    except _TimeIsUp:
        remedy = "see what it waits for, or try a quieter machine"
        found.append(Finding(check.about, "FAIL", f"no result in {check.limit_s:.0f} s", remedy))
    except Exception as e:
        said = str(e).strip().partition("\n")[0]
        remedy = "not foreseen: jppo.train with the same settings shows where"
        found.append(Finding(check.about, "FAIL", f"{type(e).__name__}: {said}", remedy))
    return found


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Ends what runs in it after so many seconds, once it is back in Python; signals reach the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def up(*_: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_room(about: str, free: int, *, warn: int, fail: int, remedy: str) -> Finding:
    """Bytes that are free against what a run needs."""
    verdict: Verdict = "FAIL" if free < fail else "WARN" if free < warn else "OK"
    found = f"{free / GIB:.1f} GiB free"
    return Finding(about, verdict, found, "" if verdict == "OK" else remedy)


def report(found: Iterable[Finding], console: rich.console.Console) -> int:
    """Prints each finding when it is there, and what all come to; the exit code."""
    failed = 0
    for finding in found:
        row = rich.table.Table.grid(padding=(0, 2))
        for width in (4, ABOUT):
            row.add_column(width=width)
        row.add_column()
        verdict = rich.text.Text(finding.verdict, STYLE[finding.verdict])
        told = f"{finding.found}\n→ {finding.remedy}" if finding.remedy else finding.found
        row.add_row(verdict, rich.text.Text(finding.about), rich.text.Text(told, overflow="fold"))
        console.print(row)
        failed += finding.verdict == "FAIL"
    console.print(f"{failed} to be mended before a training" if failed else "fit to train")
    return 1 if failed else 0
