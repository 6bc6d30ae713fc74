"""Accounts of one layer of experts of large mixtures, compiled for described machines: forecasts, not measurements.

    python benchmarks/expert_accounts.py
    python benchmarks/expert_accounts.py --only=qwen3-30b-a3b@8xH100,gpt-oss-20b@8xH100

A case is MODEL@MACHINE, with `mesh.expert=8`, `mesh.fsdp` for the rest, 24,576 tokens per device and all weights
trained. It has the experts alone: no router, attention or norm. `backward` recomputes gate and up. Bytes of tokens are
relative to one row for each pair of a token and an expert: two rows forward, three backward. Bytes of kernels are
relative to gathering a device's experts once for each direction, and reducing their gradients once. Loops of
unknown length, the further rounds of the exchange, count once. Writes OUT/<date>-expert-accounts.json after each case.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from machine import ROOT, begin

from jppo import settings
from jppo.errors import UserError
from jppo.forecast import account, compilers, machines
from jppo.forecast import account as forecast
from jppo.learner import sharding
from jppo.models import config_reader, experts

OF_QWEN3 = dict(model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=512)
OF_QWEN3 |= dict(
    num_attention_heads=8,
    num_key_value_heads=4,
    num_hidden_layers=1,
    intermediate_size=512,
    max_position_embeddings=512,
)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": OF_QWEN3 | dict(hidden_size=2048, moe_intermediate_size=768),
    "qwen3-235b-a22b": OF_QWEN3 | dict(hidden_size=4096, moe_intermediate_size=1536),
    "gpt-oss-20b": dict(
        model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=1, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        swiglu_limit=7.0, vocab_size=512, max_position_embeddings=512,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
}  # fmt: skip
CASES = (
    "qwen3-30b-a3b@8xH100", "qwen3-30b-a3b@4x8xH100", "qwen3-30b-a3b@v5p-64",
    "gpt-oss-20b@8xH100", "gpt-oss-20b@4x8xH100", "gpt-oss-20b@v5p-64",
    "qwen3-235b-a22b@16x8xH100", "qwen3-235b-a22b@v5p-256",
)  # fmt: skip
ROWS, LENGTH, EXPERT = 16, 1536, 8  # rows of a device, their tokens, and mesh.expert
SENDS = {"forward": 2, "backward": 3}  # times that a pair's row is sent


def compiled(case: str) -> dict[str, Any]:
    """Compiles both directions of a case's layer and returns their figures; in a process with the compiler."""
    name, machine = case.split("@")
    described = machines.parse_machine(machine)
    cfg = config_reader.parse_config(MODELS[name], path="config.json")
    mixture, D = cfg.experts, cfg.hidden_size
    assert mixture is not None
    fsdp = described.devices // EXPERT
    mesh = sharding.mesh_of_shape((1, fsdp, 1, 1, EXPERT), compilers.devices_of(described))
    mix = experts.make_mix(mesh)

    def of(shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    rows = ROWS * described.devices, LENGTH
    shapes = [(mixture.count, D, mixture.width)] * 3
    if mixture.names.fused:
        shapes += [(mixture.count, 1, mixture.width)] * 2 + [(mixture.count, D, 1)]
    kernels = tuple(of(s, jnp.float32, "expert", "fsdp" if s[1] == D else None) for s in shapes)
    x, weight, chosen = (
        of((*rows, n), dtype, ("data", "fsdp", "expert"))
        for n, dtype in ((D, jnp.bfloat16), (mixture.active, jnp.float32), (mixture.active, jnp.int32))
    )

    def forward(kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
        return mix(kernels, x, weight, chosen, cfg)

    def backward(kernels: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array, given: jax.Array) -> Any:
        return jax.vjp(lambda *learned: mix(*learned, chosen, cfg), kernels, x, weight)[1](given)

    accounts = {}
    pairs = ROWS * LENGTH * mixture.active
    for direction, fn, more in (("forward", forward, ()), ("backward", backward, (x,))):
        program = account.account_of_program(jax.jit(fn).lower(kernels, x, weight, chosen, *more), dict(mesh.shape))
        useful = 6 * pairs * D * mixture.width * described.devices * (1 if direction == "forward" else 2)
        estimate = forecast.forecast_account(program, described, mesh, useful)
        sent = dict.fromkeys(("all-to-all", "all-gather", "reduce-scatter"), 0)
        for part in program.collectives:
            sent[part.kind] = sent.get(part.kind, 0) + part.times * part.bytes
        parameters = sum(x.size for x in kernels) // EXPERT
        accounts[direction] = dict(
            error=program.error, compile_s=program.compile_s, temporaries=program.temporaries,
            flops=program.total_flops, hbm=program.hbm,
            sent=sent, tokens_needed=SENDS[direction] * pairs * D * 2, kernels_needed=2 * parameters,
            forecast=estimate.as_dict(),
        )  # fmt: skip
    return accounts


def table(cases: dict[str, Any]) -> str:
    """The accounts as markdown."""
    lines = [
        "| model | machine | direction | HBM, GB | tokens sent / needed | temporaries, GiB | MFU at most | bound by |"
    ]
    lines.append("|---|---|---|---:|---:|---:|---:|---|")
    for case, accounts in cases.items():
        for direction, program in accounts.items():
            where = " | ".join([*case.split("@"), direction])
            if program["error"]:
                lines.append(f"| {where} | {program['error'][:90]} | | | | |")
                continue
            ratio, estimate = program["sent"]["all-to-all"] / program["tokens_needed"], program["forecast"]
            figures = f"{program['hbm'] / 1e9:.1f} | {ratio:.2f} | {program['temporaries'] / 2**30:.1f}"
            lines.append(f"| {where} | {figures} | {estimate['mfu']:.0%} | {estimate['bound']} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas; others keep their figures")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [case for case in names if case not in CASES]:
        raise UserError(f"--only={args.only}: {unknown[0]!r} must be one of {', '.join(CASES)}")
    head = begin()
    out = args.out / f"{head['date']}-expert-accounts.json"
    for case in names:
        machine = machines.parse_machine(case.split("@")[1])
        if not compilers.is_present(machine):  # a process for each: it has one compiler
            command = [sys.executable, __file__, f"--only={case}", f"--out={args.out}"]
            subprocess.run(command, env=compilers.require_compiler(machine), check=True)
            continue
        kept = json.loads(out.read_text())["cases"] if out.is_file() else {}
        kept[case] = compiled(case)
        ordered = {one: kept[one] for one in CASES if one in kept}
        result = {**head, "note": "forecasts of compilers, not measured", "cases": ordered}
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(table({case: kept[case]}), flush=True)


if __name__ == "__main__":
    main()
