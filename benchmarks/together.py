"""Runs every benchmark of `make bench` in separate processes, into one file and one page.

    make bench
    python benchmarks/together.py --only throughput,gae --args throughput="--shapes S --no-rollout"

Each script is run as by hand, into a folder of its own. Writes OUT/<date>-<machine>.json, with the result of each
script under its name, and the tables next to it as markdown.
"""

import argparse
import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from machine import ROOT, commit, machine, slug

from jppo import settings
from jppo.errors import UserError

# Script and its arguments, in the order of the page.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "throughput": (),
    "scale": (),
    "quickstart": (),
    "models": (),
    "attention": (),
    "gae": (),
    "exact_kl": (),
}
Found = dict[str, dict[str, Any]]  # by script: its result, its output, or its error


def run_script(name: str, argv: Sequence[str], out: pathlib.Path) -> dict[str, Any]:
    """Runs a script; returns its result, its printed tables and its exit code."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *argv, "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    files = sorted(out.glob("*.json"))
    result = json.loads(files[0].read_text()) if files else None
    lines = [line for line in done.stdout.strip().splitlines() if not line.startswith(str(out))]
    return {"result": result, "said": "\n".join(lines).strip(), "exit_code": done.returncode}


def run_all(scripts: dict[str, Sequence[str]]) -> Found:
    """Runs the scripts one after the other; a failure does not end the others."""
    outcomes = {}
    for name, argv in scripts.items():
        print(f"== {name} {' '.join(argv)}".rstrip(), file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as out:
            outcomes[name] = run_script(name, argv, pathlib.Path(out))
    return outcomes


def page(outcomes: Found) -> str:
    """All tables as markdown; a script that failed says so."""
    parts = []
    for name, x in outcomes.items():
        failed = f"**It ended with exit code {x['exit_code']}.**\n\n" if x["exit_code"] else ""
        parts.append(f"## {name}\n\n{failed}{x['said']}".rstrip())
    return "\n\n".join(parts) + "\n"


def arguments(pairs: Sequence[str], known: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parses the scripts' arguments from NAME=ARGUMENTS."""
    parsed = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in known:
            raise UserError(f"--args {pair}: it must be NAME=ARGUMENTS, and a name one of {', '.join(known)}")
        parsed[name] = tuple(shlex.split(text))
    return parsed


def write(outcomes: Found, out: pathlib.Path, about: dict[str, Any], suffix: str = "") -> pathlib.Path:
    """Writes the file and the page; returns the file's path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{about['date']}-{slug(about['machine'])}{suffix}.json"
    kept = {name: {"exit_code": x["exit_code"], "result": x["result"]} for name, x in outcomes.items()}
    path.write_text(json.dumps(about | {"scripts": kept}, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(outcomes))
    return path


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCRIPTS), help="of the scripts, separated by commas")
    parser.add_argument("--args", action="append", default=[], metavar="NAME=ARGUMENTS", help="of one script")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in SCRIPTS]:
        raise UserError(f"--only={args.only}: {unknown[0]!r} is not one of {', '.join(SCRIPTS)}")
    given = arguments(args.args, list(SCRIPTS))
    load, at = os.getloadavg()[0], commit()  # before the run: the load of other programs
    outcomes = run_all({name: given.get(name, SCRIPTS[name]) for name in names})
    date = datetime.date.today().isoformat()
    # Asked for last: who asks for the machine takes its accelerator, which the scripts need.
    about = {"date": date, "machine": machine(), "commit": at, "load_average": load}
    path = write(outcomes, args.out, about)
    print(f"{page(outcomes)}\n{path}")
    if failed := [name for name, x in outcomes.items() if x["exit_code"]]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
