"""jppo's engine for vLLM's weight transfer routes: it stages a publish, and loads it once it is complete and checked.

    /init_weight_transfer_engine   joins the trainer's NCCL communicator, where there is one
    /start_weight_update           begins an empty publish
    /update_weights                receives a bucket; the last call has the digest of all
    /finish_weight_update          loads a complete publish into the model

A refusal is kept for `jppo_transfer`, never raised, which would leave vLLM in an undefined state. vLLM gets this module
by `--worker-extension-cls`; it imports it before it makes the engine.
"""

import dataclasses
import itertools
import mmap
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer import base, factory, nccl_common
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from jppo.plugins.carriers import transports
from jppo.rollout.vllm import layout, worker
from jppo.rollout.vllm.layout import Staging

WORDS = {2: torch.int16, 4: torch.int32}
BROADCAST_S = 60.0  # for a bucket by NCCL, from when this worker takes part
PIECE = 1 << 22  # words that are checksummed together, in 64 bits


@dataclasses.dataclass
class Init(base.WeightTransferInitInfo):
    """The communicator of NCCL to join; over sockets there is none."""

    nccl_unique_id_b64: str
    rank_offset: int
    world_size: int


@dataclasses.dataclass
class Update(base.WeightTransferUpdateInfo):
    """A bucket, or the end of a publish: its digest."""

    version: int
    entries: Sequence[Sequence[Any]] = ()
    address: Mapping[str, Any] | None = None  # over a socket
    handles: Mapping[str, str] | None = None  # by CUDA IPC: of each GPU of the trainer, by its UUID
    digest: str | None = None
    base: str | None = None  # the digest of the weights that the changes at `address` are of; None: whole tensors
    changes: Sequence[Sequence[Any]] = ()  # the entries of their bytes


class StagedEngine(base.WeightTransferEngine[Init, Update]):
    """Holds the publish that is under way."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        with worker.config_set(self):
            self._expected, self._tied = worker.expected_tensors(self.model_config.hf_config)
        self.staging = Staging(self._expected)
        self.group = ""  # the id of the communicator
        self._communicator: Any = None
        self._gpu: transports.CudaDevice | None = None
        self.base = layout.LoadedWeights()
        self._spare: list[mmap.mmap] = []  # of an earlier publish, for the next one

    def init_transfer_engine(self, init_info: Init) -> None:
        """Joins the trainer and the other workers."""
        self._leave()
        nccl_info = nccl_common.NCCLWeightTransferInitInfo(**dataclasses.asdict(init_info))
        self._communicator = nccl_common.worker_init_process_group(nccl_info, self.parallel_config)
        self.group = init_info.nccl_unique_id_b64

    def start_weight_update(self) -> None:
        """Drops an unfinished publish and begins an empty one."""
        self.staging = Staging(self._expected)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like vLLM's, which would also synchronise an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        """Receives a bucket, or checks the whole."""
        if update_info.digest is not None:
            self.staging.finish(update_info.version, update_info.digest)
            return
        entries = layout.unpack_entries(update_info.entries)
        self.staging.add(update_info.version, entries, lambda: self._fetch_bucket(update_info, entries))

    def finish_weight_update(self) -> None:
        """Loads a complete publish."""
        if staged := self.staging.take_buckets():
            buckets = self.base.apply(staged)
            loaded = list(buckets)
            self.staging.error = worker.load_weights(
                self.model, self.model_config.hf_config.model_type, buckets, self._tied, self._reload_weights
            )
            self.base.hold(loaded if self.staging.error is None else [])
            self._spare = []

    def shutdown(self) -> None:
        self.start_weight_update()
        self._leave()

    def _leave(self) -> None:
        communicator, self._communicator, self.group = self._communicator, None, ""
        if communicator is not None:  # a thread that waits in a broadcast returns
            communicator.destroy()

    def _fetch_bucket(self, update_info: Update, entries: Sequence[layout.TensorEntry]) -> Any:
        """Receives the bytes of a bucket, or its changes, by the transport that the request names."""
        if update_info.base is not None and update_info.address is not None:
            changes = layout.unpack_entries(update_info.changes)
            sent = transports.receive(transports.Address(**update_info.address), changes)
            return self.base.check(update_info.base, entries, changes, memoryview(sent))
        if any(isinstance(data, layout.Changes) for _, data in self.staging.buckets):
            raise layout.WeightsRefused("a bucket of whole tensors came into a publish of changes")
        self._spare += self.base.release()
        if update_info.address is not None:
            return transports.receive(transports.Address(**update_info.address), entries, worker.reuse(self._spare))
        if update_info.handles is None and self._communicator is None:
            raise layout.WeightsRefused("a bucket has no address, and no communicator of NCCL was joined")
        try:
            data = torch.empty(layout.size_of(entries), dtype=torch.uint8, device=self.device)
            parts = [(data[e.offset : e.offset + e.nbytes], e) for e in entries if e.nbytes]
            if update_info.handles is not None:
                self._copy_from_trainer(update_info.handles, data)
            else:
                self._broadcast([part for part, _ in parts])
            for part, entry in parts:
                layout.check_sum(entry, checksum(part, getattr(torch, entry.dtype).itemsize))
            return data if torch.accelerator.get_memory_info()[0] > 2 * len(data) else data.cpu()
        except torch.OutOfMemoryError as e:
            raise layout.WeightsRefused(
                f"the GPU has no room for a bucket of {layout.size_of(entries)} bytes, {entries[0].name} to"
                f" {entries[-1].name} ({e}); lower rollout.gpu_memory_utilization or set rollout.publish_via to tcp"
            ) from e

    def _broadcast(self, parts: Sequence[torch.Tensor]) -> None:
        """Receives all parts and waits for them.

        Leaves the communicator, which ends its calls, if the trainer was killed meanwhile.
        """
        gave_up = threading.Event()

        def give_up() -> None:
            gave_up.set()
            self._leave()

        timer = threading.Timer(BROADCAST_S, give_up)
        timer.daemon = True
        timer.start()
        try:
            for part in parts:
                self._communicator.broadcast(part, src=0)
            torch.accelerator.synchronize()
        except Exception:
            if not gave_up.is_set():
                raise
        finally:
            timer.cancel()
        if gave_up.is_set():
            fault = f"a broadcast by NCCL did not end within {BROADCAST_S:g} s"
            raise layout.WeightsRefused(f"{fault}: the trainer was killed, or another server does not take part")

    def _copy_from_trainer(self, handles: Mapping[str, str], data: torch.Tensor) -> None:
        """Copies the trainer's buffer on this GPU and waits for it."""
        try:
            gpu = self._gpu = self._gpu or transports.CudaDevice(self.device.index or 0)
            if gpu.uuid not in handles:
                raise transports.CudaError(f"the server is on GPU {gpu.uuid}, the trainer on {', '.join(handles)}")
            torch.accelerator.synchronize()  # memory that torch uses again
            with gpu.opened(handles[gpu.uuid]) as address:
                gpu.copy(data.data_ptr(), address, len(data))
                gpu.wait()
        except transports.CudaError as e:
            raise layout.WeightsRefused(f"a bucket by CUDA IPC: {e}; set rollout.publish_via to file or tcp") from e

    def _reload_weights(self, *, weights_iterator: Any) -> None:
        reload_weights(self.vllm_config, self.model, weights_iterator, weights_path=None, is_checkpoint_format=True)


