"""Fastest settings of a run on a described machine:

    python -m jppo.plan --config=configs/gsm8k_7b.py --machine=8xH100

Tries meshes, model.remat, actor.max_tokens_per_device, data.packing and offload, in this order, by compiling every
program of the run for the described machine. Each group is tried on the best settings so far. A fastest mesh that does
not fit is tried with recomputation and fewer tokens per device, offload only if nothing else fits. Prints a table, the
fastest forecast first, and the command line of the best. --json=FILE writes it as JSON; --rollout_tokens_per_s=N adds
the rollout to each step. Every figure is a forecast by the compiler, not measured. Nothing is trained, no weight is
read.
"""

import shlex
import sys
import time
from collections.abc import Collection, Iterator, Sequence

from jppo import settings
from jppo.errors import UserError
from jppo.plugins.forecast import machines, search
from jppo.plugins.forecast.compilers import rerun_if_absent
from jppo.plugins.forecast.machines import GIB
from jppo.plugins.forecast.outlook import NOTE
from jppo.preflight import memory_budget
from jppo.preflight.request import DryRun
from jppo.run.inputs import read_inputs
from jppo.settings import Settings


def without_options(argv: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yields the words of a command line without these options and their values, NAME=VALUE or NAME VALUE."""
    expects_value = False  # a value: the last word was one of the options, without one
    for word in argv:
        name, equals, _ = word.partition("=")
        is_value, expects_value = expects_value and not word.startswith("--"), name in names and not equals
        if not is_value and name not in names:
            yield word


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Searches the fastest settings for --machine and prints all that were tried, the best first."""
    argv = sys.argv[1:] if argv is None else argv
    config, switches = settings.parse(argv, __doc__ or "", settings.default(), describes=True)
    c = memory_budget.first_candidate(settings.typed(config, Settings))
    if not switches["machine"]:
        raise UserError(f"--machine is not given; name one, as in --machine=8xH100: {machines.known_names()}")
    machine = machines.parse_machine(switches["machine"])
    rerun_if_absent(machine, "jppo.plan", argv)
    start, rate = time.monotonic(), switches["rollout_tokens_per_s"]
    print(f"{machine}\n{search.HEADING}", flush=True)
    inputs = read_inputs(c, weights=False)
    candidates = search.search(
        c, inputs, machine, rate=rate, report=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print("\n".join(map(search.candidate_line, candidates)))
    print(f"{len(candidates)} settings compiled in {time.monotonic() - start:.0f} s; {NOTE}")
    DryRun(machine, switches["json"]).write(
        {"machine": machine.name, "candidates": list(map(search.candidate_dict, candidates))}
    )
    best = candidates[0]
    if not best.fits:
        raise UserError(
            f"{machine.name}: none of {len(candidates)} settings fits a device of {machine.chip.memory / GIB:.1f} GiB;"
            " take more or larger devices, or train adapters by model.lora_rank"
        )
    plan_options = {"--machine", "--json", "--rollout_tokens_per_s"} | {f"--config.{name}" for name in best.changes}
    words = [*map(shlex.quote, without_options(argv, plan_options)), *memory_budget.as_arguments(best.changes).split()]
    print(f"best: python -m jppo.train {' '.join(words)}")


if __name__ == "__main__":
    main()
