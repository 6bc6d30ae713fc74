"""What a command is doing, between the lines of its steps: a spinner on a terminal, a line every 30 s elsewhere."""

import sys
import threading
from types import TracebackType
from typing import Self

import rich.console
import rich.status
import rich.text

from jppo.runlog.timers import Timers

EVERY_S, REDRAW_S = 30.0, 0.25


class Doing:
    """The running stage of `timer`, as a renderable that is new at each drawing."""

    def __init__(self, timer: Timers):
        self._timer = timer

    def __rich__(self) -> rich.text.Text:
        return rich.text.Text(self._timer.line(), style="dim")


class Display:
    """Shows the running stage from a thread, on stderr; a context manager."""

    def __init__(self, timer: Timers, console: rich.console.Console | None = None, *, every_s: float = EVERY_S):
        self._timer = timer
        self._console = console or rich.console.Console(stderr=True)
        self._every_s = every_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._spinner: rich.status.Status | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._spinner = rich.status.Status(Doing(self._timer), console=self._console)
            self._spinner.start()
        else:
            self._thread = threading.Thread(target=self._print, name="jppo-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave_terminal()
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def leave_terminal(self) -> None:
        """Removes the spinner: the table of steps follows. Elsewhere than on a terminal the lines continue."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _print(self) -> None:
        while not self._end.wait(self._every_s):
            if self._timer.stage()[1] >= self._every_s / 2 and (line := self._timer.line()):
                print(line, file=sys.stderr, flush=True)
