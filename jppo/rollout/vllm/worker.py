"""The vLLM worker extension: verifies a whole weights file before loading it.

vLLM gets it by `--worker-extension-cls jppo.rollout.vllm.worker.WeightLoader`; `publish.py` calls it over
`/collective_rpc`. It runs in the server's interpreter, which needs neither jax nor jppo's other dependencies. A
refusal is a value (`ok: False` with the reason), never an exception, which would leave vLLM in an undefined state.
"""

import contextlib
import mmap
import secrets
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jppo.rollout.vllm import layout
from jppo.rollout.vllm.layout import Bucket

PROCESS = secrets.token_hex(8)  # tells the server from others, whatever its address


class WeightLoader:
    """Mixed into vLLM's worker: `model_config`, `vllm_config` and `reload_weights` are vLLM's."""

    model_config: Any
    vllm_config: Any
    model_runner: Any
    reload_weights: Any
    get_model: Any
    _jppo_expected: tuple[dict[str, tuple[int, ...]], dict[str, list[str]]] | None = None
    _jppo_checked: tuple[tuple[int, str], Bucket] | None = None  # by version and path
    _jppo_version: int | None = None

    def jppo_info(self) -> dict[str, Any]:
        """Returns what the trainer must know about an attached server."""
        return {
            "version": self._jppo_version,
            "process": PROCESS,
            "logprobs_mode": str(self.model_config.logprobs_mode),
            "max_model_len": int(self.model_config.max_model_len),
            "chunked_prefill": bool(self.vllm_config.scheduler_config.enable_chunked_prefill),
            "device": str(self.vllm_config.device_config.device_type),
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "experts": hasattr(self, "returns_experts") or bool(self.vllm_config.aux_output_config.enabled),
            "kept": bool(getattr(self, "returns_kept", False)),
        }

    def jppo_check(self, *, version: int, entries: Sequence[Sequence[Any]], path: str) -> dict[str, Any]:
        """Maps the file at `path` and compares it with the model."""
        if self._jppo_expected is None:
            with config_set(self):
                self._jppo_expected = expected_tensors(self.model_config.hf_config)
        self._jppo_checked = None  # drops an older one
        unpacked = layout.unpack_entries(entries)
        try:
            data = layout.map_checked(path, unpacked, self._jppo_expected[0])
            self._jppo_checked = ((version, path), (unpacked, data))
        except layout.WeightsRefused as e:
            return {"ok": False, "error": str(e)}
        return {"ok": True, "error": None}

    def jppo_working(self) -> dict[str, int]:
        """Returns how many requests it samples for, and how many at most."""
        runner: Any = self.model_runner
        requests = runner.requests if hasattr(runner, "requests") else runner.req_states.req_id_to_index
        return {"requests": len(requests), "most": int(self.vllm_config.scheduler_config.max_num_seqs)}

    def jppo_load(self, *, version: int, path: str) -> dict[str, Any]:
        """Loads the file of the last successful `jppo_check`, unless that was another trainer's."""
        if self._jppo_checked is None or self._jppo_checked[0] != (version, path):
            return {"ok": False, "error": f"version {version} was not checked before the load"}
        _, bucket = self._jppo_checked
        assert self._jppo_expected is not None  # jppo_check came first
        self._jppo_checked = None
        kind = self.model_config.hf_config.model_type
        error = load_weights(self.get_model(), kind, [bucket], self._jppo_expected[1], self.reload_weights)
        self._jppo_version = version if error is None else self._jppo_version
        return {"ok": error is None, "error": error}


def config_set(owner: Any) -> Any:
    """Makes vLLM's config the current one: classes of vLLM's transformers backend read it."""
    vllm = sys.modules.get("vllm.config")
    return contextlib.nullcontext() if vllm is None else vllm.set_current_vllm_config(owner.vllm_config)


def reuse(memory: list[mmap.mmap]) -> mmap.mmap | None:
    """Takes the first of these memories for the next publish, unless a tensor of a model still lies in it."""
    if not memory or sys.getrefcount(memory[0]) > 2:  # the list's and the argument's
        return None
    return memory.pop(0)


