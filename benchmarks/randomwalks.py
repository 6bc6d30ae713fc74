"""The benchmark `randomwalks` of trlX: jppo's PPO and GRPO, and TRL's last PPO, from the same starting model.

    benchmarks/peers/setup.sh python3 trl_ppo       # TRL's environment; without it: --contestants=PPO,GRPO
    python benchmarks/randomwalks.py --seeds=5

examples/randomwalks.py makes the graph, the prompts and 1,000 random walks, which the model imitates by `jppo.sft`. All
contestants train it with trlX's numbers: 128 samples a step of up to 9 tokens, four epochs, learning rate 3e-4, no KL,
λ = 0.95, clips of 0.2, no warm-up, no clipping of gradients. Mini-batches have 64 samples (trlX's: 100 and 28). GRPO
has 8 samples of 16 prompts. All are in float32 on the same cores; jppo samples in process, TRL with transformers.

Every finished run is a line of OUT/<date>-<machine>-randomwalks.jsonl; the same command later adds the missing runs.
"first" and "last" are mean optimality of the samples, at temperature 1, in step 1 (the starting model) and in the last
five steps. "samples to 0.9" counts up to the first step with a mean of 0.9, its own included. Seconds are a run's
median step, without the first one. Intervals are 95%, by Student's t over seeds. --tables prints the table without
running anything.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any

import jax
from intervals import interval
from machine import ROOT, add_options, begin, lines_of, machine, names_of, run_and_print
from ml_collections import ConfigDict

sys.path.insert(0, str(ROOT))  # the checkout, for examples/
from examples import arithmetic, randomwalks
from jppo import settings, sft, train
from jppo.errors import UserError
from jppo.runlog.logger import read_metrics

TRL = ROOT / "benchmarks/peers/.envs/trl_ppo/bin/python"
REWARD = f"{ROOT / 'examples/randomwalks.py'}:compute_score"
SCORE = "critic/score/mean"
GOOD, LAST = 0.9, 5
SAMPLES, TOKENS = 128, randomwalks.LONGEST - 1
IMITATION_STEPS = 200  # of 100 walks: 20 epochs
NONE = 1e9  # a limit that nothing reaches

# trlX's numbers; TRL has them under other names (peers/run_trl_ppo.py).
OPTIMIZER = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 1e-6, "grad_clip": NONE}
COMMON: dict[str, Any] = {
    **{f"actor.{name}": value for name, value in OPTIMIZER.items()},
    "actor.ppo_epochs": 4,
    "actor.ppo_mini_batch_size": 64,
    "actor.shuffle": True,
    "actor.clip_ratio": 0.2,
    "actor.clip_ratio_c": NONE,
    "data.max_prompt_length": 1,
    "data.max_response_length": TOKENS,
    "data.row_lengths": 1,
    "model.scan_layers": False,
    "rollout.name": "inprocess",
    "reward.workers": 1,
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.logger": "jsonl",
    "trainer.token_samples": 0,
    "trainer.log_val_generations": 0,
}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "PPO": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.95,
        "data.train_batch_size": SAMPLES,
        **{f"critic.{name}": value for name, value in OPTIMIZER.items()},
        "critic.shuffle": True,
        "critic.cliprange_value": 0.2,
    },
    "GRPO": {"algorithm.adv_estimator": "grpo", "data.train_batch_size": SAMPLES // 8, "rollout.n": 8},
    "TRL": {"vf_coef": 1.2},
}

# As many weights in the layers as trlX's GPT-2, whose MLP is four times as wide and not gated.
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24}
MODEL |= {"hidden_size": 144, "intermediate_size": 384, "num_hidden_layers": 6}
MODEL |= {"num_attention_heads": 12, "num_key_value_heads": 12}

Row = dict[str, Any]  # a finished run


def write_inputs(folder: pathlib.Path) -> None:
    """Writes the data, and config and tokenizer of the model."""
    randomwalks.main([f"--out={folder}"])
    arithmetic.write_model(folder / "model", randomwalks.LETTERS)
    (folder / "model/config.json").write_text(json.dumps(arithmetic.MODEL | MODEL))


def prepare(work: pathlib.Path) -> None:
    """Makes the data, and the starting model by imitation of the walks."""
    write_inputs(work / "data")
    c = settings.recipe("quickstart_sft", str(work))
    c.data.train_batch_size, c.data.max_prompt_length = 100, 1
    c.data.max_response_length = randomwalks.LONGEST  # with the end of text
    c.optim.lr, c.trainer.total_training_steps, c.trainer.logger = 1e-3, IMITATION_STEPS, "jsonl"
    settings.check(c)
    sft.train(c)


def make_config(contestant: str, seed: int, steps: int, work: pathlib.Path) -> ConfigDict:
    """Returns the config of a run of jppo."""
    c = settings.default()
    c.update_from_flattened_dict(COMMON | CONTESTANTS[contestant])
    c.model.path, c.reward.function = str(work / "sft/hf"), REWARD
    c.data.train_files, c.data.val_files = str(work / "data/train.jsonl"), str(work / "data/test.jsonl")
    c.trainer.run_dir, c.trainer.compile_cache = str(work / "run"), str(work / "programs")
    c.trainer.seed, c.trainer.total_training_steps = seed, steps
    settings.check(c)
    return c


def run_jppo(contestant: str, seed: int, steps: int, work: pathlib.Path) -> Row:
    """Trains by jppo; returns seconds and mean score of each step."""
    c = make_config(contestant, seed, steps, work)
    folder = pathlib.Path(c.trainer.run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    with (work / "log").open("a") as log, contextlib.redirect_stdout(log):
        train.train(c)
    lines = [line for line in read_metrics(folder) if SCORE in line]
    jax.clear_caches()
    return {"seconds": [line["timing_s/step"] for line in lines], "scores": [line[SCORE] for line in lines]}


def work_of(seed: int, steps: int, work: pathlib.Path) -> dict[str, Any]:
    """Returns the same work for TRL."""
    ppo = CONTESTANTS["PPO"]
    return CONTESTANTS["TRL"] | {
        **OPTIMIZER,
        "model": str(work / "sft/hf"),
        "train_files": str(work / "data/train.jsonl"),
        "responses": SAMPLES,
        "mini_batch": COMMON["actor.ppo_mini_batch_size"],
        "epochs": COMMON["actor.ppo_epochs"],
        "clip_ratio": COMMON["actor.clip_ratio"],
        "cliprange_value": ppo["critic.cliprange_value"],
        "lam": ppo["algorithm.lam"],
        "max_tokens": TOKENS,
        "steps": steps,
        "seed": seed,
    }


def run_trl(python: pathlib.Path, seed: int, steps: int, work: pathlib.Path) -> Row:
    """Trains by TRL and returns the same, with versions."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, (work / "log").open("a") as log:
        json.dump(work_of(seed, steps, work), file)
        file.flush()
        command = [str(python), str(ROOT / "benchmarks/peers/run_trl_ppo.py"), file.name]
        env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    if done.returncode:
        raise UserError(f"TRL failed with exit code {done.returncode}; the end of {work / 'log'} has its error")
    return json.loads(done.stdout.strip().splitlines()[-1])


