"""Fields of a model's config.json, each read with its type; an error names file, field and value."""

import math
from collections.abc import Mapping
from typing import Any

from jppo.settings import UserError

LARGEST = 1 << 40  # of a whole number: more than any model has
_REQUIRED = object()


class Fields:
    """The fields of one config.json."""

    def __init__(self, config: Mapping[str, Any], path: str):
        self.config, self.path = config, path

    def __contains__(self, key: str) -> bool:
        return self.config.get(key) is not None  # HF writes null for "the class's default"

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Returns the field's value, from 1 to `LARGEST` if it is a whole number."""
        value = self.config.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"{self.path}: {key} is missing; a model's config.json must give it")
            return default
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
            raise UserError(f"{self.path}: {key}={value!r} must be of type {kind.__name__}")
        try:
            result = kind(value)
        except OverflowError:
            result = math.inf
        if kind is float and not math.isfinite(result):
            raise UserError(f"{self.path}: {key}={value!r} must be a finite number")
        if kind is int and result < 1:
            raise UserError(f"{self.path}: {key}={value} must be positive")
        if kind is int and result > LARGEST:
            raise UserError(f"{self.path}: {key}={value} must be at most {LARGEST}")
        return result

    def from_zero(self, key: str, default: int) -> int:
        """Returns the value of a field that is a whole number, 0 or more."""
        if self.config.get(key) == 0:
            return 0
        value: int = self.get(key, int, default)
        return value

    def above_zero(self, key: str, default: float) -> float:
        """Returns the value of a field that is a number above 0."""
        value: float = self.get(key, float, default)
        if not value > 0:
            raise UserError(f"{self.path}: {key}={value!r} must be above 0")
        return value

    def or_null(self, key: str, kind: type, default: Any) -> Any:
        """Returns the same for a field in which null means none, and absence the default."""
        return self.get(key, kind, None) if key in self.config else default

    def refuse(self, key: str, why: str) -> UserError:
        """Makes the error of an unsupported field."""
        return UserError(f"{self.path}: {key}={self.config.get(key)!r} {why}")
