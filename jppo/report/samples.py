"""The samples in the report, within a budget, and the distribution of scores over the steps."""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jppo.report.folder import SampleFile, read_jsonl
from jppo.report.series import number

FILES = {"step": 150, "test": 50}  # maximum number of files read per run, evenly spaced
LEVELS = 12  # up to this many distinct scores are listed; more are binned
BINS = 20
TEXT = 20_000  # characters kept of a text
RATIO = 6.0  # assumed compression of texts, until some are packed
QUANTITIES = ("reward", "value", "advantage", "log_ratio_engine", "log_ratio_reference")
TOKENS = 5_000  # kept of a response, half of them from its end
TOKEN_RATIO = 4.0  # assumed compression of a file of token records


def files_read(files: Sequence[SampleFile]) -> list[SampleFile]:
    """Returns the files that are read."""
    return [f for kind, most in FILES.items() for f in evenly([f for f in files if f.kind == kind], most)]


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
        kept, packed, ratio = fit(rows, budget // (len(files) - i), ratio)
        budget -= len(packed)
        scores = [number(row.get("score")) for row in rows]  # None: not graded
        entries.append(
            {"kind": file.kind, "step": file.step, "of": len(rows), "kept": kept, "packed": packed, "scores": scores}
        )
    return entries


def samples_left_out(files: Sequence[SampleFile], entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Describes the samples that the report omits; None if it has all."""
    rows, kept = sum(e["of"] for e in entries), sum(e["kept"] for e in entries)
    if len(entries) == len(files) and rows == kept:
        return None
    return (
        f"{len(entries):,} of {len(files):,} files of samples are in this page, evenly spaced over the steps, with"
        f" {kept:,} of their {rows:,} samples"
    )


def fit(rows: Sequence[Mapping[str, Any]], budget: int, ratio: float = RATIO) -> tuple[int, str, float]:
    """Returns the number of kept rows, their packed text of at most `budget` characters, and the compression.

    Keeps all rows, or the rows of evenly spaced prompts; prompts with token records come first. `ratio` is the initial
    guess of the compression.
    """
    groups: list[list[str]] = []
    recorded: set[int] = set()
    before = None
    for row in rows:
        if not groups or before is None or row.get("uid") != before:
            groups.append([])
        groups[-1].append(compact(shortened(row)))
        before = row.get("uid")
        if "token_record" in row:
            recorded.add(len(groups) - 1)
    size = sum(len(text) for group in groups for text in group)
    count = len(groups) if size <= budget * ratio else int(len(groups) * budget * ratio / size)
    while count:
        first = evenly(sorted(recorded), count)
        others = evenly([i for i in range(len(groups)) if i not in recorded], count - len(first))
        kept = [text for i in sorted([*first, *others]) for text in groups[i]]
        text = f"[{','.join(kept)}]"
        packed = deflate(text)
        if len(packed) <= budget:
            return len(kept), packed, len(text) / len(packed)
        count = min(count - 1, int(0.95 * count * budget / len(packed)))
    return 0, "", ratio


def compact(value: Any) -> str:
    """Returns the value as compact ASCII JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def deflate(text: str) -> str:
    """Returns the text deflated in base64, as the page's `unpack` reads it."""
    return base64.b64encode(zlib.compress(text.encode("ascii"))).decode()


def shortened(value: Any) -> Any:
    """Returns the value for JSON, with long texts cut in the middle."""
    if isinstance(value, str) and len(value) > TEXT:
        gone = len(value) - TEXT
        return f"{value[: TEXT // 2]}\n[… {gone:,} characters are left out here …]\n{value[-TEXT // 2 :]}"
    if isinstance(value, Mapping):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Returns at most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def levels(scores: Sequence[float]) -> dict[str, Any]:
    """Returns the rows of a histogram: the scores themselves if they are few, otherwise even bins."""
    different = sorted(set(scores))
    if len(different) <= LEVELS:
        return {"values": different}
    edges = np.linspace(different[0], different[-1], BINS + 1)
    return {"edges": [float(f"{e:.5g}") for e in edges]}


def score_histogram(entries: Sequence[Mapping[str, Any]], rows: Mapping[str, Any]) -> dict[str, Any]:
    """Counts a step's samples by `levels`, and those that could not be graded.

    Uses training samples, or test samples if there are no others.
    """
    kind = "step" if any(e["kind"] == "step" for e in entries) else "test"
    steps, counts, ungraded = [], [], []
    for entry in entries:
        if entry["kind"] != kind or not entry["scores"]:
            continue
        graded = [s for s in entry["scores"] if s is not None]
        if "values" in rows:
            found = [graded.count(value) for value in rows["values"]]
        else:
            low, high = rows["edges"][0], rows["edges"][-1]
            found = np.histogram(np.clip(graded, low, high), bins=rows["edges"])[0].tolist()
        steps.append(entry["step"])
        counts.append(found)
        ungraded.append(len(entry["scores"]) - len(graded))
    return {"kind": kind, "steps": steps, "counts": counts, "ungraded": ungraded}


class Records(NamedTuple):
    """The records of a step: the lines of their samples in its file, and the packed records."""

    samples: list[int]
    packed: str


def read_records(files: Sequence[SampleFile], budget: int, notes: list[str]) -> dict[int, Records]:
    """Returns the records of evenly spaced steps by step; `budget` is in characters of packed text, in total."""
    size = sum(file.path.stat().st_size for file in files)
    count = len(files) if size <= budget * TOKEN_RATIO else max(1, int(len(files) * budget * TOKEN_RATIO / size))
    found: dict[int, Records] = {}
    for file in reversed(evenly(files, count)):
        lines = read_jsonl(file.path, notes, None)
        rows = [row for row in map(record, lines) if row is not None]
        if len(rows) < len(lines):
            notes.append(f"{file.path.name}: {len(lines) - len(rows)} of {len(lines)} records are broken and left out")
        packed = deflate(compact(rows))
        if rows and len(packed) <= budget:
            found[file.step] = Records([row["sample"] for row in rows], packed)
            budget -= len(packed)
    return found


def record(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a record as the page reads it, without the middle of a long response; None if it is broken."""
    columns = {name: row[name] for name in ("pieces", "tokens", "trained", *QUANTITIES) if name in row}
    pieces, sample = row.get("pieces"), row.get("sample")
    if not isinstance(sample, int) or sample < 0 or not isinstance(pieces, list):
        return None
    if not all(isinstance(x, list) and len(x) == len(pieces) for x in columns.values()):
        return None
    if not all(isinstance(piece, str) for piece in pieces):
        return None
    gone = max(0, len(pieces) - TOKENS)
    columns = {name: [*x[: TOKENS // 2], *x[gone + TOKENS // 2 :]] for name, x in columns.items()}
    columns |= {name: [short_value(x) for x in columns[name]] for name in QUANTITIES if name in columns}
    return {"sample": sample, "gone": gone} | columns


def short_value(value: Any) -> Any:
    """Returns a finite number with four digits, another value as text, None as it is."""
    found = number(value)
    return float(f"{found:.4g}") if found is not None else None if value is None else str(value)


def tokens_left_out(files: Sequence[SampleFile], entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Describes the records that the report omits; None if it has all."""
    kept = sum(bool(entry["records"]) for entry in entries)
    return None if kept == len(files) else f"{kept:,} of {len(files):,} files of token values are in this page"
