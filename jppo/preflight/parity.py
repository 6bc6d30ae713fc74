"""Compares jppo's log-probs of a few tokens with transformers', with the same weights."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.interpreter import python_path
from jppo.learner.model_configs import read_models
from jppo.models import decoder, heads, hf
from jppo.models.config import ModelConfig
from jppo.preflight import memory, memory_budget
from jppo.preflight.finding import GIB, Finding
from jppo.settings import Settings, UserError
from jppo.types import Params

TOKENS = 12
TOLERANCE = 1e-3  # of a log-prob, in float32
PROGRAM = GIB  # of torch and transformers
LIMIT_S = 240.0


def check(c: Settings) -> Iterator[Finding]:
    """Compares the policy's log-probs of a few random tokens; skipped without torch."""
    policy, _, _ = read_models(c)
    if c.model.init == "random":
        yield Finding("parity", "OK", "skipped: random weights")
        return
    needs, free = memory.served(policy, "float32") + PROGRAM, memory_budget.host_room()
    if free is not None and needs > free:
        said = f"skipped: it takes {needs / GIB:.1f} GiB, and {free / GIB:.1f} are free"
        yield Finding("parity", "WARN", said, "run scripts/check_parity.py on a larger machine")
        return
    directory = str(hf.resolve(c.model.path, weights=True))
    ids = np.random.default_rng(0).integers(0, policy.vocab_size, TOKENS).astype(np.int32)
    theirs = reference(c.rollout.python, directory, ids)
    if isinstance(theirs, str):
        said = f"skipped: no {theirs} to compare with; training does not need it"
        yield Finding("parity", "OK", said)
        return
    _, short = hf.read_config(directory, longest=TOKENS)  # transformers scales positions by the tokens that it is given
    gap = float(np.abs(ours(directory, short, ids) - theirs).max())
    said = f"largest gap to transformers' log-probs {gap:.1e} on {TOKENS - 1} tokens"
    if gap <= TOLERANCE:
        yield Finding("parity", "OK", said)
    else:
        remedy = f"do not train it: python scripts/check_parity.py {c.model.path} says where they differ"
        yield Finding("parity", "FAIL", f"{said}, more than {TOLERANCE:g}", remedy)


def reference(python: str, directory: str, ids: np.ndarray) -> np.ndarray | str:
    """Returns transformers' log-probs from the interpreter that has vLLM and torch; or the missing package."""
    command = [python if python else sys.executable, "-m", "jppo.preflight.parity_worker", directory, *map(str, ids)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UserError(f"transformers gave no log-probs: {e}; set rollout.python to a working interpreter") from e
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"transformers cannot read {directory}: {said[-300:]}; download the model again")
    answer = json.loads(done.stdout.splitlines()[-1])
    return str(answer["missing"]) if "missing" in answer else np.array(answer["logp"], np.float32)


def ours(directory: str, cfg: ModelConfig, ids: np.ndarray) -> np.ndarray:
    """Returns jppo's log-probs of each token after the first."""
    model = decoder.Decoder(cfg, dtype="float32", param_dtype="float32")

    @jax.jit
    def logp(values: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        segment, position = jnp.ones_like(inputs), jnp.arange(inputs.shape[1], dtype=jnp.int32)[None]
        hidden: Any = model.apply({"params": values}, inputs, segment, position)
        return heads.logprob_of(heads.logits_of((hidden, decoder.head_kernel(values, cfg), cfg)), targets)

    with jax.default_matmul_precision("highest"):
        values = hf.load_params(directory, cfg, head="lm", param_dtype=jnp.float32)
        return np.asarray(logp(values, ids[None, :-1], ids[None, 1:]))[0]
