"""The exact KL over the vocabulary: memory and time by tokens and vocabulary size.

    python benchmarks/exact_kl.py                                   # 1,024 to 16,384 tokens, 8,192 to 151,936 words
    python benchmarks/exact_kl.py --tokens 4096 --vocab 32000 --width 256

Only the head is measured: hidden states in, the gradient of the mean KL out, as `actor.kl_loss_type=full` computes it.
Memory is what XLA sets aside for temporaries, by its own account, beside the logits of both models that it would take
at once. --chunk_bytes bounds the logits of a chunk, as `model.logprob_chunk_bytes` does. Writes
OUT/<date>-<machine>-exact_kl.json.
"""

import argparse
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import ROOT, begin, write

from jppo.algorithms import kl
from jppo.models import config_reader, heads
from jppo.models.config import ModelConfig

ROWS = 4  # the tokens stand in as many rows


def model(vocab: int) -> ModelConfig:
    """A model with plain logits: no soft cap, no padding."""
    shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
    return config_reader.parse_config(
        dict(model_type="llama", vocab_size=vocab, max_position_embeddings=1, **shape), path="exact_kl.py"
    )


def make_gradient(chunk_tokens: int, vocab: int) -> Any:
    """The gradient of the mean exact KL in the policy's hidden states and kernel, compiled."""

    cfg = model(vocab)

    def loss(states: tuple[jax.Array, jax.Array], reference: tuple[jax.Array, jax.Array], targets: jax.Array):
        def body(_: Any, targets: jax.Array, logits: jax.Array, ref_logits: jax.Array) -> tuple[jax.Array]:
            return (kl.full(logits, ref_logits),)

        options = dict(temperature=1.0, chunk_tokens=chunk_tokens)
        return jnp.mean(heads.by_logits(body, [(*states, cfg), (*reference, cfg)], targets, **options)[0])

    return jax.jit(jax.grad(loss))


def measure(tokens: int, vocab: int, *, width: int, chunk_bytes: int, repeats: int) -> dict[str, Any]:
    """Returns the temporaries of the compiled gradient in bytes, and the seconds of each repeat."""
    shapes = (ROWS, tokens // ROWS, width), (vocab, width)
    states = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    targets = jax.ShapeDtypeStruct(shapes[0][:2], jnp.int32)
    compiled = make_gradient(max(1, chunk_bytes // (4 * vocab)), vocab).lower(states, states, targets).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    seconds = []
    rng = np.random.default_rng(0)
    if repeats:
        policy, reference = ([jnp.asarray(rng.normal(size=s, scale=0.3), jnp.float32) for s in shapes] for _ in "pr")
        zeros = jnp.zeros(shapes[0][:2], jnp.int32)
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(compiled(tuple(policy), tuple(reference), zeros))
            seconds.append(time.perf_counter() - start)
    return {
        "tokens": tokens,
        "vocabulary": vocab,
        "temporaries": temporaries,
        "all_logits": 2 * 4 * tokens * vocab,
        "seconds": seconds,
    }


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    mib = 2**20
    lines = [
        f"Width {result['width']}, chunks of {result['chunk_bytes'] / mib:g} MiB; float32; jax {result['jax']}; commit"
        f" {result['commit']}; load average before {result['load_average']:.1f}",
        "",
        "| tokens | vocabulary | temporaries, MiB | logits of both at once, MiB | seconds |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in result["cases"]:
        seconds = f"{statistics.median(row['seconds']):.2f}" if row["seconds"] else ""
        lines.append(
            f"| {row['tokens']:,} | {row['vocabulary']:,} | {row['temporaries'] / mib:,.0f}"
            f" | {row['all_logits'] / mib:,.0f} | {seconds} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--vocab", type=int, nargs="+", default=[8192, 32768, 151936])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--chunk_bytes", type=int, default=2**26)
    parser.add_argument("--repeats", type=int, default=1, help="0 compiles only")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    begun = begin()
    cases = [
        measure(t, v, width=args.width, chunk_bytes=args.chunk_bytes, repeats=args.repeats)
        for v in args.vocab
        for t in args.tokens
    ]
    result = {
        **begun,
        "width": args.width,
        "chunk_bytes": args.chunk_bytes,
        "cases": cases,
    }
    write(result, table, args.out, "exact_kl")


if __name__ == "__main__":
    main()
