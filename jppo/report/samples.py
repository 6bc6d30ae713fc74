"""The samples that go into the report, within a budget, and the distribution of scores over the steps."""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.report.folder import SampleFile, read_rows
from jppo.report.series import number

FILES = {"step": 150, "test": 50}  # files of a run that are read at most, evenly spread
LEVELS = 12  # up to as many different scores are told apart; more are binned
BINS = 20
TEXT = 20_000  # characters of a text that are kept
RATIO = 6.0  # how much smaller packed texts are thought to be, until some are


def read_samples(files: Sequence[SampleFile], budget: int, notes: list[str]) -> list[dict[str, Any]]:
    """An entry for each file that is read: its step, its scores, and the rows that fit, packed.

    `budget` is in characters of packed text, for all of them together.
    """
    chosen = [f for kind, most in FILES.items() for f in spread([f for f in files if f.kind == kind], most)]
    entries, ratio = [], RATIO
    for i, file in enumerate(chosen):
        rows = read_rows(file.path, notes, "no samples of it")
        kept, packed, ratio = fit(rows, budget // (len(chosen) - i), ratio)
        budget -= len(packed)
        scores = [score(row) for row in rows]
        entries.append(
            {"kind": file.kind, "step": file.step, "of": len(rows), "kept": kept, "packed": packed, "scores": scores}
        )
    return entries


def told(files: Sequence[SampleFile], entries: Sequence[Mapping[str, Any]]) -> str | None:
    """In words, what of the samples the report does not hold; None where it has all."""
    rows, kept = sum(e["of"] for e in entries), sum(e["kept"] for e in entries)
    if len(entries) == len(files) and rows == kept:
        return None
    return (
        f"{len(entries):,} of {len(files):,} files of samples are in this page, evenly spread over the steps, and"
        f" {kept:,} of their {rows:,} samples"
    )


def fit(rows: Sequence[Mapping[str, Any]], budget: int, ratio: float = RATIO) -> tuple[int, str, float]:
    """How many rows were kept, they packed in at most `budget` characters, and how much smaller that made them.

    All are kept, or those of some prompts, evenly spread. `ratio` is the guess by which the first try is made.
    """
    groups: list[list[str]] = []
    before = None
    for row in rows:
        if not groups or before is None or row.get("uid") != before:
            groups.append([])
        groups[-1].append(compact(cut(row)))
        before = row.get("uid")
    size = sum(len(text) for group in groups for text in group)
    count = len(groups) if size <= budget * ratio else int(len(groups) * budget * ratio / size)
    while count:
        kept = [text for group in spread(groups, count) for text in group]
        text = f"[{','.join(kept)}]"
        packed = pack(text)
        if len(packed) <= budget:
            return len(kept), packed, len(text) / len(packed)
        count = min(count - 1, int(0.95 * count * budget / len(packed)))
    return 0, "", ratio


def compact(value: Any) -> str:
    """The value as JSON, in ASCII and without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def pack(text: str) -> str:
    """The text deflated and in base64: what the page's `unpack` reads."""
    return base64.b64encode(zlib.compress(text.encode("ascii"))).decode()


def cut(value: Any) -> Any:
    """The value as JSON can hold it, with texts that are too long cut in the middle."""
    if isinstance(value, str) and len(value) > TEXT:
        gone = len(value) - TEXT
        return f"{value[: TEXT // 2]}\n[… {gone:,} characters are left out here …]\n{value[-TEXT // 2 :]}"
    if isinstance(value, Mapping):
        return {key: cut(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [cut(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def score(row: Mapping[str, Any]) -> float | None:
    """The sample's score; None where it could not be graded."""
    return number(row.get("score"))


def levels(scores: Sequence[float]) -> dict[str, Any]:
    """The rows of a histogram: the scores themselves where they are few, else even bins."""
    different = sorted(set(scores))
    if len(different) <= LEVELS:
        return {"values": different}
    edges = np.linspace(different[0], different[-1], BINS + 1)
    return {"edges": [float(f"{e:.5g}") for e in edges]}


def histogram(entries: Sequence[Mapping[str, Any]], rows: Mapping[str, Any]) -> dict[str, Any]:
    """How many of a step's samples have each of `levels`, and how many could not be graded.

    Of the training's samples; of the tests' where there are no others.
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