def checksum(data: torch.Tensor, itemsize: int) -> int:
    """Returns the sum of the words of `itemsize` bytes, each times an odd number of its place, modulo 2^32."""
    total = 0
    for start, piece in zip(itertools.count(0, PIECE), data.view(WORDS[itemsize]).split(PIECE), strict=False):
        weights = torch.arange(start, start + len(piece), device=data.device) * 2 + 1
        total += int(((piece.long() & ((1 << 8 * itemsize) - 1)) * weights % (1 << 32)).sum())
    return total % (1 << 32)


factory.WeightTransferEngineFactory.register_engine("jppo", StagedEngine)


class Receiver(worker.WeightLoader):
    """The worker extension of servers with this engine."""

    weight_transfer_engine: StagedEngine

    def jppo_info(self) -> dict[str, Any]:
        return {**super().jppo_info(), "buckets": True}

    def jppo_transfer(self, *, abandon: bool = False, nccl: bool = False) -> dict[str, Any]:
        """Returns the first refusal of the publish under way; `abandon` ends one that its trainer left.

        `base` is the digest of the loaded weights that changes may be of; `nccl` is the version of NCCL, if asked.
        """
        if abandon:
            self._weight_update_active = False
            self.weight_transfer_engine.start_weight_update()
        engine = self.weight_transfer_engine
        error = engine.staging.error
        versions = {"nccl": NCCLLibrary().ncclGetRawVersion()} if nccl else {}
        return {"ok": error is None, "error": error, "group": engine.group, "base": engine.base.digest} | versions

    def jppo_load(self, *, version: int, path: str) -> dict[str, Any]:
        """Loads a file as `WeightLoader` does, and forgets the weights that were loaded from buckets."""
        self.weight_transfer_engine.base.release()
        return super().jppo_load(version=version, path=path)
