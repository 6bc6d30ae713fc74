"""Newer Pythons: jppo installs there; the mathematics, the data, whole runs and the notebooks pass their tests."""

import glob
import os
import re
import shutil
import subprocess

import pytest

from tests.make import ROOT

# Without torch, of which some thousand MB would be loaded for its CUDA.
ROOMS = ("algorithms/test_*.py", "learner/test_*.py", "runlog/test_*.py", "data/test_*.py", "test_config.py")
ROOMS += ("test_resume.py", "test_evaluate.py", "test_sft.py")
NO_TORCH = "not test_the_model_is_a_small_qwen2"
TOOLS = ("pytest", "hypothesis", "pytest-timeout", "pytest-xdist", "ipykernel", "matplotlib", "nbclient")


def interpreter(version: str) -> str | None:
    """The path of this Python, on PATH or among pyenv's."""
    root = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    kept = sorted(glob.glob(f"{root}/versions/{version}.*/bin/python{version}"))
    return kept[-1] if kept else shutil.which(f"python{version}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_quick_tests_of_most_rooms_and_the_notebooks_pass(version, tmp_path):
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} is installed")
    foreign = ("PYTHON", "VIRTUAL_ENV", "PIP_", "XLA_")  # what is for this interpreter and its JAX
    env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    subprocess.run([found, "-m", "venv", tmp_path / "venv"], check=True, env=env)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", f"{ROOT}[judge]", *TOOLS], check=True, env=env)
    files = [file for room in ROOMS for file in sorted((ROOT / "tests").glob(room))]
    files = [file for file in files if not re.search(r"^ *(import|from) (torch|peft)\b", file.read_text(), re.M)]
    command = [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    notebooks = [ROOT / "tests/test_notebooks.py", "-k", "test_it_runs_to_its_end", "-m", "slow"]
    for tests in (["-m", "not slow", "-k", NO_TORCH, *files], notebooks):
        done = subprocess.run([*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]
