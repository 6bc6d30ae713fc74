"""One GPU in ten minutes: kernels, updates, decoding, memory; one process with a time limit per part.

    python benchmarks/gpu.py                                        # on a GPU of 141 GB
    python benchmarks/gpu.py --parts decode,decode_while --seconds 150
    python benchmarks/gpu.py --tiny                                 # on a CPU: whether everything runs

The parts are in gpu_parts.py and gpu_decode.py; they run in the order of PARTS, the most valuable first. A measurement
is a line in OUT/gpu.jsonl as soon as it is made, so a run that is cut keeps what it has. A part that is out of time, or
finds no time left, is reported as left out. In the end the lines are in OUT/<date>-<machine>-gpu.json, and their tables
are printed. Exit code 1 if a measurement failed. Needs JAX and jppo's other dependencies, but no vLLM and no data.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from machine import ROOT, begin, lines_of, names_of, title, write

from jppo import settings
from jppo.errors import UserError

Line = dict[str, Any]
LEAST_S = 15.0  # a part is not started with less
MOST = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
ON_DEMAND = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
BUFFERS = "--xla_gpu_enable_command_buffer="  # XLA's command buffers, CUDA graphs: none, or loops too


@dataclasses.dataclass(frozen=True)
class Part:
    """A process: its module and function, its time limit, its environment."""

    function: str
    limit_s: float
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    xla_flags: str = ""


PARTS = {
    "ipc": Part("gpu_parts.ipc", 35, ON_DEMAND),
    "attention": Part("gpu_parts.attention", 80),
    "update": Part("gpu_parts.update", 130, MOST),
    "decode": Part("gpu_decode.decode", 105),
    "decode_unbuffered": Part("gpu_decode.decode_again", 45, xla_flags=BUFFERS),
    "decode_while": Part("gpu_decode.decode_again", 45, xla_flags=f"{BUFFERS}+WHILE"),
    "gae": Part("gpu_parts.gae", 20),
    "update_7b": Part("gpu_parts.update_7b", 65, MOST),
    "allocator": Part("gpu_parts.allocator", 22, ON_DEMAND),
    "allocator_platform": Part("gpu_parts.allocator", 23, ON_DEMAND | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
}  # fmt: skip


def append(file: pathlib.Path, line: Line) -> None:
    """Adds a line to the file and prints it."""
    text = json.dumps(line)
    print(text, flush=True)
    with file.open("a") as out:
        out.write(text + "\n")


def run_part(name: str, file: pathlib.Path, tiny: bool) -> None:
    """Runs a part in this process."""
    module, _, function_name = PARTS[name].function.partition(".")
    function: Callable[[bool], Iterator[Line]] = getattr(importlib.import_module(module), function_name)
    for line in function(tiny):
        append(file, {"part": name, **line})


def run_process(name: str, file: pathlib.Path, options: list[str], seconds: float, env: dict[str, str]) -> None:
    """Runs a part in a new process with a time limit in seconds, and appends a line on its exit."""
    part, begun = PARTS[name], time.monotonic()
    flags = f"{os.environ.get('XLA_FLAGS', '')} {part.xla_flags}".strip()
    command = [sys.executable, __file__, "--part", name, "--lines", str(file), *options]
    end: Line = {"part": name}
    try:
        code = subprocess.run(command, env=env | part.env | {"XLA_FLAGS": flags}, timeout=seconds, check=False)
        if code.returncode:
            end["left_out"] = f"the rest: exit code {code.returncode}"
    except subprocess.TimeoutExpired:
        end["left_out"] = f"the rest: stopped after {seconds:.0f} s"
    append(file, end | {"process_s": round(time.monotonic() - begun, 1)})


def table(result: dict[str, Any]) -> str:
    """The result as markdown: a table for each kind of line, then one of the processes."""
    blocks = [f"{title(result['machine'])}; jax {result['jax']}; commit {result['commit']}; {result['date']}"]
    by_kind: dict[tuple[str, ...], list[Line]] = {}
    for line in result["lines"]:
        by_kind.setdefault(() if "process_s" in line else tuple(line), []).append(line)
    processes = by_kind.pop((), [])
    for lines in [*by_kind.values(), processes]:
        columns = list(dict.fromkeys(name for line in lines for name in line))
        rows = [columns, ["---"] * len(columns), *([cell(line.get(name)) for name in columns] for line in lines)]
        blocks.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(blocks)


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas, in the order of the list")
    parser.add_argument("--seconds", type=float, default=575.0, help="for all parts; later ones are left out")
    parser.add_argument("--tiny", action="store_true", help="a small model and short measurements")
    parser.add_argument("--out", type=pathlib.Path, default=os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        run_part(args.part, args.lines, args.tiny)
        return
    names, end = names_of(args.parts, PARTS, "--parts"), time.monotonic() + args.seconds
    if args.seconds < LEAST_S:
        raise UserError(f"--seconds={args.seconds:g} must be {LEAST_S:g} or more, which the shortest part needs")
    result = begin()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "gpu.jsonl"
    file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as cache:  # compilation cache that all parts share
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
        for name in PARTS:
            if name not in names:
                continue
            seconds = min(math.inf if args.tiny else PARTS[name].limit_s, end - time.monotonic())
            if seconds < LEAST_S:
                append(file, {"part": name, "left_out": f"all: no time was left of {args.seconds:g} s"})
                continue
            run_process(name, file, ["--tiny"] if args.tiny else [], seconds, env)
    result |= {"lines": lines_of(file), "tiny": args.tiny}
    write(result, table, args.out, "gpu")
    file.unlink()
    if count := sum("failed" in line for line in result["lines"]):
        sys.exit(f"{count} of {len(result['lines'])} measurements failed: see above")


if __name__ == "__main__":
    main()
