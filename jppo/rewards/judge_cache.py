"""Scores that a judge has given before, in files: one an entry, shared by any number of processes."""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from jppo.config import UserError


class Cache:
    """Scores on 0..1 by what was asked of whom. An entry that cannot be read is none, and is written anew."""

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = pathlib.Path(folder).expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"reward.judge.cache_dir={str(folder)!r} cannot be made: {e}; choose another") from e

    def get(self, asked: Mapping[str, Any]) -> float | None:
        """The score of an entry, or None."""
        try:
            score = json.loads(self._file(asked).read_bytes())["score"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        known = isinstance(score, float | int) and not isinstance(score, bool)
        return float(score) if known and math.isfinite(score) and 0 <= score <= 1 else None

    def put(self, asked: Mapping[str, Any], score: float, reply: str) -> None:
        """Writes an entry, whole or not at all; `reply` is for people who look into it."""
        file = self._file(asked)
        file.parent.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        try:
            with open(handle, "w") as f:
                json.dump({"score": score, "reply": reply}, f)
            os.replace(name, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _file(self, asked: Mapping[str, Any]) -> pathlib.Path:
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest[2:]}.json"
