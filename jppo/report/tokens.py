"""Token records in the report: rewards, values, advantages and log-ratios of single tokens, within a budget."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jppo.report.folder import SampleFile, read_jsonl
from jppo.report.samples import compact, evenly, pack
from jppo.report.series import number

QUANTITIES = ("reward", "value", "advantage", "log_ratio_engine", "log_ratio_reference")
TOKENS = 5_000  # kept of a response, half of them from its end
RATIO = 4.0  # assumed compression of a file


class Records(NamedTuple):
    """The records of a step: the lines of their samples in its file, and the packed records."""

    samples: list[int]
    packed: str


def read_records(files: Sequence[SampleFile], budget: int, notes: list[str]) -> dict[int, Records]:
    """Returns the records of evenly spaced steps by step; `budget` is in characters of packed text, in total."""
    size = sum(file.path.stat().st_size for file in files)
    count = len(files) if size <= budget * RATIO else max(1, int(len(files) * budget * RATIO / size))
    found: dict[int, Records] = {}
    for file in reversed(evenly(files, count)):
        lines = read_jsonl(file.path, notes, None)
        rows = [row for row in map(record, lines) if row is not None]
        if len(rows) < len(lines):
            notes.append(f"{file.path.name}: {len(lines) - len(rows)} of {len(lines)} records are broken and left out")
        packed = pack(compact(rows))
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
    columns |= {name: [short(x) for x in columns[name]] for name in QUANTITIES if name in columns}
    return {"sample": sample, "gone": gone} | columns


def short(value: Any) -> Any:
    """Returns a finite number with four digits, another value as text, None as it is."""
    found = number(value)
    return float(f"{found:.4g}") if found is not None else None if value is None else str(value)


def told(files: Sequence[SampleFile], entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Describes the records that the report omits; None if it has all."""
    kept = sum(bool(entry["records"]) for entry in entries)
    return None if kept == len(files) else f"{kept:,} of {len(files):,} files of token values are in this page"
