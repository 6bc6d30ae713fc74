"""Makes GSM8K's prompts: `python -m jppo.data.gsm8k --out data/gsm8k`.

Writes train.parquet and test.parquet to that folder, or, with --tfds, a data set of tensorflow-datasets for
tfds:gsm8k/train@data/gsm8k and tfds:gsm8k/test@data/gsm8k.

The layout is verl's, so either project reads the other's files: the question with the recipe's suffix as one chat
message, and the text after `####` in the worked solution, without commas, as the ground truth.
"""

import pathlib
import re
import tempfile
from typing import Any

import httpx

from jppo.data import gsm8k_tfds, prepare
from jppo.data.files import make_directory, read_rows
from jppo.data.rows import Row, text_column
from jppo.errors import escaped
from jppo.settings import Parser, UserError, exit_on_user_error

SUFFIX = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")
COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
SOURCE = f"https://raw.githubusercontent.com/openai/grade-school-math/{COMMIT}/grade_school_math/data"

_ANSWER = re.compile(r"#### *(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*\Z")


def example(row: Row, split: str) -> dict[str, Any]:
    """Converts a row with `question` and `answer` to verl's layout."""
    question, answer = text_column(row, "question"), text_column(row, "answer")
    match = _ANSWER.search(answer)
    if match is None:
        raise UserError(f"{row.place}: the answer must end with `#### <number>`; it ends with {answer[-40:]!r}")
    extra: dict[str, Any] = dict(split=split, index=row.number - 1, question=question, answer=answer)
    truth = match.group(1).replace(",", "")
    return prepare.example(f"{question} {SUFFIX}", truth, source="openai/gsm8k", **extra)


def examples(source: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each split from the JSON lines in `source`."""
    for split in SPLITS:
        if not (source / f"{split}.jsonl").is_file():
            raise UserError(f"no {source / f'{split}.jsonl'}; --from must have train.jsonl and test.jsonl")
    return {split: [example(row, split) for row in read_rows(source / f"{split}.jsonl")] for split in SPLITS}


def convert(source: pathlib.Path, out: pathlib.Path, *, tfds: bool = False) -> dict[str, int]:
    """Writes each split of the JSON lines in `source`, as parquet or with tfds; returns row counts."""
    splits = examples(source)
    if tfds:
        make_directory(out)
        gsm8k_tfds.build(splits, out)
        return {f"tfds:{gsm8k_tfds.NAME}/{split}@{out}": len(rows) for split, rows in splits.items()}
    return prepare.write(splits, out)


def download(directory: pathlib.Path) -> None:
    """Downloads the JSON lines of both splits from OpenAI's repository."""
    for split in SPLITS:
        url = f"{SOURCE}/{split}.jsonl"
        try:
            response = httpx.get(url, timeout=60.0, follow_redirects=True).raise_for_status()
        except httpx.HTTPError as e:
            raise UserError(
                f"{url} could not be fetched ({type(e).__name__}: {e}); get train.jsonl and test.jsonl of "
                "openai/grade-school-math on a machine with a network, and pass their directory by --from"
            ) from e
        (directory / f"{split}.jsonl").write_bytes(response.content)


@exit_on_user_error
def main() -> None:
    """Runs the command line."""
    parser = Parser("jppo.data.gsm8k", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--from", dest="source", type=pathlib.Path, help="directory with train.jsonl and test.jsonl")
    parser.add_argument("--tfds", action="store_true", help="write a data set of tensorflow-datasets")
    args = parser.parse_args()
    if args.source is not None:
        counts = convert(args.source, args.out, tfds=args.tfds)
    else:
        with tempfile.TemporaryDirectory() as directory:
            download(pathlib.Path(directory))
            counts = convert(pathlib.Path(directory), args.out, tfds=args.tfds)
    for written, count in counts.items():
        print(escaped(f"{written}: {count} rows"))


if __name__ == "__main__":
    main()
