"""Sources of rows: files, prepared data sets of tensorflow-datasets, or a custom class.

A setting such as data.train_files lists sources, separated by commas: PATH.parquet, PATH.jsonl, PATH.json, or
tfds:NAME/SPLIT[@DIR]. With data.custom_cls=PATH.py:CLASS each entry is passed to the class: CLASS(entry,
tokenizer=tokenizer) must be an iterable of rows, dicts with the columns of a file. Data is never run as code; the
custom class is.
"""

import dataclasses
import functools
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jppo.data import tfds
from jppo.data.files import SUFFIXES, read_rows
from jppo.data.rows import Row, brief
from jppo.errors import expanded
from jppo.registry import resolve, said
from jppo.settings import UserError

FORMS = f"{', '.join(SUFFIXES)} or {tfds.PREFIX}NAME/SPLIT"


@dataclasses.dataclass(frozen=True)
class Source:
    """The rows of one entry of a list of sources."""

    name: str  # a file's stem or NAME/SPLIT; the whole entry if that is not unique
    rows: list[Row]


NAMED_BY = {"prompt": "data.prompt_key", "data_source": "data.reward_fn_key"}


def read_sources(
    entries: str,
    setting: str,
    *,
    custom_cls: str = "",
    tokenizer: Any = None,
    columns: Mapping[str, str] = types.MappingProxyType({}),
) -> list[Source]:
    """Reads the rows of all sources in a comma-separated list, in order; `columns` are other names for jppo's."""
    listed = [entry.strip() for entry in entries.split(",") if entry.strip()]
    if not listed:
        raise UserError(f"{setting}={entries!r} names no file; give one or more of {FORMS}, separated by commas")
    for i, entry in enumerate(listed):
        if entry in listed[:i]:
            raise UserError(f"{setting} lists {entry} twice; a source may be listed once")
    if custom_cls:
        rows_of = functools.partial(_custom_rows, resolve(custom_cls, "data.custom_cls"), custom_cls, tokenizer)
        readers = [(functools.partial(rows_of, entry), pathlib.PurePath(entry).stem) for entry in listed]
    else:
        readers = [_reader(entry, setting) for entry in listed]  # checks that all exist before reading one
    short = [name for _, name in readers]
    names = [name if short.count(name) == 1 else entry for name, entry in zip(short, listed, strict=True)]
    other = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    found = [Source(name, read()) for name, (read, _) in zip(names, readers, strict=True)]
    return [Source(one.name, [_renamed(row, other) for row in one.rows]) for one in found] if other else found


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    for ours, theirs in columns.items():
        if theirs not in row.columns:
            raise UserError(
                f"{row.place} has no {theirs!r}, which {NAMED_BY[ours]} names; its columns are"
                f" {', '.join(map(str, row.columns))}"
            )
    kept = {name: value for name, value in row.columns.items() if name not in (*columns, *columns.values())}
    return dataclasses.replace(row, columns=kept | {ours: row.columns[theirs] for ours, theirs in columns.items()})


def _reader(entry: str, setting: str) -> tuple[functools.partial[list[Row]], str]:
    """Returns a reader of an entry, after checking that it exists, and its short name."""
    if entry.startswith(tfds.PREFIX):
        spec = tfds.parse(entry, setting)
        return functools.partial(tfds.read_rows, spec), f"{spec.name}/{spec.split}"
    path = expanded(entry)
    if path.suffix not in SUFFIXES:
        raise UserError(f"{setting}: {path} ends in {path.suffix!r}; data sources are {FORMS}")
    if not path.is_file():
        raise UserError(f"{setting}: no file {path}; use the path of a {', '.join(SUFFIXES)} file")
    return functools.partial(read_rows, path), path.stem


def _custom_rows(cls: Callable[..., Iterable[Any]], spec: str, tokenizer: Any, entry: str) -> list[Row]:
    where = f"data.custom_cls={spec} of {entry!r}"
    rows: list[Row] = []
    try:
        for number, columns in enumerate(cls(entry, tokenizer=tokenizer), start=1):
            if not isinstance(columns, dict):
                raise UserError(f"{where}, row {number} is {brief(columns)}; each row must be a dict of columns")
            rows.append(Row(where, number, columns))
    except UserError:
        raise
    except Exception as e:  # and so may its class
        after = f"after row {len(rows)}" if rows else "before the first row"
        raise UserError(f"{where} failed {after} ({said(e)}); fix the class") from e
    if not rows:
        raise UserError(f"{where} has no rows; at least one is needed")
    return rows
