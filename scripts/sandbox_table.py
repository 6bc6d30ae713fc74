"""Runs the hostile programs of the tests in four ways to start a trainer and prints the table of docs/security.md.

sudo python scripts/sandbox_table.py    # root, because it becomes the others; takes some minutes
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.hostile_programs import PROGRAMS

NOBODY = 65534
AS_USER = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def main() -> None:
    """Prints one column a mode: its protections, then the programs that did nothing, of all in each class."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable  # one that other users can start
    modes = {
        "root": ([], 0),
        "user": (AS_USER, NOBODY),
        "`unshare -r`": ([*AS_USER, "unshare", "-r"], NOBODY),
        "container": ([python, str(ROOT / "tests/container.py")], 0),
    }
    reports = {name: _run([*before, python], owner) for name, (before, owner) in modes.items()}
    print("| | " + " | ".join(modes) + " |")
    print("|---" * (len(modes) + 1) + "|")
    for protection in next(iter(reports.values()))["guards"]:
        print(
            f"| `{protection}` | "
            + " | ".join(report["guards"][protection] or "no" for report in reports.values())
            + " |"
        )
    print(
        "| `strict` | " + " | ".join("refuses" if report["missing"] else "starts" for report in reports.values()) + " |"
    )
    for group in dict.fromkeys(group for group, *_ in PROGRAMS):
        print(f"| {group} | " + " | ".join(_held(group, report["results"]) for report in reports.values()) + " |")


def _run(python: list[str], owner: int) -> dict:
    out = tempfile.mkdtemp(prefix="jppo-hostile-")
    os.chown(out, owner, owner)
    try:
        command = [*python, str(ROOT / "tests/hostile_run.py"), "0", "", out]
        done = subprocess.run(command, cwd="/", env={"PATH": os.defpath}, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout)


def _held(group: str, results: dict) -> str:
    mine = [(name, right) for g, name, _, _, right in PROGRAMS if g == group]
    bad = [
        name for name, right in mine if results[f"{group}: {name}"][0] not in right or results[f"{group}: {name}"][1]
    ]
    return f"{len(mine) - len(bad)} of {len(mine)}" + (f" ({', '.join(bad)})" if bad else "")


if __name__ == "__main__":
    main()
