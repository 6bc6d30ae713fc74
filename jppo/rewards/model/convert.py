"""Conversion of a reward model's weights to safetensors, once: PyTorch files, and causal models with a v_head.

    python -m jppo.rewards.model.convert FROM TO

`converted` runs it with the interpreter of the reward model, which has torch. PyTorch files are read with
`weights_only`, so that they run no code.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from jppo.interpreter import executable, python_path
from jppo.models import tensorfile
from jppo.rewards.model.classifier import refused
from jppo.settings import UserError

CACHE = "~/.cache/jppo/reward_models"
V_HEADS = {"v_head.weight": "weight", "v_head.summary.weight": "weight"}  # Starling's and TRL's
V_BIASES = ("v_head.bias", "v_head.summary.bias")


def converted(directory: pathlib.Path, *, python: str, cache: str = CACHE) -> pathlib.Path:
    """Returns the directory, or its converted copy in the cache if it needs one; UserError if that fails."""
    weights = torch_files(directory)
    if not weights and not has_v_head(directory):
        return directory
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(directory.iterdir())]
    key = hashlib.sha256(json.dumps([str(directory.resolve()), stats]).encode()).hexdigest()[:16]
    target = pathlib.Path(cache).expanduser() / f"{directory.name}-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(dir=target.parent)
    try:
        command = [executable(python, "reward.model.python"), "-m", "jppo.rewards.model.convert", str(directory), made]
        env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]
            raise refused(str(directory), f"its weights cannot be converted to safetensors: {said}")
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.rename(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def torch_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Lists the PyTorch weights of a directory without safetensors."""
    return [] if list(directory.glob("*.safetensors")) else sorted(directory.glob("pytorch_model*.bin"))


def has_v_head(directory: pathlib.Path) -> bool:
    """Whether the safetensors of a directory are a causal model with a value head."""
    if not ((directory / tensorfile.SINGLE).is_file() or (directory / tensorfile.INDEX).is_file()):
        return False
    try:
        return any(name in V_HEADS for name in tensorfile.slots(directory))
    except UserError as e:
        raise refused(str(directory), str(e)) from e


def renamed(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the tensors as a sequence classifier's of that base prefix; others are as they are."""
    head = next((name for name in V_HEADS if name in tensors), None)
    if head is None:
        return tensors
    out = {"score.weight": tensors[head]}
    for name, tensor in tensors.items():
        inner = name.removeprefix("pretrained_model.")
        if name not in (head, *V_BIASES) and not inner.startswith("lm_head."):
            root, _, rest = inner.partition(".")
            out[f"{prefix}.{rest}" if root in ("transformer", "model") else inner] = tensor
    return out


def main(source: pathlib.Path, target: pathlib.Path) -> None:
    """Writes the converted copy."""
    import safetensors.torch
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    files = torch_files(source)
    tensors: dict[str, Any] = {}
    for file in files or sorted(source.glob("*.safetensors")):
        load = torch.load(file, map_location="cpu", weights_only=True) if files else safetensors.torch.load_file(file)
        tensors |= load
    if any(name in V_HEADS for name in tensors):
        kind: Any = transformers.AutoModelForSequenceClassification._model_mapping[type(config)]
        tensors = renamed(tensors, kind.base_model_prefix)
        config.architectures, config.num_labels = [kind.__name__], 1
    pointers: set[int] = set()
    for name, tensor in tensors.items():  # tied ones are written twice
        tensors[name] = tensor.clone() if tensor.data_ptr() in pointers else tensor.contiguous()
        pointers.add(tensor.data_ptr())
    safetensors.torch.save_file(tensors, target / tensorfile.SINGLE, metadata={"format": "pt"})
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".model", ".txt", ".jinja") and "index" not in file.name:
            shutil.copy(file, target)
    config.save_pretrained(target)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
