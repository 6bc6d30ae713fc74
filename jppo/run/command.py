"""The command line of a training: its settings, its dry run, and the end of a stopped run."""

import sys
from collections.abc import Callable

from ml_collections import ConfigDict

from jppo import settings
from jppo.dry_run import described_machine
from jppo.dry_run.described_machine import Request
from jppo.errors import escaped
from jppo.runlog.watchdog import ending


def run(
    argv: list[str] | None,
    name: str,
    about: str | None,
    defaults: ConfigDict,
    *,
    dry_run: Callable[[ConfigDict, Request], str],
    train: Callable[[ConfigDict], None],
) -> None:
    """Checks the settings of command `name`, then prints a dry run or trains."""
    argv = sys.argv[1:] if argv is None else argv
    config, switches = settings.parse(argv, about or "", defaults, describes=True)
    settings.check(config)
    request = described_machine.read(switches, name, argv)
    if switches["dry_run"]:
        print(settings.dump(config), flush=True)
        print(escaped(dry_run(config, request)), end="")
        return
    with ending(config.trainer.run_dir, within_s=config.trainer.stop_timeout_s):
        train(config)
