"""Device memory that ran out during a run, as one line: where, how much was asked for, and changes that fit.

The changes have been compiled, as by `--dry_run`, where one host runs PPO; otherwise they are those to try first.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax

from jppo import settings
from jppo.errors import RunEnded, UserError
from jppo.forecast.machines import GIB
from jppo.learner.make import make_mesh
from jppo.preflight import auto, preview
from jppo.preflight.described_machine import remedies
from jppo.rollout.make import with_servers
from jppo.run.inputs import read_inputs
from jppo.runlog.timers import IN_STAGE
from jppo.settings import Common, Settings

_SIGN = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OUT_OF_MEMORY")
_COUNT = re.compile(r"allocat\w* (?P<count>[\d.]+) ?(?P<unit>bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemory(RunEnded):
    """A device or the host had no room for an array."""


@contextlib.contextmanager
def explained(c: Common, *, hosts: int = 1) -> Iterator[None]:
    """Raises OutOfMemory in place of XLA's error, with the stage of `Timers` and changes that fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not _SIGN.search(str(e)):
            raise
        notes = [note for note in getattr(e, "__notes__", ()) if note.startswith(IN_STAGE)]
        where = notes[0].removeprefix(IN_STAGE) if notes else "the run"
        count = _COUNT.search(str(e))
        asked = f" for {float(count['count']) * _UNITS[count['unit']] / GIB:.2f} GiB" if count else ""
        kind = jax.devices()[0].device_kind
        raise OutOfMemory(f"{where}: memory of {kind} has no room{asked}; {_advice(c, hosts)}") from e


def _advice(c: Common, hosts: int) -> str:
    """Returns the first changes that fit, or those to try."""
    tries = list(remedies(c))
    if isinstance(c, Settings) and hosts == 1 and tries:
        print("out of memory: compiling the run with settings that need less", file=sys.stderr, flush=True)
        with contextlib.suppress(UserError, jax.errors.JaxRuntimeError, MemoryError):
            if (found := _fitting(c, tries)) is not None:
                return f"{auto.as_arguments(found)} fits by the account of --dry_run"
    first = f"try {auto.as_arguments(tries[0])}, " if tries else ""
    return f"{first}spread the models by mesh.fsdp, train adapters by model.lora_rank, or take a larger machine"


def _fitting(c: Settings, tries: list[dict[str, Any]]) -> dict[str, Any] | None:
    inputs, mesh = read_inputs(c), make_mesh(c)
    c = with_servers(c, mesh)
    peak = preview.estimate(c, inputs, mesh).peak
    for changes in tries:
        _, found, places = preview.look(settings.changed(c, changes), inputs, mesh)
        if found.peak < peak and not found.refused and all(place.verdict != "FAIL" for place in places):
            return changes
    return None
