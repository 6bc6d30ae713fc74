"""Is this environment fit to train? `python -m jppo.doctor` says what is wrong and what to do.

    python -m jppo.doctor                                       # the machine alone; --python=FILE has the server's vLLM
    python -m jppo.doctor --config=configs/gsm8k.py --config.model.path=DIR

Without a config: starts no server, trains nothing. With one, and its overrides as for jppo.train, also whether that run
would go: its folder, models, data, reward, memory, disk; a server is started, gets the weights, and must agree with the
trainer, unless there is --no_server. Nothing is trained, and the run's folder stays as it is. Exit code 1 where
something must be mended, 2 where the settings themselves cannot be.
"""

import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

import rich.console
from ml_collections import ConfigDict

from jppo import config as settings
from jppo.assemble.memory import available_memory
from jppo.checkup import machine, run
from jppo.checkup.finding import GIB, Finding, check_room, report
from jppo.config import UserError

MEMORY = 3 * GIB  # a small trainer and its vLLM on a CPU
SHARED_MEMORY = GIB  # vLLM's processes talk through it
DISK_WARN, DISK_FAIL = 10 * GIB, GIB


def findings(python: str) -> Iterator[Finding]:
    """Everything that is looked at without a config, in the order of the report."""
    yield from machine.environment(python)
    free = available_memory(pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup"))
    if free is not None:
        remedy = "end other programs, or give the container more"
        yield check_room("memory", free, warn=MEMORY, fail=MEMORY // 3, remedy=remedy)
    if os.path.isdir("/dev/shm"):
        remedy = "empty /dev/shm, or give the container more (docker run --shm-size=8g)"
        free = shutil.disk_usage("/dev/shm").free
        yield check_room("shared memory", free, warn=SHARED_MEMORY, fail=0, remedy=remedy)
    remedy = "make room, or start where there is more: runs are written below the current folder"
    yield check_room("disk", shutil.disk_usage(".").free, warn=DISK_WARN, fail=DISK_FAIL, remedy=remedy)
    yield machine.check_loopback()
    yield machine.check_sandbox()


def read_run(argv: list[str]) -> tuple[ConfigDict, bool]:
    """The settings that --config and its overrides give, and whether a server is to be started."""
    rest = [word for word in argv if word != "--no_server"]
    if [word for word in rest if word.split("=")[0] == "--python"]:
        raise UserError("--python is for a look without settings; with --config give --config.rollout.python=FILE")
    c, _ = settings.parse(rest, __doc__ or "", settings.default())
    if "rollout" not in c:
        raise UserError(
            "--config is one of jppo.sft or jppo.reward_model, and the doctor looks at those of jppo.train; their own"
            " --dry_run looks at it"
        )
    settings.check(c)
    return c, len(rest) == len(argv)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    if any(word.startswith("--config") for word in argv):
        c, server = read_run(argv)
        sys.exit(report(run.doctor(c, server=server), rich.console.Console()))
    parser = settings.Parser("jppo.doctor", __doc__)
    parser.add_argument("--python", default="", help="the interpreter that has vLLM, as in rollout.python")
    args = parser.parse_args(argv)
    sys.exit(report(findings(args.python), rich.console.Console()))


if __name__ == "__main__":
    main()
