"""A file cache of judge scores: one file per entry, shared by any number of processes."""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from jppo.errors import expanded
from jppo.settings import UserError


class Cache:
    """Scores from 0 to 1, keyed by the request and the judge. An unreadable entry is ignored and rewritten."""

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = expanded(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"reward.judge.cache_dir={str(folder)!r} cannot be created: {e}; choose another") from e

    def get(self, asked: Mapping[str, Any]) -> float | None:
        """Returns the score of an entry, or None."""
        try:
            score = json.loads(self._file(asked).read_bytes())["score"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        known = isinstance(score, float | int) and not isinstance(score, bool)
        return float(score) if known and math.isfinite(score) and 0 <= score <= 1 else None

    def put(self, asked: Mapping[str, Any], score: float, reply: str) -> None:
        """Writes an entry atomically; `reply` is for human readers."""
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
