"""Mixtures of experts: jppo, its dense model of as many active parameters, and transformers on the same batch.

    python benchmarks/experts.py
    python benchmarks/experts.py --shapes 8x2x256 --repeats 5

A shape is experts x active ones x width of each; the dense model's MLP has the width of the active ones together.
float32, rows without padding, weights of one initialisation in both libraries, whose log-probs are compared. All run in
one process, in turn, on the processor: log-probs of every token, and the gradient of their mean. transformers runs with
its eager and its grouped experts; the faster ones count. Each figure is the median of --repeats. Writes
OUT/<date>-<machine>-experts.json and prints a table.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import ROOT, begin, version, write

from jppo import settings
from jppo.errors import UserError
from jppo.models import config_reader, decoder, heads, hf_write

MODEL = dict(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=512,
    max_position_embeddings=512, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_theta=1e4, hidden_act="silu",
    initializer_range=0.05,
)  # fmt: skip
ROWS, LENGTH = 8, 256
IMPLEMENTATIONS = ("eager", "grouped_mm")  # of transformers; batched_mm copies the kernels of every token
STAGES = ("log-probs", "gradient")
Calls = dict[str, Callable[[], Any]]


def configs(experts: int, active: int, width: int) -> dict[str, dict[str, Any]]:
    """Returns config.json of the mixture and of the dense model of as many active parameters."""
    sparse = dict(num_experts=experts, num_experts_per_tok=active, moe_intermediate_size=width, norm_topk_prob=True)
    names = {"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    each = {"mixture": "qwen3_moe", "dense": "qwen3"}
    shape = MODEL | dict(intermediate_size=active * width)
    return {
        name: shape | dict(model_type=kind, architectures=[names[kind]]) | (sparse if name == "mixture" else {})
        for name, kind in each.items()
    }


def of_jppo(config: dict[str, Any], tokens: np.ndarray) -> tuple[Any, Calls]:
    """Returns the weights and the compiled calls of a model in jppo, as a training on a CPU runs it."""
    cfg = config_reader.parse_config(config, path="config.json")
    values = jax.jit(lambda key: decoder.init_params(cfg, key, head="lm", param_dtype=jnp.float32))(jax.random.key(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    position = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    model = decoder.Decoder(cfg, scan_layers=False)

    def logprob(values: Any) -> jax.Array:
        hidden = model.apply({"params": values}, inputs, np.ones_like(inputs), position)
        state = hidden, decoder.head_kernel(values, cfg), cfg
        return heads.logprob_entropy(state, targets, temperature=1.0, chunk_tokens=targets.size, with_entropy=False)[0]

    calls = jax.jit(logprob), jax.jit(jax.grad(lambda values: jnp.mean(logprob(values))))
    return (cfg, values), dict(zip(STAGES, (lambda f=f: jax.block_until_ready(f(values)) for f in calls), strict=True))


def of_transformers(weights: Any, config: dict[str, Any], tokens: np.ndarray, kind: str | None) -> Calls:
    """Returns the same calls of transformers with the same weights, by one of its implementations of experts."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cfg, values = weights
    with tempfile.TemporaryDirectory() as folder:
        source, out = pathlib.Path(folder) / "source", pathlib.Path(folder) / "model"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        hf_write.save_model(out, values, cfg, source=source, dtype=np.float32)
        options = {} if kind is None else dict(experts_implementation=kind)
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **options)
    ids = torch.from_numpy(tokens.astype(np.int64))

    def logprob() -> Any:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)

    def forward() -> Any:
        with torch.no_grad():
            return logprob()

    def gradient() -> None:
        model.zero_grad(set_to_none=True)
        logprob().mean().backward()

    return dict(zip(STAGES, (forward, gradient), strict=True))


def measure(experts: int, active: int, width: int, *, repeats: int) -> dict[str, Any]:
    """Measures the models of a shape: tokens/s by stage, and the ratios of jppo's mixture to the others."""
    tokens = np.random.default_rng(0).integers(0, MODEL["vocab_size"], (ROWS, LENGTH + 1)).astype(np.int32)
    wanted, calls = configs(experts, active, width), dict[str, Calls]()
    made = {name: of_jppo(config, tokens) for name, config in wanted.items()}
    for name, config in wanted.items():
        calls[f"jppo, {name}"] = made[name][1]
        for kind in IMPLEMENTATIONS if name == "mixture" else (None,):
            label = f"transformers, {name}" + (f", {kind}" if kind else "")
            calls[label] = of_transformers(made[name][0], config, tokens, kind)
            apart = np.abs(np.asarray(calls[label]["log-probs"]()) - np.asarray(made[name][1]["log-probs"]())).max()
            assert apart < 1e-4, f"{label} differs from jppo by {apart:.1e}"
    seconds: dict[str, dict[str, list[float]]] = {name: {stage: [] for stage in STAGES} for name in calls}
    for again in range(repeats + 1):
        for name, of_name in calls.items():
            for stage, call in of_name.items():
                start = time.perf_counter()
                call()
                if again:  # the first one compiles
                    seconds[name][stage].append(time.perf_counter() - start)
    rate = {n: {stage: ROWS * LENGTH / statistics.median(x) for stage, x in s.items()} for n, s in seconds.items()}
    ratios = {}
    for stage in STAGES:
        best = max(rate[name][stage] for name in rate if name.startswith("transformers, mixture"))
        ours = rate["jppo, mixture"][stage]
        ratios[stage] = {"of_dense": ours / rate["jppo, dense"][stage], "of_transformers": ours / best}
    return {"seconds": seconds, "tokens_per_s": rate, "ratios": ratios}


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    where = result["machine"]
    lines = [
        f"{where['cpu']}, {where['cores']} cores ({result['threads']} used); float32; jax {result['jax']}, transformers"
        f" {result['transformers']}, torch {result['torch']}; commit {result['commit']}; {result['date']}; load average"
        f" before {result['load_average']:.1f}",
        "",
        "| shape | model | log-probs, tokens/s | gradient, tokens/s |",
        "|---|---|---:|---:|",
    ]
    for shape, measured in result["shapes"].items():
        for name, rate in measured["tokens_per_s"].items():
            lines.append(f"| {shape} | {name} | {rate['log-probs']:,.0f} | {rate['gradient']:,.0f} |")
        for key, name in (
            ("of_dense", "mixture / dense"),
            ("of_transformers", "jppo / fastest of transformers, mixture"),
        ):
            cells = (f"{measured['ratios'][stage][key]:.2f}" for stage in STAGES)
            lines.append(f"| {shape} | **{name}** | {' | '.join(cells)} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8x2x256,64x8x64", help="experts x active x width, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="of each model; the median counts")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    shapes = args.shapes.split(",")
    for shape in shapes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape):
            raise UserError(f"--shapes={args.shapes}: {shape!r} must be experts x active x width, as 8x2x256")
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats} must be 1 or more")
    result: dict[str, Any] = {
        **begin(),
        "threads": len(os.sched_getaffinity(0)),
        "transformers": version("transformers"),
        "torch": version("torch"),
        "shapes": {shape: measure(*map(int, shape.split("x")), repeats=args.repeats) for shape in shapes},
    }
    write(result, table, args.out, "experts")


if __name__ == "__main__":
    main()
