"""Compares compiled small programs on described machines with reference accounts:

    python scripts/check_accounts.py --platform=gpu            # compares; exit code 1 with the differences
    python scripts/check_accounts.py --platform=tpu --write    # renews the kept files
    python scripts/check_accounts.py --platform=gpu --only=fsdp,lora

Cases: every mesh axis, hosts, experts, LoRA, an exact KL and long rows, with few layers of real widths. It fails where
bytes of a collective, temporaries or the peak grow by more than 3 % or a fused kernel is lost. It also fails where the
partitioner newly gathers an array whole. The files are tests/accounts/PLATFORM/NAME.json.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the checkout, for examples/
from examples import arithmetic
from jppo import settings
from jppo.errors import UserError
from jppo.learner.make import make_mesh
from jppo.plugins.forecast import compilers, machines, schedule
from jppo.plugins.forecast.account import Account, inspect
from jppo.preflight import memory, preview
from jppo.run.inputs import read_inputs

KEPT = pathlib.Path(__file__).resolve().parents[1] / "tests/accounts"
GROWTH = 1.03
SMALL = 2**20  # bytes below which growth does not count

HALF = dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936)
SEVEN = dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4)
SEVEN |= dict(vocab_size=152064, tie_word_embeddings=False)
TINY = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, vocab_size=32768)
# Of Qwen3-30B-A3B, with heads of 128.
SPARSE = dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=4)
SPARSE |= dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=128, num_experts_per_tok=8)
SPARSE |= dict(moe_intermediate_size=768, norm_topk_prob=True, vocab_size=151936, tie_word_embeddings=False)

# name -> machine, model, settings that differ from BASE
GPU: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one": ("H100", HALF, {}),
    "remat": ("H100", HALF, {"model.remat": "full"}),
    "segments": ("H100", HALF, {"data.packing": "segments"}),
    "data": ("8xH100", HALF, {"mesh.data": 8}),
    "fsdp": ("8xH100", SEVEN, {"mesh.data": 1, "mesh.fsdp": 8, "model.remat": "full"}),
    "data_fsdp": ("8xH100", SEVEN, {"mesh.data": 2, "mesh.fsdp": 4}),
    "tensor": ("8xH100", SEVEN, {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 4}),
    "long": (
        "8xH100", SEVEN,
        {"mesh.data": 1, "mesh.fsdp": 2, "mesh.sequence": 4, "data.max_response_length": 15360, "model.remat": "full"},
    ),
    "lora": ("8xH100", SEVEN, {"mesh.data": 1, "mesh.fsdp": 8, "model.lora_rank": 16}),
    "exact_kl": (
        "8xH100", HALF, {"mesh.data": 1, "mesh.fsdp": 8, "actor.use_kl_loss": True, "actor.kl_loss_type": "full"},
    ),
    "hosts": ("4x8xH100", SEVEN, {"mesh.data": 4, "mesh.fsdp": 8}),
    "experts": ("8xH100", SPARSE, {"mesh.data": 1, "mesh.expert": 8, "model.remat": "full"}),
}  # fmt: skip
TPU: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one": ("v5e-1", TINY, {}),
    "fsdp": ("v5e-4", TINY, {"mesh.data": 1, "mesh.fsdp": 4}),
    "tensor": ("v5e-4", TINY, {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2}),
    "sequence": ("v5e-4", TINY, {"mesh.data": 1, "mesh.fsdp": 2, "mesh.sequence": 2}),
}
CASES = {"gpu": GPU, "tpu": TPU}
BASE: dict[str, Any] = {
    "model.init": "random",
    "model.remat": "dots",
    "data.train_batch_size": 256,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 1024,
    "data.row_lengths": 1,
    "data.packing": "buckets",
    "actor.ppo_mini_batch_size": 64,
    "actor.max_tokens_per_device": 8192,
    "algorithm.adv_estimator": "grpo",  # no critic
    "algorithm.use_kl_in_reward": False,
    "rollout.n": 4,
}


def config_of(model: dict[str, Any], changes: dict[str, Any], folder: pathlib.Path) -> Any:
    """Returns a case's settings, with its model and data in the folder."""
    arithmetic.write_model(folder / "model")
    shape = arithmetic.MODEL | model | {"num_hidden_layers": 2, "max_position_embeddings": 32768}
    (folder / "model/config.json").write_text(json.dumps({k: v for k, v in shape.items() if k != "head_dim"}))
    rows = arithmetic.make(seed=0, test=4, sloppy=0.5, demonstrations=1)["train"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:256]))
    c = settings.recipe("gsm8k")
    c.model.path = str(folder / "model")
    c.data.train_files = c.data.val_files = str(folder / "train.jsonl")
    c.update_from_flattened_dict(BASE | changes)
    c = settings.typed(c)
    return c


