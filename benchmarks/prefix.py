"""Shared prompts, `data.packing=prefix`, compared with one row per sample, `buckets`.

    python benchmarks/prefix.py                                   # shape S, three kinds of lengths, 4 and 8 samples
    python benchmarks/prefix.py --samples 8 --cases 256:16-128    # prompts of 256 tokens, responses of 16 to 128

Log-probs and the actor's update of one mini-batch of --sequences trajectories, called as a step calls them, packing
included. Both packings see the same trajectories and take turns; the first turn of each, which compiles, is left out.
Writes OUT/<date>-<machine>-prefix.json.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from machine import ROOT, begin, machine, slug, title
from ml_collections import ConfigDict
from work import SHAPES, base_config, flat_batch, hf_config, make_batch, make_rows

from jppo import settings
from jppo.learner import batch, ppo
from jppo.learner.make import make_learner, make_mesh
from jppo.learner.ppo import ModelConfigs
from jppo.models import config_reader
from jppo.models.config import ModelConfig
from jppo.runlog.timers import Timers
from jppo.types import Trajectory

CASES = ("64:16-128", "256:16-128", "104:56-500")  # prompt:shortest-longest response; the last has GSM8K's means
STAGES = {"old_log_prob": "log-probs", "update_actor": "actor update"}
PACKINGS = ("buckets", "prefix")
Lengths = tuple[int, int, int]  # of a prompt, of the shortest and of the longest response


def parse(case: str) -> Lengths:
    """Parses '64:16-128'."""
    prompt, responses = case.split(":")
    shortest, longest = responses.split("-")
    return int(prompt), int(shortest), int(longest)


def make_samples(cfg: ModelConfig, lengths: Lengths, *, samples: int, sequences: int) -> list[Trajectory]:
    """Makes ragged responses, `samples` per prompt."""
    prompt, shortest, longest = lengths
    responses = np.random.default_rng(0).integers(shortest, longest + 1, sequences)
    drawn = make_batch(cfg, responses, prompt=prompt)
    firsts = [drawn[i - i % samples] for i in range(sequences)]
    return [
        dataclasses.replace(t, uid=first.uid, tokens=np.concatenate([first.tokens[:prompt], t.tokens[prompt:]]))
        for t, first in zip(drawn, firsts, strict=True)
    ]


def make_config(packing: str, lengths: Lengths, *, samples: int, sequences: int) -> ConfigDict:
    """Returns the settings for the batch: a group estimator, no critic."""
    c = base_config("random", "float32")
    c.model.scan_layers = jax.default_backend() != "cpu"
    c.data.max_prompt_length, c.data.max_response_length = lengths[0], lengths[2]
    c.data.train_batch_size, c.rollout.n, c.actor.ppo_mini_batch_size = sequences // samples, samples, sequences
    c.algorithm.adv_estimator, c.data.packing = "grpo", packing
    settings.check(c)
    return c


def make_turn(
    c: ConfigDict, cfg: ModelConfig, trajectories: list[Trajectory]
) -> tuple[Callable[[], dict[str, tuple[float, float]]], dict[str, Any]]:
    """Makes a function that runs both stages and returns wall and CPU seconds of each; and the fill of rows."""
    typed = settings.typed(c)
    mesh = make_mesh(typed)
    inputs = ModelConfigs(policy=cfg, total_steps=1)
    learner, now = make_learner(typed, inputs, mesh)
    state = [now]

    def turn() -> dict[str, tuple[float, float]]:
        now = state[0]
        data = flat_batch(trajectories, mesh, samples=c.rollout.n)
        begin = time.perf_counter(), time.process_time()
        micros = batch.pack_micros(data, trajectories, plan=learner.plan, mesh=mesh)
        data = ppo.with_old_logprob(learner.passes, learner.recipe, data, micros, learner.policy(now))
        seconds = {"old_log_prob": since(begin)}
        data, _ = ppo.with_advantages(learner.passes, data, now.kl_coef, mesh)
        begin = time.perf_counter(), time.process_time()
        state[0], _ = ppo.learn(learner, now, data, trajectories, Timers())
        return seconds | {"update_actor": since(begin)}

    shapes = [rows.inputs.shape for rows in make_rows(trajectories, learner.plan, mesh)]
    return turn, {"rows": [list(shape) for shape in shapes], "entries": sum(r * t for r, t in shapes)}


def since(begin: tuple[float, float]) -> tuple[float, float]:
    """Returns elapsed wall and CPU seconds."""
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def measure(shape: str, case: str, *, samples: int, sequences: int, repeats: int) -> dict[str, Any]:
    """Measures both packings in turn on one batch."""
    cfg, lengths = config_reader.parse_config(hf_config(*SHAPES[shape]), path=f"shape {shape}"), parse(case)
    trajectories = make_samples(cfg, lengths, samples=samples, sequences=sequences)
    options = dict(samples=samples, sequences=sequences)
    made = {packing: make_turn(make_config(packing, lengths, **options), cfg, trajectories) for packing in PACKINGS}
    for turn, _ in made.values():
        turn()
    turns = [{packing: turn() for packing, (turn, _) in made.items()} for _ in range(repeats)]
    packings = {
        packing: about
        | {
            stage: {kind: [one[packing][stage][i] for one in turns] for i, kind in enumerate(("wall", "process"))}
            for stage in STAGES
        }
        for packing, (_, about) in made.items()
    }
    tokens = sum(len(t.tokens) - 1 for t in trajectories)
    return {"shape": shape, "case": case, "samples": samples, "tokens": tokens, "packings": packings}


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"{title(result['machine'])}; float32; jax {result['jax']}; {result['sequences']} trajectories; commit"
        f" {result['commit']}; load average before {result['load_average']:.1f}",
        "",
        "| prompt:responses | samples | entries, buckets and prefix | stage | wall s | | | process s | | |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---:|",
        "| | | | | buckets | prefix | ratio | buckets | prefix | ratio |",
    ]
    for x in result["measured"]:
        a, b = (x["packings"][packing] for packing in PACKINGS)
        for stage, name in STAGES.items():
            cells = []
            for kind in ("wall", "process"):
                before, after = (statistics.median(packing[stage][kind]) for packing in (a, b))
                cells += [f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}"]
            entries = f"{a['entries']:,}, {b['entries']:,}"
            lines.append(f"| {x['case']} | {x['samples']} | {entries} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="S", choices=list(SHAPES), help="of the model")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="PROMPT:SHORTEST-LONGEST")
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8], help="of a prompt")
    parser.add_argument("--sequences", type=int, default=32, help="trajectories in all, a multiple of the samples")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    options = dict(sequences=args.sequences, repeats=args.repeats)
    result: dict[str, Any] = {
        **begin(),
        "machine": machine(),
        "sequences": args.sequences,
        "measured": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / f"{result['date']}-{slug(result['machine'])}-prefix.json"
    for case in args.cases:
        for n in args.samples:
            result["measured"].append(measure(args.shape, case, samples=n, **options))
            out.write_text(json.dumps(result, indent=1) + "\n")  # kept if a later case fails
    print(f"{table(result)}\n\n{out}")


if __name__ == "__main__":
    main()
