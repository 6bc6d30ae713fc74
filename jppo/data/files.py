"""Rows of data files as they stand on disk, each with its place for errors. First stage of `data/`."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jppo.config import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a file; `number` counts from 1 and is the line number in JSON lines."""

    path: pathlib.Path
    number: int
    columns: dict[str, Any]

    @property
    def place(self) -> str:
        """Where the row stands, for error messages."""
        return _place(self.path, self.number)


def split_paths(files: str, setting: str) -> list[pathlib.Path]:
    """The paths of a comma-separated list; each must exist, once, with a known suffix."""
    paths = [pathlib.Path(name.strip()).expanduser() for name in files.split(",") if name.strip()]
    if not paths:
        raise UserError(f"{setting}={files!r} names no file; give one or more of {_suffixes()}, separated by commas")
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise UserError(f"{setting}: {path} ends in {path.suffix!r}; data files end in {_suffixes()}")
        if not path.is_file():
            raise UserError(f"{setting}: no file {path}; give the path of a {_suffixes()} file")
    repeated = [str(path) for i, path in enumerate(paths) if path in paths[:i]]
    if repeated:
        raise UserError(f"{setting} lists {repeated[0]} twice; a file may be read once")
    return paths


def read_rows(path: pathlib.Path) -> list[Row]:
    """All rows of one JSON lines, JSON array or parquet file."""
    read = _parquet if path.suffix == ".parquet" else _json
    rows = [Row(path, number, columns) for number, columns in read(path)]
    if not rows:
        raise UserError(f"{path} has no rows; at least one is needed")
    return rows


def text_column(row: Row, column: str) -> str:
    """The text in `column`; missing, empty or not text is an error that names file and row."""
    if column not in row.columns or row.columns[column] is None:
        raise UserError(f"{row.place} has no {column!r}; its columns are {sorted(row.columns)}")
    return checked_text(row, column, row.columns[column])


def checked_text(row: Row, column: str, value: Any) -> str:
    """`value` itself when it is text with something in it."""
    if not isinstance(value, str):
        raise UserError(f"{row.place}: {column} is {_brief(value)}, of type {type(value).__name__}; it must be text")
    if not value.strip():
        raise UserError(f"{row.place}: {column} is empty; fill it in or remove the row")
    return value


def checked_messages(row: Row, column: str, value: Any) -> list[dict[str, str]]:
    """`value` as chat messages: objects with text in `role` and `content`; null fields are left out."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        kind = type(value).__name__
        raise UserError(f"{row.place}: {column} is {_brief(value)}, of type {kind}; it must be text or chat messages")
    if not value:
        raise UserError(f"{row.place}: {column} is empty; fill it in or remove the row")
    for message in value:
        for field in ("role", "content"):
            if message.get(field) is None:
                raise UserError(f"{row.place}: a message of {column} has no {field!r}: {_brief(message)}")
        checked_text(row, f"role in {column}", message["role"])
        if not isinstance(message["content"], str):
            raise UserError(f"{row.place}: content in {column} is {_brief(message['content'])}; it must be text")
    # Parquet fills the fields that only other rows have with null.
    return [{k: v for k, v in message.items() if v is not None} for message in value]


def make_directory(path: pathlib.Path) -> None:
    """Make the directory of `--out`, and those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out={path} cannot be made a directory ({e.strerror}); name another place") from e


def write_jsonl(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object a line, in UTF-8."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _place(path: pathlib.Path, number: int) -> str:
    return f"{path}, {'line' if path.suffix == '.jsonl' else 'row'} {number}"


def _suffixes() -> str:
    return ", ".join(SUFFIXES)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _json(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    numbered: Iterator[tuple[int, Any]]
    if path.suffix == ".json" and data.lstrip().startswith(b"["):
        array = _parse(data, str(path))
        numbered = iter(enumerate(array, start=1))
    else:
        lines = enumerate(data.split(b"\n"), start=1)
        numbered = ((n, _parse(line, _place(path, n))) for n, line in lines if line.strip())
    for number, value in numbered:
        if not isinstance(value, dict):
            raise UserError(f"{_place(path, number)} is {_brief(value)}; each row must be a JSON object")
        yield number, value


def _parse(data: bytes, place: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise UserError(f"{place} is not UTF-8 ({e.reason} at byte {e.start}); convert the file to UTF-8") from e
    except (json.JSONDecodeError, RecursionError) as e:
        raise UserError(f"{place} is not JSON: {e}") from e


def _parquet(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as e:
        raise UserError(f"{path} is not a readable parquet file: {str(e).splitlines()[0]}") from e
    for number in range(1, table.num_rows + 1):
        try:
            columns = table.slice(number - 1, 1).to_pylist()[0]
        except UnicodeDecodeError as e:
            raise UserError(f"{_place(path, number)} is not UTF-8 ({e.reason}); convert the file to UTF-8") from e
        yield number, columns
