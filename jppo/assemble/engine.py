"""The engine of the rollouts: which one, how it is started, what it is asked for."""

import functools
import os
import pathlib

import numpy as np
from ml_collections import ConfigDict

from jppo.assemble.learner import Learner
from jppo.models import hf
from jppo.models.lora import Lora
from jppo.rollout.sampler import Sampler
from jppo.rollout.server import ServerSettings
from jppo.rollout.vllm import VllmEngine, start_vllm
from jppo.structs import Sampling, TrainState


def sampling(c: ConfigDict, version: int) -> Sampling:
    """How this step's responses are drawn; each step has seeds of its own."""
    seed = int(np.random.SeedSequence([c.trainer.seed, version]).generate_state(1)[0])
    return Sampling(
        temperature=c.rollout.temperature,
        top_p=1.0,
        top_k=-1,
        n=c.rollout.n,
        max_tokens=c.data.max_response_length,
        seed=seed,
    )


def val_sampling(c: ConfigDict) -> Sampling:
    """How a test's responses are drawn; every test of a run has the same seeds, so that they can be compared."""
    how = c.rollout.val_kwargs
    return Sampling(
        temperature=how.temperature,
        top_p=how.top_p,
        top_k=how.top_k,
        n=how.n,
        max_tokens=c.data.max_response_length,
        seed=int(np.random.SeedSequence(c.trainer.seed).generate_state(1)[0]),
    )


def share_gpu(c: ConfigDict) -> None:
    """Leaves the servers' part of a GPU to them: JAX would take three quarters of it when it starts."""
    if not c.rollout.urls:
        os.environ.setdefault(
            "XLA_PYTHON_CLIENT_MEM_FRACTION", f"{max(0.1, 0.92 - c.rollout.gpu_memory_utilization):.2f}"
        )


def start_engine(c: ConfigDict, run: pathlib.Path) -> VllmEngine:
    """vLLM on its way to being ready, or attached to."""
    r = c.rollout
    run.mkdir(parents=True, exist_ok=True)
    server = ServerSettings(
        python=r.python,
        servers=r.servers,
        port=r.port,
        dtype=r.dtype,
        max_model_len=c.data.max_prompt_length + c.data.max_response_length,
        max_num_seqs=r.max_num_seqs,
        enforce_eager=r.enforce_eager,
        gpu_memory_utilization=r.gpu_memory_utilization,
        kv_cache_memory_bytes=r.kv_cache_memory_bytes,
        omp_threads=r.omp_threads,
        start_timeout_s=r.start_timeout_s,
        lora_rank=c.model.lora_rank if r.lora_sync == "adapter" else 0,
    )
    return start_vllm(
        str(hf.resolve(c.model.path, weights=False)),
        str(run),
        settings=server,
        urls=[url.strip() for url in r.urls.split(",") if url.strip()],
        request_timeout_s=r.request_timeout_s,
        publish_dir=r.publish_dir,
    )


def publish(c: ConfigDict, learner: Learner, sampler: Sampler, now: TrainState, adapters: Lora | None) -> None:
    """Makes the policy what the engine samples from: whole, or its adapters beside the base that the engine has."""
    version = int(now.step)
    if adapters is None or c.rollout.lora_sync == "merge":
        sampler.load(hf.hf_tensors(learner.policy(now), learner.cfg), version=version)
        return
    save = functools.partial(hf.save_adapter, learned=now.policy, cfg=learner.cfg, how=adapters, base=c.model.path)
    sampler.load_adapter(save, version=version)


def publish_base(c: ConfigDict, learner: Learner, sampler: Sampler, version: int) -> None:
    """Gives the engine what stays of the policy, where it will get the adapters alone."""
    base = learner.actor.base
    if base is not None and c.rollout.lora_sync == "adapter":
        sampler.load(hf.hf_tensors(base.params, learner.cfg), version=version)


# What `rollout.name` chooses from.
ENGINES = {"vllm": start_engine}
