"""Models of 0.5B, 1.5B and 7B parameters on one accelerator: passes, attention kernels, memory.

    python benchmarks/gpu.py                                   # on a machine with a GPU
    python benchmarks/gpu.py --models q05 --sequences 8 --length 2048
    python benchmarks/gpu.py --models tiny --length 128        # a CPU: to see that it runs

Each model is in a process of its own and goes through the passes of models.py in bfloat16, its layers scanned and
rematerialised: hidden states, log-probs, an update of adapters and one of all weights (clipped loss, AdamW), where
they fit. The batch is --sequences of --length tokens, half of each prompt; weights are random. Utilisation is the FLOP
that the real tokens need relative to the vendor's dense peak, for known devices, and to a large matrix product.
Weights are float32 except for those of 7B, which are bfloat16 as are their optimizer's moments. Then attention.py, and
memory.py with the first model: the estimate of --dry_run against the peak that the device reports. vLLM is not needed.
Writes OUT/<date>-<machine>-gpu.json, and the tables as markdown.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
from machine import ROOT, begin, machine, title
from models import MODELS, make_config, measure
from together import run_all, write

from jppo import settings
from jppo.errors import UserError
from jppo.learner import sharding

IN_BF16 = {"q7"}  # weights and their optimizer, too
# The least share of the maker's peak that is aimed at, on one GPU of H200's class.
GOALS = {("q7", "update"): 0.45, ("q7", "log-probs"): 0.55, ("q05", "update"): 0.25}


def one(name: str, *, sequences: int, length: int, repeats: int, changes: list[str]) -> dict[str, Any]:
    """The passes of one model, in this process."""
    responses = np.full(sequences, length - length // 2)
    sizes = {
        "data.max_prompt_length": length // 2,
        "data.max_response_length": length - length // 2,
        "data.train_batch_size": sequences,
        "actor.ppo_mini_batch_size": sequences,
        "model.scan_layers": True,
        "model.remat": "full",
    }
    if name in IN_BF16:
        sizes |= dict.fromkeys(("model.param_dtype", "actor.master_dtype", "actor.moments_dtype"), "bfloat16")
    c = make_config(name, "bfloat16", [*(f"{k}={v}" for k, v in sizes.items()), *changes])
    measured = measure(name, c, responses, prompt=length // 2, repeats=repeats)
    return measured | {"peak_flops_per_s": sharding.known_peak(machine()["device"], "bfloat16"), "machine": machine()}


def in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs `one` in a separate process, with its own memory."""
    command = [sys.executable, __file__, "--measure", name]
    for option in ("sequences", "length", "repeats"):
        command += [f"--{option}", str(getattr(args, option))]
    command += [part for change in args.changes for part in ("--set", change)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}", "passes": {}, "left_out": {}}
    return json.loads(done.stdout.splitlines()[-1])


def table(result: dict[str, Any]) -> str:
    """The models as markdown."""
    gib = 2**30
    lines = [
        f"{title(result['machine'])}; bfloat16; jax {result['jax']}; commit {result['commit']}; {result['date']};"
        f" {result['sequences']} sequences of {result['length']:,} tokens",
        "",
        "| model | pass | tokens/s | TFLOP/s | of the maker's peak | of the matmul rate | device peak, GiB | goal |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, measured in result["models"].items():
        for stage, x in measured["passes"].items():
            rate = x["flops"] / statistics.median(x["seconds"])
            share = None if measured["peak_flops_per_s"] is None else rate / measured["peak_flops_per_s"]
            goal = GOALS.get((name, stage))
            aim = "" if goal is None or share is None else f"{goal:.0%}, {'met' if share >= goal else 'missed'}"
            cells = (
                f"{x['tokens_per_s']:,.0f}",
                f"{rate / 1e12:,.2f}",
                "" if share is None else f"{share:.1%}",
                f"{x['utilisation']:.1%}",
                "" if x["device_peak"] is None else f"{x['device_peak'] / gib:.1f}",
            )
            lines.append(f"| {name} | {stage} | {' | '.join(cells)} | {aim} |")
    for name, measured in result["models"].items():
        reasons = {stage: f"left out: {why}" for stage, why in measured["left_out"].items()}
        if "failed" in measured:
            reasons["every pass"] = f"failed: {measured['failed']}"
        lines += ["", *(f"{stage} of {name} {why}." for stage, why in reasons.items())] if reasons else []
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="q05,q15,q7", help=f"of {', '.join(MODELS)}, separated by commas")
    parser.add_argument("--sequences", type=int, default=16, help="of the batch; an update is one mini-batch of them")
    parser.add_argument("--length", type=int, default=4096, help="of each sequence, half of it prompt")
    parser.add_argument("--repeats", type=int, default=5, help="of each pass; the median counts")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--no-others", dest="others", action="store_false", help="leave out attention and memory")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for option, least in (("sequences", 1), ("length", 2), ("repeats", 1)):
        if (value := getattr(args, option)) < least:
            raise UserError(f"--{option}={value} must be {least} or more")
    if args.measure:
        options = dict(sequences=args.sequences, length=args.length, repeats=args.repeats, changes=args.changes)
        print(json.dumps(one(args.measure, **options)))
        return
    names = args.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        raise UserError(f"--models={args.models}: {unknown[0]!r} is not one of {', '.join(MODELS)}")
    begun = begin()
    # This process must not take the device before its children: it asks for the machine when they are done.
    models = {name: in_process(name, args) for name in names}
    others = {"attention": (), "memory": ("--models", names[0], "--set", "model.compute_dtype=bfloat16")}
    outcomes = run_all(others) if args.others else {}
    about: dict[str, Any] = {
        **begun,
        "machine": next((x["machine"] for x in models.values() if "machine" in x), None) or machine(),
        "sequences": args.sequences,
        "length": args.length,
        "changes": args.changes,
        "models": models,
    }
    failed = any("failed" in x for x in models.values())
    passes = {"result": None, "said": table(about), "exit_code": int(failed)}
    path = write({"models": passes} | outcomes, args.out, about, suffix="-gpu")
    print(f"{path.with_suffix('.md').read_text()}\n{path}")
    if failed or any(x["exit_code"] for x in outcomes.values()):
        sys.exit("something failed: see above")


if __name__ == "__main__":
    main()
