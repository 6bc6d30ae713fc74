"""Scaling of the cost with the batch, with sequence length, and with CPU devices that share threads.

    python benchmarks/scale.py                           # of shape S, all three
    python benchmarks/scale.py --parts lengths --repeats 3

Batch: the ragged batch of throughput.py once, 4 and 16 times over, mini-batches of 32; tokens a second of log-probs and
of an update (both models) should stay within 10%. Lengths: batches of as many tokens each in sequences of one length,
half of it prompt; FLOP a second should stay within 15%. The cases run in turn in one process. Devices: one CPU device
and eight in two processes that are asked in turn; XLA's threads are as many in both, and eight should lose 10% at most.
Each figure is the median of --repeats. Writes OUT/<date>-<machine>-scale.json and prints tables.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from contest import chosen, note, workers, write_work
from machine import ROOT, begin, title, write
from throughput import make_config, stage_flops, step
from work import PROMPT, SHAPES, hf_config, make_batch, response_lengths

from jppo import settings
from jppo.errors import UserError
from jppo.learner.make import make_learner, make_mesh
from jppo.learner.ppo import ModelConfigs
from jppo.models import config_reader
from jppo.runlog.timers import Timers

TIMES = (1, 4, 16)
LENGTHS, TOKENS = (128, 256, 512, 1024, 2048), 16384
DEVICES = (1, 8)
LIMITS = {"batch": 0.10, "lengths": 0.15, "devices": 0.10}
TIMED = {"logprobs": ("old_log_prob",), "update": ("update_critic", "update_actor")}


def make_case(shape: str, responses: np.ndarray, prompt: int, changes: list[str]) -> tuple[Callable[[], Any], Any]:
    """Makes a function that runs a step without vLLM and returns seconds by stage; and their tokens and FLOP."""
    cfg = config_reader.parse_config(hf_config(*SHAPES[shape]), path=shape)
    trajectories = make_batch(cfg, responses, prompt=prompt)
    sizes = {
        "data.max_prompt_length": prompt,
        "data.max_response_length": int(max(responses)),
        "data.train_batch_size": len(responses),
        "actor.ppo_mini_batch_size": min(32, len(responses)),
    }
    changes = [*(f"{k}={v}" for k, v in sizes.items()), *changes]
    c = settings.typed(make_config("none: the weights are random", "float32", changes))
    inputs = ModelConfigs(policy=cfg, critic=cfg, total_steps=1)
    learner, now = make_learner(c, inputs, make_mesh(c))
    timer = Timers()

    def run() -> dict[str, float]:
        nonlocal now
        now = step(c, learner, now, trajectories, None, timer)
        took = timer.next_step()
        return {part: sum(took[f"timing_s/{name}"] for name in names) for part, names in TIMED.items()}

    flops = stage_flops(cfg, responses, prompt=prompt)
    tokens = sum(len(t.tokens) for t in trajectories)
    run()  # compiles
    return run, {"tokens": tokens, "flops": {p: sum(flops[name] for name in names) for p, names in TIMED.items()}}


def in_turn(cases: dict[str, tuple[Callable[[], Any], Any]], repeats: int) -> dict[str, Any]:
    """Measures the cases in turn."""
    measured = {name: about | {"seconds": {part: [] for part in TIMED}} for name, (_, about) in cases.items()}
    for _ in range(repeats):
        for name, (run, _) in cases.items():
            for part, seconds in run().items():
                measured[name]["seconds"][part].append(seconds)
    return measured


def by_batch(shape: str, repeats: int, changes: list[str]) -> dict[str, Any]:
    """Measures several copies of the batch."""
    cases = {f"{n} x": make_case(shape, np.tile(response_lengths(), n), PROMPT, changes) for n in TIMES}
    return in_turn(cases, repeats)


def by_length(shape: str, repeats: int, changes: list[str]) -> dict[str, Any]:
    """Measures the same number of tokens in sequences of each length."""
    cases = {}
    for length in LENGTHS:
        responses = np.full(max(1, TOKENS // length), length - length // 2)
        cases[f"{length} tokens"] = make_case(shape, responses, length // 2, changes)
    return in_turn(cases, repeats)


def by_devices(shape: str, repeats: int, changes: list[str]) -> dict[str, Any]:
    """Measures one CPU device and several, each in a separate process, on the workload of contest.py."""
    who = {"peer": "jppo", "dtype": "float32", "python": sys.executable}
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    entered = {
        f"{n} device{'s' * (n > 1)}": who
        | {"env": {"XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={n}"])}}
        for n in DEVICES
    }
    with tempfile.TemporaryDirectory() as place:
        about = write_work(pathlib.Path(place), shape, changes)
        with workers(entered, pathlib.Path(place)) as (able, reports, _):
            measured: dict[str, Any] = {
                name: about | {"said": reports[name], "seconds": {}, "checks": {}} for name in able
            }
            for _ in range(repeats):
                for stage in ("logprobs", "update"):
                    for name, worker in able.items():
                        note(measured[name], stage, worker.go(stage))
    return measured


PARTS = {"batch": by_batch, "lengths": by_length, "devices": by_devices}


def worst(part: str, cases: dict[str, Any], stage: str) -> float:
    """Returns the largest deviation of the rates: below the first; for lengths in FLOP/s, in either direction."""
    amount = (lambda x: x["flops"][stage]) if part == "lengths" else (lambda x: x["tokens"])
    rates = [amount(x) / statistics.median(x["seconds"][stage]) for x in cases.values()]
    if part == "lengths":
        return max(abs(rate / rates[0] - 1) for rate in rates)
    return max(1 - rate / rates[0] for rate in rates)


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"{title(result['machine'])}; shape {result['shape']}; float32; jax {result['jax']}; commit"
        f" {result['commit']}; {result['date']}; load average before {result['load_average']:.1f}",
        "",
        "| part | case | stage | tokens/s | GFLOP/s | seconds |",
        "|---|---|---|---:|---:|---:|",
    ]
    for part, cases in result["parts"].items():
        for name, x in cases.items():
            for stage in TIMED:
                took = statistics.median(x["seconds"][stage])
                rates = f"{x['tokens'] / took:,.0f} | {x['flops'][stage] / took / 1e9:,.1f}"
                lines.append(f"| {part} | {name} | {stage} | {rates} | {took:.3f} |")
    lines += ["", "| part | stage | apart at most | goal |", "|---|---|---:|---:|"]
    for part, cases in result["parts"].items():
        for stage in TIMED:
            apart, limit = worst(part, cases, stage), LIMITS[part]
            lines.append(f"| {part} | {stage} | {apart:.0%} | {limit:.0%}, {'met' if apart <= limit else 'missed'} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--shape", default="S", choices=list(SHAPES), help="of the model")
    parser.add_argument("--repeats", type=int, default=5, help="of each case; the median counts")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    parts = chosen("--parts", args.parts, tuple(PARTS))
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats} must be 1 or more")
    if "devices" in parts and jax.default_backend() != "cpu":
        raise UserError("--parts=devices is about CPU devices: give JAX_PLATFORMS=cpu, or other parts")
    begun = begin()
    measured = {}
    for part in parts:
        measured[part] = PARTS[part](args.shape, args.repeats, args.changes)
        print(f"{part} measured", file=sys.stderr)
    result: dict[str, Any] = {
        **begun,
        "shape": args.shape,
        "changes": args.changes,
        "parts": measured,
    }
    write(result, table, args.out, "scale")


if __name__ == "__main__":
    main()