def about(contestant: str, seed: int, steps: int, start: int) -> Row:
    """What identifies a run."""
    own = json.loads(json.dumps(COMMON | CONTESTANTS[contestant]))
    return {"contestant": contestant, "seed": seed, "steps": steps, "start": start, "settings": own}


def run_missing(args: argparse.Namespace, path: pathlib.Path) -> None:
    """Runs what the file lacks, seed by seed, and adds each run to it."""
    if not (args.work / "ready").exists():
        shutil.rmtree(args.work, ignore_errors=True)
        args.work.mkdir(parents=True)
        prepare(args.work)
        (args.work / "ready").touch()
    start = zlib.crc32((args.work / "sft/hf/model.safetensors").read_bytes())
    done = lines_of(path)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for contestant in args.contestants:
            row = about(contestant, seed, args.steps, start)
            if any(row == {name: old[name] for name in row} for old in done):
                continue
            row |= begin() | {"machine": machine()}
            if contestant == "TRL":
                row |= run_trl(args.python, seed, args.steps, args.work)
            else:
                row |= run_jppo(contestant, seed, args.steps, args.work)
            for name in ("seconds", "scores"):
                row[name] = [round(value, 4) for value in row[name]]
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            last = statistics.mean(row["scores"][-LAST:])
            print(f"{contestant} seed {seed}: optimality {last:.3f}, {sum(row['seconds']):.0f} s", flush=True)


def samples_to(scores: Sequence[float]) -> float:
    """The samples up to the first step with a mean score of `GOOD`; NaN if there is none."""
    return next((step * SAMPLES for step, score in enumerate(scores, 1) if score >= GOOD), math.nan)


def table(rows: Sequence[Row]) -> str:
    """The runs as markdown, those with the last run's number of steps and starting model."""
    if not rows:
        raise UserError("there are no runs; run without --tables first")
    lines = [
        f"| contestant | seeds | first | last | samples to {GOOD} | s a step | load average |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in CONTESTANTS:
        runs = [r for r in rows if r["contestant"] == name and all(r[k] == rows[-1][k] for k in ("steps", "start"))]
        if not runs:
            continue
        reached = [n for r in runs if not math.isnan(n := samples_to(r["scores"]))]
        count = f"{interval(reached).mean:,.0f}" if reached else "none"
        if len(reached) > 1:
            count += f" ± {interval(reached).half:,.0f}"
        if len(reached) < len(runs):
            count += f" ({len(reached)} of {len(runs)})"
        first = interval([r["scores"][0] for r in runs])
        last = interval([statistics.mean(r["scores"][-LAST:]) for r in runs])
        seconds = interval([statistics.median(r["seconds"][1:]) for r in runs])
        load = statistics.mean(r["load_average"] for r in runs)
        full = "TRL's PPO" if name == "TRL" else f"jppo's {name}"
        lines.append(f"| {full} | {len(runs)} | {first} | {last} | {count} | {seconds} | {load:.1f} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="PPO and GRPO by jppo, PPO by TRL")
    parser.add_argument("--steps", type=int, default=20, help="of a run, 2 or more")
    parser.add_argument("--python", type=pathlib.Path, default=TRL, help="interpreter of TRL's environment")
    add_options(parser, "runs/randomwalks")
    args = parser.parse_args(argv)
    args.contestants = names_of(args.contestants, CONTESTANTS, "--contestants")
    if args.steps < 2:
        raise UserError(f"--steps={args.steps} must be 2 or more: the first one compiles")
    if "TRL" in args.contestants and not args.tables and not args.python.exists():
        raise UserError(f"--python={args.python} does not exist; benchmarks/peers/setup.sh python3 trl_ppo makes it")
    jax.config.update("jax_platforms", "cpu")
    run_and_print(args, "randomwalks", run_missing, table)


if __name__ == "__main__":
    main()
