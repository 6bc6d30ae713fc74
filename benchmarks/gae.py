"""Generalised advantage estimation: jppo, Python loops, other JAX forms, and the time to move the bytes.

    python benchmarks/gae.py                                    # [256, 1024] and [1024, 8192]
    python benchmarks/gae.py --shapes 64x4096 --repeats 5

A flat batch of responses, tool output inside, float32, always the same. All forms run in one process, in turn,
on the first device, and every result is compared with jppo's. Compilation is counted apart; each figure is the median
of --repeats. Writes OUT/<date>-<machine>-gae.json and prints a table.
"""

import argparse
import functools
import pathlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import ROOT, begin, version, write

from jppo import settings
from jppo.algorithms import advantage
from jppo.errors import UserError

GAMMA, LAM = 0.99, 0.95
UNROLLS = (1, 4, 8, 16, 32)
FEW = 4  # rows of the loop over tokens, which would take minutes on all of them
BYTES = 4 + 4 + 1 + 4 + 4  # of a token: reward, value and mask are read, advantage and returns written

Form = Callable[..., tuple[Any, Any]]


def make_batch(B: int, L: int) -> tuple[np.ndarray, ...]:
    """Reward, value and mask of responses of L / 4 tokens or more, each with tool output inside."""
    rng = np.random.default_rng(0)
    length = rng.integers(L // 4, L + 1, (B, 1))
    at = np.arange(L)
    tool = length // 4
    mask = (at < length) & ~((tool <= at) & (at < tool + rng.integers(1, L // 16, (B, 1))))
    reward = rng.normal(size=(B, L), scale=0.01).astype(np.float32)  # as a KL in the reward
    reward += (at == length - 1) & (rng.random((B, 1)) < 0.5)
    return np.where(mask, reward, np.float32(0.0)), rng.random((B, L), np.float32), mask


def by_token(reward, value, mask):
    """A Python loop over tokens."""
    advantages = np.zeros_like(reward)
    for row in range(len(reward)):
        r, v, m = (x[row].tolist() for x in (reward, value, mask))
        out, next_a, next_v = [0.0] * len(r), 0.0, 0.0
        for t in reversed(range(len(r))):
            if m[t]:
                next_a = out[t] = r[t] + GAMMA * next_v - v[t] + GAMMA * LAM * next_a
                next_v = v[t]
        advantages[row] = out
    return advantages, np.where(mask, advantages + value, 0.0)


def by_position(reward, value, mask):
    """A Python loop over positions, with numpy over the rows."""
    advantages = np.zeros_like(reward)
    next_a, next_v = np.zeros((2, len(reward)), np.float32)
    for t in reversed(range(reward.shape[1])):
        now = reward[:, t] + GAMMA * next_v - value[:, t] + GAMMA * LAM * next_a
        next_a, next_v = np.where(mask[:, t], now, next_a), np.where(mask[:, t], value[:, t], next_v)
        advantages[:, t] = np.where(mask[:, t], now, 0.0)
    return advantages, np.where(mask, advantages + value, 0.0)


def two_numbers(reward, value, mask):
    """A scan over whole rows that carries the next advantage and the next value, as the equation is written."""

    def step(carry, now):
        next_a, next_v = carry
        r, v, m = now
        a = r + GAMMA * next_v - v + GAMMA * LAM * next_a
        return (jnp.where(m, a, next_a), jnp.where(m, v, next_v)), jnp.where(m, a, 0.0)

    nothing = jnp.zeros_like(reward[:, 0])
    advantages = jax.lax.scan(step, (nothing, nothing), (reward.T, value.T, mask.T), reverse=True)[1].T
    return advantages, jnp.where(mask, advantages + value, 0.0)


def recurrence(solve: Callable[[jax.Array, jax.Array], jax.Array], reward, value, mask):
    """GAE by a solver of C_t = a_t C_{t+1} + b_t: C_t = V_t + λ A_t where the mask keeps, the next C in gaps."""
    a = jnp.where(mask, GAMMA * LAM, 1.0)
    b = jnp.where(mask, LAM * reward + (1.0 - LAM) * value, 0.0)
    next_c = jnp.pad(solve(a, b)[:, 1:], ((0, 0), (0, 1)))
    advantages = jnp.where(mask, reward - value + GAMMA * next_c, 0.0)
    return advantages, jnp.where(mask, advantages + value, 0.0)


def by_scan(a: jax.Array, b: jax.Array, *, unroll: int) -> jax.Array:
    """Scans whole rows with one multiplication and one sum per position."""

    def step(c, now):
        c = now[0] * c + now[1]
        return c, c

    return jax.lax.scan(step, jnp.zeros_like(b[:, 0]), (a.T, b.T), reverse=True, unroll=unroll)[1].T


def by_tree(a: jax.Array, b: jax.Array) -> jax.Array:
    """Uses log T rounds over all positions."""
    return jax.lax.associative_scan(_compose, (a, b), reverse=True, axis=1)[1]


def by_trees(a: jax.Array, b: jax.Array, *, length: int) -> jax.Array:
    """Scans blocks of time, with such rounds inside each."""
    R, T = b.shape

    def block(c, now):
        a, b = jax.lax.associative_scan(_compose, now, reverse=True, axis=1)
        c = a * c[:, None] + b
        return c[:, 0], c

    blocks = tuple(x.reshape(R, T // length, length).swapaxes(0, 1) for x in (a, b))
    return jax.lax.scan(block, jnp.zeros_like(b[:, 0]), blocks, reverse=True)[1].swapaxes(0, 1).reshape(R, T)


def _compose(later, earlier):
    """Composes two steps C -> a C + b."""
    return earlier[0] * later[0], earlier[0] * later[1] + earlier[1]


def move(reward, value, mask):
    """Reads GAE's inputs and writes its outputs once."""
    return jnp.where(mask, reward, 1.0), 2.0 * value


def jax_forms(T: int) -> dict[str, Form]:
    """Returns the compiled forms."""
    length = max(n for n in range(1, 65) if T % n == 0)
    forms: dict[str, Form] = {
        "jppo": functools.partial(advantage.gae, gamma=GAMMA, lam=LAM),
        "scan, two numbers": two_numbers,
    }
    for unroll in UNROLLS:
        solve = functools.partial(by_scan, unroll=unroll)
        forms[f"scan, one number, unroll={unroll}"] = functools.partial(recurrence, solve)
    forms["associative_scan"] = functools.partial(recurrence, by_tree)
    solve = functools.partial(by_trees, length=length)
    forms[f"scan of associative_scan of {length}"] = functools.partial(recurrence, solve)
    return forms


def measure(R: int, T: int, *, repeats: int) -> dict[str, Any]:
    """Measures each form on rows of one shape: seconds, compilation, deviation from jppo."""
    host = make_batch(R, T)
    device = jax.block_until_ready(jax.device_put(host, jax.devices()[0]))
    few = tuple(x[:FEW] for x in host)
    half = np.ones(R * T * BYTES // 2, np.uint8)
    into = np.empty_like(half)
    calls: dict[str, Callable[[], Any]] = {}
    compilation: dict[str, float] = {}
    for name, form in (jax_forms(T) | {"bytes moved, jax": move}).items():
        start = time.perf_counter()
        compiled = jax.jit(form).lower(*device).compile()
        compilation[name] = time.perf_counter() - start
        calls[name] = lambda compiled=compiled: jax.block_until_ready(compiled(*device))
    calls["bytes moved, numpy"] = lambda: np.copyto(into, half)
    calls["numpy, loop over positions"] = lambda: by_position(*host)
    calls["Python, loop over tokens"] = lambda: by_token(*few)
    want = jax.device_get(calls["jppo"]())
    scale, forms = float(np.abs(want[0]).max()), {}
    for name, call in calls.items():
        outputs = call()  # the warm-up too
        forms[name] = {"seconds": [], "scaled_by": R / len(few[0]) if name.startswith("Python") else 1.0}
        if not name.startswith("bytes"):
            apart = max(float(np.abs(y - w[: len(y)]).max()) for y, w in zip(outputs, want, strict=True)) / scale
            assert apart < 1e-5, f"{name} differs from jppo by {apart:.1e} of the largest advantage"
            forms[name]["difference"] = apart
        if name in compilation:
            forms[name]["compile_seconds"] = compilation[name]
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            forms[name]["seconds"].append((time.perf_counter() - start) * forms[name]["scaled_by"])
    medians = {name: statistics.median(form["seconds"]) for name, form in forms.items()}
    for name, form in forms.items():
        form["of_moving_the_bytes"] = medians[name] / medians["bytes moved, jax"]
        form["of_jppo"] = medians[name] / medians["jppo"]
    return {"bytes": R * T * BYTES, "in_the_mask": float(host[2].mean()), "forms": forms}


def table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    where = result["machine"]
    on = f"{where['cpu']}, {where['cores']} cores"
    if where["device"] != "cpu":
        on = f"{where['device']}; the loops and numpy on {on}"
    lines = [
        f"{on}; float32; jax {result['jax']}; commit {result['commit']}; {result['date']};"
        f" load average before {result['load_average']:.1f}",
        "",
        "| rows | form | ms | of moving the bytes | of jppo | compilation, s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for shape, measured in result["shapes"].items():
        for name, x in measured["forms"].items():
            cells = (
                f"{1e3 * statistics.median(x['seconds']):,.2f}",
                f"{x['of_moving_the_bytes']:,.1f}",
                f"{x['of_jppo']:,.2f}",
                f"{x['compile_seconds']:.1f}" if "compile_seconds" in x else "",
            )
            lines.append(f"| {shape} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="256x1024,1024x8192", help="rows x positions, separated by commas")
    parser.add_argument("--repeats", type=int, default=9, help="of each form; the median counts")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    shapes = args.shapes.split(",")
    for shape in shapes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape) or int(shape.split("x")[1]) < 128:
            raise UserError(f"--shapes={args.shapes}: {shape!r} must be rows x positions, 128 or more, as 256x1024")
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats} must be 1 or more")
    result: dict[str, Any] = {
        **begin(),
        "numpy": version("numpy"),
        "shapes": {shape: measure(*map(int, shape.split("x")), repeats=args.repeats) for shape in shapes},
    }
    write(result, table, args.out, "gae")


if __name__ == "__main__":
    main()
