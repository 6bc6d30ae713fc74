"""The command line of every training: settings, then a dry run or the training."""

import sys
from collections.abc import Callable
from typing import TypeVar

from jppo import settings
from jppo.errors import escaped
from jppo.preflight.request import DryRun, read_request
from jppo.runlog.watchdog import ending
from jppo.settings import Training

C = TypeVar("C", bound=Training)


def run_training(
    argv: list[str] | None,
    name: str,
    about: str | None,
    kind: type[C],
    *,
    dry_run: Callable[[C, DryRun], str],
    train: Callable[[C], None],
) -> None:
    """Checks the settings of command `name`, then prints a dry run or trains."""
    argv = sys.argv[1:] if argv is None else argv
    config, switches = settings.parse(argv, about or "", settings.config_of(kind), describes=True)
    c = settings.typed(config, kind)
    request = read_request(switches, name, argv)
    if switches["dry_run"]:
        from jppo.preflight import programs

        print(settings.dump(c), flush=True)
        with programs.programs_announced():
            report = dry_run(c, request)
        print(escaped(report), end="")
        return
    with ending(c.trainer.run_dir, within_s=c.trainer.stop_timeout_s, resume_mode=c.trainer.resume_mode):
        train(c)
