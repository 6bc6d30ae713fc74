"""Makes GSM8K's prompts: `python -m jppo.data.gsm8k --out data/gsm8k`.

Writes train.parquet and test.parquet to that folder, or, with --tfds, a data set of tensorflow-datasets for
tfds:gsm8k/train@data/gsm8k and tfds:gsm8k/test@data/gsm8k.

The layout is verl's, so either project reads the other's files: the question with the recipe's suffix as one chat
message, and the text after `####` in the worked solution, without commas, as the ground truth.
"""

import contextlib
import io
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import numpy as np

from jppo.data import prepare
from jppo.data.rows import TFDS_MISSING, Row, make_directory, read_rows, text_column
from jppo.errors import UserError, escaped, expanded, first_line
from jppo.registry import explain
from jppo.settings import Parser, exit_on_user_error

_SUFFIX = 'Let\'s think step by step and output the final answer after "####".'
TFDS_NAME, TFDS_VERSION = "gsm8k", "1.0.0"
SPLITS = ("train", "test")
COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
_SOURCE = f"https://raw.githubusercontent.com/openai/grade-school-math/{COMMIT}/grade_school_math/data"

_ANSWER = re.compile(r"#### *(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*\Z")


def _example(row: Row, split: str) -> dict[str, Any]:
    """Converts a row with `question` and `answer` to verl's layout."""
    question, answer = text_column(row, "question"), text_column(row, "answer")
    match = _ANSWER.search(answer)
    if match is None:
        raise UserError(f"{row.place}: the answer must end with `#### <number>`; it ends with {answer[-40:]!r}")
    extra: dict[str, Any] = dict(split=split, index=row.number - 1, question=question, answer=answer)
    truth = match.group(1).replace(",", "")
    return prepare.verl_row(f"{question} {_SUFFIX}", truth, source="openai/gsm8k", **extra)


def _rows_of_splits(source: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each split from the JSON lines in `source`."""
    for split in SPLITS:
        if not (source / f"{split}.jsonl").is_file():
            raise UserError(f"no {source / f'{split}.jsonl'}; --from must have train.jsonl and test.jsonl")
    return {split: [_example(row, split) for row in read_rows(source / f"{split}.jsonl")] for split in SPLITS}


def convert(source: pathlib.Path, out: pathlib.Path, *, tfds: bool = False) -> dict[str, int]:
    """Writes each split of the JSON lines in `source`, as parquet or with tfds; returns row counts."""
    splits = _rows_of_splits(source)
    if tfds:
        make_directory(out)
        write_tfds(splits, out)
        return {f"tfds:{TFDS_NAME}/{split}@{out}": len(rows) for split, rows in splits.items()}
    return prepare.write_parquet(splits, out)


def download(directory: pathlib.Path) -> None:
    """Downloads the JSON lines of both splits from OpenAI's repository."""
    for split in SPLITS:
        url = f"{_SOURCE}/{split}.jsonl"
        try:
            response = httpx.get(url, timeout=60.0, follow_redirects=True).raise_for_status()
        except httpx.HTTPError as e:
            raise UserError(
                f"{url} could not be fetched ({type(e).__name__}: {e}); get train.jsonl and test.jsonl of "
                "openai/grade-school-math on a machine with a network, and pass their directory by --from"
            ) from e
        (directory / f"{split}.jsonl").write_bytes(response.content)


def write_tfds(splits: Mapping[str, list[dict[str, Any]]], out: pathlib.Path) -> None:
    """Writes the rows of each split below `out` with tensorflow-datasets, in their order, replacing earlier output.

    Stored as array_record, which is written and read without TensorFlow. It is not the registered data set gsm8k, which
    has raw questions and answers; a folder holds only one of the two.
    """
    try:
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core import registered
    except ImportError as e:
        raise UserError(f"--tfds: {TFDS_MISSING.format(first_line(e))}") from e
    text = tfds.features.Text
    features = tfds.features.FeaturesDict(
        {
            "data_source": text(),
            "prompt": tfds.features.Sequence({"role": text(), "content": text()}),
            "ability": text(),
            "reward_model": {"style": text(), "ground_truth": text()},
            "extra_info": {"split": text(), "index": np.int64, "question": text(), "answer": text()},
        }
    )

    with registered.skip_registration():

        class Builder(tfds.core.GeneratorBasedBuilder):
            name = TFDS_NAME
            VERSION = tfds.core.Version(TFDS_VERSION)
            code_path = None  # no checksums of downloads to look for

            def _info(self) -> Any:
                return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                return {split: self._generate_examples(rows) for split, rows in splits.items()}

            def _generate_examples(self, rows: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
                yield from enumerate(rows)

    shutil.rmtree(out / TFDS_NAME / TFDS_VERSION, ignore_errors=True)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it would print about a download
            Builder(data_dir=str(out), file_format="array_record").download_and_prepare()
    except Exception as e:  # tensorflow-datasets raises its own errors, and TensorFlow's if it needs that
        raise UserError(
            f"--tfds: tensorflow-datasets could not write {out / TFDS_NAME} ({explain(e)}); omit --tfds to write"
            " parquet"
        ) from e


@exit_on_user_error
def main() -> None:
    """Writes GSM8K's splits from downloaded files, or from the files of --from."""
    parser = Parser("jppo.data.gsm8k", __doc__)
    parser.add_argument("--out", type=expanded, required=True, help="directory to write to")
    parser.add_argument("--from", dest="source", type=expanded, help="directory with train.jsonl and test.jsonl")
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
