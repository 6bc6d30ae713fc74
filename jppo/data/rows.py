"""Rows of data: checks of their columns, with their place for errors; JSON and parquet files of them."""

import contextlib
import dataclasses
import gzip
import json
import pathlib
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jppo.errors import escaped, first_line
from jppo.settings import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a source; `number` counts from 1 and is the line number in JSON lines."""

    source: str  # a file's path, or another name for errors
    number: int
    columns: dict[str, Any]
    unit: str = "row"

    @property
    def place(self) -> str:
        """Returns the row's place for error messages."""
        return f"{self.source}, {self.unit} {self.number}"


def text_column(row: Row, column: str) -> str:
    """Returns the text in `column`; a missing, empty or non-text value is an error that names file and row."""
    if column not in row.columns or row.columns[column] is None:
        raise UserError(f"{row.place} has no {column!r}; its columns are {', '.join(map(str, row.columns))}")
    return checked_text(row, column, row.columns[column])


def checked_text(row: Row, column: str, value: Any, *, blank: bool = False) -> str:
    """Returns `value` if it is text; only with `blank` may it be empty."""
    if not isinstance(value, str):
        raise UserError(f"{row.place}: {column} is {brief(value)}, of type {type(value).__name__}; it must be text")
    if not blank and not value.strip():
        raise UserError(f"{row.place}: {column} is empty; fill it in or remove the row")
    _check_characters(row, column, value)
    return value


def checked_prompt(row: Row, column: str, value: Any) -> str | list[dict[str, str]]:
    """Returns `value` if it is non-empty text or chat messages."""
    return checked_messages(row, column, value) if isinstance(value, list) else checked_text(row, column, value)


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite number, which a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def checked_messages(row: Row, column: str, value: Any) -> list[dict[str, str]]:
    """Returns `value` as chat messages: objects with text in `role` and `content`; null fields are dropped."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        kind = type(value).__name__
        raise UserError(f"{row.place}: {column} is {brief(value)}, of type {kind}; it must be text or chat messages")
    if not value:
        raise UserError(f"{row.place}: {column} is empty; fill it in or remove the row")
    for message in value:
        for field in ("role", "content"):
            if message.get(field) is None:
                raise UserError(f"{row.place}: a message of {column} has no {field!r}: {brief(message)}")
        checked_text(row, f"role in {column}", message["role"])
        if not isinstance(message["content"], str):
            raise UserError(f"{row.place}: content in {column} is {brief(message['content'])}; it must be text")
        _check_characters(row, f"content in {column}", message["content"])
    # Parquet fills missing fields with null.
    return [{k: v for k, v in message.items() if v is not None} for message in value]


def brief(value: Any) -> str:
    """Formats a value for errors in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_characters(row: Row, column: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:  # JSON can spell half of a surrogate pair, which tokenizers refuse
        raise UserError(
            f"{row.place}: {column} has {value[e.start]!r}, half of a surrogate pair, at character {e.start + 1}; "
            "write the whole character"
        ) from e


def read_rows(path: pathlib.Path) -> list[Row]:
    """Reads all rows of a JSON lines, JSON array or parquet file."""
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else _json(path)
    except (EOFError, zlib.error) as e:
        raise UserError(f"{path} is not a whole gzip file ({e}); get the file again") from e
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror or first_line(e)}); check the file") from e
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


def write_sets(out: pathlib.Path, sets: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Writes each set of rows to NAME.jsonl in the directory `out`, and prints the files."""
    make_directory(out)
    for name, rows in sets.items():
        write_jsonl(out / f"{name}.jsonl", rows)
        print(escaped(f"{out / f'{name}.jsonl'}: {len(rows)} rows"))


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
        raise UserError(f"{place} is not JSON: {first_line(e)}") from e


def _parquet(path: pathlib.Path) -> list[Row]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as e:
        raise UserError(f"{path} is not a readable parquet file: {first_line(e)}") from e
    rows: list[Row] = []
    with file:
        for group in range(file.num_row_groups):
            first, count = len(rows) + 1, file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group)
            except (pa.ArrowException, OSError) as e:
                where = f"{path}, rows {first} to {first + count - 1}"
                raise UserError(f"{where} cannot be read: {first_line(e)}; get the file again") from e
            rows += [Row(str(path), first + i, columns) for i, columns in enumerate(_to_python(table, path, first))]
    return rows


def _to_python(table: pa.Table, path: pathlib.Path, first: int) -> list[dict[str, Any]]:
    with contextlib.suppress(UnicodeDecodeError):  # one of the rows has the fault: the loop below names it
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    rows = []
    for i in range(table.num_rows):
        try:
            rows += table.slice(i, 1).to_pylist()
        except UnicodeDecodeError as e:
            place = f"{path}, row {first + i}"
            raise UserError(f"{place} is not UTF-8 ({e.reason}); convert the file to UTF-8") from e
    return rows
