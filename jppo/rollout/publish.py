"""The publish of a policy: its weights as named tensors for the rollout engine, after each update.

    train.py -> PolicyPublisher, with the named tensors of hf_write.py
        -> `Fleet.load` in servers/fleet.py, and servers/delivery.py: all servers or none
        -> vllm/publish.py with layout.py: the file, and the requests to the workers -> vllm/worker.py

Without a file, the plugin `carriers` stands in for the file of `vllm/publish.py`, and its `weight_engine.py` for the
worker's reading of it. A publish runs concurrently with the critic's update where possible. The in-process engine gets
the trainer's own arrays.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jppo.distributed.hosts import ALONE, Hosts
from jppo.learner import sharding, state
from jppo.learner.ppo import Learner
from jppo.models import half, hf, hf_write, placing
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import Lora, Weights
from jppo.rollout.inprocess import InprocessSampler, PolicySampler
from jppo.rollout.protocol import Served
from jppo.types import TrainState


@dataclasses.dataclass(frozen=True)
class PublishSettings:
    """The form of published policies, and the servers' behaviour meanwhile."""

    dtype: str  # of whole weights
    on_device: bool  # whole weights are sent from the device's memory, without a copy on the host
    adapters: Lora | None  # published alone, after the frozen base; None: whole weights, with any adapters merged
    base: str  # path of the model that published adapters belong to
    on_update: str  # the servers' treatment of running requests: wait, abort or keep


class PolicyPublisher:
    """Publishes a step's final policy: by `begin`, where it may start `early`, or by `finish`."""

    def __init__(self, publish: Callable[[TrainState], None], *, early: bool):
        self._publish = publish
        self._pool = ThreadPoolExecutor(1, "publish") if early else None
        self._running: Future[None] | None = None

    def begin(self, state: TrainState) -> None:
        """Starts publishing the policy of `state`, now final, if it may overlap."""
        if self._pool is not None:
            self._running = self._pool.submit(self._publish, state)

    def finish(self, state: TrainState) -> None:
        """Publishes the policy of `state`, or waits for `begin`; raises its error."""
        running, self._running = self._running, None
        if running is None:
            self._publish(state)
        else:
            running.result()

    def close(self) -> None:
        """Waits for a publish that is under way; the engine must still be open."""
        if self._pool is not None:
            self._pool.shutdown()


@dataclasses.dataclass(frozen=True)
class Repeatable:
    """Tensors that each iteration makes anew, so that a transport that keeps none can send them again."""

    make: Callable[[], Iterator[tuple[str, np.ndarray]]]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        return self.make()


def publish_policy(
    s: PublishSettings, learner: Learner, sampler: PolicySampler, state: TrainState, hosts: Hosts = ALONE
) -> None:
    """Publishes the policy to the engine: whole, or only its adapters."""
    version, mode = int(state.step), s.on_update
    if isinstance(sampler, InprocessSampler):
        policy, own_mesh = learner.policy(state), sharding.own_part(learner.mesh)
        if s.dtype == "float16":
            half.require_range_of_all(policy, "rollout.dtype")
        sampler.hold(policy if own_mesh is learner.mesh else placing.local(policy, own_mesh), version=version)
        return
    if s.adapters is None:
        _load(s, sampler, learner.policy(state), learner.cfg, hosts, version=version, mode=mode)
        return
    save_adapter = functools.partial(
        hf_write.save_adapter, learned=state.policy, cfg=learner.cfg, spec=s.adapters, base=s.base
    )
    hosts.together(lambda: sampler.load_adapter(save_adapter, version=version, mode=mode))


def publish_base(
    s: PublishSettings, learner: Learner, sampler: PolicySampler, version: int, hosts: Hosts = ALONE
) -> None:
    """Publishes the policy's frozen base, where later only the adapters are published."""
    frozen_base = learner.actor.base
    if frozen_base is not None and not isinstance(sampler, InprocessSampler) and s.adapters is not None:
        _load(s, sampler, frozen_base.params, learner.cfg, hosts, version=version)


def _load(s: PublishSettings, sampler: Served, model: Weights, cfg: ModelConfig, hosts: Hosts, **options: Any) -> None:
    """Loads all weights of `model` into each host's servers; a host that fails still joins the others' gathers."""
    export: Callable[..., Iterator[tuple[str, Any]]] = hf_write.device_tensors if s.on_device else hf_write.hf_tensors
    make = functools.partial(export, model, cfg, dtype=s.dtype)

    def load() -> None:
        if hosts.count == 1:
            sampler.load(Repeatable(make), **options)
            return
        with hf_write.exhaust_on_exit(make()) as tensors:
            sampler.load(tensors, **options)

    hosts.together(load)


def publish_checkpoint(
    path: str, sampler: PolicySampler, cfg: ModelConfig, mesh: Mesh, *, param_dtype: str, engine_dtype: str
) -> None:
    """Publishes the model stored at `path` as version 0; the in-process engine holds it sharded over `mesh`."""

    def stored_tensors() -> Iterator[tuple[str, np.ndarray]]:
        tensors = hf.stored_tensors(path, cfg)
        return half.within_range(tensors, "rollout.dtype") if engine_dtype == "float16" else tensors

    if isinstance(sampler, InprocessSampler):
        cfg = pad_vocab(cfg, mesh.shape["tensor"])
        layout = state.model_weights(cfg, mesh, head="lm", param_dtype=param_dtype)
        values = hf.load_params(path, cfg, head="lm", param_dtype=param_dtype, shardings=layout.shardings)
        if engine_dtype == "float16":
            half.require_range_of_all(values, "rollout.dtype")
        sampler.hold(values, version=0)
    else:
        sampler.load(Repeatable(stored_tensors), version=0)
