"""Writes a reward model's weights as a classifier's in safetensors. It needs only torch and transformers.

    python -m jppo.plugins.reward_models.convert_worker FROM TO sequence|token

PyTorch files are read with `weights_only`, so that they run no code.
"""

import pathlib
import shutil
import sys
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_V_HEADS = ("v_head.weight", "v_head.summary.weight")  # Starling's and TRL's
_V_BIASES = ("v_head.bias", "v_head.summary.bias")
_COPIED_SUFFIXES = (".json", ".model", ".txt", ".jinja")


def main(source: pathlib.Path, target: pathlib.Path, kind: str) -> None:
    """Writes the converted copy of a model directory."""
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    tensors: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    for file in [] if tensors else sorted(source.glob("pytorch_model*.bin")):
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    if any(name in _V_HEADS for name in tensors):
        cls: Any = getattr(transformers, f"AutoModelFor{kind.title()}Classification")._model_mapping[type(config)]
        tensors = _rename_to_classifier(tensors, cls.base_model_prefix, bias=kind == "token")
        config.architectures, config.num_labels = [cls.__name__], 1
        config.token_classification_bias = "score.bias" in tensors
    written_pointers: set[int] = set()
    for name, tensor in tensors.items():  # tied ones are written twice
        tensors[name] = tensor.clone() if tensor.data_ptr() in written_pointers else tensor.contiguous()
        written_pointers.add(tensor.data_ptr())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and file.suffix in _COPIED_SUFFIXES and "index" not in file.name:
            shutil.copy(file, target)
    config.save_pretrained(target)


def _rename_to_classifier(tensors: dict[str, Any], prefix: str, *, bias: bool) -> dict[str, Any]:
    """Renames the tensors of a causal model with a value head to those of a classifier with that base prefix."""
    head_name = next(name for name in _V_HEADS if name in tensors)
    renamed = {"score.weight": tensors[head_name]}
    for name, tensor in tensors.items():
        if name in _V_BIASES and bias:
            renamed["score.bias"] = tensor
        plain_name = name.removeprefix("pretrained_model.")
        if name not in (head_name, *_V_BIASES) and not plain_name.startswith("lm_head."):
            module, _, name_in_module = plain_name.partition(".")
            renamed[f"{prefix}.{name_in_module}" if module in ("transformer", "model") else plain_name] = tensor
    return renamed


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