def account_of(machine: machines.Machine, model: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the compared figures of a case's programs."""
    with tempfile.TemporaryDirectory() as folder:
        c = config_of(model, changes, pathlib.Path(folder))
        inputs = read_inputs(c)
        mesh = make_mesh(c, compilers.devices_of(machine))
        entries = preview.work_of_step(c, inputs, mesh).entries
        estimate = memory.estimate_memory(c, inputs, mesh, entries=entries, inspect=inspect)
    programs = {}
    for moment in estimate.moments:
        compiled = moment.compiled
        a = compiled.work or Account()
        sent = {f"{kind} {'+'.join(axes)}": size for kind, axes, _, size in schedule.totals(a.collectives)}
        programs[moment.name] = dict(
            error=compiled.error, temporaries=compiled.temporaries, peak=sum(estimate.parts.values()) + moment.needs,
            flops=a.total_flops, collectives=sent, kernels=a.kernels, warnings=list(a.warnings),
        )  # fmt: skip
    return dict(machine=machine.name, jax=jax.__version__, settings=changes, programs=programs)


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns a line for each regression of a case's programs."""
    regressions = []
    for name, old in kept["programs"].items():
        new = now["programs"].get(name)
        if new is None:
            regressions.append(f"{name}: is no longer compiled")
            continue
        if new["error"] and not old["error"]:
            regressions.append(f"{name}: refused by the compiler: {new['error']}")
            continue
        sizes = {figure: (old[figure], new[figure]) for figure in ("temporaries", "peak")}
        for kind in new["collectives"]:
            sizes[f"bytes of {kind}"] = (old["collectives"].get(kind, 0), new["collectives"][kind])
        for figure, (before, after) in sizes.items():
            if after > GROWTH * before and after - before > SMALL:
                change = f"{after / before - 1:+.1%}" if before else "new"
                regressions.append(f"{name}: {figure} {before / SMALL:,.1f} -> {after / SMALL:,.1f} MiB ({change})")
        for kernel in old["kernels"]:
            if kernel not in new["kernels"]:
                regressions.append(f"{name}: lost the fused kernel {kernel}; has {', '.join(new['kernels']) or 'none'}")
        regressions += [
            f"{name}: the partitioner gathers whole: {w}" for w in new["warnings"] if w not in old["warnings"]
        ]
    return regressions


def main(argv: list[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=sorted(CASES), required=True)
    parser.add_argument("--write", action="store_true", help="write the reference accounts")
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    args = parser.parse_args(argv)
    cases, folder = CASES[args.platform], KEPT / args.platform
    names = args.only.split(",") if args.only else list(cases)
    if unknown := [name for name in names if name not in cases]:
        raise UserError(f"--only={args.only}: {unknown[0]!r} must be one of {', '.join(cases)}")
    first = machines.parse_machine(cases[names[0]][0])
    if not compilers.is_present(first):
        return subprocess.run(
            [sys.executable, __file__, *argv], env=compilers.require_compiler(first), check=False
        ).returncode
    worse = 0
    for name in names:
        machine, model, changes = cases[name]
        file, now = folder / f"{name}.json", account_of(machines.parse_machine(machine), model, changes)
        if args.write:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(now, indent=1) + "\n")
            print(f"{args.platform}/{name}: kept", flush=True)
            continue
        if not file.is_file():
            raise UserError(f"{file}: no such account; make it with --write --only={name}")
        regressions = differences(json.loads(file.read_text()), now)
        worse += bool(regressions)
        print(f"{args.platform}/{name}: {'worse' if regressions else 'no worse'}", *regressions, sep="\n  ", flush=True)
    if worse:
        print(f"if that is meant: python scripts/check_accounts.py --platform={args.platform} --write")
    return 1 if worse else 0


@settings.exit_on_user_error
def command() -> None:
    """Exits with the exit code."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    command()
