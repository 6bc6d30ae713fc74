"""Rewards earned inside a response, as a custom function's result has them. Pure.

A result is a dict with one of

    spans: [(start, end, amount), ...]     characters of the response
    steps: [amount, ...]                   texts between delimiters, which `delimiter` sets; blank ones are no steps
    turns: [amount, ...]                   turns of the policy

An amount is earned at the last token of its span, step or turn; `parts.at_characters` finds that. Standard library
only: workers import this file.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

_FORMS = ("spans", "steps", "turns")
DELIMITER = "\n\n"  # of steps

Amounts = tuple[tuple[int, float], ...]  # (place, amount)


def finite(value: Any) -> float | None:
    """Converts numbers, also of numpy and torch, to a finite float; None for text and all other values."""
    if value is None or isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except Exception:  # a foreign __float__ may raise anything
        return None
    return number if math.isfinite(number) else None


def read_amounts(result: Mapping[str, Any], *, text: str, turns: int) -> tuple[str, Amounts] | None:
    """Reads the amounts of a custom function's result: ('characters' or 'turns', (place, amount) pairs), or None."""
    amounts_by_form = {form: amounts for form in _FORMS if (amounts := _as_list(result.get(form))) is not None}
    if not amounts_by_form:
        return None
    if len(amounts_by_form) > 1:
        raise ValueError(f"the function returned {' and '.join(amounts_by_form)}; return one of {', '.join(_FORMS)}")
    ((form, amounts),) = amounts_by_form.items()
    if form == "spans":
        return "characters", tuple(_read_span(span, len(text)) for span in amounts)
    ends, rule = list(range(turns)), "one for each"
    if form == "steps":
        delimiter = result.get("delimiter", DELIMITER)
        if not isinstance(delimiter, str) or not delimiter:
            raise ValueError(f"the function returned delimiter={short(delimiter)}; it must be a text, and not empty")
        ends, rule = step_ends(text, delimiter), f"one for each text between delimiter={delimiter!r} that is not blank"
    if len(amounts) != len(ends):
        raise ValueError(
            f"the function returned {len(amounts)} amounts for the {len(ends)} {form} of the response; return {rule}"
        )
    placed_amounts = tuple((end, _read_amount(amount, form)) for end, amount in zip(ends, amounts, strict=True))
    return "characters" if form == "steps" else form, placed_amounts


def _as_list(amounts: Any) -> list[Any] | None:
    """Returns the amounts as a list; None for a number or a text: a function may name an ordinary part so."""
    try:
        return None if isinstance(amounts, str) else list(amounts)
    except TypeError:
        return None


def step_ends(text: str, delimiter: str) -> list[int]:
    """Returns for each step that is not blank the number of characters up to its end."""
    ends, begin = [], 0
    for piece in text.split(delimiter):
        if piece.strip():
            ends.append(begin + len(piece))
        begin += len(piece) + len(delimiter)
    return ends


def _read_span(span: Any, length: int) -> tuple[int, float]:
    """Returns the end and the amount of a span (start, end, amount); ValueError if it is outside the response."""
    try:
        start, end, amount = span
        valid = 0 <= int(start) == start < end == int(end) <= length
    except (TypeError, ValueError, OverflowError):
        valid = False
    if not valid:
        raise ValueError(
            f"the function returned the span {short(span)} of a response of {length} characters; a span is (start,"
            " end, amount) with whole numbers 0 <= start < end, and end at most the number of characters"
        )
    return int(end), _read_amount(amount, "spans")


def _read_amount(value: Any, form: str) -> float:
    """Returns an amount of the custom function as a float; ValueError if it is not finite."""
    amount = finite(value)
    if amount is None:
        raise ValueError(f"the function returned the amount {short(value)} in {form}; it must be a finite number")
    return amount


def short(value: Any) -> str:
    """Returns a user's value as one line of at most 100 characters, for errors."""
    try:
        return re.sub(r"\s+", " ", repr(value))[:100]
    except Exception:  # a foreign __repr__ may raise anything, and that of an int with 5,000 digits does
        return type(value).__name__
