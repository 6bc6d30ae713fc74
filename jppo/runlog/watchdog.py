"""Ends a run: on a signal, when a stage is stuck, or by an error, each with its exit code (`ending`).

A signal raises `Stopped` at once in a stage that only waits, whose work the resumed run repeats; in any other stage the
step is finished first. The handler of `Stopped` saves. A run that has not ended `stop_timeout_s` later is ended by
force, without a new checkpoint, except after Ctrl-C, of which a second one does not wait.

Python drops an exception that is raised in `__del__`, a callback of the garbage collector or a callback from C, and
code may catch every exception. A signal may arrive there. `Stopped` is therefore raised again, every `AGAIN_S`, until
the main thread has left the stage or is on its way out.
"""

import contextlib
import errno
import faulthandler
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jppo.distributed.hosts import ALONE, Elsewhere, Hosts, Stopped
from jppo.errors import INTERRUPTED, RunEnded, expanded, one_line
from jppo.runlog.checkpoint import last_remains
from jppo.runlog.timers import Timers

WAITING = ("start", "gen", "reward", "testing")
POLL_S = 0.2
AGAIN_S = 1.0
STOPPED = 143  # the shell's code for SIGTERM: a batch system must not consider the run finished
STUCK = 1  # exit code of a stuck run


class Watch:
    """Watches one run; a context manager around the whole run."""

    def __init__(
        self,
        timer: Timers,
        *,
        stage_timeout_s: float,
        stop_timeout_s: float,
        stacks: pathlib.Path,
        checkpoints: pathlib.Path,
        hosts: Hosts = ALONE,
        stopped: int = STOPPED,
    ) -> None:
        """Sets the limits of a stage's time and of the end's; `stacks` is the file for the stacks of a stuck run.

        `checkpoints` is the folder of its checkpoints, and `stopped` the exit code after SIGTERM or SIGHUP.
        """
        self._codes = {signal.SIGTERM: stopped, signal.SIGHUP: stopped, signal.SIGINT: INTERRUPTED}
        self._timer = timer
        self._hosts = hosts
        self._stage_timeout_s = stage_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._stacks, self._checkpoints = stacks, checkpoints
        self._stop: Stopped | None = None
        self._deadline = float("inf")
        self._finished = threading.Event()
        self._handlers: dict[int, Any] = {}

    def check(self) -> None:
        """Raises a requested stop of any host; called between steps, where the state is consistent."""
        self._hosts.together(self._raise)

    def _raise(self) -> None:
        if self._stop is not None:
            raise self._stop

    def __enter__(self) -> "Watch":
        """Sets the signals' handlers and starts the watching thread."""
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            self._main = threading.get_ident()
            for number in (*self._codes, signal.SIGUSR1):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # by nohup: the run should outlive its terminal
                self._handlers[number] = signal.signal(number, self._handle_signal)
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, _: Any) -> None:
        """Requests a stop, and raises it at once in a stage that only waits; runs in the main thread."""
        if number == signal.SIGINT and self._stop is not None:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait
        if number == signal.SIGHUP:
            _mute()
        if number in self._codes:
            name = signal.Signals(number).name
            self._request_stop(Stopped(self._codes[signal.Signals(number)], f"stopped by {name}"))
        if self._stop is not None and self._timer.stage()[0] in WAITING and self._hosts.working and not _is_ending():
            raise self._stop

    def _request_stop(self, stopped: Stopped) -> None:
        """Records the first reason for a stop, and by when the run has to end."""
        self._stop = self._stop or stopped
        if stopped.status != INTERRUPTED or stopped.heard:  # after Ctrl-C a person decides, by a second one
            self._deadline = min(self._deadline, time.monotonic() + self._stop_timeout_s)

    def _watch(self) -> None:
        """Checks the stage's time and other hosts, repeats a stop's signal, and ends a late run; runs in a thread."""
        announced, next_signal = False, 0.0
        while not self._finished.wait(POLL_S):
            stage, seconds = self._timer.stage()
            remote_stop = self._hosts.heard()
            if self._stop is None and (remote_stop is not None or seconds > self._stage_timeout_s):
                if remote_stop is None:
                    self._report_stuck(stage, seconds)
                self._request_stop(remote_stop or Stopped(STUCK, f"stuck in stage {stage}"))
            if self._stop is not None and self._handlers and stage in WAITING and time.monotonic() >= next_signal:
                next_signal = time.monotonic() + AGAIN_S
                signal.pthread_kill(self._main, signal.SIGUSR1)  # wakes it from a wait
            if self._stop is not None and not announced:
                announced = True
                if not self._stop.heard:
                    self._hosts.tell(self._stop)
                if self._stop.status == INTERRUPTED and stage not in WAITING:
                    _print_error("stopping after this step, with a checkpoint; Ctrl-C again does not wait for it")
            if time.monotonic() > self._deadline:
                _print_error(
                    f"the run did not end within trainer.stop_timeout_s={self._stop_timeout_s:g} in stage {stage}"
                    f" ({self._stop.why if self._stop else ''}); it is ended by force;"
                    f" {last_remains(self._checkpoints)}"
                )
                os._exit(STUCK)

    def _report_stuck(self, stage: str, seconds: float) -> None:
        """Writes the stacks of all threads to a file, and prints that the stage is stuck."""
        where = f"are in {self._stacks}"
        try:
            self._stacks.parent.mkdir(parents=True, exist_ok=True)
            with self._stacks.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: stage {stage} for {seconds:.0f} s\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as e:  # a full disk must not end this thread
            where = f"cannot be written to {self._stacks} ({e.strerror})"
        _print_error(
            f"stage {stage} has not ended for {seconds:.0f} s, trainer.stage_timeout_s={self._stage_timeout_s:g}; the"
            f" stacks of all threads {where}; the run ends with a checkpoint"
        )


