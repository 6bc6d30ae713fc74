"""Attention by XLA and by each fused kernel of the device: time, memory, agreement.

    python benchmarks/attention.py                                  # on a CPU small shapes and XLA alone
    python benchmarks/attention.py --shapes 4x4096x32x8x128 --window 1024 --dtype float32

A shape is rows x positions x query heads x key/value heads x width of a head. Each is measured with one trajectory a
row, and with four. Each figure is the median of --repeats, all kernels in turn on the first device; memory is what XLA
sets aside for temporaries of the gradients, by its own account. Every kernel's output and gradients are compared with
XLA's in float32, on the first row and key/value head. After a kernel that fails or differs by more than a hundredth of
their norm (in float32 a thousandth) the exit code is 1. Writes OUT/<date>-<machine>-attention.json and prints a table.
"""

import argparse
import functools
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import ROOT, begin, write

from jppo import settings
from jppo.errors import UserError
from jppo.models import fused
from jppo.models.attention import Attend

SHAPES = {
    "cpu": "2x256x4x2x64",
    "gpu": "16x1024x14x2x64,8x2048x32x8x128,2x8192x32x8x128",
    "tpu": "16x1024x14x2x64,8x2048x32x8x128,2x8192x32x8x128",
}
CLOSE = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 1e-2}
FAILED = "it fails:"
KERNELS = [name for name in fused.NAMES if name != "auto"]

Arrays = tuple[jax.Array, ...]


def attends(needs: fused.Needs) -> tuple[dict[str, Attend], dict[str, str]]:
    """Returns the kernels that can run here, plain XLA first, and the reason for each other."""
    able: dict[str, Attend] = {}
    reasons: dict[str, str] = {}
    gpu = fused.capability(jax.devices()[0])
    for name in KERNELS:
        try:
            fused.choose_kernel(name, needs, backend=jax.default_backend(), gpu=gpu)
        except UserError as e:
            reasons[name] = str(e).split(": ", 1)[1].split(";")[0]
        else:
            able[name] = fused.make_attention(name, needs)
    return able, reasons


def make_batch(shape: tuple[int, ...], trajectories: int, dtype: str) -> Arrays:
    """Makes random q, k, v, output weights and segments, with padding at the end of each row."""
    R, T, H, K, A = shape
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.standard_normal((R, T, heads, A), np.float32), dtype) for heads in (H, K, K, H))
    full = T - T // 16
    segment = np.zeros((R, T), np.int32)
    segment[:, :full] = 1 + np.arange(full) * trajectories // full
    return q, k, v, weight * (segment > 0)[..., None, None].astype(dtype), jnp.asarray(segment)


def forward(attend: Attend) -> Callable[..., jax.Array]:
    """The output alone."""
    return lambda q, k, v, weight, segment: attend(q, k, v, segment, 0) * weight


