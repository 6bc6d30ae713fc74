"""Publishing to vLLM without a file: buckets (groups of tensors) by vLLM's weight transfer routes.

    for each bucket: gather it -> every server stages it (offers) -> every server checks the whole
    pause -> load and set the version (take) -> resume

With `rollout.publish_delta`, a server that proves by its digest to have the last publish gets the changes of a bucket
(`layout.py`); one that refuses them, and any other server, gets all bytes.

`weight_engine.py` is the server's side. On the host are at most `BUCKET` bytes, or the largest tensor, and the tensors
that `hf_write.hf_tensors` has in flight; with `rollout.publish_delta` also a copy of the last publish.
"""

import contextlib
import dataclasses
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from jppo.errors import UserError
from jppo.plugins.carriers import transports
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.delivery import Delivery, Offers, Step, WeightsGone
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.vllm import layout
from jppo.rollout.vllm.layout import TensorEntry
from jppo.rollout.vllm.publish import Buffers, FilePublisher, call_workers, require_ok

BUCKET = 3 << 26  # bytes: with 64 MiB in flight from the device, 256 MiB in all
IN_TIME = 0.8  # fraction of the request timeout: a longer transfer is refused, with the reason
UPDATE = "/update_weights"
Tensors = Sequence[tuple[str, Any]]


class Carrier(Protocol):
    """A way of buckets to the servers."""

    exclusive: bool = True  # one delivery at a time, as with one communicator or buffer

    def joins(self) -> Iterator[Step]:
        """Yields the steps that prepare the servers for a publish."""
        return iter(())

    def offer(self, bucket: Tensors) -> contextlib.AbstractContextManager[tuple[list[TensorEntry], Mapping[str, Any]]]:
        """Offers a bucket within the block; returns its entries and its place for the request."""

    def close(self) -> None:
        """Ends all transfers; may be called twice."""


class Tcp(Carrier):
    """Servers download each bucket from the trainer's memory."""

    exclusive = False

    def __init__(self, publish_host: str, request_timeout_s: float):
        """`request_timeout_s`: of a server's request."""
        try:
            self._sender = transports.Sender(publish_host, timeout_s=IN_TIME * request_timeout_s)
        except OSError as e:
            raise UserError(
                f"rollout.publish_host={publish_host!r}: the trainer cannot listen there ({e}); use an address of this"
                " machine that the servers reach"
            ) from e

    @contextlib.contextmanager
    def offer(self, bucket: Tensors) -> Iterator[tuple[list[TensorEntry], Mapping[str, Any]]]:
        """Checksums the tensors and lets servers download them."""
        entries, views = checksummed(bucket)
        with self._sender.offer(entries, views) as address:
            yield entries, {"address": dataclasses.asdict(address)}

    def close(self) -> None:
        self._sender.close()


