"""Publishes of changes over real training: bytes and seconds by step, by `rollout.publish_delta`.

    python benchmarks/delta.py --config configs/smollm2_sums.py:DIR --steps 6 --set actor.lr=1e-6
    python benchmarks/delta.py --rates 512

Trains through a real vLLM with weights by tcp, once with whole publishes and once with changes. --rates compares,
verifies and applies so many MB of random bfloat16 weights, 0.3% of them changed, without a server.
"""

import argparse
import itertools
import json
import mmap
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import ml_dtypes
import numpy as np
from machine import ROOT, begin, write

from jppo.rollout.vllm import buckets, layout
from jppo.settings import exit_on_user_error

BYTES = ("rollout/published_mb", "rollout/published_whole_mb")
OTHERS = ("timing_s/update_weights", "actor/lr")


def train(args: argparse.Namespace, changes: bool) -> list[dict[str, Any]]:
    """Runs a training and returns the columns of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"trainer.run_dir={folder}", f"trainer.total_training_steps={args.steps}", "trainer.test_freq=-1",
            "trainer.val_before_train=False", "trainer.save_freq=-1", "rollout.publish_via=tcp",
            f"rollout.publish_delta={changes}", *args.set,
        ]  # fmt: skip
        command = [sys.executable, "-m", "jppo.train", f"--config={args.config}", *(f"--config.{s}" for s in settings)]
        subprocess.run(command, check=True, cwd=ROOT)
        lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "rollout/published_mb" in step]
    # a line has the bytes of the publish before it, and the seconds of the one after its update
    return [
        {"step": step["step"], **{name: after[name] for name in BYTES}, **{name: step[name] for name in OTHERS}}
        for step, after in itertools.pairwise(steps)
    ]


def rates(nbytes: int, share: float = 0.003) -> dict[str, float]:
    """Returns bytes/s of tensors by part of a publish, of the best of eight."""
    rng, size = np.random.default_rng(0), 1 << 23
    old = [(f"w{i}", rng.normal(size=size).astype(ml_dtypes.bfloat16)) for i in range(nbytes // (2 * size))]
    new = []
    for name, tensor in old:
        words = tensor.view(np.uint16).copy()
        words[rng.integers(0, size, int(share * size))] ^= 1
        new.append((name, words.view(ml_dtypes.bfloat16)))
    copy, base = layout.Copy(), layout.LoadedWeights()
    entries, views = buckets.checksummed(old)
    copy.replace(entries, [tensor for _, tensor in old])
    memory = mmap.mmap(-1, layout.size_of(entries))
    for entry, view in zip(entries, views, strict=True):
        memory[entry.offset : entry.offset + entry.nbytes] = view
    base.hold([(entries, memory)])
    seconds = {}

    def timed(name: str, do: Any) -> Any:
        began = time.perf_counter()
        result = do()
        seconds[name] = min(seconds.get(name, 1e9), time.perf_counter() - began)  # others may use the machine
        return result

    for tensors in (new, old) * 4:
        entries, _ = timed("checksum", lambda tensors=tensors: buckets.checksummed(tensors))
        changes = timed("compare", lambda e=entries, t=tensors: copy.changes(e, [tensor for _, tensor in t]))
        described, views = buckets.checksummed(changes)
        data = bytearray(layout.size_of(described))
        for entry, view in zip(described, views, strict=True):
            data[entry.offset : entry.offset + entry.nbytes] = view
        checked = timed("verify", lambda e=entries, d=described, x=data: base.check(base.digest, e, d, memoryview(x)))
        base.hold(timed("apply", lambda e=entries, c=checked: base.apply([(e, c)])))
    total = sum(tensor.nbytes for _, tensor in new)
    return {name: total / took for name, took in seconds.items()} | {
        "share": sum(view.nbytes for view in views) / total
    }


def table(result: dict[str, Any]) -> str:
    """Formats the steps of each run, or the rates."""
    lines = [f"{name:<9} {value / 1e9:.2f} GB/s" for name, value in result.get("rates", {}).items() if name != "share"]
    for name, steps in result.get("runs", {}).items():
        lines.append(f"{name}: step, MB, MB of whole weights, seconds of the publish")
        lines += [
            "  {step:>3} {0:9.2f} {1:9.2f} {2:7.2f}".format(*(s[c] for c in (*BYTES, OTHERS[0])), **s) for s in steps
        ]
    return "\n".join(lines)


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="", help="of jppo.train")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], help="SECTION.NAME=VALUE of the training")
    parser.add_argument("--runs", default="whole,changes", help="trainings, separated by commas")
    parser.add_argument("--rates", type=int, default=0, help="MB of weights")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    name = pathlib.Path(args.config.split(":")[0]).stem or "rates"
    result: dict[str, Any] = begin() | {"config": name, "set": args.set}
    if args.rates:
        result["rates"] = rates(args.rates * 10**6)
    if args.config:
        result["runs"] = {run: train(args, run == "changes") for run in args.runs.split(",")}
    write(result, table, args.out, "delta", name, *(setting.split("=")[1] for setting in args.set if "lr=" in setting))


if __name__ == "__main__":
    main()
