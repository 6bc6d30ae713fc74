"""Checks whether a machine or a run is ready to train: python -m jppo.doctor

    python -m jppo.doctor                                       # the machine; --python=FILE has the server's vLLM
    python -m jppo.doctor --config=configs/gsm8k.py --config.model.path=DIR

Without a config it starts no server. With one, and overrides as for jppo.train, it also checks that run: folder,
models, data, reward, memory, disk. Unless --no_server is given it then starts a server, publishes the weights, compares
log-probs with the trainer, and compiles and runs every program of a step on empty rows, as a run's start does. Nothing
is trained, and the run folder is not changed. Exit code 1 if something must be fixed, 2 for invalid settings.
"""

import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

import rich.console

from jppo import settings
from jppo.errors import UserError
from jppo.preflight import accelerators, checks, machine
from jppo.preflight.finding import GIB, Finding, check_room, print_findings
from jppo.preflight.memory_budget import available_memory
from jppo.settings import Settings

MEMORY = 3 * GIB  # a small trainer and its vLLM on a CPU
SHARED_MEMORY = GIB  # used by vLLM's processes
DISK_WARN, DISK_FAIL = 10 * GIB, GIB


def findings(python: str) -> Iterator[Finding]:
    """Yields the findings that need no config, in the order of the report."""
    yield from machine.check_environment(python, needed=bool(python))
    cards = accelerators.gpus()
    yield from accelerators.check_bfloat16(cards, {}, None)
    yield from accelerators.check_small(cards)
    yield from accelerators.check_wsl(accelerators.kernel_version(), ())
    free = available_memory(pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup"))
    if free is not None:
        remedy = "end other programs, or give the container more"
        yield check_room("memory", free, warn=MEMORY, fail=MEMORY // 3, remedy=remedy)
    if os.path.isdir("/dev/shm"):
        remedy = "empty /dev/shm, or give the container more (docker run --shm-size=8g)"
        free = shutil.disk_usage("/dev/shm").free
        yield check_room("shared memory", free, warn=SHARED_MEMORY, fail=0, remedy=remedy)
    remedy = "make room, or start elsewhere: runs are written below the current folder"
    yield check_room("disk", shutil.disk_usage(".").free, warn=DISK_WARN, fail=DISK_FAIL, remedy=remedy)
    yield machine.check_loopback()
    yield machine.check_sandbox()


def read_run(argv: list[str]) -> tuple[Settings, bool]:
    """Returns the settings of --config and its overrides, and whether to start a server."""
    words = [word for word in argv if word != "--no_server"]
    if [word for word in words if word.split("=")[0] == "--python"]:
        raise UserError("--python is for checks without settings; with --config use --config.rollout.python=FILE")
    config, _ = settings.parse(words, __doc__ or "", settings.default())
    c = settings.typed(config, Settings)
    return c, len(words) == len(argv)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Prints the findings about the machine, or about the run of --config, and exits with their code."""
    argv = sys.argv[1:] if argv is None else argv
    if any(word.startswith("--config") for word in argv):
        c, server = read_run(argv)
        sys.exit(print_findings(checks.doctor(c, server=server), rich.console.Console()))
    parser = settings.Parser("jppo.doctor", __doc__)
    parser.add_argument("--python", default="", help="the interpreter that has vLLM, as in rollout.python")
    args = parser.parse_args(argv)
    sys.exit(print_findings(findings(args.python), rich.console.Console()))


if __name__ == "__main__":
    main()
