"""Rows of data: their sources, checks of their columns with their place for errors, JSON and parquet files of them.

A setting such as data.train_files lists sources, separated by commas: PATH.parquet, PATH.jsonl, PATH.json, PATH.csv,
hub:NAME[:CONFIG]/SPLIT, or tfds:NAME/SPLIT[@DIR]. With data.custom_cls=PATH.py:CLASS each entry is passed to the
class: CLASS(entry, tokenizer=tokenizer) must be an iterable of rows, dicts with the columns of a file. Data is never
run as code; the custom class is.

The package `datasets` downloads data sets of the hub. Those of tensorflow-datasets must have been prepared on disk, as
array_record or parquet, which have random access and need no TensorFlow; nothing is downloaded or built. NAME may have
a config and a version, as in gsm8k:1.0.0; SPLIT may be a slice, as in train[:90%]. Without DIR it is
tensorflow-datasets' default folder.
"""

import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import json
import pathlib
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jppo.errors import UserError, escaped, expanded, first_line
from jppo.registry import did_you_mean, explain, resolve

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
TFDS = "tfds:"
TFDS_MISSING = "tensorflow-datasets cannot be imported ({}); pip install 'jppo[tfds]'"
HUB = "hub:"
_FORMS = f"{', '.join(SUFFIXES)}, {HUB}NAME/SPLIT or {TFDS}NAME/SPLIT"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a source; `number` counts from 1 and is the line number in JSON lines."""

    source: str  # a file's path, or another name for errors
    number: int
    columns: dict[str, Any]
    unit: str = "row"

    @property
    def place(self) -> str:
        return f"{self.source}, {self.unit} {self.number}"


def text_column(row: Row, column: str) -> str:
    """Returns the text in `column`; UserError with the row's place for a missing, empty or non-text value."""
    if column not in row.columns or row.columns[column] is None:
        raise UserError(f"{row.place} has no {column!r}; its columns are {', '.join(map(str, row.columns))}")
    return checked_text(row, column, row.columns[column])


def checked_text(row: Row, column: str, value: Any, *, blank: bool = False) -> str:
    """Returns `value` if it is text that is not blank, or may be; else UserError with the row's place."""
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
    """Shortens a value to one line of 60 characters, for errors."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_characters(row: Row, column: str, value: str) -> None:
    """UserError if a text cannot be encoded as UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:  # JSON can spell half of a surrogate pair, which tokenizers refuse
        raise UserError(
            f"{row.place}: {column} has {value[e.start]!r}, half of a surrogate pair, at character {e.start + 1}; "
            "write the whole character"
        ) from e


def read_rows(path: pathlib.Path, part: slice = slice(None)) -> list[Row]:
    """Reads the rows of a JSON lines, JSON array, CSV or parquet file, or a `part` of them."""
    try:
        rows = {".parquet": _read_parquet, ".csv": _read_csv}.get(path.suffix, _read_json)(path)
    except (EOFError, zlib.error) as e:
        raise UserError(f"{path} is not a whole gzip file ({e}); get the file again") from e
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror or first_line(e)}); check the file") from e
    return _require_rows(rows[part], path if part == slice(None) else f"{path}[{part.start}:{part.stop}]")


def _require_rows(rows: list[Row], place: object) -> list[Row]:
    """Returns the rows; UserError if there is none."""
    if not rows:
        raise UserError(f"{place} has no rows; at least one is needed")
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


def _read_json(path: pathlib.Path) -> list[Row]:
    """Reads a JSON array of objects, one object, or JSON lines, also compressed."""
    unit = "row" if path.suffix == ".json" else "line"
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = data.removeprefix(b"\xef\xbb\xbf")
    values: Iterator[tuple[int, Any]]
    if path.suffix == ".json" and data.lstrip().startswith(b"["):
        values = iter(enumerate(_parse_json(data, str(path)), start=1))
    elif path.suffix == ".json" and not _is_json(data.lstrip().partition(b"\n")[0]):  # one object over several lines
        values = iter([(1, _parse_json(data, str(path)))])
    else:
        lines = enumerate(data.split(b"\n"), start=1)
        values = ((n, _parse_json(line, f"{path}, {unit} {n}")) for n, line in lines if line.strip())
    rows = []
    for number, value in values:
        if not isinstance(value, dict):
            raise UserError(f"{path}, {unit} {number} is {brief(value)}; each row must be a JSON object")
        rows.append(Row(str(path), number, value, unit))
    return rows


