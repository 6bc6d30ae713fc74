"""A row of data with its place for errors, and checks of its columns."""

import dataclasses
import sys
from typing import Any

from jppo.settings import UserError


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a source; `number` counts from 1 and is the line number in JSON lines."""

    source: str  # a file's path, or another name for errors
    number: int
    columns: dict[str, Any]
    unit: str = "row"

    @property
    def place(self) -> str:
        """Returns the row's place for error messages."""
        return f"{self.source}, {self.unit} {self.number}"


def text_column(row: Row, column: str) -> str:
    """Returns the text in `column`; a missing, empty or non-text value is an error that names file and row."""
    if column not in row.columns or row.columns[column] is None:
        raise UserError(f"{row.place} has no {column!r}; its columns are {', '.join(map(str, row.columns))}")
    return checked_text(row, column, row.columns[column])


def checked_text(row: Row, column: str, value: Any, *, blank: bool = False) -> str:
    """Returns `value` if it is text; only with `blank` may it be empty."""
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
    """Formats a value for errors in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_characters(row: Row, column: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as e:  # JSON can spell half of a surrogate pair, which tokenizers refuse
        raise UserError(
            f"{row.place}: {column} has {value[e.start]!r}, half of a surrogate pair, at character {e.start + 1}; "
            "write the whole character"
        ) from e
