"""Accounts of programs on described machines against those that are kept: scripts/check_accounts.py."""

import copy
import json
import os
import subprocess
import sys

import pytest

from jppo.plugins.forecast import compilers
from tests.make import ROOT, script

SCRIPT = ROOT / "scripts/check_accounts.py"
check_accounts = script("scripts/check_accounts.py")

MIB = 2**20
KEPT = {
    "programs": {
        "log-probs": {
            "error": None,
            "temporaries": 100 * MIB,
            "peak": 1000 * MIB,
            "flops": 10,
            "collectives": {"all-gather fsdp": 500 * MIB},
            "kernels": {"__cudnn$fmhaSoftmax": 2},
            "warnings": [],
        }
    }
}


def changed(**changes):
    now = copy.deepcopy(KEPT)
    now["programs"]["log-probs"] |= changes
    return now


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, None),
        ({"temporaries": 103 * MIB}, None),
        ({"temporaries": 90 * MIB, "collectives": {}}, None),
        ({"temporaries": 104 * MIB}, "log-probs: temporaries 100.0 -> 104.0 MiB (+4.0%)"),
        ({"peak": 1100 * MIB}, "log-probs: peak 1,000.0 -> 1,100.0 MiB (+10.0%)"),
        # the old head: its matrix gathered anew in each chunk
        (
            {"collectives": {"all-gather fsdp": 50_000 * MIB}},
            "log-probs: bytes of all-gather fsdp 500.0 -> 50,000.0 MiB (+9900.0%)",
        ),
        (
            {"collectives": {"all-gather fsdp": 500 * MIB, "all-reduce data": 5 * MIB}},
            "log-probs: bytes of all-reduce data 0.0 -> 5.0 MiB (new)",
        ),
        ({"collectives": {"all-gather fsdp": 500 * MIB, "all-reduce data": 64}}, None),
        ({"kernels": {}}, "log-probs: lost the fused kernel __cudnn$fmhaSoftmax; has none"),
        ({"warnings": ["gather f32[8]"]}, "log-probs: the partitioner gathers whole: gather f32[8]"),
        ({"error": "too large"}, "log-probs: refused by the compiler: too large"),
    ],
)
def test_what_is_worse_is_said(changes, said):
    assert check_accounts.differences(KEPT, {"programs": {}}) == ["log-probs: is no longer compiled"]
    assert check_accounts.differences(KEPT, changed(**changes)) == ([] if said is None else [said])


def run(*arguments):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], env=env, capture_output=True, text=True)


def test_an_unknown_case_is_one_line():
    done = run("--platform=gpu", "--only=none")
    assert done.returncode == 2 and done.stderr.startswith("error: --only=none: 'none' must be one of one, ")


@pytest.mark.parametrize(
    "platform, only",
    [("gpu", "tensor"), *(pytest.param(platform, "", marks=pytest.mark.slow) for platform in ("gpu", "tpu"))],
)
def test_no_program_became_worse(platform, only):
    if not (compilers.compiler_folder(platform) / compilers.READY).is_file():
        pytest.skip(f"XLA's compiler for {platform.upper()}s is not installed; make target-{platform}")
    if not (check_accounts.KEPT / platform).is_dir():
        pytest.skip(f"no accounts are kept; python scripts/check_accounts.py --platform={platform} --write")
    done = run(f"--platform={platform}", f"--only={only}")
    assert done.returncode == 0, done.stdout + done.stderr


GATHERED_AGAIN = """
import importlib.util, sys
import jax
from jppo.models import heads

once = heads._products

def in_each_chunk(states, kernel):
    kernel, states = jax.lax.optimization_barrier((kernel, states))
    width = kernel.shape[1] // jax.lax.axis_size("fsdp")
    mine = jax.lax.dynamic_slice_in_dim(kernel, jax.lax.axis_index("fsdp") * width, width, axis=1)
    return once(states, jax.lax.all_gather(mine, "fsdp", axis=1, tiled=True))

heads._products = in_each_chunk
spec = importlib.util.spec_from_file_location("check_accounts", sys.argv[1])
check_accounts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_accounts)
sys.exit(check_accounts.main(["--platform=gpu", "--only=fsdp"]))
"""


@pytest.mark.slow
def test_a_head_that_is_gathered_in_each_chunk_is_caught():
    if not (compilers.compiler_folder("gpu") / compilers.READY).is_file():
        pytest.skip("XLA's compiler for GPUs is not installed; make target-gpu")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {
        "PYTHONPATH": f"{compilers.compiler_folder('gpu')}{os.pathsep}{ROOT}",
        "JAX_PLATFORMS": "cpu",
        compilers.PLATFORM_VARIABLE: "gpu",
    }
    command = [sys.executable, "-c", GATHERED_AGAIN, str(SCRIPT)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    for program in ("log-probs", "actor gradient"):
        assert f"  {program}: bytes of all-gather fsdp " in done.stdout, done.stdout


def test_experts_receive_what_their_tokens_and_parameters_need_once():
    """By the kept account of two layers on 8 GPUs, with mesh.expert=8 and remat=full."""
    programs = json.loads((check_accounts.KEPT / "gpu/experts.json").read_text())["programs"]
    shape, layers = check_accounts.SPARSE, 2
    D, N = shape["hidden_size"], check_accounts.BASE["actor.max_tokens_per_device"]
    row = 2 * N * D  # bytes of a device's tokens
    pairs = layers * shape["num_experts_per_tok"] * row
    attention = 2 * D * 64 * (2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"])
    whole = layers * 2 * attention + 2 * D * shape["vocab_size"]  # the experts stay where they are
    # Forward: rows there, outputs back. Backward: rows and gradients there, gradients back. And the embedding's rows.
    for name, times, directions in (("log-probs", 2, 1), ("actor gradient", 5, 2)):
        sent = programs[name]["collectives"]
        assert sent["all-to-all expert"] <= 1.2 * (times * pairs + directions * row), name
        assert sent["all-gather expert"] <= 1.2 * directions * whole, name
        assert sent.get("reduce-scatter expert", 0) <= 1.2 * 2 * whole, name  # in float32
        assert programs[name]["temporaries"] < 40 * 8 * row  # not one array of rows for each of 128 experts