def _parse_json(data: bytes, place: str) -> Any:
    """Parses one JSON text; `place` is the file and line for errors."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as e:
        raise UserError(f"{place} is not UTF-8 ({e.reason} at byte {e.start}); convert the file to UTF-8") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{place} is not JSON: {first_line(e)}") from e


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict; ValueError if it has a name twice."""
    if len(columns := dict(pairs)) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"an object has {twice!r} twice")
    return columns


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _separator(text: str) -> str:
    """Returns what separates the values of a CSV: a mark by which the first two rows have as many, if there is one."""
    possible = list[str]()
    for mark in ",;\t":
        with contextlib.suppress(csv.Error):
            rows = filter(None, csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=mark))
            names = len(next(rows, ()))
            if names > 1:
                possible.append(mark)
                if len(next(rows, ())) in (0, names):
                    return mark
    return next(iter(possible), ",")


def _read_csv(path: pathlib.Path) -> list[Row]:
    """Reads texts below a line of column names, separated by commas, else by semicolons or tabs."""
    rows: list[Row] = []
    lines: Any = None
    csv.field_size_limit(sys.maxsize)
    try:
        text = path.read_text(encoding="utf-8-sig")
        separator = _separator(text)
        lines = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
        filled = filter(None, lines)  # blank lines are none
        names: list[str] = next(filled, [])
        if names[:1] == ["sep="]:  # as a spreadsheet begins a file
            names = next(filled, [])
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{path}, line {lines.line_num} names the column {twice!r} twice; rename or remove one")
        for values in filled:
            rows.append(Row(str(path), lines.line_num, dict(zip(names, values, strict=False)), "line"))
            if len(values) != len(names):
                raise UserError(
                    f"{rows[-1].place} has not the columns {', '.join(names)}; quote values that have {separator!r}"
                )
            if values == names:
                raise UserError(f"{rows[-1].place} repeats the names of the columns; remove the line")
            if quoted := next((value for value in values if re.fullmatch(r'\s+".*"\s*', value, re.DOTALL)), None):
                raise UserError(f"{rows[-1].place} has a space before the quotes of {brief(quoted)}; remove it")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 ({e.reason} at byte {e.start}); convert the file to UTF-8") from e
    except csv.Error as e:
        line = lines.line_num if lines is not None else 1
        raise UserError(f"{path}, line {line} is not CSV: {e}; quotes must open and close a whole value") from e
    return rows


