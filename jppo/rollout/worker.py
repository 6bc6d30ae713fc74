"""What jppo runs inside vLLM's worker: it checks a weights file as a whole, and only then loads it.

Given to vLLM by `--worker-extension-cls jppo.rollout.worker.WeightLoader` and called by `weights.py` over
`/collective_rpc`. Runs in the server's interpreter, which needs neither jax nor jppo's other dependencies.
A refusal is a value (`ok: False` with the reason), never an exception: an exception leaves vLLM in doubt.
"""

import mmap
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from jppo.rollout import layout, transfer


class WeightLoader:
    """Mixed into vLLM's worker: `model_config`, `vllm_config` and `reload_weights` are vLLM's."""

    model_config: Any
    vllm_config: Any
    reload_weights: Any
    get_model: Any
    _jppo_expected: tuple[dict[str, tuple[int, ...]], dict[str, list[str]]] | None = None
    _jppo_checked: tuple[int, list[layout.Entry], mmap.mmap] | None = None
    _jppo_version: int | None = None

    def jppo_info(self) -> dict[str, Any]:
        """What the trainer must know of a server that it did not start."""
        return {
            "version": self._jppo_version,
            "logprobs_mode": str(self.model_config.logprobs_mode),
            "max_model_len": int(self.model_config.max_model_len),
            "chunked_prefill": bool(self.vllm_config.scheduler_config.enable_chunked_prefill),
            "device": str(self.vllm_config.device_config.device_type),
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
        }

    def jppo_check(
        self,
        *,
        version: int,
        entries: Sequence[Sequence[Any]],
        path: str | None = None,
        address: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Maps the file at `path`, or gets it from `address`, and compares it with the model, which stays as it is."""
        if self._jppo_expected is None:
            self._jppo_expected = _expected(self.model_config.hf_config)
        self._jppo_checked = None  # an older one is not wanted any more
        unpacked, expected = layout.unpack(entries), self._jppo_expected[0]
        try:
            if path is not None:
                data = layout.check(path, unpacked, expected)
            else:
                assert address is not None  # a publish has one of the two
                layout.check_names(unpacked, expected)
                data = transfer.receive(transfer.Address(**address), unpacked)
        except layout.Refused as e:
            return {"ok": False, "error": str(e)}
        self._jppo_checked = (version, unpacked, data)
        return {"ok": True, "error": None}

    def jppo_load(self, *, version: int) -> dict[str, Any]:
        """Loads the file that the last `jppo_check` found good."""
        if self._jppo_checked is None or self._jppo_checked[0] != version:
            return {"ok": False, "error": f"version {version} was not checked before it was loaded"}
        _, entries, data = self._jppo_checked
        assert self._jppo_expected is not None  # jppo_check came first
        self._jppo_checked = None
        modules = {name for name, _ in self.get_model().named_modules(remove_duplicate=False)}
        self.reload_weights(weights_iterator=_stream(entries, data, self._jppo_expected[1], modules))
        self._jppo_version = version
        return {"ok": True, "error": None}


def _expected(hf_config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, list[str]]]:
    """HF names and shapes of the model that `config.json` describes, and the other names of its tied ones."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    first: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tied: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied.setdefault(first[id(parameter)], []).append(name)
        else:
            first[id(parameter)] = name
            shapes[name] = tuple(parameter.shape)
    return shapes, tied


def _stream(
    entries: Sequence[layout.Entry], data: mmap.mmap, tied: dict[str, list[str]], modules: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        count = entry.nbytes // dtype.itemsize
        tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.offset).reshape(entry.shape)
        yield entry.name, tensor
        # vLLM keeps a tied head stale unless its own name comes too; some models have no head of their own there
        for name in tied.get(entry.name, ()):
            if name.rpartition(".")[0] in modules:
                yield name, tensor
