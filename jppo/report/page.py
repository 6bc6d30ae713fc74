"""Writes the report's HTML: page, style, scripts and one JSON document of data in a file without network requests."""

import datetime
import html
import importlib.resources
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jppo
from jppo import settings
from jppo.report import samples, series
from jppo.report.folder import Folder, distinct_names, read_folder
from jppo.report.samples import compact, deflate
from jppo.runlog import durable_files
from jppo.settings import table

NAME = "report.html"
BUDGET = 10_000_000  # characters of packed samples in a page, over all runs
CURVES = 4_000  # points of a metric, over all runs
SCRIPTS = (
    "shared.js",
    "plot.js",
    "curves.js",
    "stages.js",
    "scores.js",
    "tokens.js",
    "samples.js",
    "settings.js",
    "main.js",
)


def write_report(run_dirs: Sequence[pathlib.Path], out: pathlib.Path, budget: int = BUDGET) -> pathlib.Path:
    """Writes the page about these runs atomically and returns its path."""
    text = make_page(make_document(run_dirs, budget))
    return durable_files.write_file(out, lambda new: new.write_text(text, encoding="utf-8", errors="replace"))


def report_line(run: pathlib.Path) -> str:
    """Writes the page of a finished run and returns its line of the summary; a failure does not fail the run."""
    try:
        return str(write_report([run], run / NAME))
    except Exception as e:
        why = " ".join(f"{type(e).__name__}: {e}".split())
        return f"not written ({why[:200]}); python -m jppo.report {run} tries again"


def make_page(document: Mapping[str, Any]) -> str:
    """Returns the page. Data is embedded as base64, so no sample text is parsed as HTML.

    The samples of each step are packed separately and unpacked on demand.
    """
    runs, texts = [], []
    for i, run in enumerate(document["runs"]):
        entries = [{k: v for k, v in e.items() if k not in ("packed", "records")} for e in run["samples"]]
        runs.append({**run, "samples": entries})
        texts += [_data(f"samples-{i}-{e['kind']}-{e['step']}", e["packed"]) for e in run["samples"]]
        texts += [_data(f"tokens-{i}-{e['step']}", e["records"]) for e in run["samples"] if e["records"]]
    parts = {
        "title": html.escape(", ".join(run["name"] for run in runs)),
        "style": _file("page.css"),
        "data": "\n".join([_data("data", deflate(compact({**document, "runs": runs}))), *texts]),
        "script": "\n".join(_file(name) for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _data(name: str, packed: str) -> str:
    return f'<script type="text/plain" id="{name}">{packed}</script>'


def _file(name: str) -> str:
    return (importlib.resources.files("jppo.report") / "static" / name).read_text(encoding="utf-8")


def make_document(run_dirs: Sequence[pathlib.Path], budget: int = BUDGET) -> dict[str, Any]:
    """Returns the document: common data, and under `runs` each run's data."""
    folders = [read_folder(path) for path in run_dirs]
    read = [read_entries(f, budget // len(folders)) for f in folders]
    graded = [s for entries in read for e in entries for s in e["scores"] if s is not None]
    rows = samples.levels(graded)
    names = distinct_names([f.path for f in folders])
    return {
        "made": _time(datetime.datetime.now().timestamp()),
        "jppo": jppo.__version__,
        "levels": rows,
        "settings": setting_rows([f.settings for f in folders]),
        "runs": [
            describe_run(folder, name, points=min(series.POINTS, CURVES // len(folders)))
            | {
                "scores": samples.score_histogram(entries, rows),
                "samples": [{k: v for k, v in e.items() if k != "scores"} for e in entries],
                "left_out": samples.samples_left_out(folder.samples, entries),
                "tokens_left_out": samples.tokens_left_out(folder.tokens, entries),
            }
            for folder, name, entries in zip(folders, names, read, strict=True)
        ],
    }


def read_entries(folder: Folder, budget: int) -> list[dict[str, Any]]:
    """Returns an entry per file of samples, with the token records of its step; they get a quarter of the budget."""
    files = samples.files_read(folder.samples)
    steps = {file.step for file in files if file.kind == "step"}
    found = samples.read_records([file for file in folder.tokens if file.step in steps], budget // 4, folder.notes)
    budget -= sum(len(one.packed) for one in found.values())
    entries = samples.read_samples(files, budget, folder.notes, {step: one.samples for step, one in found.items()})
    for entry in entries:
        entry["records"] = found[entry["step"]].packed if entry["kind"] == "step" and entry["step"] in found else ""
    return entries


def describe_run(folder: Folder, name: str, points: int = series.POINTS) -> dict[str, Any]:
    """Describes a run without its samples."""
    lines = folder.lines
    tested = series.points_of(lines, "val/score")
    step = lines[-1]["step"] if lines else 0
    total = planned_steps(folder.settings)
    return {
        "name": name,
        "path": str(folder.path),
        "step": step,
        "total": total,
        "finished": folder.exported and bool(lines) and (total is None or step >= total),
        "written": None if folder.written is None else _time(folder.written),
        "seconds": round(sum(series.total(lines, f"timing_s/{stage}") for stage in ("step", *series.OUTSIDE)), 1),
        "tokens": series.total(lines, "perf/total_num_tokens"),
        "best": max(tested, key=lambda point: point[1]) if tested else None,
        "last": tested[-1] if tested else None,
        "versions": folder.versions,
        "notes": folder.notes,
        "warnings": group_warnings(folder.warnings),
        "curves": series.curves(lines, points),
        "stages": series.stage_times(lines),
    }


def planned_steps(found: Mapping[str, Any] | None) -> int | None:
    """Returns the steps in the settings; None if these count epochs, or are unknown."""
    trainer = (found or {}).get("trainer")
    steps = trainer.get("total_training_steps") if isinstance(trainer, Mapping) else None
    return steps if isinstance(steps, int) and steps > 0 else None


def group_warnings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups warnings by name: how often, first and last step, and the last message."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = str(row.get("name", "warning"))
        step = series.number(row.get("step"))
        one = found.setdefault(name, {"name": name, "count": 0, "first": step, "last": None})
        one |= {"count": one["count"] + 1, "last": step}
        one |= {key: str(row[key]) for key in ("found", "remedy") if row.get(key) is not None}
    return list(found.values())


def setting_rows(found: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Returns every setting of the runs and its default, as JSON; None if missing.

    `differs`: from the default for a single run, or between runs.
    """
    flat = [{name: json.dumps(value) for name, value in table.values(one or {}).items()} for one in found]
    kinds = [table.kind_of(one) for one in found if one is not None]
    defaults = settings.config_of(settings.Settings if settings.Settings in kinds or not kinds else kinds[0])
    usual = {name: json.dumps(value) for name, value in table.values(defaults).items()}
    rows = []
    for name in dict.fromkeys(name for one in flat for name in one):
        values = [one.get(name) for one in flat]
        compared = {value for value, one in zip(values, flat, strict=True) if one}
        differs = len(compared | ({usual.get(name)} if len(flat) == 1 else set())) > 1
        rows.append({"name": name, "default": usual.get(name), "values": values, "differs": differs})
    return rows


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
