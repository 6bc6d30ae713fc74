"""The modes of a rollout, each trained through real vLLM servers on the quickstart's task made smaller.

Each mode is `python -m jppo.train --config=configs/quickstart.py` with some settings: 20 steps of 256 responses on a
CPU. All start from one model, which a short fine-tuning makes first. A mode must learn, train on each prompt as often
as it should, and show its own work by the figures in `MODES`.
"""

import collections
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from examples import arithmetic
from jppo.data.rows import write_jsonl
from jppo.errors import UserError
from jppo.runlog.logger import read_metrics
from tests.make import ROOT

STEPS, LIMIT_S = 20, 900.0  # seconds of a run
GAIN = 0.25  # of accuracy on the held-out problems, at least; eight standard errors
TEST = 256  # held-out problems
SHAPE = {"num_hidden_layers": 2, "intermediate_size": 384}
COMMON: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.shuffle": False,  # the prompts of a step are known beforehand
    "data.val_max_samples": TEST,
    "actor.lr": 3e-4,
    "actor.ppo_mini_batch_size": 64,
    "critic.lr": 1e-3,
    "trainer.total_training_steps": STEPS,
    "trainer.test_freq": STEPS,
    "trainer.save_freq": -1,
}
# Few responses at once, so that updates find some of them under way.
ASYNC = {"rollout.mode": "async", "rollout.max_num_seqs": 16, "rollout.max_concurrent_requests": 16}
GROUPS = {"data.train_batch_size": 32, "rollout.n": 8, "algorithm.adv_estimator": "grpo"}
ADAPTERS = {"model.lora_rank": 16, "actor.lr": 2e-3}
PAIRS = {"max_prompt_length": 6, "max_response_length": 4, "train_batch_size": 128, "row_lengths": 1}
REWARD_MODEL = {
    "reward.model.engine": "vllm",
    "reward.model.max_length": 16,
    "reward.weights": "rm_score=1,function_score=0",
}


class Ran(NamedTuple):
    """A finished run."""

    settings: Mapping[str, Any]
    folder: pathlib.Path
    said: str  # its output
    lines: list[dict[str, Any]]  # its metrics

    def steps(self, metric: str) -> list[float]:
        """The values of all steps."""
        return [line[metric] for line in self.lines if line["step"] > 0 and metric in line]


class Must(NamedTuple):
    """A figure of a run, with the least and the most that it may be."""

    measure: Callable[[Ran], float]
    least: float
    most: float = float("inf")


Give = Callable[[Sequence[str], pathlib.Path], str]  # (arguments of jppo.train, run folder) -> output


class Mode(NamedTuple):
    """Settings, the figures that show the mode at work, and how the command is given."""

    settings: Mapping[str, Any]
    must: Mapping[str, Must]
    give: Give


def largest(metric: str) -> Callable[[Ran], float]:
    """The largest value of a step."""
    return lambda ran: max(ran.steps(metric))


def mean(metric: str) -> Callable[[Ran], float]:
    """The mean over the steps."""
    return lambda ran: float(np.mean(ran.steps(metric)))


def total(metric: str) -> Callable[[Ran], float]:
    """The sum over the steps."""
    return lambda ran: float(np.sum(ran.steps(metric)))


def found(pattern: str) -> Callable[[Ran], float]:
    """The number that the output has at the pattern's group; 0 without it."""
    return lambda ran: float(match[1]) if (match := re.search(pattern, ran.said)) else 0.0


def prompts(ran: Ran) -> tuple[list[str], list[list[str]]]:
    """The prompts that the run should train on, in order, and those of each step's samples."""
    size = int(ran.settings["data.train_batch_size"])
    rows = (ran.folder.parent / "data/train.jsonl").read_text().splitlines()[: STEPS * size]
    files = [ran.folder / f"samples/step_{step}.jsonl" for step in range(1, STEPS + 1)]
    trained = [[json.loads(line)["prompt"] for line in file.read_text().splitlines()] for file in files]
    return [json.loads(row)["prompt"] for row in rows], trained


def trained_otherwise(ran: Ran) -> float:
    """The prompts that were not trained on exactly `rollout.n` times: lost or doubled ones."""
    due, trained = prompts(ran)
    times = collections.Counter(prompt for step in trained for prompt in step)
    expected = dict.fromkeys(due, int(ran.settings.get("rollout.n", 1)))
    return float(sum(times[prompt] != expected.get(prompt, 0) for prompt in times.keys() | expected.keys()))


