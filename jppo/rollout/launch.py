"""Runs a command that may not outlive the process which asked for it: `server.py` starts vLLM through this.

    python -m jppo.rollout.launch PARENT_PID FOLDER COMMAND...

It leads the process group that COMMAND and all its children live in. When the parent is gone, however it
went, when COMMAND ends, or on SIGTERM, the whole group gets SIGTERM, some seconds, and SIGKILL. When the
parent is gone, FOLDER ('' for none) goes too. It watches from the first moment, before vLLM's imports end.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

GRACE_S = 8.0  # for vLLM to take its own children down
POLL_S = 0.2


class _Stop(Exception):
    pass


def main(parent: int, folder: str, command: list[str]) -> None:
    """Runs `command` until it ends or until it must; never returns."""
    signal.signal(signal.SIGTERM, _stop)
    child = None
    try:
        child = subprocess.Popen(command, preexec_fn=die_with_parent)
        while os.getppid() == parent and child.poll() is None:
            time.sleep(POLL_S)
    except _Stop:
        pass
    finally:
        signal.signal(signal.SIGTERM, lambda *_: None)  # SIG_IGN would be inherited by a late child
        if child is not None and child.poll() is not None:
            print(f"the server's process ended with code {child.returncode}", file=sys.stderr, flush=True)
        os.killpg(0, signal.SIGTERM)
        if child is not None:
            _wait(child, GRACE_S)
        if folder and os.getppid() != parent:  # a parent that lives may need it yet, and removes it itself
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # itself too


def _stop(*_: object) -> None:
    raise _Stop


def _wait(child: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def die_with_parent() -> None:
    """For the child, before its program: on Linux it gets SIGTERM when the process that starts it is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
