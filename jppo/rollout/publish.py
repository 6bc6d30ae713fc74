"""The publish of a policy: its weights as named tensors for the rollout engine, after each update.

    train.py -> PolicyPublisher, with the named tensors of hf_write.py
        -> `load` in servers/delivery.py: all servers or none
        -> vllm/publish.py with layout.py: the file, and the requests to the workers -> vllm/worker.py

Without a file, `vllm/buckets.py` stands in for the file of `vllm/publish.py`, and `vllm/weight_engine.py` for the
worker's reading of it. A publish runs concurrently with the critic's update where possible. The in-process engine gets
the trainer's own arrays.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jppo.distributed.hosts import ALONE, Hosts
from jppo.learner import sharding, state
from jppo.learner.make import make_mesh
from jppo.learner.ppo import Learner
from jppo.models import hf, hf_write, placing
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import Lora, Weights
from jppo.rollout.inprocess import InprocessSampler, Source
from jppo.rollout.protocol import Served
from jppo.settings import Settings
from jppo.types import TrainState


def may_overlap(c: Settings, hosts: Hosts) -> bool:
    """Whether servers may get the policy while the critic learns.

    Not with several hosts: their exchanges would mix. Not with sleeping servers: they would wake on a GPU in use. Not
    in asynchronous mode: responses are in flight.
    """
    served = c.rollout.name != "inprocess"
    return hosts.count == 1 and served and c.rollout.mode == "sync" and not c.rollout.sleep_level


class PolicyPublisher:
    """Publishes a step's final policy: started early by `begin`, or made by `finish`."""

    def __init__(
        self, c: Settings, learner: Learner, sampler: Source, adapters: Lora | None = None, hosts: Hosts = ALONE
    ):
        self._publish = functools.partial(publish_policy, c, learner, sampler, adapters=adapters, hosts=hosts)
        early = learner.critic is not None and may_overlap(c, hosts)
        self._pool = ThreadPoolExecutor(1, "publish") if early else None
        self._under_way: Future[None] | None = None

    def begin(self, now: TrainState) -> None:
        """Starts publishing the policy of `now`, now final, if it may overlap."""
        if self._pool is not None:
            self._under_way = self._pool.submit(self._publish, now)

    def finish(self, now: TrainState) -> None:
        """Publishes the policy of `now`, or waits for `begin`; raises its error."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            self._publish(now)
        else:
            under_way.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown()  # before the engine closes


@dataclasses.dataclass(frozen=True)
class Repeatable:
    """Tensors that each iteration makes anew, so that a transport that keeps none can send them again."""

    make: Callable[[], Iterator[tuple[str, np.ndarray]]]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """Makes them."""
        return self.make()


def published_dtype(c: Settings) -> str:
    """Returns the dtype of published weights: the policy's, or the servers' if smaller.

    Rounded on the device to nearest even, as vLLM would: the same bits, sooner.
    """
    ours, theirs = c.model.param_dtype, c.rollout.dtype
    return theirs if jnp.dtype(theirs).itemsize < jnp.dtype(ours).itemsize else ours


def publish_policy(
    c: Settings, learner: Learner, sampler: Source, now: TrainState, adapters: Lora | None, hosts: Hosts = ALONE
) -> None:
    """Publishes the policy to the engine: whole, or only its adapters."""
    version, mode = int(now.step), c.rollout.on_update
    if isinstance(sampler, InprocessSampler):
        policy, own = learner.policy(now), sharding.own_part(learner.mesh)
        sampler.hold(policy if own is learner.mesh else placing.local(policy, own), version=version)
        return
    if adapters is None or c.rollout.lora_sync == "merge":
        _load(c, sampler, learner.policy(now), learner.cfg, hosts, version=version, mode=mode)
        return
    save = functools.partial(
        hf_write.save_adapter, learned=now.policy, cfg=learner.cfg, spec=adapters, base=c.model.path
    )
    hosts.together(lambda: sampler.load_adapter(save, version=version, mode=mode))


def publish_base(c: Settings, learner: Learner, sampler: Source, version: int, hosts: Hosts = ALONE) -> None:
    """Publishes the policy's frozen base, where later only the adapters are published."""
    base = learner.actor.base
    if base is not None and not isinstance(sampler, InprocessSampler) and c.rollout.lora_sync == "adapter":
        _load(c, sampler, base.params, learner.cfg, hosts, version=version)


def _load(c: Settings, sampler: Served, model: Weights, cfg: ModelConfig, hosts: Hosts, **options: Any) -> None:
    """Loads all weights into each host's servers; a host that fails still joins the others' gathers."""
    on_device = c.rollout.publish_via in ("nccl", "ipc")
    export: Callable[..., Iterator[tuple[str, Any]]] = hf_write.device_tensors if on_device else hf_write.hf_tensors
    make = functools.partial(export, model, cfg, dtype=published_dtype(c))

    def load() -> None:
        if hosts.count == 1:
            sampler.load(Repeatable(make), **options)
            return
        with hf_write.fetched_by_all(make()) as tensors:
            sampler.load(tensors, **options)

    hosts.together(load)


def publish_stored(c: Settings, sampler: Source, cfg: ModelConfig) -> None:
    """Publishes the model stored at `model.path` as version 0."""
    if isinstance(sampler, InprocessSampler):
        mesh = make_mesh(c)
        cfg = pad_vocab(cfg, mesh.shape["tensor"])
        layout = state.model_weights(cfg, mesh, head="lm", param_dtype=c.model.param_dtype)
        values = state.load_sharded(layout, c.model.path, init="pretrained", key=jax.random.key(c.trainer.seed))
        sampler.hold(values, version=0)
    else:
        sampler.load(Repeatable(functools.partial(hf.stored_tensors, c.model.path, cfg)), version=0)
