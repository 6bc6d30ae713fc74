"""Where device memory runs out during a run: one line with the stage, how much was asked for, and changes that fit.

The changes are compiled, as by `--dry_run`, where one host runs PPO; otherwise they are those to try first. If the run
should fit an accelerator, other programs may hold it; on a CPU the budget leaves out what these hold.
"""

import contextlib
import re
import sys
from collections.abc import Iterator

import jax

from jppo.errors import RunEnded
from jppo.learner.make import make_mesh
from jppo.runlog.timers import IN_STAGE
from jppo.settings import Settings, Training

_SIGN = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OUT_OF_MEMORY")
_COUNT = re.compile(r"allocat\w* (?P<count>[\d.]+) ?(?P<unit>bytes|[KMGT]iB)")
_GIB = 2**30
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemory(RunEnded):
    """A device or the host had no room for an array."""


@contextlib.contextmanager
def memory_explained(c: Training, *, hosts: int = 1) -> Iterator[None]:
    """Raises OutOfMemory in place of XLA's error, with the stage of `Timers` and changes that fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not _SIGN.search(str(e)):
            raise
        notes = [note for note in getattr(e, "__notes__", ()) if note.startswith(IN_STAGE)]
        stage = notes[0].removeprefix(IN_STAGE) if notes else "the run"
        count = _COUNT.search(str(e))
        requested = f" for {float(count['count']) * _UNITS[count['unit']] / _GIB:.2f} GiB" if count else ""
        kind = jax.devices()[0].device_kind
        raise OutOfMemory(f"{stage}: memory of {kind} has no room{requested}; {_advise(c, hosts)}") from e


def _advise(c: Training, hosts: int) -> str:
    """Returns an error's remedy: settings that fit, found by compiling the run with less, or settings to try."""
    from jppo.preflight import memory_budget, preview
    from jppo.rollout.make import with_servers
    from jppo.run.inputs import read_inputs

    if isinstance(c, Settings) and c.memory_chooses:
        c = memory_budget.read_choice(c)
    tries = list(memory_budget.remedies(c))
    if isinstance(c, Settings) and hosts == 1:
        print("out of memory: compiling the run with settings that need less", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # advice that fails must not hide the error
            inputs, mesh = read_inputs(c), make_mesh(c)
            c = with_servers(c, mesh)
            sizes = preview.look_up_sizes(c, inputs, mesh)
            changes = preview.first_smaller(c, inputs, mesh, tries, below=sizes[1].peak)
            smaller = "" if changes is None else memory_budget.as_arguments(changes)
            if preview.has_verdicts(sizes, "OK") and jax.default_backend() != "cpu":
                smaller = f", or reduce its memory with {smaller}" if smaller else ""
                return f"--dry_run estimates that the run fits: end other programs on the device{smaller}"
            if smaller:
                return f"{smaller} fits by the account of --dry_run"
    first = f"try {memory_budget.as_arguments(tries[0])}, " if tries else ""
    return f"{first}spread the models by mesh.fsdp, train adapters by model.lora_rank, or take a larger machine"
