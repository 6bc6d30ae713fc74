"""Checks that a vLLM server samples from the published weights.

    python scripts/check_sync.py HF_DIR [--via file|tcp|nccl|ipc] [--dtype bfloat16]

Starts vLLM on HF_DIR (config and tokenizer; random weights where it has none), publishes two random changes
of the weights, and compares the log-probs of what the server generates with jppo's own, on prompts so long
that a stale prefix cache would show. Exits with 1 where the mean or the 95% quantile is above what
rollout.logp_tolerance allows a run; --tolerance is another one.
jppo computes in float32 in any case; with --dtype bfloat16 the weights are rounded as a training's are, and the
server's own rounding is part of the gap.
--via nccl needs two GPUs: the trainer takes the first, the server the second. --via ipc needs one, for both.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jppo.errors import UserError
from jppo.models import decoder, heads, hf, hf_write
from jppo.models.config import ModelConfig
from jppo.rollout.protocol import RolloutError, greedy
from jppo.rollout.servers.fleet import Fleet
from jppo.rollout.servers.member import ServerSettings
from jppo.rollout.vllm.client import start_vllm
from jppo.run.agreement import TOLERANCE, LogpGap, MismatchLimits
from jppo.types import Params, Prompt, Trajectory

PROMPT_TOKENS = 300  # vLLM caches whole blocks, of 128 tokens on a CPU
SAMPLING = dataclasses.replace(greedy(32), temperature=0.8, n=2, seed=3)


def changed(params: Params, key: jax.Array) -> Params:
    """The parameters with noise of a third of their own size."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        x + (0.3 * jnp.sqrt(jnp.mean(x**2)) + 0.01) * jax.random.normal(k, x.shape, x.dtype)
        for x, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def gap(params: Params, cfg: ModelConfig, trajectories: Sequence[Trajectory]) -> LogpGap:
    """Returns |log-prob of the server - our own| of the sampled tokens."""
    tokens = np.stack([t.tokens for t in trajectories])  # all of one length: nothing ends a response
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    position = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)
    hidden = decoder.Decoder(cfg).apply({"params": params}, inputs, np.ones_like(inputs), position)
    logp, _ = heads.logprob_entropy(
        (hidden, decoder.head_kernel(params, cfg), cfg),
        jnp.asarray(targets),
        temperature=SAMPLING.temperature,
        chunk_tokens=1024,
        with_entropy=False,
    )
    sampled = np.stack([t.sampled for t in trajectories])[:, 1:]
    served = np.stack([t.logprob for t in trajectories])[:, 1:]
    return LogpGap(np.abs(np.asarray(logp) - served)[sampled])


def check(sampler: Fleet, base: Params, cfg: ModelConfig, via: str, dtype: str) -> list[LogpGap]:
    """Publishes, generates and compares; returns the gap after each publish."""
    rng = np.random.default_rng(0)
    export = functools.partial(hf_write.device_tensors if via in ("nccl", "ipc") else hf_write.hf_tensors, dtype=dtype)
    prompts = [
        Prompt(str(i), "", "", rng.integers(3, cfg.vocab_size, PROMPT_TOKENS).astype(np.int32), "", {})
        for i in range(4)
    ]
    gaps = []
    params = base
    for version in (1, 2):
        before = params
        params = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), changed(base, jax.random.key(version)))
        start = time.perf_counter()
        sampler.load(export(params, cfg), version=version)
        seconds = time.perf_counter() - start
        trajectories = sampler.generate(prompts, SAMPLING, version=version)
        gaps.append(gap(params, cfg, trajectories))
        print(f"version {version}, published in {seconds:.2f} s: {gaps[-1]};")
        print(f"  to the weights before {gap(before, cfg, trajectories)}", flush=True)
    return gaps


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf_dir")
    parser.add_argument("--tolerance", type=float, help="rollout.logp_tolerance; by default that of --dtype")
    parser.add_argument("--via", choices=("file", "tcp", "nccl", "ipc"), default="file", help="rollout.publish_via")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the server")
    parser.add_argument("--python", default="", help="the interpreter that has vLLM")
    args = parser.parse_args()
    # By default a float32 product is TF32 on a GPU, and the server's is not.
    jax.config.update("jax_default_matmul_precision", "highest")
    if args.via != "nccl":  # server and trainer share a GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    _, cfg = hf.read_config(args.hf_dir, longest=PROMPT_TOKENS + SAMPLING.max_tokens)
    settings = ServerSettings(
        python=args.python,
        dtype=args.dtype,
        max_model_len=PROMPT_TOKENS + SAMPLING.max_tokens,
        vocab_size=cfg.vocab_size,
        max_num_seqs=64,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        cache_on_cpu=1 << 28,
        omp_threads=1,
        request_timeout_s=120.0,
        max_restarts=0,
        latent=cfg.latent_sizes,
        delta=cfg.delta_kind,
        publish_via=args.via,
        devices=("1",) if args.via == "nccl" else (),
    )
    with tempfile.TemporaryDirectory() as run_dir:
        engine = start_vllm(args.hf_dir, run_dir, settings=settings, urls=[])
        try:
            if list(pathlib.Path(args.hf_dir).glob("*.safetensors")):
                base = hf.load_params(args.hf_dir, cfg, head="lm", param_dtype=jnp.float32)
            else:
                base = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype=jnp.float32)
            gaps = check(engine.ready(eos_token_ids=[], decode=lambda _: ""), base, cfg, args.via, args.dtype)
        finally:
            engine.close()
    bound = MismatchLimits.of(TOLERANCE[args.dtype] if args.tolerance is None else args.tolerance)
    worst = {name: max(getattr(one, name) for one in gaps) for name in ("mean", "high", "largest")}
    print(f"at most {worst['mean']:.2e} on average, {worst['high']:.2e} at the quantile; {bound}")
    print(f"largest difference: {worst['largest']:.2e}")
    if not all(one.within(bound) for one in gaps):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        print(e, file=sys.stderr)
        sys.exit(2)
    except RolloutError as e:
        print(e, file=sys.stderr)
        sys.exit(1)
