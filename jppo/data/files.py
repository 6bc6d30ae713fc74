"""Reads and writes rows of JSON and parquet files."""

import contextlib
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jppo.data.rows import Row, brief
from jppo.settings import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")


def read_rows(path: pathlib.Path) -> list[Row]:
    """Reads all rows of a JSON lines, JSON array or parquet file."""
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else _json(path)
    except (EOFError, zlib.error) as e:
        raise UserError(f"{path} is not a whole gzip file ({e}); get the file again") from e
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror or _first_line(e)}); check the file") from e
    if not rows:
        raise UserError(f"{path} has no rows; at least one is needed")
    return rows


def make_directory(path: pathlib.Path) -> None:
    """Creates the directory of `--out` and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out={path} cannot be created ({e.strerror}); use another folder") from e


def write_jsonl(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes one JSON object per line, in UTF-8."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _json(path: pathlib.Path) -> list[Row]:
    unit = "row" if path.suffix == ".json" else "line"
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = data.removeprefix(b"\xef\xbb\xbf")
    numbered: Iterator[tuple[int, Any]]
    if path.suffix == ".json" and data.lstrip().startswith(b"["):
        numbered = iter(enumerate(_parse(data, str(path)), start=1))
    elif path.suffix == ".json" and re.match(rb"\s*\{\s*\n", data):  # one object over several lines
        numbered = iter([(1, _parse(data, str(path)))])
    else:
        lines = enumerate(data.split(b"\n"), start=1)
        numbered = ((n, _parse(line, f"{path}, {unit} {n}")) for n, line in lines if line.strip())
    rows = []
    for number, value in numbered:
        if not isinstance(value, dict):
            raise UserError(f"{path}, {unit} {number} is {brief(value)}; each row must be a JSON object")
        rows.append(Row(str(path), number, value, unit))
    return rows


def _parse(data: bytes, place: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise UserError(f"{place} is not UTF-8 ({e.reason} at byte {e.start}); convert the file to UTF-8") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{place} is not JSON: {_first_line(e)}") from e


def _parquet(path: pathlib.Path) -> list[Row]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as e:
        raise UserError(f"{path} is not a readable parquet file: {_first_line(e)}") from e
    rows: list[Row] = []
    with file:
        for group in range(file.num_row_groups):
            first, count = len(rows) + 1, file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group)
            except (pa.ArrowException, OSError) as e:
                where = f"{path}, rows {first} to {first + count - 1}"
                raise UserError(f"{where} cannot be read: {_first_line(e)}; get the file again") from e
            rows += [Row(str(path), first + i, columns) for i, columns in enumerate(_to_python(table, path, first))]
    return rows


def _to_python(table: pa.Table, path: pathlib.Path, first: int) -> list[dict[str, Any]]:
    with contextlib.suppress(UnicodeDecodeError):  # one of the rows has the fault: the loop below names it
        return table.to_pylist()
    rows = []
    for i in range(table.num_rows):
        try:
            rows += table.slice(i, 1).to_pylist()
        except UnicodeDecodeError as e:
            place = f"{path}, row {first + i}"
            raise UserError(f"{place} is not UTF-8 ({e.reason}); convert the file to UTF-8") from e
    return rows


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
