"""Writes GSM8K as a data set of tensorflow-datasets, in verl's layout and the rows' order, for `gsm8k.py`.

Stored as array_record, which is written and read without TensorFlow. It is not the registered data set gsm8k, which has
raw questions and answers; a folder holds only one of the two.
"""

import contextlib
import io
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jppo.data.tfds import MISSING
from jppo.settings import UserError

NAME = "gsm8k"
VERSION = "1.0.0"


def build(splits: Mapping[str, list[dict[str, Any]]], out: pathlib.Path) -> pathlib.Path:
    """Writes the rows of each split below `out`, replacing earlier output; returns the folder."""
    try:
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core import registered
    except ImportError as e:
        said = str(e).strip().partition("\n")[0]
        raise UserError(f"--tfds: {MISSING.format(said)}") from e
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
            name = NAME
            VERSION = tfds.core.Version(VERSION)
            code_path = None  # no checksums of downloads to look for

            def _info(self) -> Any:
                return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                return {split: self._generate_examples(rows) for split, rows in splits.items()}

            def _generate_examples(self, rows: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
                yield from enumerate(rows)

    shutil.rmtree(out / NAME / VERSION, ignore_errors=True)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it would print about a download
            builder = Builder(data_dir=str(out), file_format="array_record")
            builder.download_and_prepare()
    except Exception as e:  # tensorflow-datasets raises its own errors, and TensorFlow's if it needs that
        said = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
        raise UserError(
            f"--tfds: tensorflow-datasets could not write {out / NAME} ({said}); omit --tfds to write parquet"
        ) from e
    return pathlib.Path(builder.data_dir)
