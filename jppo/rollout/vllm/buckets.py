"""Publishing to vLLM without a file: buckets of tensors by vLLM's weight transfer routes, none of which is kept.

    for each bucket: gather it -> every server stages it (offers) -> every server checks the whole
    pause -> load and set the version (take) -> resume

`weight_engine.py` is the server's side. On the host are at most `BUCKET` bytes, or the largest tensor, and the tensors
that `hf_write.hf_tensors` has in flight.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from jppo.rollout.servers.delivery import Delivery, Offers, Step, WeightsGone
from jppo.rollout.servers.endpoint import Endpoint
from jppo.rollout.vllm import layout, tcp
from jppo.rollout.vllm.layout import TensorEntry
from jppo.rollout.vllm.publish import Buffers, Publisher, accept
from jppo.settings import UserError

BUCKET = 3 << 26  # bytes: with 64 MiB in flight from the device, 256 MiB in all
IN_TIME = 0.8  # fraction of the request timeout: a longer transfer is refused, with the reason
UPDATE = "/update_weights"
Tensors = Sequence[tuple[str, Any]]


class Carrier(Protocol):
    """A way of buckets to the servers."""

    alone: bool  # one delivery at a time, as with one communicator or buffer

    def joins(self) -> Iterator[Step]:
        """Yields the steps that prepare the servers for a publish."""

    def offer(self, bucket: Tensors) -> contextlib.AbstractContextManager[tuple[list[TensorEntry], Mapping[str, Any]]]:
        """Offers a bucket within the block; returns its entries and its place for the request."""

    def close(self) -> None:
        """Ends all transfers; may be called twice."""


class Tcp:
    """Servers download each bucket from the trainer's memory."""

    alone = False

    def __init__(self, publish_host: str, timeout_s: float):
        """`timeout_s`: of a server's request."""
        try:
            self._sender = tcp.Sender(publish_host, timeout_s=IN_TIME * timeout_s)
        except OSError as e:
            raise UserError(
                f"rollout.publish_host={publish_host!r}: the trainer cannot listen there ({e}); use an address of this"
                " machine that the servers reach"
            ) from e

    def joins(self) -> Iterator[Step]:
        """Yields nothing: each bucket names its address."""
        return iter(())

    @contextlib.contextmanager
    def offer(self, bucket: Tensors) -> Iterator[tuple[list[TensorEntry], Mapping[str, Any]]]:
        """Checksums the tensors and lets servers download them."""
        entries, views = describe(bucket)
        with self._sender.offer(entries, views) as address:
            yield entries, {"address": dataclasses.asdict(address)}

    def close(self) -> None:
        """Stops listening."""
        self._sender.close()


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A whole policy that is sent as it is gathered; `tensors` are iterated for each delivery."""

    tensors: Iterable[tuple[str, Any]]
    version: int
    carrier: Carrier
    model: None = None
    whole: bool = True
    _begun: list[bool] = dataclasses.field(default_factory=list)  # an iterator cannot be begun again

    @property
    def alone(self) -> bool:
        """Whether the carrier serves one delivery at a time."""
        return self.carrier.alone

    def offers(self) -> Offers:
        """Yields: begin, each bucket, the check of the whole."""
        source = iter(self.tensors)
        if source is self.tensors and self._begun:  # perhaps other hosts still gather with it
            raise WeightsGone("the weights were gathered from all hosts and not kept", another_comes=False)
        self._begun.append(True)
        yield _begin
        yield from self.carrier.joins()
        sent: list[TensorEntry] = []
        try:
            for bucket in _buckets(source):
                with self.carrier.offer(bucket) as (entries, where):
                    yield self._update({"entries": layout.pack(entries), **where})
                sent += entries
                del bucket  # before the next one is gathered
        except (RuntimeError, ValueError) as e:  # of JAX, for an array that the trainer's update has overwritten
            if "deleted" not in str(e):
                raise
            raise WeightsGone("the trainer is updating the published weights", another_comes=True) from e
        yield self._update({"digest": layout.digest(sent)})

    def take(self, endpoint: Endpoint) -> None:
        """Loads the staged tensors on the server."""
        endpoint.post("/finish_weight_update", {})
        accept(endpoint, self.version, "jppo_transfer")
        endpoint.post("/update_weight_version", {"new_version": str(self.version)})

    def _update(self, what: Mapping[str, Any]) -> Step:
        def update(endpoint: Endpoint) -> None:
            endpoint.post(UPDATE, {"update_info": {"version": self.version, **what}})
            accept(endpoint, self.version, "jppo_transfer")

        return update


class StreamPublisher(Publisher):
    """Sends whole policies by a carrier; adapters still go by path."""

    def __init__(self, buffers: Buffers, carrier: Carrier):
        super().__init__(buffers)
        self._carrier = carrier

    def whole(self, tensors: Iterable[tuple[str, Any]], version: int) -> Delivery:
        """Gathers nothing yet."""
        self._forget(0)
        return Streamed(tensors, version, self._carrier)

    def close(self) -> None:
        """Ends all transfers."""
        self._carrier.close()
        super().close()


def _begin(endpoint: Endpoint) -> None:
    endpoint.call("jppo_transfer", abandon=True)  # of a publish that ended early
    endpoint.post("/start_weight_update")


def _buckets(tensors: Iterator[tuple[str, Any]]) -> Iterator[Tensors]:
    """Yields the tensors by `BUCKET` bytes."""
    bucket: list[tuple[str, Any]] = []
    for name, tensor in tensors:
        if bucket and sum(other.nbytes for _, other in bucket) + tensor.nbytes > BUCKET:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
        del tensor
    if bucket:
        yield bucket


def describe(bucket: Sequence[tuple[str, np.ndarray]]) -> tuple[list[TensorEntry], list[memoryview]]:
    """Returns the entries of a bucket, checksums included, and the tensors' bytes."""
    arrays = [np.asarray(tensor, order="C") for _, tensor in bucket]
    views = [array.reshape(-1).view(np.uint8).data for array in arrays]
    with ThreadPoolExecutor(layout.THREADS) as pool:
        sums = list(pool.map(zlib.crc32, views))
    known = zip(bucket, arrays, sums, strict=True)
    return layout.in_order((name, a.dtype.name, a.shape, a.nbytes, crc32) for (name, _), a, crc32 in known), views
