"""Shared parts of the preparation commands: reading a publisher's files and writing rows in verl's layout."""

import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jppo.data.rows import SUFFIXES, Row, checked_messages, make_directory, read_rows, text_column
from jppo.errors import UserError, escaped, expanded
from jppo.settings import Parser, exit_on_user_error

# DAPO's published prompt; the rule `math_dapo` reads the line of the answer.
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    " $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
RowSets = Mapping[str, list[dict[str, Any]]]  # rows by output file, without its suffix
_READ = (*SUFFIXES, ".jsonl.gz")


def rows_of(source: pathlib.Path, split: str = "") -> list[Row]:
    """Reads the rows of all files of a split below the directory `source`, ordered by path; '' is every file.

    A file belongs to a split by its own name (train.jsonl, train-00000-of-00001.parquet) or by a directory's (train/).
    """
    if not source.exists():
        raise UserError(f"--from={source} does not exist; name the directory of the downloaded data set")
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if _in_split(split, p, source))
    if not files:
        patterns = f"{split}.parquet, {split}-*.parquet, {split}.jsonl or {split}/*.json" if split else ", ".join(_READ)
        raise UserError(f"--from={source} has none of {patterns}; name the directory of the downloaded data set")
    return [row for file in files for row in read_rows(file)]


def _in_split(split: str, path: pathlib.Path, source: pathlib.Path) -> bool:
    """Whether a path below `source` is a data file of the split ('': any split) and not hidden."""
    folders = path.relative_to(source).parent.parts
    is_hidden = path.name.startswith(".") or any(folder.startswith(".") for folder in folders)
    is_named = not split or split in folders or re.match(rf"{split}(?![A-Za-z])", path.name) is not None
    return is_named and not is_hidden and path.name.endswith(_READ) and path.is_file()


def verl_row(
    prompt: str | list[dict[str, str]],
    truth: str,
    *,
    source: str,
    ability: str = "math",
    style: str = "rule",
    **extra: Any,
) -> dict[str, Any]:
    """Makes a row in verl's layout; a text prompt becomes the user's message, `extra` its extra_info."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": truth},
        "extra_info": extra,
    }


def checked_verl_row(row: Row, split: str) -> dict[str, Any]:
    """Returns a row that already has verl's layout, after checking its prompt, source and truth."""
    from jppo.data.prompts import ground_truth  # importing takes seconds, and most commands need none of it

    messages = checked_messages(row, "prompt", row.columns.get("prompt"))
    extra = {"split": split} | (row.columns.get("extra_info") or {})
    return verl_row(messages, ground_truth(row), source=text_column(row, "data_source"), **extra)


def deduplicate(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes duplicates: keeps the first row of each prompt and answer."""
    first_rows: dict[str, dict[str, Any]] = {}
    for row in rows:
        first_rows.setdefault(repr((row["prompt"], row["reward_model"]["ground_truth"])), row)
    return list(first_rows.values())


def write_parquet(sets: RowSets, out: pathlib.Path) -> dict[str, int]:
    """Writes each list of rows as OUT/NAME.parquet; returns the paths with their row counts."""
    counts = {}
    for name, rows in sets.items():
        path = out / f"{name}.parquet"
        make_directory(path.parent)
        try:
            pq.write_table(pa.Table.from_pylist(rows), path)
        except OSError as e:
            raise UserError(f"{path} cannot be written ({e.strerror}); name another --out") from e
        counts[str(path)] = len(rows)
    return counts


def command(name: str, about: str | None, make: Callable[[pathlib.Path], RowSets]) -> Callable[..., None]:
    """Makes a data set's command: `make` makes rows of the files in --from, and they are written to --out."""

    @exit_on_user_error
    def main(argv: Sequence[str] | None = None) -> None:
        parser = Parser(name, about)
        parser.add_argument(
            "--from", dest="source", type=expanded, required=True, help="directory of the data set's files"
        )
        parser.add_argument("--out", type=expanded, required=True, help="directory to write to")
        args = parser.parse_args(argv)
        for written, count in write_parquet(make(args.source), args.out).items():
            print(escaped(f"{written}: {count} rows"))

    return main
