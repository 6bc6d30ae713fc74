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
    """Returns the value as a float, also from numpy and torch numbers, but not from text."""
    if value is None or isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except Exception:  # a foreign __float__ may raise anything
        return None
    return number if math.isfinite(number) else None


def read_amounts(result: Mapping[str, Any], *, text: str, turns: int) -> tuple[str, Amounts] | None:
    """Returns ('characters' or 'turns', amounts) by the last character or by the turn; None without amounts.

    Raises ValueError with a readable reason.
    """
    given = {form: amounts for form in _FORMS if (amounts := _listed(result.get(form))) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"the function returned {' and '.join(given)}; return one of {', '.join(_FORMS)}")
    ((form, amounts),) = given.items()
    if form == "spans":
        return "characters", tuple(_span(span, len(text)) for span in amounts)
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
    placed = tuple((end, _amount(amount, form)) for end, amount in zip(ends, amounts, strict=True))
    return "characters" if form == "steps" else form, placed


def _listed(amounts: Any) -> list[Any] | None:
    """Returns the amounts; None for a number, which is a part of the score that has such a name."""
    try:
        return None if isinstance(amounts, str) else list(amounts)
    except TypeError:
        return None


def step_ends(text: str, delimiter: str) -> list[int]:
    """Returns the number of characters up to the end of each step."""
    ends, begin = [], 0
    for piece in text.split(delimiter):
        if piece.strip():
            ends.append(begin + len(piece))
        begin += len(piece) + len(delimiter)
    return ends


def _span(given: Any, length: int) -> tuple[int, float]:
    try:
        start, end, amount = given
        inside = 0 <= int(start) == start < end == int(end) <= length
    except (TypeError, ValueError, OverflowError):
        inside = False
    if not inside:
        raise ValueError(
            f"the function returned the span {short(given)} of a response of {length} characters; a span is (start,"
            " end, amount) with whole numbers 0 <= start < end, and end at most the number of characters"
        )
    return int(end), _amount(amount, "spans")


def _amount(given: Any, form: str) -> float:
    amount = finite(given)
    if amount is None:
        raise ValueError(f"the function returned the amount {short(given)} in {form}; it must be a finite number")
    return amount


def short(value: Any) -> str:
    """Shows a user's value in one line."""
    try:
        return re.sub(r"\s+", " ", repr(value))[:100]
    except Exception:  # a foreign __repr__ may raise anything, and that of an int with 5,000 digits does
        return type(value).__name__