def backward(attend: Attend) -> Callable[..., Arrays]:
    """The output, and the gradients of its weighted sum in q, k and v."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, weight: jax.Array, segment: jax.Array) -> Arrays:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segment, 0), q, k, v)
        return out * weight, *pull(weight)

    return run


def difference(outputs: Arrays, batch: Arrays, needs: fused.Needs) -> float:
    """Returns the largest deviation from XLA in float32, of output and gradients, in the first row and head."""
    q, k, _, _, segment = batch
    shared = q.shape[2] // k.shape[2]
    heads = (shared, 1, 1, shared)
    few = [x[:1, :, :n].astype(jnp.float32) for x, n in zip(batch[:4], heads, strict=True)]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(backward(fused.make_attention("xla", needs)))(*few, segment[:1])
    worst = 0.0
    for x, y, n in zip(outputs, expected, (shared, shared, 1, 1), strict=True):
        apart = x[:1, :, :n].astype(jnp.float32) - y
        worst = max(worst, float(jnp.linalg.norm(apart.ravel()) / jnp.linalg.norm(y.ravel())))
    return worst


def measure(shape: tuple[int, ...], trajectories: int, *, dtype: str, window: int | None, repeats: int) -> Any:
    """Measures each kernel on rows of one shape: seconds, temporaries, deviation; and why others were skipped."""
    A = shape[-1]
    needs = fused.Needs(A**-0.5, None, (window,), A, dtype, one_segment=trajectories == 1)
    able, reasons = attends(needs)
    batch = jax.block_until_ready(jax.device_put(make_batch(shape, trajectories, dtype), jax.devices()[0]))
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    kernels: dict[str, Any] = {}
    for name, attend in able.items():
        try:
            compiled = {
                "forward": jax.jit(forward(attend)).lower(*batch).compile(),
                "both": jax.jit(backward(attend)).lower(*batch).compile(),
            }
            apart = difference([jax.block_until_ready(f(*batch)) for f in compiled.values()][1], batch, needs)
        except Exception as e:  # a kernel may fail on this device; the others are still timed
            full = "RESOURCE_EXHAUSTED" in str(e)
            reasons[name] = "it runs out of memory" if full else f"{FAILED} {type(e).__name__}: {str(e)[:300]}"
            continue
        memory: Any = compiled["both"].memory_analysis()
        temporaries = memory.temp_size_in_bytes
        kernels[name] = {"forward": [], "both": [], "temporaries": temporaries, "difference": apart}
        for part, f in compiled.items():
            calls[name, part] = functools.partial(f, *batch)
    for _ in range(repeats):
        for (name, part), call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            kernels[name][part].append(time.perf_counter() - start)
    return {"shape": shape, "trajectories": trajectories, "kernels": kernels, "left_out": reasons}


def faults(result: dict[str, Any]) -> list[str]:
    """Returns a line for each kernel that failed or is wrong."""
    out, close = [], CLOSE[result["dtype"]]
    for case in result["cases"]:
        of = f"at {'x'.join(map(str, case['shape']))} with {case['trajectories']} a row"
        out += [f"{name} {of}: {why}" for name, why in case["left_out"].items() if why.startswith(FAILED)]
        out += [
            f"{name} {of} differs from XLA by {x['difference']:.1e} of the norm, above {close}"
            for name, x in case["kernels"].items()
            if not x["difference"] <= close
        ]
    return out


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    where = result["machine"]
    on = f"{where['cpu']}, {where['cores']} cores" if where["device"] == "cpu" else where["device"]
    window = "no window" if result["window"] is None else f"window {result['window']}"
    lines = [
        f"{on}; {result['dtype']}; {window}; jax {result['jax']}; commit {result['commit']}; {result['date']};"
        f" load average before {result['load_average']:.1f}",
        "",
        "| rows | trajectories a row | kernel | forward, ms | with gradients, ms | of XLA's | temporaries, MiB"
        " | difference |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    left_out: dict[tuple[str, str], list[str]] = {}  # of which cases
    for case in result["cases"]:
        rows, kernels = "x".join(map(str, case["shape"])), case["kernels"]
        plain = statistics.median(kernels["xla"]["both"]) if "xla" in kernels else None
        for name, x in kernels.items():
            both = statistics.median(x["both"])
            cells = (
                f"{1e3 * statistics.median(x['forward']):,.2f}",
                f"{1e3 * both:,.2f}",
                "" if plain is None else f"{both / plain:.2f}",
                f"{x['temporaries'] / 2**20:,.1f}",
                f"{x['difference']:.0e}",
            )
            lines.append(f"| {rows} | {case['trajectories']} | {name} | {' | '.join(cells)} |")
        for name, why in case["left_out"].items():
            left_out.setdefault((name, why), []).append(f"{rows} with {case['trajectories']} a row")
    lines.append("")
    for (name, why), cases in left_out.items():
        everywhere = len(cases) == len(result["cases"])
        lines.append(f"Left out: {name}{'' if everywhere else ' at ' + ', '.join(cases)}: {why}.")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    backend = jax.default_backend()
    parser.add_argument("--shapes", default=SHAPES.get(backend, SHAPES["cpu"]), help="separated by commas")
    parser.add_argument("--dtype", choices=sorted(CLOSE), default="float32" if backend == "cpu" else "bfloat16")
    parser.add_argument("--window", type=int, help="of sliding layers; without it every token sees all before it")
    parser.add_argument("--repeats", type=int, default=9, help="of each kernel; the median counts")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    shapes = []
    for text in args.shapes.split(","):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", text):
            raise UserError(f"--shapes={args.shapes}: {text!r} must be five numbers, as 8x2048x32x8x128")
        shape = tuple(map(int, text.split("x")))
        if shape[2] % shape[3] or shape[1] < 16:
            raise UserError(
                f"--shapes={args.shapes}: {text!r} must have 16 positions or more, and query heads that its"
                " key/value heads divide, as 8x2048x32x8x128"
            )
        shapes.append(shape)
    for name, least in (("repeats", args.repeats), ("window", 1 if args.window is None else args.window)):
        if least < 1:
            raise UserError(f"--{name}={least} must be 1 or more")
    if args.dtype == "float32" and backend != "cpu":
        # As in training: by default a float32 product is TF32 on GPUs and bfloat16 on TPUs.
        jax.config.update("jax_default_matmul_precision", "highest")
    begun = begin()
    options = dict(dtype=args.dtype, window=args.window, repeats=args.repeats)
    result: dict[str, Any] = {
        **begun,
        "dtype": args.dtype,
        "window": args.window,
        "cases": [measure(shape, trajectories, **options) for shape in shapes for trajectories in (1, 4)],
    }
    write(result, table, args.out, "attention")
    if bad := faults(result):
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
