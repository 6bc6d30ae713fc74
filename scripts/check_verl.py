"""Runs jppo.from_verl on verl's own scripts, and compares with bash and with Hydra.

    python scripts/check_verl.py DIR [DIR ...]

Each DIR is a checkout of verl or of its recipes; nothing in it is changed. Every shell script that starts a trainer under
bash, with stand-ins for its programs, is translated. Prints a table: arguments equal to those under bash, exit codes, and
how many translations with exit code 0 are the script's run. The last needs hydra-core, and a DIR with verl's YAML.
"""

import argparse
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STAND_INS = """
accelerate apt-get conda curl deepspeed git hf huggingface-cli ifconfig ip kubectl ninja npu-smi nsys numactl nvcc nvidia-smi
pip pip3 pkill ps python python3 ray rocm-smi sbatch scontrol sleep srun ssh sudo torchrun uv wandb wget chmod
"""
TOOLS = "awk basename bash cat cp cut date dirname env expr find grep head hostname ls mkdir mktemp nohup realpath rm sed"
TOOLS += " seq sh sort tail tee touch tr uname wc xargs readlink timeout"
RECORD = """#!/bin/bash
case ${0##*/} in
  python*) case $1 in -c|-|"") exec PYTHON -I -S "$@" ;; esac ;;
esac
printf '%s\\0' "$PWD" "${0##*/}" "$@" > "$(mktemp "$CALLS/XXXXXXXX")"
"""
PROBES = {"torch_npu": ""}


def oracle(script: pathlib.Path, root: pathlib.Path, work: pathlib.Path) -> list[list[str]]:
    """Returns the commands that the script starts under bash: folder, program and arguments."""
    calls = pathlib.Path(tempfile.mkdtemp(dir=work))
    calls.chmod(0o777)
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    environment = {"HOME": str(work / "home"), "PATH": f"{work}/bin", "CALLS": str(calls)}
    command = [shutil.which("bash"), str(script)]
    with subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True, **user
    ) as process:  # fmt: skip
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
    found = sorted(calls.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    return [file.read_text(errors="replace").split("\0")[:-1] for file in found]


def make_programs(work: pathlib.Path) -> None:
    """Makes the folder of programs that scripts find under bash."""
    (work / "bin").mkdir()
    for name in STAND_INS.split():
        (work / "bin" / name).write_text(RECORD.replace("PYTHON", os.path.realpath(sys.executable)))
        (work / "bin" / name).chmod(0o755)
    for name in TOOLS.split():
        (work / "bin" / name).symlink_to(shutil.which(name))
    (work / "home").mkdir(mode=0o777)
    (work / "home").chmod(0o777)
