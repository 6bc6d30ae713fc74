"""Reads a run folder for the report, with notes on missing files. A kill may have truncated any file."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from jppo.errors import expanded
from jppo.runlog import durable_files, logger
from jppo.settings import UserError

SERVER_HEAD = 65_536  # bytes of a server's log that contain its version


@dataclasses.dataclass(frozen=True)
class SampleFile:
    """One file of samples/: of a training step, of the test after it, or the step's token records."""

    kind: str  # 'step', 'test' or 'tokens'
    step: int
    path: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Folder:
    """The contents of a run folder, without samples."""

    path: pathlib.Path
    settings: dict[str, Any] | None  # None: no readable config.json
    lines: list[dict[str, Any]]  # of metrics.jsonl, by step
    warnings: list[dict[str, Any]]
    samples: list[SampleFile]  # by kind and step
    tokens: list[SampleFile]  # token records of training steps, by step
    exported: bool  # hf/ is written last
    written: float | None  # time of the last metrics line, in seconds since 1970
    versions: dict[str, str]
    notes: list[str]  # missing or unreadable files


def read_folder(path: pathlib.Path) -> Folder:
    """Reads everything except the samples; UserError if the path is not a run."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; use a run folder such as runs/quickstart")
    if not any((path / name).exists() for name in ("config.json", logger.FILE, "samples")):
        raise UserError(f"{path} is not a run: it has none of config.json, {logger.FILE} and samples/")
    notes: list[str] = []
    found = read_jsonl(path / logger.FILE, notes, "no curves and no times")
    lines = {m["step"]: m for m in found if _is_step(m.get("step"))}  # the last line of a repeated step
    if len(lines) < len(found):
        notes.append(f"{logger.FILE}: {len(found) - len(lines)} lines have no step or a repeated one and are skipped")
    file, settings = path / logger.FILE, _settings(path / "config.json", notes)
    files = _sample_files(path / "samples", notes)
    return Folder(
        path=path,
        settings=settings,
        lines=[lines[step] for step in sorted(lines)],
        warnings=read_jsonl(path / "warnings.jsonl", notes, None),
        samples=[f for f in files if f.kind != "tokens"],
        tokens=[f for f in files if f.kind == "tokens"],
        exported=(path / "hf").is_dir(),
        written=file.stat().st_mtime if file.is_file() else None,
        versions=_versions(path),
        notes=notes,
    )


def read_jsonl(path: pathlib.Path, notes: list[str], without: str | None) -> list[dict[str, Any]]:
    """Returns the objects of a jsonl file; counts invalid lines in `notes`.

    `without` names the parts of the report that need the file; None: the file is optional.
    """
    if not path.is_file():
        if without is not None:
            notes.append(f"no {path.name}: {without}")
        return []
    rows, broken = [], 0
    # Only a newline ends a line: texts may contain other characters that splitlines splits at.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} of {broken + len(rows)} lines cannot be read and are left out")
    elif not rows and without is not None:
        notes.append(f"{path.name} is empty: {without}")
    return rows


def distinct_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the last part of each path, with as many parents as make it unique."""
    parts = [expanded(path).resolve().parts for path in paths]
    depth = [1] * len(parts)
    while True:
        names = ["/".join(p[-d:]) for p, d in zip(parts, depth, strict=True)]
        twice = [i for i, name in enumerate(names) if names.count(name) > 1 and depth[i] < len(parts[i])]
        if not twice:
            return names
        depth = [d + (i in twice) for i, d in enumerate(depth)]


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**53  # larger numbers are not exact in a page


def _settings(path: pathlib.Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        notes.append("no config.json: no settings, and no planned number of steps")
        return None
    if not (found := durable_files.read_json(path)):
        notes.append("config.json cannot be read: no settings, and no planned number of steps")
    return found or None


def _sample_files(folder: pathlib.Path, notes: list[str]) -> list[SampleFile]:
    found = []
    for path in folder.glob("*.jsonl"):
        match = re.fullmatch(r"(step|test|tokens)_(\d+)\.jsonl", path.name)
        if match:
            found.append(SampleFile(match[1], int(match[2]), path))
    if not found:
        notes.append("no samples/step_N.jsonl or test_N.jsonl: no samples and no distribution of scores")
    return sorted(found, key=lambda f: (f.kind, f.step))


def _versions(run: pathlib.Path) -> dict[str, str]:
    log = run / "server-0.log"
    if not log.is_file():
        return {}
    with log.open("rb") as file:
        head = file.read(SERVER_HEAD).decode("utf-8", errors="replace")
    found = re.search(r"\bversion v?(\d+\.\d[\w.+-]*)", head)
    return {"vLLM": found[1]} if found else {}
