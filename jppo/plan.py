"""Fastest settings of a run on a described machine:

    python -m jppo.plan --config=configs/gsm8k_7b.py --machine=8xH100

Tries meshes, model.remat, actor.max_tokens_per_device, data.packing and offload by compiling every program of the run
for the described machine. Prints a table, the fastest forecast first, and the command line of the best. --json=FILE
writes it as JSON; --rollout_tokens_per_s=N adds the rollout to each step. Every figure is a forecast by the compiler,
not measured. Nothing is trained, no weight is read.
"""

import shlex
import sys
import time

from jppo import settings
from jppo.forecast import compilers, machines
from jppo.preflight import auto, described_machine, search
from jppo.preflight import table as forecast
from jppo.preflight.described_machine import Request
from jppo.run.inputs import read_inputs
from jppo.settings import Settings, UserError

HEAD = f"{'s a step':>9}  {'peak GiB':>8}  {'':<12}  {'slowest stage, bound by':<26}  settings"


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    argv = sys.argv[1:] if argv is None else argv
    config, switches = settings.parse(argv, __doc__ or "", settings.default(), describes=True)
    c = auto.first(settings.typed(config, Settings))
    if not switches["machine"]:
        raise UserError(f"--machine is not given; name one, as in --machine=8xH100: {machines.known()}")
    machine = machines.parse(switches["machine"])
    if not compilers.present(machine):
        compilers.rerun(machine, "jppo.plan", argv)
    began, rate = time.monotonic(), switches["rollout_tokens_per_s"]
    print(f"{machine}\n{HEAD}", flush=True)
    found = search.search(
        c, read_inputs(c), machine, rate=rate, say=lambda said: print(said, file=sys.stderr, flush=True)
    )
    print("\n".join(map(search.line, found)))
    print(f"{len(found)} settings compiled in {time.monotonic() - began:.0f} s; {forecast.NOTE}")
    Request(machine, switches["json"]).write({"machine": machine.name, "candidates": list(map(search.as_dict, found))})
    best = found[0]
    if not best.fits:
        room, _ = described_machine.capacity(c, machine)
        raise UserError(
            f"{machine.name}: none of {len(found)} settings fits a device's {room / machines.GIB:.1f} GiB; take more or"
            " larger devices, or train adapters by model.lora_rank"
        )
    ours = ("--machine", "--json", "--rollout_tokens_per_s")
    given = [word for word in argv if word.split("=")[0] not in ours]
    kept = [word for word in given if word.split("=")[0].removeprefix("--config.") not in best.changes]
    words = [*map(shlex.quote, kept), *auto.arguments(best.changes).split()]
    print(f"best: python -m jppo.train {' '.join(words)}")


if __name__ == "__main__":
    main()
