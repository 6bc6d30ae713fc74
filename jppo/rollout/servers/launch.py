"""Runs a command that must not outlive its parent process: `member.py` starts servers through this.

    python -m jppo.rollout.servers.launch PARENT_PID FOLDER COMMAND...

It leads the process group of COMMAND and all its children. When the parent is gone, when COMMAND ends, or on SIGTERM,
the whole group gets SIGTERM and, some seconds later, SIGKILL. When the parent is gone, FOLDER ('' for none) is removed,
too. It watches from the start, before vLLM's imports end.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

GRACE_S = 8.0  # for vLLM to end its children
POLL_S = 0.2


class _Stop(Exception):
    pass


def main(parent: int, folder: str, command: list[str]) -> None:
    """Runs `command` until it ends or has to end; never returns."""
    signal.signal(signal.SIGTERM, _stop)
    child = None
    try:
        with contextlib.suppress(_Stop):  # SIGTERM: all end below
            child = subprocess.Popen(command, preexec_fn=die_with_parent)
            while os.getppid() == parent and child.poll() is None:
                time.sleep(POLL_S)
    finally:
        signal.signal(signal.SIGTERM, lambda *_: None)  # a late child would inherit SIG_IGN
        if child is not None and child.poll() is not None:
            print(f"the server's process ended with code {child.returncode}", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGTERM)
        if child is not None:
            _wait_for_end(child, GRACE_S)
        if folder and os.getppid() != parent:  # a living parent removes it itself
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # including itself


def _stop(*_: object) -> None:
    raise _Stop


def _wait_for_end(child: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def die_with_parent() -> None:
    """For the child before exec: on Linux it gets SIGTERM when its parent is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
