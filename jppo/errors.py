"""Errors that every part of jppo may raise, their form in a terminal, and paths as a user writes them."""

import os
import pathlib
import re
from collections.abc import Callable, Iterable

INTERRUPTED = 130  # exit code after Ctrl-C, as the shell has it
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST_WHY = 1000  # characters; what a client sent may be in it


class UserError(Exception):
    """A mistake that the user can correct, in one line: value, rule, remedy. Commands print it and exit with code 2."""


class UserErrors(UserError):
    """Several mistakes of one config; commands print a line for each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(self.faults)


class RunEnded(Exception):
    """Ends a run. The message is one line, which the command prints; the exit code is 1.

    Every host raises it at the same place, so that the last complete state is saved.
    """


class BadRequest(Exception):
    """A request over HTTP that is not answered; the message says why, and `code` is the API's name of the reason."""

    def __init__(self, why: str, code: str = "invalid_request_error", status: int = 400):
        super().__init__(" ".join(why.split())[:_MOST_WHY])
        self.code, self.status = code, status


def escaped(text: str) -> str:
    """Escapes a terminal's control characters as \x1b and the like; lines and tabs stay."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def one_line(error: BaseException) -> str:
    """Returns the text of an error as a command prints it: one line for each mistake."""
    faults = error.faults if isinstance(error, UserErrors) else [error]
    return "\n".join(escaped(f"error: {fault}").replace("\n", "\\n") for fault in faults)


def faults_of(checks: Iterable[Callable[[], object]]) -> list[str]:
    """Calls every check; returns the messages of their UserErrors, each once."""
    faults: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as e:
            faults += [fault for fault in (e.faults if isinstance(e, UserErrors) else [str(e)]) if fault not in faults]
    return faults


def raise_faults(faults: list[str]) -> None:
    """Raises the faults as one error, if there are any."""
    if faults:
        raise UserError(faults[0]) if len(faults) == 1 else UserErrors(faults)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path with a home folder in place of ~; UserError where ~ names no user."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as e:
        raise UserError(f"{path}: {pathlib.Path(path).parts[0]} is no user's home folder; write the path out") from e
