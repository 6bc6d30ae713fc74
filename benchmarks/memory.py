"""The memory estimate of `--dry_run` compared with measured peaks of a step.

    python benchmarks/memory.py                                   # shapes S and M, PPO with a critic and a reference
    python benchmarks/memory.py --models q05 --tokens 1024 --set algorithm.adv_estimator=reinforce_plus_plus
    python benchmarks/memory.py --models q05 --layers 4           # q05 with 4 layers

Each model has random weights and goes through the start and two steps of training as `jppo.train` does them, without
vLLM: every pass on empty rows of every shape, then log-probs, the reference's, values, advantages and both updates, on
the ragged batch of work.py, or a part of it by --tokens. Each runs twice in a separate process: the first run compiles
into a cache, so the second one measures no compiler memory. On a CPU the figure is the peak of resident memory, above
the memory before any array and in total. On an accelerator it is the peak that the device reports.
Exit code 1 where an estimate is off by more than 20%.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
from machine import ROOT, begin, names_of, title, write
from ml_collections import ConfigDict
from models import CPU_SCANS, MODELS, some
from work import SEQUENCES, base_config, change, make_batch, make_rows, response_lengths, score

from jppo import settings
from jppo.errors import UserError
from jppo.learner import ppo
from jppo.learner.make import make_adapters, make_mesh
from jppo.learner.ppo import ModelConfigs
from jppo.learner.sharding import device_peak
from jppo.models import config_reader
from jppo.preflight import memory
from jppo.run.make import list_run_programs, make_learner, make_recipe, plan_of_run
from jppo.runlog.timers import Timers
from jppo.settings import Settings
from jppo.types import Trajectory

LIMIT = 0.2  # how far off an estimate may be
STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
# glibc gives large blocks back when they are freed, whatever their size was before.
TRUE_PEAK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}


def make_config(name: str, sequences: int, changes: Sequence[str]) -> ConfigDict:
    """Returns the default config with a KL in the reward, for the model and this number of sequences."""
    c = base_config("none: the weights are random", "float32")
    c.model.scan_layers = jax.default_backend() != "cpu" or name in CPU_SCANS
    c.data.train_batch_size = sequences
    c.actor.ppo_mini_batch_size = min(c.actor.ppo_mini_batch_size, sequences)
    c.algorithm.use_kl_in_reward = True
    return change(c, changes)


def make_inputs(c: Settings, described: dict[str, Any]) -> ModelConfigs:
    """Returns the models of a run."""
    cfg = config_reader.parse_config(described, path="memory.py")
    return ModelConfigs(
        policy=cfg,
        critic=cfg if make_recipe(c).algorithm.critic else None,
        reference=cfg if c.algorithm.use_kl_in_reward else None,
        adapters=make_adapters(c),
        critic_adapters=make_adapters(c),
        total_steps=1,
    )


def step(learner: Any, now: Any, trajectories: list[Trajectory]) -> Any:
    """Runs the device part of a step."""
    data = score(learner, now, trajectories, Timers())
    return ppo.learn(learner, now, data, trajectories, Timers())[0]


def status(field: str) -> int | None:
    """Returns the bytes in a line of this process's status, or None."""
    lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


def measure(name: str, *, layers: int, tokens: int | None, changes: Sequence[str]) -> dict[str, Any]:
    """Measures the estimate and two steps, in this process."""
    described = MODELS[name] | ({"num_hidden_layers": layers} if layers else {})
    responses = some(response_lengths()[:SEQUENCES], tokens)
    c = settings.typed(make_config(name, len(responses), changes))
    mesh, inputs = make_mesh(c), make_inputs(c, described)
    trajectories = make_batch(inputs.policy, responses)
    plan = plan_of_run(c, mesh, inputs)
    entries = sum(r * t for r, t in (rows.inputs.shape for rows in make_rows(trajectories, plan, mesh)))
    estimate = memory.estimate_memory(c, inputs, mesh, entries=entries)
    program = status("VmRSS")
    if CLEAR.is_file():
        with contextlib.suppress(OSError):
            CLEAR.write_text("5")  # resets the peak
    learner, now = make_learner(c, inputs, mesh)
    for program in list_run_programs(c, learner, now):
        program.run()
    for _ in range(2):
        now = step(learner, now, trajectories)
    jax.block_until_ready(now)
    devices = jax.local_device_count()
    return {
        "parts": estimate.parts,
        "moments": {m.name: [m.gradients, m.temporaries] for m in estimate.moments},
        "estimate": estimate.peak * (devices if jax.default_backend() == "cpu" else 1),
        "program": program,
        "device_peak": device_peak(),
        "resident_peak": status("VmHWM"),
        "rows": [list(shape) for shape in plan.shapes],
    }


def in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs `measure` in two processes: the first compiles, the second counts."""
    command = [sys.executable, __file__, "--measure", name, "--layers", str(args.layers)]
    command += [] if args.tokens is None else ["--tokens", str(args.tokens)]
    command += [part for change in args.changes for part in ("--set", change)]
    with tempfile.TemporaryDirectory() as cache:
        keep = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        for _ in range(2):
            done = subprocess.run(
                command, env=os.environ | TRUE_PEAK | keep, stdout=subprocess.PIPE, text=True, check=True
            )
    return json.loads(done.stdout.splitlines()[-1])


def compared(x: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Estimate and measured peak: of the device, or of the process without and with the program itself."""
    if x["device_peak"] is not None:
        return {"device": (x["estimate"], x["device_peak"])}
    if x["program"] is None or x["resident_peak"] is None:
        raise UserError("memory.py reads /proc/self/status, which this machine has not; run it on Linux")
    whole = (x["estimate"] + x["program"], x["resident_peak"])
    return {"arrays": (x["estimate"], x["resident_peak"] - x["program"]), "process": whole}


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    mib = 2**20
    lines = [
        f"{title(result['machine'])}; jax {result['jax']}; commit {result['commit']}; {result['date']}; load average"
        f" before {result['load_average']:.1f}",
        "",
        "| model | of | estimate, MiB | measured peak, MiB | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    for name, x in result["models"].items():
        for of, (estimate, peak) in compared(x).items():
            lines.append(f"| {name} | {of} | {estimate / mib:,.0f} | {peak / mib:,.0f} | {estimate / peak:.2f} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="S,M", help=f"of {', '.join(MODELS)}, separated by commas")
    parser.add_argument("--layers", type=int, default=0, help="of every model; 0: its own")
    parser.add_argument("--tokens", type=int, help="of the batch, at most; by default all")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args.measure, layers=args.layers, tokens=args.tokens, changes=args.changes)))
        return
    names = names_of(args.models, MODELS, "--models")
    result: dict[str, Any] = {
        **begin(),
        "layers": args.layers,
        "tokens": args.tokens,
        "changes": args.changes,
        "models": {name: in_process(name, args) for name in names},
    }
    write(result, table, args.out, "memory", *names)
    ratios = [estimate / peak for x in result["models"].values() for estimate, peak in compared(x).values()]
    if max(abs(ratio - 1) for ratio in ratios) > LIMIT:
        sys.exit(f"an estimate is off by more than {LIMIT:.0%}")


if __name__ == "__main__":
    main()
