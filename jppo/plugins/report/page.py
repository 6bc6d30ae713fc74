"""Writes the report's HTML: page, style, scripts and one JSON document of data in a file without network requests."""

import base64
import datetime
import html
import importlib.resources
import json
import math
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import jppo
from jppo import settings
from jppo.plugins.report import run_folder
from jppo.plugins.report.run_folder import Folder, SampleFile, distinct_names, number, read_folder
from jppo.runlog import durable_files
from jppo.runlog.durable_files import read_jsonl
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
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        return f"not written ({reason[:200]}); python -m jppo.report {run} tries again"


def make_page(document: Mapping[str, Any]) -> str:
    """Returns the page. Data is embedded as base64, so no sample text is parsed as HTML.

    The samples of each step are packed separately and unpacked on demand.
    """
    runs, texts = [], []
    for i, run in enumerate(document["runs"]):
        entries = [{k: v for k, v in e.items() if k not in ("packed", "records")} for e in run["samples"]]
        runs.append({**run, "samples": entries})
        texts += [_data_element(f"samples-{i}-{e['kind']}-{e['step']}", e["packed"]) for e in run["samples"]]
        texts += [_data_element(f"tokens-{i}-{e['step']}", e["records"]) for e in run["samples"] if e["records"]]
    parts = {
        "title": html.escape(", ".join(run["name"] for run in runs)),
        "style": _static_file("page.css"),
        "data": "\n".join([_data_element("data", deflate(compact({**document, "runs": runs}))), *texts]),
        "script": "\n".join(_static_file(name) for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _static_file("page.html"))


def _data_element(name: str, packed: str) -> str:
    return f'<script type="text/plain" id="{name}">{packed}</script>'


def _static_file(name: str) -> str:
    return (importlib.resources.files("jppo.plugins.report") / "static" / name).read_text(encoding="utf-8")


def make_document(run_dirs: Sequence[pathlib.Path], budget: int = BUDGET) -> dict[str, Any]:
    """Reads the runs; returns the page's data: common ones, and under `runs` each run's."""
    folders = [read_folder(path) for path in run_dirs]
    entries_of = [read_entries(f, budget // len(folders)) for f in folders]
    scores = [score for entries in entries_of for entry in entries for score in entry["scores"] if score is not None]
    rows = score_levels(scores)
    names = distinct_names([f.path for f in folders])
    return {
        "made": _format_time(datetime.datetime.now().timestamp()),
        "jppo": jppo.__version__,
        "levels": rows,
        "settings": setting_rows([f.settings for f in folders]),
        "runs": [
            describe_run(folder, name, points=min(run_folder.POINTS, CURVES // len(folders)))
            | {
                "scores": score_histogram(entries, rows),
                "samples": [{key: value for key, value in entry.items() if key != "scores"} for entry in entries],
                "left_out": samples_left_out(folder.samples, entries),
                "tokens_left_out": tokens_left_out(folder.tokens, entries),
            }
            for folder, name, entries in zip(folders, names, entries_of, strict=True)
        ],
    }


def read_entries(folder: Folder, budget: int) -> list[dict[str, Any]]:
    """Reads a run's files of samples and token records; returns an entry per file, within `budget` characters."""
    of_kind = [(count, [f for f in folder.samples if f.kind == kind]) for kind, count in FILES.items()]
    files = [file for count, files in of_kind for file in pick_evenly(files, count)]
    steps = {file.step for file in files if file.kind == "step"}
    records = read_records([file for file in folder.tokens if file.step in steps], budget // 4, folder.notes)
    budget -= sum(len(packed.packed) for packed in records.values())
    entries = read_samples(files, budget, folder.notes, {step: packed.samples for step, packed in records.items()})
    for entry in entries:
        entry["records"] = records[entry["step"]].packed if entry["kind"] == "step" and entry["step"] in records else ""
    return entries


def describe_run(folder: Folder, name: str, points: int = run_folder.POINTS) -> dict[str, Any]:
    """Returns a run's data for the page without its samples: progress, scores, curves, times, warnings."""
    lines = folder.lines
    test_scores = run_folder.points_of(lines, "val/score")
    step = lines[-1]["step"] if lines else 0
    total = planned_steps(folder.settings)
    return {
        "name": name,
        "path": str(folder.path),
        "step": step,
        "total": total,
        "finished": folder.exported and bool(lines) and (total is None or step >= total),
        "written": None if folder.written is None else _format_time(folder.written),
        "seconds": round(
            sum(run_folder.total(lines, f"timing_s/{stage}") for stage in ("step", *run_folder.OUTSIDE)), 1
        ),
        "tokens": run_folder.total(lines, "perf/total_num_tokens"),
        "best": max(test_scores, key=lambda point: point[1]) if test_scores else None,
        "last": test_scores[-1] if test_scores else None,
        "versions": folder.versions,
        "notes": folder.notes,
        "warnings": group_warnings(folder.warnings),
        "curves": run_folder.curves(lines, points),
        "stages": run_folder.stage_times(lines),
    }


def planned_steps(config: Mapping[str, Any] | None) -> int | None:
    """Returns the total of steps that the settings name; None if they count epochs, or are unknown."""
    trainer = (config or {}).get("trainer")
    steps = trainer.get("total_training_steps") if isinstance(trainer, Mapping) else None
    return steps if isinstance(steps, int) and steps > 0 else None


def group_warnings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups warnings by name: how often, first and last step, and the last message."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = str(row.get("name", "warning"))
        step = run_folder.number(row.get("step"))
        group = groups.setdefault(name, {"name": name, "count": 0, "first": step, "last": None})
        group |= {"count": group["count"] + 1, "last": step}
        group |= {key: str(row[key]) for key in ("found", "remedy") if row.get(key) is not None}
    return list(groups.values())


def setting_rows(configs: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Returns a row for each setting: its default and its value in each run, as JSON; None if missing.

    `differs`: from the default for a single run, or between runs.
    """
    flat = [{name: json.dumps(value) for name, value in table.by_name(config or {}).items()} for config in configs]
    kinds = [table.kind_of(config) for config in configs if config is not None]
    defaults = settings.config_of(settings.Settings if settings.Settings in kinds or not kinds else kinds[0])
    default_of = {name: json.dumps(value) for name, value in table.by_name(defaults).items()}
    rows = []
    for name in dict.fromkeys(name for config in flat for name in config):
        values = [config.get(name) for config in flat]
        distinct = {value for value, config in zip(values, flat, strict=True) if config}
        differs = len(distinct | ({default_of.get(name)} if len(flat) == 1 else set())) > 1
        rows.append({"name": name, "default": default_of.get(name), "values": values, "differs": differs})
    return rows


def _format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


FILES = {"step": 150, "test": 50}  # maximum number of files read per run, evenly spaced
LEVELS = 12  # up to this many distinct scores are listed; more are binned
BINS = 20
TEXT = 20_000  # characters kept of a text
RATIO = 6.0  # assumed compression of texts, until some are packed
QUANTITIES = ("reward", "value", "advantage", "log_ratio_engine", "log_ratio_reference")
TOKENS = 5_000  # kept of a response, half of them from its end
TOKEN_RATIO = 4.0  # assumed compression of a file of token records


def read_samples(
    files: Sequence[SampleFile], budget: int, notes: list[str], recorded: Mapping[int, Sequence[int]]
) -> list[dict[str, Any]]:
    """Returns an entry per file: its step, its scores, and the packed rows that fit.

    `budget` is in characters of packed text, in total. `recorded` has the lines of a step's samples with a token
    record; they get its index as `token_record`.
    """
    entries, ratio = [], RATIO
    for i, file in enumerate(files):
        rows = read_jsonl(file.path, notes, "no samples of it")
        for index, line in enumerate(recorded.get(file.step, ()) if file.kind == "step" else ()):
            if line < len(rows):
                rows[line]["token_record"] = index
        count, packed, ratio = pack_fitting(rows, budget // (len(files) - i), ratio)
        budget -= len(packed)
        scores = [number(row.get("score")) for row in rows if not row.get("given")]  # None: not graded
        entries.append(
            {"kind": file.kind, "step": file.step, "of": len(rows), "kept": count, "packed": packed, "scores": scores}
        )
    return entries


def samples_left_out(files: Sequence[SampleFile], entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Describes the samples that the report omits; None if it has all."""
    rows, shown_count = sum(entry["of"] for entry in entries), sum(entry["kept"] for entry in entries)
    if len(entries) == len(files) and rows == shown_count:
        return None
    return (
        f"{len(entries):,} of {len(files):,} files of samples are in this page, evenly spaced over the steps, with"
        f" {shown_count:,} of their {rows:,} samples"
    )


def pack_fitting(rows: Sequence[Mapping[str, Any]], budget: int, ratio: float = RATIO) -> tuple[int, str, float]:
    """Packs as many rows as fit; returns their number, their text of at most `budget` characters, and its compression.

    Keeps all rows, or the rows of evenly spaced prompts; prompts with token records come first. `ratio` is the initial
    guess of the compression.
    """
    groups: list[list[str]] = []
    recorded: set[int] = set()
    last_uid = None
    for row in rows:
        if not groups or last_uid is None or row.get("uid") != last_uid:
            groups.append([])
        groups[-1].append(compact(shorten(row)))
        last_uid = row.get("uid")
        if "token_record" in row:
            recorded.add(len(groups) - 1)
    size = sum(len(text) for group in groups for text in group)
    count = len(groups) if size <= budget * ratio else int(len(groups) * budget * ratio / size)
    while count:
        recorded_groups = pick_evenly(sorted(recorded), count)
        other_groups = pick_evenly([i for i in range(len(groups)) if i not in recorded], count - len(recorded_groups))
        kept_texts = [text for i in sorted([*recorded_groups, *other_groups]) for text in groups[i]]
        text = f"[{','.join(kept_texts)}]"
        packed = deflate(text)
        if len(packed) <= budget:
            return len(kept_texts), packed, len(text) / len(packed)
        count = min(count - 1, int(0.95 * count * budget / len(packed)))
    return 0, "", ratio


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def deflate(text: str) -> str:
    """Returns the text deflated in base64, as the page's `unpack` reads it."""
    return base64.b64encode(zlib.compress(text.encode("ascii"))).decode()


def shorten(value: Any) -> Any:
    """Returns a value for JSON, with long texts cut in the middle and non-finite numbers as text."""
    if isinstance(value, str) and len(value) > TEXT:
        cut = len(value) - TEXT
        return f"{value[: TEXT // 2]}\n[… {cut:,} characters are left out here …]\n{value[-TEXT // 2 :]}"
    if isinstance(value, Mapping):
        return {key: shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shorten(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def pick_evenly(items: Sequence[Any], limit: int) -> list[Any]:
    """Returns at most `limit` evenly spaced items, including the first and the last."""
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def score_levels(scores: Sequence[float]) -> dict[str, Any]:
    """Returns the rows of a histogram of scores: the scores themselves if they are few, otherwise even bins."""
    distinct = sorted(set(scores))
    if len(distinct) <= LEVELS:
        return {"values": distinct}
    edges = np.linspace(distinct[0], distinct[-1], BINS + 1)
    return {"edges": [float(f"{e:.5g}") for e in edges]}


def score_histogram(entries: Sequence[Mapping[str, Any]], rows: Mapping[str, Any]) -> dict[str, Any]:
    """Counts a step's samples by the rows of `score_levels`, and those that could not be graded.

    Uses training samples, or test samples if there are no others.
    """
    kind = "step" if any(e["kind"] == "step" for e in entries) else "test"
    steps, counts, ungraded = [], [], []
    for entry in entries:
        if entry["kind"] != kind or not entry["scores"]:
            continue
        graded = [s for s in entry["scores"] if s is not None]
        if "values" in rows:
            histogram = [graded.count(value) for value in rows["values"]]
        else:
            low, high = rows["edges"][0], rows["edges"][-1]
            histogram = np.histogram(np.clip(graded, low, high), bins=rows["edges"])[0].tolist()
        steps.append(entry["step"])
        counts.append(histogram)
        ungraded.append(len(entry["scores"]) - len(graded))
    return {"kind": kind, "steps": steps, "counts": counts, "ungraded": ungraded}


class Records(NamedTuple):
    """The token records of a step: the lines of their samples in its file of samples, and the packed records."""

    samples: list[int]
    packed: str


def read_records(files: Sequence[SampleFile], budget: int, notes: list[str]) -> dict[int, Records]:
    """Returns the token records by step, of evenly spaced steps; `budget` is in characters of packed text, in total."""
    size = sum(file.path.stat().st_size for file in files)
    count = len(files) if size <= budget * TOKEN_RATIO else max(1, int(len(files) * budget * TOKEN_RATIO / size))
    records: dict[int, Records] = {}
    for file in reversed(pick_evenly(files, count)):
        lines = read_jsonl(file.path, notes, None)
        rows = [row for row in map(read_record, lines) if row is not None]
        if len(rows) < len(lines):
            notes.append(f"{file.path.name}: {len(lines) - len(rows)} of {len(lines)} records are broken and left out")
        packed = deflate(compact(rows))
        if rows and len(packed) <= budget:
            records[file.step] = Records([row["sample"] for row in rows], packed)
            budget -= len(packed)
    return records


def read_record(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a token record as the page reads it, without the middle of a long response; None if it is broken."""
    columns = {name: row[name] for name in ("pieces", "tokens", "trained", *QUANTITIES) if name in row}
    pieces, sample = row.get("pieces"), row.get("sample")
    if not isinstance(sample, int) or sample < 0 or not isinstance(pieces, list):
        return None
    if not all(isinstance(values, list) and len(values) == len(pieces) for values in columns.values()):
        return None
    if not all(isinstance(piece, str) for piece in pieces):
        return None
    cut = max(0, len(pieces) - TOKENS)
    columns = {name: [*values[: TOKENS // 2], *values[cut + TOKENS // 2 :]] for name, values in columns.items()}
    columns |= {name: [short_value(values) for values in columns[name]] for name in QUANTITIES if name in columns}
    return {"sample": sample, "gone": cut} | columns


def short_value(value: Any) -> Any:
    """Rounds a finite number to four digits; other values become text, None stays."""
    finite = number(value)
    return float(f"{finite:.4g}") if finite is not None else None if value is None else str(value)


def tokens_left_out(files: Sequence[SampleFile], entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Describes the records that the report omits; None if it has all."""
    shown = sum(bool(entry["records"]) for entry in entries)
    return None if shown == len(files) else f"{shown:,} of {len(files):,} files of token values are in this page"
