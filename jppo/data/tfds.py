"""Rows of data sets that tensorflow-datasets has prepared on disk: `tfds:NAME/SPLIT` or `tfds:NAME/SPLIT@DIR`.

Reads them as a data source without TensorFlow, so the data set must be stored as array_record or parquet, which have
random access. Nothing is downloaded or built. NAME may have a config and a version, as in gsm8k:1.0.0; SPLIT may be a
slice, as in train[:90%]. Without DIR it is tensorflow-datasets' default folder.
"""

import sys
from typing import Any, NamedTuple

import numpy as np

from jppo.data.rows import Row
from jppo.settings import UserError

PREFIX = "tfds:"
MISSING = "tensorflow-datasets cannot be imported ({}); pip install 'jppo[tfds]'"


class Spec(NamedTuple):
    """One split of one data set."""

    text: str  # as in the setting
    name: str
    split: str
    directory: str | None


def parse(entry: str, setting: str) -> Spec:
    """Parses tfds:NAME/SPLIT@DIR."""
    of, at, directory = entry.removeprefix(PREFIX).partition("@")
    name, slash, split = of.rpartition("/")
    if not (slash and name and split) or (at and not directory):
        raise UserError(f"{setting}: {entry!r} must be {PREFIX}NAME/SPLIT or {PREFIX}NAME/SPLIT@DIR")
    return Spec(entry, name, split, directory or None)


def read_rows(spec: Spec) -> list[Row]:
    """Reads all rows of the split, with text as str."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as e:
        raise UserError(f"{spec.text}: {MISSING.format(_said(e))}") from e
    _hide_gpus(spec)
    where = {} if spec.directory is None else {"data_dir": spec.directory}
    try:
        # Like tfds.data_source, which would prefer code of the same name to the files.
        source = tfds.core.read_only_builder.builder_from_files(spec.name, **where).as_data_source(spec.split)
        features = source.dataset_info.features
        rows = []
        for number, example in enumerate(source, start=1):
            row = Row(spec.text, number, {})
            row.columns.update({column: _plain(value, features[column], row) for column, value in example.items()})
            rows.append(row)
    except UserError:
        raise
    except Exception as e:  # a damaged file, another format, an unknown name: each raises its own
        raise UserError(
            f"{spec.text} cannot be read ({_said(e)}); it must have been prepared, as array_record, in "
            f"{spec.directory or 'the folder of tensorflow-datasets'}"
        ) from e
    _hide_gpus(spec)
    if not rows:
        raise UserError(f"{spec.text} has no rows; at least one is needed")
    return rows


def _plain(value: Any, feature: Any, row: Row) -> Any:
    """Converts a feature's value to JSON types; a sequence of dicts, stored as a dict of lists, is restored."""
    inner = getattr(feature, "feature", None)
    if isinstance(value, dict):
        if inner is None:
            return {name: _plain(each, feature[name], row) for name, each in value.items()}
        columns = {name: [_plain(v, inner[name], row) for v in each] for name, each in value.items()}
        return [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{row.place} is not UTF-8 ({e.reason}); build the data set from UTF-8") from e
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), feature, row)
    if isinstance(value, list):
        return [_plain(each, inner if inner is not None else feature, row) for each in value]
    return value


def _hide_gpus(spec: Spec) -> None:
    """Prevents an imported TensorFlow from taking the GPU memory that JAX needs."""
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        try:
            tensorflow.config.set_visible_devices([], "GPU")
        except RuntimeError as e:
            raise UserError(
                f"{spec.text}: TensorFlow has taken the GPU already ({e}); run without tensorflow, the "
                "data does not need it"
            ) from e


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
