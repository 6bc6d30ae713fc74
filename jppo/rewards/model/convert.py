"""Conversion of a reward model's weights to safetensors, once: PyTorch files, and causal models with a v_head."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

from jppo.interpreter import executable, python_path
from jppo.models import tensorfile
from jppo.rewards.model.classifier import refused
from jppo.settings import UserError

CACHE = "~/.cache/jppo/reward_models"
V_HEADS = ("v_head.weight", "v_head.summary.weight")  # Starling's and TRL's


def converted(directory: pathlib.Path, *, python: str, cache: str = CACHE, steps: bool = False) -> pathlib.Path:
    """Returns the directory, or its converted copy in the cache if it needs one; UserError if that fails.

    A causal model with a value head becomes a sequence classifier, or a token classifier with `steps`.
    """
    weights = torch_files(directory)
    if not weights and not has_v_head(directory):
        return directory
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(directory.iterdir())]
    key = hashlib.sha256(json.dumps([str(directory.resolve()), stats]).encode()).hexdigest()[:16]
    kind = "token" if steps else "sequence"
    target = pathlib.Path(cache).expanduser() / f"{directory.name}-{key}{'-steps' if steps else ''}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(dir=target.parent)
    try:
        program = [executable(python, "reward.model.python"), "-m", "jppo.rewards.model.convert_worker"]
        env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*program, str(directory), made, kind], env=env, capture_output=True, text=True, check=False
        )
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
