"""What benchmarks share: the machine and versions for the head of every result, options, files of finished runs."""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jppo.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """Describes the hardware by its kind."""
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file() and (match := re.search(r"model name\s*: (.*)", info.read_text())):
        cpu = match[1]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "environment": {k: v for k, v in os.environ.items() if k in ("GLIBC_TUNABLES", "LD_PRELOAD", "XLA_FLAGS")},
    }


def title(hardware: dict[str, Any]) -> str:
    """Returns a line with processor and cores, or accelerators."""
    on_cpu = hardware["device"] == "cpu"
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores" if on_cpu else f"{hardware['devices']} × {hardware['device']}"
    )


def slug(hardware: dict[str, Any]) -> str:
    """Returns the machine as part of a file name: accelerators, or processor and cores."""
    on_cpu = hardware["device"] == "cpu"
    name = f"{hardware['cpu']} {hardware['cores']} cores" if on_cpu else f"{hardware['devices']} {hardware['device']}"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\([^)]*\)", "", name.lower())).strip("-")


def commit() -> str | None:
    """Returns the commit of the checkout, with '+' if files are changed; None without git."""
    if shutil.which("git") is None:
        return None
    described = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return described.stdout.strip() if described.returncode == 0 else None


def begin() -> dict[str, Any]:
    """The head of a result, before the run: it is what runs, and what ran beside it."""
    return {
        "date": datetime.date.today().isoformat(),
        "load_average": os.getloadavg()[0],
        "commit": commit(),
        "python": platform.python_version(),
        "jax": version("jax"),
    }


def write(result: dict[str, Any], table: Callable[[dict[str, Any]], str], folder: pathlib.Path, *names: str) -> None:
    """Adds the machine, writes the result as JSON to a file named after both and prints its table."""
    result["machine"] = machine()  # last: a benchmark's processes may need the device before this one takes it
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{'-'.join([result['date'], slug(result['machine']), *names])}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table(result)}\n\n{out}")


def newest(folder: pathlib.Path, date: str, name: str) -> pathlib.Path:
    """Returns the newest file of this machine's results that grows line by line, or a new one of today."""
    kind = f"{slug(machine())}-{name}.jsonl"
    return max(folder.glob(f"*-{kind}"), default=folder / f"{date}-{kind}")


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the finished runs of such a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def names_of(text: str, known: Iterable[str], option: str) -> list[str]:
    """Splits an option at its commas; a name that is not known is an error."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{option}={text}: {unknown[0]!r} is not one of {', '.join(known)}")
    return names


def version(package: str) -> str | None:
    """Returns the installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def add_options(parser: argparse.ArgumentParser, work: str) -> None:
    """Adds the options of a benchmark of runs with several seeds, whose models and data are in the folder `work`."""
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first_seed", type=int, default=1)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / work, help="data, starting models, programs")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--tables", action="store_true", help="only print the tables")


def run_and_print(
    args: argparse.Namespace,
    name: str,
    run_missing: Callable[[argparse.Namespace, pathlib.Path], None],
    tables: Callable[[list[dict[str, Any]]], str],
) -> list[dict[str, Any]]:
    """Runs what the newest file of results lacks, and prints the tables; returns the finished runs."""
    if args.seeds < 1:
        raise UserError(f"--seeds={args.seeds} must be 1 or more; an interval needs 2")
    args.work = args.work.resolve()
    path = newest(args.out, begin()["date"], name)
    if not args.tables:
        path.parent.mkdir(parents=True, exist_ok=True)
        run_missing(args, path)
    rows = lines_of(path)
    if rows:
        print(f"{title(rows[-1]['machine'])}; commit {rows[-1]['commit']}\n")
    print(f"{tables(rows)}\n\n{os.path.relpath(path)}")
    return rows