def _read_parquet(path: pathlib.Path) -> list[Row]:
    """Reads a parquet file by row groups; UserError for a damaged file names the rows."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as e:
        raise UserError(f"{path} is not a readable parquet file: {first_line(e)}") from e
    names = file.schema_arrow.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path} has the column {twice!r} twice; rename or remove one")
    rows: list[Row] = []
    with file:
        for group in range(file.num_row_groups):
            first, count = len(rows) + 1, file.metadata.row_group(group).num_rows
            try:
                table = file.read_row_group(group)
            except (pa.ArrowException, OSError) as e:
                place = f"{path}, rows {first} to {first + count - 1}"
                raise UserError(f"{place} cannot be read: {first_line(e)}; get the file again") from e
            rows += [Row(str(path), first + i, columns) for i, columns in enumerate(_table_rows(table, path, first))]
    return rows


def _table_rows(table: pa.Table, path: pathlib.Path, first_row: int) -> list[dict[str, Any]]:
    """Returns the columns of each row; rows are numbered from `first_row` in errors."""
    with contextlib.suppress(UnicodeDecodeError):  # one of the rows has the fault: the loop below names it
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    rows = []
    for i in range(table.num_rows):
        try:
            rows += table.slice(i, 1).to_pylist()
        except UnicodeDecodeError as e:
            place = f"{path}, row {first_row + i}"
            raise UserError(f"{place} is not UTF-8 ({e.reason}); convert the file to UTF-8") from e
    return rows


@dataclasses.dataclass(frozen=True)
class Source:
    """The rows of one entry of a list of sources."""

    name: str  # a file's stem or NAME/SPLIT; the whole entry if that is not unique
    rows: list[Row]


NAMED_BY = {"data_source": "data.reward_fn_key"}  # others by their own name, as data.prompt_key


def read_sources(
    entries: str,
    setting: str,
    *,
    custom_cls: str = "",
    tokenizer: Any = None,
    columns: Mapping[str, str] = types.MappingProxyType({}),
) -> list[Source]:
    """Reads all listed sources in order; `columns` are the files' names, COLUMN or COLUMN.ENTRY, for jppo's columns."""
    entry_list = [entry.strip() for entry in entries.split(",") if entry.strip()]
    if not entry_list:
        raise UserError(f"{setting}={entries!r} names no file; give one or more of {_FORMS}, separated by commas")
    for i, entry in enumerate(entry_list):
        if entry in entry_list[:i]:
            raise UserError(f"{setting} lists {entry} twice; a source may be listed once")
    if custom_cls:
        read_entry = functools.partial(_custom_rows, resolve(custom_cls, "data.custom_cls"), custom_cls, tokenizer)
        readers = [(functools.partial(read_entry, entry), pathlib.PurePath(entry).stem) for entry in entry_list]
    else:
        if len(entry_list) > 1 and expanded(entries).is_file():
            raise UserError(f"{setting}: commas separate sources; rename {entries}, which has one in its name")
        readers = [_make_reader(entry, setting) for entry in entry_list]  # checks that all exist before reading one
    stems = [name for _, name in readers]
    names = [name if stems.count(name) == 1 else entry for name, entry in zip(stems, entry_list, strict=True)]
    renames = {column: file_column for column, file_column in columns.items() if column != file_column}
    sources = [Source(name, read_rows()) for name, (read_rows, _) in zip(names, readers, strict=True)]
    if not renames:
        return sources
    return [Source(source.name, [_rename_columns(row, renames) for row in source.rows]) for source in sources]


def _rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Renames columns of a file to jppo's names, which are the keys of `columns`."""
    renamed = {}
    for column, file_column in columns.items():
        value: Any = row.columns
        for part in [file_column] if file_column in row.columns else file_column.split("."):
            if not isinstance(value, dict) or part not in value:
                names = [*map(str, row.columns)]
                raise UserError(
                    f"{row.place} has no {file_column!r}, which {NAMED_BY.get(column, f'data.{column}_key')} names; its"
                    f" columns are {', '.join(names)}{did_you_mean(file_column, names)}"
                )
            value = value[part]
        renamed[column] = value
    # A custom function may read the ground truth by its own name.
    dropped = {*columns, *columns.values()} - {columns.get("ground_truth")}
    other_columns = {name: value for name, value in row.columns.items() if name not in dropped}
    return dataclasses.replace(row, columns=other_columns | renamed)


def _make_reader(entry: str, setting: str) -> tuple[functools.partial[list[Row]], str]:
    """Checks that an entry exists; returns the function that reads its rows, and its short name."""
    if entry.startswith(TFDS):
        spec = tfds_spec(entry, setting)
        return functools.partial(_tfds_rows, spec), f"{spec.name}/{spec.split}"
    if entry.startswith(HUB):
        name, _, split = entry.removeprefix(HUB).rpartition("/")
        if not (name.partition(":")[0] and split):
            raise UserError(f"{setting}: {entry!r} must be {HUB}NAME/SPLIT or {HUB}NAME:CONFIG/SPLIT")
        return functools.partial(_hub_rows, entry, name, split), f"{name}/{split}"
    sliced = re.fullmatch(r"(.*)\[(-?\d*):(-?\d*)\]", entry)
    path = expanded(sliced[1] if sliced else entry)
    part = slice(*(int(edge) if edge else None for edge in sliced.groups()[1:])) if sliced else slice(None)
    if path.suffix not in SUFFIXES:
        hub = f"; of the hub: {HUB}{entry}/train" if entry.count("/") == 1 and not path.exists() else ""
        raise UserError(f"{setting}: {path} ends in {path.suffix!r}; data sources are {_FORMS}{hub}")
    if not path.is_file():
        raise UserError(f"{setting}: no file {path}; use the path of a {', '.join(SUFFIXES)} file")
    return functools.partial(read_rows, path, part), path.stem


