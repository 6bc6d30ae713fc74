"""The NVIDIA GPUs of this machine, as its driver reports them."""

import dataclasses
import shutil
import subprocess


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    driver: str  # version
    memory: int  # bytes in all


def gpus() -> list[Gpu]:
    """Returns the GPUs; [] without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [Gpu(name, driver, int(mib) * 2**20) for name, driver, mib in rows if mib.isdigit()]