def out_of_turn(ran: Ran) -> float:
    """The fraction of prompts that were trained on in another step than their place in the data gives."""
    due, trained = prompts(ran)
    size = len(due) // STEPS
    turns = {prompt: i // size for i, prompt in enumerate(due)}
    return float(np.mean([turns.get(prompt) != i for i, step in enumerate(trained) for prompt in step]))


def accuracy(ran: Ran, step: int) -> float:
    """The fraction of held-out problems that the greedy policy solved in the test of a step, whatever its reward is."""
    rows = map(json.loads, (ran.folder / f"samples/test_{step}.jsonl").read_text().splitlines())
    return float(np.mean([row["parts"]["function_score"] for row in rows]))


def rank_of_the_change(ran: Ran) -> float:
    """The largest rank of what training added to a matrix of the layers."""
    before, after = (load_file(path / "hf/model.safetensors") for path in (ran.folder.parent / "sft", ran.folder))
    changes = [after[name] - before[name] for name in before if "proj.weight" in name]
    return float(max(np.linalg.matrix_rank(change, tol=1e-5) for change in changes))


def at_home(ran: Ran) -> float:
    """The fraction of the requests that went to the server of their prompt's index."""
    routed = [json.loads(line) for line in (ran.folder / "routed.jsonl").read_text().splitlines()]
    return float(np.mean([prompt % 2 == server for prompt, server in routed]))


ROUTED = """
import json, pathlib, sys
from jppo import train
from jppo.rollout.servers.member import Router
take = Router.take
async def recorded(self, near, **how):
    member = await take(self, near, **how)
    with pathlib.Path({path!r}).open("a") as file:
        print(json.dumps([near, self.members.index(member)]), file=file)
    return member
Router.take = recorded
train.main(sys.argv[1:])
"""


def started(arguments: Sequence[str], log: pathlib.Path, program: Sequence[str] = ("-m", "jppo.train")) -> Any:
    """The command as a user gives it; its output goes to `log`."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, *program, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def ended(process: Any, log: pathlib.Path) -> str:
    """Waits for a command and returns its output; UserError if it failed."""
    try:
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
    output = log.read_text()
    if code:
        raise UserError(f"the run ended with exit code {code}: {output.strip()[-1500:]}")
    return output


def reached(step: int, folder: pathlib.Path, process: Any) -> None:
    """Waits until the run has logged the step."""
    deadline = time.monotonic() + LIMIT_S
    while not any(line["step"] >= step for line in logged(folder)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise UserError(f"the run did not reach step {step}: {(folder / 'said.txt').read_text().strip()[-1500:]}")
        time.sleep(0.05)


def logged(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics so far; the last line may be in writing."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return []


def to_the_end(arguments: Sequence[str], folder: pathlib.Path) -> str:
    """Gives the command once."""
    return ended(started(arguments, folder / "said.txt"), folder / "said.txt")


def routed(arguments: Sequence[str], folder: pathlib.Path) -> str:
    """Gives the command with a router that records each request's prompt and server."""
    program = ["-c", ROUTED.format(path=str(folder / "routed.jsonl"))]
    return ended(started(arguments, folder / "said.txt", program), folder / "said.txt")


def killed(arguments: Sequence[str], folder: pathlib.Path) -> str:
    """Kills the trainer in mid-step after a third and two thirds of the steps, and gives the command again."""
    for step in (STEPS // 3, 2 * STEPS // 3):
        process = started(arguments, folder / "said.txt")
        reached(step, folder, process)
        time.sleep(0.4)
        process.kill()
        process.wait()
    return to_the_end(arguments, folder)


def server_killed(arguments: Sequence[str], folder: pathlib.Path) -> str:
    """Kills one of the servers with all its processes after a third of the steps."""
    process = started(arguments, folder / "said.txt")
    reached(STEPS // 3, folder, process)
    os.killpg(next(launchers(process.pid)), signal.SIGKILL)
    return ended(process, folder / "said.txt")


def launchers(trainer: int) -> Iterator[int]:
    """The processes that started the trainer's servers; each leads its server's group."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
            if parent == trainer and b"jppo.rollout.servers.launch" in command:
                yield int(stat.parent.name)


SAME_WEIGHTS = {"largest log-prob mismatch": Must(largest("rollout/logp_gap_max"), 0.0, 1e-3)}
ALL_ONCE = {"lost or doubled": Must(trained_otherwise, 0, 0)}
MIXED = {"mixed": Must(mean("rollout/mixed_versions"), 1e-3)}
UNMIXED = {"mixed": Must(mean("rollout/mixed_versions"), 0.0, 0.0)}


def stale(k: int, least: int) -> dict[str, Must]:
    """Old samples, and none older than allowed."""
    dropped = {"dropped": Must(total("rollout/stale_dropped"), 0, 0)}
    return {
        "oldest": Must(largest("rollout/staleness_max"), least, k),
        "mean age": Must(mean("rollout/staleness_mean"), 0.01),
    } | dropped


def asynchronous(on_update: str, k: int, must: Mapping[str, Must], give: Give = to_the_end, **more: Any) -> Mode:
    """A mode of asynchronous training."""
    changes = ASYNC | {"rollout.on_update": on_update, "rollout.max_staleness": k} | more
    partial = changes.get("rollout.partial", False)
    turns = {"out of turn": Must(out_of_turn, 1e-4) if partial else Must(out_of_turn, 0.0, 0.0)}
    return Mode(changes, stale(k, 1 if partial else k) | dict(must) | turns, give)


CONTINUED = {"kept by a checkpoint": Must(found(r"(\d+) samples that the checkpoint has"), 1)}
SAVED = {"trainer.save_freq": 1}
MODES: dict[str, Mode] = {
    **{f"wait-{k}": asynchronous("wait", k, UNMIXED) for k in (1, 2)},
    **{f"abort-{k}": asynchronous("abort", k, MIXED) for k in (1, 2)},
    **{f"keep-{k}": asynchronous("keep", k, MIXED) for k in (1, 2)},
    "partial": asynchronous("keep", 2, MIXED, **{"rollout.partial": True}),
    "killed": asynchronous("abort", 2, MIXED | CONTINUED, killed, **SAVED),
    "killed-partial": asynchronous("keep", 2, MIXED | CONTINUED, killed, **{"rollout.partial": True} | SAVED),
    "groups": Mode(
        GROUPS | {"rollout.servers": 2},
        SAME_WEIGHTS | {"requests at their server": Must(at_home, 0.95)},
        routed,
    ),
    "remax": Mode(
        {"algorithm.adv_estimator": "remax"},
        SAME_WEIGHTS | {"score of greedy responses": Must(largest("critic/greedy/mean"), 0.6, 1.0)},
        to_the_end,
    ),
    "lora-merged": Mode(
        ADAPTERS | {"rollout.lora_sync": "merge"},
        SAME_WEIGHTS | {"rank of the change": Must(rank_of_the_change, 1, 16)},
        to_the_end,
    ),
    "lora-adapter": Mode(
        ADAPTERS | {"rollout.lora_sync": "adapter", "critic.lora_rank": 8},
        SAME_WEIGHTS | {"rank of the change": Must(rank_of_the_change, 1, 16)},
        to_the_end,
    ),
    "two-servers": Mode(
        {"rollout.servers": 2},
        SAME_WEIGHTS | {"restarts": Must(total("rollout/restarts"), 1, 1)},
        server_killed,
    ),
    "reward-model": Mode(
        REWARD_MODEL,
        SAME_WEIGHTS | {"errors": Must(total("reward/errors"), 0, 0)},
        to_the_end,
    ),
}


def command(*words: Any) -> None:
    """Runs a command of jppo to its end."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"python -m {words[0]} failed: {(done.stdout + done.stderr).strip()[-1500:]}")


def prepare(work: pathlib.Path) -> None:
    """Makes data, the starting model and the pairs of a reward model in `work`, unless they are there."""
    if not (work / "sft/hf/config.json").is_file():
        command("examples.arithmetic", "--out", work / "data", "--test", TEST)
        (work / "data/model/config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE))
        command("jppo.sft", f"--config=configs/quickstart_sft.py:{work}")


def prepare_reward_model(work: pathlib.Path) -> None:
    """Trains a reward model to prefer right sums to those with a ten too few or too many."""
    if (work / "rm/hf/config.json").is_file():
        return
    problems = [(f"{a}+{b}=", a + b) for a, b in arithmetic.problems()]
    pairs = [
        {"prompt": prompt, "chosen": str(total), "rejected": str(total + wrong)}
        for wrong in (-10, 10)
        for prompt, total in problems
    ]
    (work / "pairs").mkdir(exist_ok=True)
    for name, rows in (("train", pairs[TEST:]), ("test", pairs[:TEST])):
        write_jsonl(work / "pairs" / f"{name}.jsonl", rows)
    command(
        "jppo.reward_model",
        f"--config=configs/tinystories_reward_model.py:{work}",
        *(f"--config.data.{name}={value}" for name, value in PAIRS.items()),
        "--config.trainer.total_training_steps=1000",
        "--config.trainer.test_freq=200",
    )


def run(name: str, work: pathlib.Path) -> dict[str, Any]:
    """Trains in the mode and returns its steps, accuracy and figures; UserError if the run failed."""
    mode, folder = MODES[name], work / name
    changes = COMMON | mode.settings | {"trainer.run_dir": str(folder), "trainer.compile_cache": str(work / "programs")}
    if "reward.model.engine" in changes:
        prepare_reward_model(work)
        changes["reward.model.path"] = str(work / "rm/hf")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments = [
        f"--config=configs/quickstart.py:{work}",
        *(f"--config.{key}={value}" for key, value in changes.items()),
    ]
    output = mode.give(arguments, folder)
    ran = Ran(changes, folder, output, read_metrics(folder))
    seen = {title: round(must.measure(ran), 6) for title, must in (mode.must | ALL_ONCE).items()}
    about = {"mode": name, "steps": len(ran.steps("critic/score/mean"))}
    return about | {"before": accuracy(ran, 0), "after": accuracy(ran, STEPS), "seen": seen}


def lacks(row: Mapping[str, Any]) -> list[str]:
    """What the run should have and has not."""
    short = [] if row["after"] >= row["before"] + GAIN else [f"accuracy {row['before']:.3f} -> {row['after']:.3f}"]
    short += [] if row["steps"] == STEPS else [f"{row['steps']} steps"]
    must = MODES[row["mode"]].must | ALL_ONCE
    return short + [f"{name} {x:g}" for name, x in row["seen"].items() if not must[name].least <= x <= must[name].most]