def load_weights(
    model: Any, model_type: str, buckets: list[Bucket], tied: Mapping[str, list[str]], reload: Callable[..., None]
) -> str | None:
    """Loads the tensors into vLLM's model by its `reload`, and empties `buckets`; returns why it is not whole."""
    experts = _let_experts_be_packed(model)
    _compute_rows_alone(model)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    if model_type == "gpt_oss":
        sinks = list(_sinks(buckets))
        reload(weights_iterator=_split_experts(_named_tensors(buckets, tied, modules)))
        model.load_weights(sinks)
    else:
        reload(weights_iterator=_named_tensors(buckets, tied, modules))
    if unloaded := [name for name, method in experts.items() if method.moe_kernel is None]:
        message = "keeps its old values: vLLM cannot reload these experts on a CPU; use rollout.name=inprocess, serve"
        return f"{unloaded[0]} {message} the model on a GPU or, for adapters, set rollout.lora_sync=merge"
    return None


def expected_tensors(hf_config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, list[str]]]:
    """Returns names and shapes in the HF files of the model in `config.json`, and the other names of tied tensors."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    first_names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first_names:
            tied.setdefault(first_names[id(tensor)], []).append(name)
        else:
            first_names[id(tensor)] = name
            tensors[name] = tensor
    # transformers stacks the experts of a layer; most files have a tensor for each
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, tensors).items()}, tied


def _let_experts_be_packed(model: torch.nn.Module) -> dict[str, Any]:
    """Makes a reload on a CPU pack the experts as a start does; returns their layers' methods by name.

    vLLM 0.32 packs the experts of a layer only while it has no kernel. A later reload puts unpacked tensors where its
    kernel expects packed ones, without an error.
    """
    methods: dict[str, Any] = {}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and all(p.device.type == "cpu" for p in module.parameters()):
            method.moe_kernel = None
            methods[name] = method
    return methods


_OVERRIDES = torch.library.Library("aten", "IMPL")  # of torch's functions, in the server's process


def _compute_rows_alone(model: torch.nn.Module) -> None:
    """Makes log-probs of latent attention on a CPU independent of the batch, to the bit.

    Torch rounds products of few rows, and the last elements of a sigmoid, differently. vLLM's latent attention
    multiplies by `torch.bmm(..., out=...)`; the routers of models that have it take a sigmoid.
    """
    if not any(getattr(m, "W_UK_T", None) is not None and m.W_UK_T.device.type == "cpu" for m in model.modules()):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch has these functions already
        _OVERRIDES.impl("bmm.out", _bmm_padded, "CPU", allow_override=True)
        _OVERRIDES.impl("sigmoid", _sigmoid_padded, "CPU", allow_override=True)


def _bmm_padded(x: torch.Tensor, kernels: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Multiplies batches of matrices, with at least four rows: fewer are rounded in another way."""
    rows = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, max(0, 4 - rows)))  # one to three are rounded in another way
    return out.copy_(torch.bmm(padded, kernels)[:, :rows])


def _sigmoid_padded(x: torch.Tensor) -> torch.Tensor:
    """Returns the sigmoid of whole vectors of the processor, whose last elements would be rounded in another way."""
    x = x if x.is_floating_point() else x.float()
    padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 256))  # of any processor's vectors, four at a time
    return torch.sigmoid(padded, out=torch.empty_like(padded))[: x.numel()].view(x.shape)


# GPT-OSS' tensors of all experts of a layer, and vLLM's names of one expert's.
_OF_ONE_EXPERT = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}


def _split_experts(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Splits GPT-OSS' tensors of all experts: vLLM 0.32 writes whole ones where a reload does not see them."""
    for name, tensor in tensors:
        module, _, last = name.rpartition(".")
        if module.endswith(".mlp.experts"):
            yield from ((f"{module}.{i}.{_OF_ONE_EXPERT[last]}", part) for i, part in enumerate(tensor))
        else:
            yield name, tensor


def _sinks(buckets: list[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields GPT-OSS' attention sinks, which vLLM 0.32 writes past a reload too; nothing packs them."""
    for entries, data in buckets:
        yield from ((entry.name, _view(entry, data)) for entry in entries if entry.name.endswith(".self_attn.sinks"))


def _view(entry: layout.TensorEntry, data: Any) -> torch.Tensor:
    storage = data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)
    part = storage[entry.offset : entry.offset + entry.nbytes]
    return part.view(getattr(torch, entry.dtype)).reshape(entry.shape)


def _named_tensors(
    buckets: list[Bucket], tied: Mapping[str, list[str]], modules: Container[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors; empties `buckets`, so that each is freed with its last tensor."""
    while buckets:
        entries, data = buckets.pop(0)
        for entry in entries:
            tensor = _view(entry, data)
            yield entry.name, tensor
            # vLLM keeps a tied head stale without its own name; some models have no separate head there
            for name in tied.get(entry.name, ()):
                if name.rpartition(".")[0] in modules:
                    yield name, tensor