def _custom_rows(cls: Callable[..., Iterable[Any]], spec: str, tokenizer: Any, entry: str) -> list[Row]:
    """Reads the rows of an entry by the class of data.custom_cls."""
    source = f"data.custom_cls={spec} of {entry!r}"
    rows: list[Row] = []
    try:
        for number, columns in enumerate(cls(entry, tokenizer=tokenizer), start=1):
            if not isinstance(columns, dict):
                raise UserError(f"{source}, row {number} is {brief(columns)}; each row must be a dict of columns")
            rows.append(Row(source, number, columns))
    except UserError:
        raise
    except Exception as e:  # and so may its class
        progress = f"after row {len(rows)}" if rows else "before the first row"
        raise UserError(f"{source} failed {progress} ({explain(e)}); fix the class") from e
    return _require_rows(rows, source)


def _hub_rows(entry: str, name: str, split: str) -> list[Row]:
    """Reads all rows of a split of a data set of the hub, or of one that `datasets` finds in a folder."""
    name, _, config = name.partition(":")
    try:
        import datasets
    except ImportError as e:
        raise UserError(
            f"{entry}: the package datasets cannot be imported ({explain(e)}); pip install 'jppo[hub]', or get the"
            f" files: hf download --repo-type dataset {name} --local-dir DIR"
        ) from e
    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
        rows = [Row(entry, number, dict(columns)) for number, columns in enumerate(dataset, start=1)]
    except Exception as e:  # no network, an unknown name, split or config: each raises its own
        raise UserError(f"{entry} cannot be read ({explain(e)}); check name, config and split, or the network") from e
    return _require_rows(rows, entry)


class TfdsSpec(NamedTuple):
    """One split of one data set."""

    text: str  # as in the setting
    name: str
    split: str
    directory: str | None


def tfds_spec(entry: str, setting: str) -> TfdsSpec:
    """Parses tfds:NAME/SPLIT@DIR."""
    name_and_split, at, directory = entry.removeprefix(TFDS).partition("@")
    name, slash, split = name_and_split.rpartition("/")
    if not (slash and name and split) or (at and not directory):
        raise UserError(f"{setting}: {entry!r} must be {TFDS}NAME/SPLIT or {TFDS}NAME/SPLIT@DIR")
    return TfdsSpec(entry, name, split, directory or None)


def _tfds_rows(spec: TfdsSpec) -> list[Row]:
    """Reads all rows of a split of a prepared data set of tensorflow-datasets, with text as str."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as e:
        raise UserError(f"{spec.text}: {TFDS_MISSING.format(explain(e))}") from e
    _hide_gpus(spec)
    options = {} if spec.directory is None else {"data_dir": spec.directory}
    try:
        # Like tfds.data_source, which would prefer code of the same name to the files.
        source = tfds.core.read_only_builder.builder_from_files(spec.name, **options).as_data_source(spec.split)
        features = source.dataset_info.features
        rows = []
        for number, example in enumerate(source, start=1):
            row = Row(spec.text, number, {})
            row.columns.update({column: _json_types(value, features[column], row) for column, value in example.items()})
            rows.append(row)
    except UserError:
        raise
    except Exception as e:  # a damaged file, another format, an unknown name: each raises its own
        raise UserError(
            f"{spec.text} cannot be read ({explain(e)}); it must have been prepared, as array_record, in "
            f"{spec.directory or 'the folder of tensorflow-datasets'}"
        ) from e
    _hide_gpus(spec)
    return _require_rows(rows, spec.text)


def _json_types(value: Any, feature: Any, row: Row) -> Any:
    """Converts a feature's value to JSON types; a sequence of dicts, stored as a dict of lists, is restored."""
    inner = getattr(feature, "feature", None)
    if isinstance(value, dict):
        if inner is None:
            return {name: _json_types(item, feature[name], row) for name, item in value.items()}
        columns = {name: [_json_types(v, inner[name], row) for v in item] for name, item in value.items()}
        return [dict(zip(columns, item, strict=True)) for item in zip(*columns.values(), strict=True)]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{row.place} is not UTF-8 ({e.reason}); build the data set from UTF-8") from e
    if isinstance(value, np.ndarray | np.generic):
        return _json_types(value.tolist(), feature, row)
    if isinstance(value, list):
        return [_json_types(item, inner if inner is not None else feature, row) for item in value]
    return value


def _hide_gpus(spec: TfdsSpec) -> None:
    """Prevents an imported TensorFlow from taking the GPU memory that JAX needs."""
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        try:
            tensorflow.config.set_visible_devices([], "GPU")
        except RuntimeError as e:
            raise UserError(
                f"{spec.text}: TensorFlow has taken the GPU already ({e}); run without tensorflow, the "
                "data does not need it"
            ) from e