@dataclasses.dataclass(frozen=True)
class Pass:
    """One iteration over the tensors, for all servers or for `only` some."""

    only: frozenset[str] | None = None
    base: str = ""  # digest of the weights that changes are of
    have_base: set[str] = dataclasses.field(default_factory=set)  # servers that have these weights
    refused: dict[str, RolloutError] = dataclasses.field(default_factory=dict)  # by servers that then need all

    def ask(self, endpoint: Endpoint) -> None:
        """Notes whether all workers of a server have the base."""
        if all(worker.get("base") == self.base for worker in call_workers(endpoint, "jppo_transfer")):
            self.have_base.add(endpoint.url)

    def begin(self, endpoint: Endpoint) -> None:
        """Begins an empty publish on a server of this pass."""
        if self.only is None or endpoint.url in self.only:
            call_workers(endpoint, "jppo_transfer", abandon=True)  # of a publish that ended early
            endpoint.post("/start_weight_update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streamed(Delivery):
    """A whole policy that is sent as it is gathered; `tensors` are iterated for each delivery.

    With a `copy` of the last publish, the first delivery sends changes to the servers that have the same weights.
    """

    tensors: Iterable[tuple[str, Any]]
    carrier: Carrier
    copy: layout.Copy | None = None
    sizes: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # of each request: bytes sent, of tensors
    _begun: list[bool] = dataclasses.field(default_factory=list)  # an iterator cannot be begun again

    def offers(self) -> Offers:
        """Yields the steps: begin, each bucket, the check of the whole; all of it again where changes were refused."""
        source = iter(self.tensors)
        iterates_once = source is self.tensors
        if iterates_once and self._begun:  # perhaps other hosts still gather with it
            raise WeightsGone("the weights were gathered from all hosts and not kept", another_comes=False)
        copy = None if self._begun else self.copy  # a later delivery may overlap the next publish
        self._begun.append(True)
        first_pass = Pass(base=copy.digest if copy is not None else "")
        yield first_pass.begin
        yield from self.carrier.joins()
        if first_pass.base:
            yield first_pass.ask
        yield from self._send_buckets(source, copy, first_pass)
        if first_pass.refused:
            last_error = first_pass.refused.popitem()[1] if iterates_once else None
            for error in first_pass.refused.values():
                remedy = "" if iterates_once else "; all weights are sent instead of their changes"
                print(f"{error}{remedy}", file=sys.stderr, flush=True)
            if last_error is not None:
                raise last_error
            second_pass = Pass(only=frozenset(first_pass.refused))
            yield second_pass.begin
            yield from self._send_buckets(iter(self.tensors), None, second_pass)

    def take(self, endpoint: Endpoint) -> None:
        endpoint.post("/finish_weight_update", {})
        require_ok(endpoint, self.version, "jppo_transfer")
        endpoint.post("/update_weight_version", {"new_version": str(self.version)})

    def _send_buckets(self, source: Iterator[tuple[str, Any]], copy: layout.Copy | None, current_pass: Pass) -> Offers:
        """Yields a step for each bucket, and the check of the whole; updates the copy of the last publish."""
        sent: list[TensorEntry] = []
        try:
            for bucket in _buckets(source):
                with (
                    self.carrier.offer(bucket) as (entries, place),
                    self._offer_changes(bucket, entries, copy, current_pass) as changes,
                ):
                    yield self._update_step(
                        current_pass, {"entries": layout.pack_bytes(entries), **place}, _total_bytes(entries), changes
                    )
                sent += entries
                del bucket  # before the next one is gathered
        except (RuntimeError, ValueError) as e:  # of JAX, for an array that the trainer's update has overwritten
            if "deleted" not in str(e):
                raise
            raise WeightsGone("the trainer is updating the published weights", another_comes=True) from e
        digest = layout.digest(sent)
        yield self._update_step(current_pass, {"digest": digest}, 0, None)
        if copy is not None:
            copy.digest = digest

    @contextlib.contextmanager
    def _offer_changes(
        self, bucket: Tensors, entries: list[TensorEntry], copy: layout.Copy | None, current_pass: Pass
    ) -> Iterator[tuple[Mapping[str, Any], int] | None]:
        """Updates the copy; within the block offers the changes, if a server can use them, and returns their bytes."""
        if copy is None or not current_pass.have_base:
            if copy is not None:
                copy.replace(entries, [tensor for _, tensor in bucket])
            yield None
            return
        with self.carrier.offer(copy.changes(entries, [tensor for _, tensor in bucket])) as (changes, place):
            fields = {
                "entries": layout.pack_bytes(entries),
                "base": current_pass.base,
                "changes": layout.pack_bytes(changes),
                **place,
            }
            yield fields, _total_bytes(changes)

    def _update_step(
        self, current_pass: Pass, whole: Mapping[str, Any], nbytes: int, changes: tuple[Mapping[str, Any], int] | None
    ) -> Step:
        """Returns the step that posts a bucket, or its changes, to a server, and checks that the server accepts it."""

        def update(endpoint: Endpoint) -> None:
            url = endpoint.url
            if url in current_pass.refused or (current_pass.only is not None and url not in current_pass.only):
                return
            fields, sent_bytes = changes if changes is not None and url in current_pass.have_base else (whole, nbytes)
            endpoint.post(UPDATE, {"update_info": {"version": self.version, **fields}})
            self.sizes.append((sent_bytes, nbytes))
            try:
                require_ok(endpoint, self.version, "jppo_transfer")
            except ServerFault:
                raise
            except RolloutError as e:
                if url not in current_pass.have_base:
                    raise
                current_pass.refused[url] = e

        return update


class StreamPublisher(FilePublisher):
    """Sends whole policies by a carrier, as `changes` where servers have the last one; adapters still go by path."""

    def __init__(self, buffers: Buffers, carrier: Carrier, *, changes: bool = False):
        super().__init__(buffers)
        self._carrier = carrier
        self._copy = layout.Copy() if changes else None
        self._sizes: list[tuple[int, int]] = []

    def whole(self, tensors: Iterable[tuple[str, Any]], version: int) -> Delivery:
        """Makes the delivery of a whole policy; gathers nothing yet."""
        self._remove_adapters(0)
        return Streamed(
            version=version,
            exclusive=self._carrier.exclusive,
            tensors=tensors,
            carrier=self._carrier,
            copy=self._copy,
            sizes=self._sizes,
        )

    def metrics(self) -> dict[str, float]:
        """Returns the megabytes sent to servers since the last call, and what they would be without changes."""
        sizes = [self._sizes.pop(0) for _ in range(len(self._sizes))]  # other threads append
        return {
            "rollout/published_mb": sum(sent_bytes for sent_bytes, _ in sizes) / 1e6,
            "rollout/published_whole_mb": sum(whole_bytes for _, whole_bytes in sizes) / 1e6,
        }

    def close(self) -> None:
        self._carrier.close()
        super().close()


def _total_bytes(entries: Sequence[TensorEntry]) -> int:
    return sum(entry.nbytes for entry in entries)


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


def checksummed(bucket: Sequence[tuple[str, np.ndarray]]) -> tuple[list[TensorEntry], list[memoryview]]:
    """Returns the entries of a bucket, checksums included, and the tensors' bytes."""
    arrays = [np.asarray(tensor, order="C") for _, tensor in bucket]
    views = [array.reshape(-1).view(np.uint8).data for array in arrays]
    with ThreadPoolExecutor(layout.THREADS) as pool:
        sums = list(pool.map(zlib.crc32, views))
    tensors = zip(bucket, arrays, sums, strict=True)
    return layout.lay_out((name, a.dtype.name, a.shape, a.nbytes, crc32) for (name, _), a, crc32 in tensors), views