@contextlib.contextmanager
def ending(run_dir: str, *, within_s: float, resume_mode: str) -> Iterator[None]:
    """Ends a command: errors and stops that are expected become one line and their exit code.

    | raised                               | exit code              | checkpoint of the last complete state |
    |--------------------------------------|------------------------|---------------------------------------|
    | UserError                            | 2                      | yes                                   |
    | RunEnded: RolloutError, Diverged     | 1                      | yes                                   |
    | RunEnded: OutOfMemory                | 1                      | yes                                   |
    | RunEnded: Unwritten                  | 1                      | yes, before the export                |
    | Elsewhere: another host's error      | 1                      | if all hosts raise it in an agreement |
    | OSError of a full disk               | 1                      | if there is room for it               |
    | Stopped by SIGTERM, SIGHUP           | trainer.stop_exit_code | yes                                   |
    | Stopped by Ctrl-C                    | 130                    | yes                                   |
    | Stopped because a stage is stuck     | 1                      | yes                                   |
    | KeyboardInterrupt: a second Ctrl-C   | 130                    | yes; a third one ends its writing     |
    | anything else, with a traceback      | 1                      | yes, on a single host                 |
    | none: the end took too long          | 1, by force            | no                                    |

    `exit_on_user_error` prints a UserError. An update that was broken off leaves no complete state, and one
    with values that are not finite is not saved.
    """

    def resumes() -> str:
        mode = "" if resume_mode == "auto" else " with trainer.resume_mode=auto"  # another begins where it did
        return f"the same command{mode} continues; {last_remains(expanded(run_dir) / 'checkpoints')}"

    try:
        yield
    except (RunEnded, Elsewhere) as e:
        print(one_line(e), file=sys.stderr)
        sys.exit(1)
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        print(f"error: {e}: make room in {run_dir}, and {resumes()}", file=sys.stderr)
        sys.exit(1)
    except Stopped as e:
        print(f"{e.why}; {resumes()}", file=sys.stderr, flush=True)
        leave(e.status, within_s=within_s)
    except KeyboardInterrupt:
        print(f"interrupted; {resumes()}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def leave(code: int, *, within_s: float) -> None:
    """Ends the process with `code`, by force if threads hang."""
    timer = threading.Timer(within_s, os._exit, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)


def _is_ending() -> bool:
    """Whether this thread handles a `Stopped`: its `finally` and `except` blocks must not be interrupted by another."""
    error = sys.exception()
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None


def _mute() -> None:
    """Makes later prints succeed when the terminal has gone."""
    for fd in (1, 2):
        try:
            os.write(fd, b"")
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, fd)
            os.close(null)


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
