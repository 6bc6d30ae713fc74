"""What a command line asks of a dry run: the machine, the file of the report; without what computes the report."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jppo import plugins
from jppo.errors import UserError
from jppo.learner.make import open_mesh
from jppo.settings import Training


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The options of `--dry_run`."""

    machine: Any = None  # a described one; None: this one
    json: str = ""  # path of the JSON report; '' writes none
    rollout_tokens_per_s: float = 0.0

    def mesh(self, c: Training) -> Any:
        """Makes the config's mesh of the devices, and prepares the process for them."""
        described = self.machine is not None
        return open_mesh(c, plugins.load("forecast.compilers").devices_of(self.machine) if described else None)

    def write(self, report: dict[str, Any]) -> None:
        """Writes the JSON file, if one is requested."""
        if self.json:
            path = pathlib.Path(self.json)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(report, indent=1) + "\n")
            except OSError as e:
                raise UserError(f"--json={self.json}: cannot be written: {e.strerror}; name another file") from e


HERE = DryRun()  # this machine


def read_request(switches: dict[str, Any], command: str, argv: Sequence[str]) -> DryRun:
    """Reads the command line's request; for a described machine, reruns the command where its compiler is installed."""
    name, rate = switches.get("machine"), switches.get("rollout_tokens_per_s", 0.0)
    if (name is not None or switches.get("json") or rate) and not switches.get("dry_run"):
        flag = "machine" if name is not None else "json" if switches.get("json") else "rollout_tokens_per_s"
        raise UserError(f"--{flag} belongs to --dry_run, which trains nothing; add --dry_run")
    if rate < 0 or (rate and not name):
        raise UserError(
            f"--rollout_tokens_per_s={rate:g} must be above 0 and is for a described machine; add --machine"
        )
    if name is None:
        return DryRun(json=switches.get("json", ""))
    machine = plugins.load("forecast.machines").parse_machine(name)  # a script's empty variable is no machine
    plugins.load("forecast.compilers").rerun_if_absent(machine, command, argv)
    return DryRun(machine, switches.get("json", ""), rate)
