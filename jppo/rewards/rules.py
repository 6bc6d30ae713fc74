"""The rules: pure functions of a response and the row's ground truth. `graders.py` maps sources to rules.

They run in the trainer and in worker processes, so only the standard library is imported here. A wrong or missing
answer is 0. A rule raises if it cannot judge, which the caller turns into the sample's error.
"""

import decimal
import logging
import re
from collections.abc import Callable
from typing import NamedTuple


class Verdict(NamedTuple):
    """The result of a rule."""

    score: float
    parts: dict[str, float]
    answer: str | None = None  # canonical form, equal for equal answers; '' without one; None: not extracted


Rule = Callable[[str, str], Verdict]  # (response, ground truth) -> verdict

_NUMBER = r"[-+]?\$?[-+]?[0-9.,]*[0-9][0-9.,]*"
_GSM8K_ANSWER = re.compile(rf"####[ \t]*({_NUMBER})")
# A minus right after a digit, a letter or a bracket is an operator: the last number of 10-4 is 4.
_ANY_NUMBER = re.compile(r"(?:(?<![\w)\]}])-)?(?:\$-?)?(?:\.?[0-9])[0-9.,]*")

# Statements of options. Lower case only in unambiguous places: (b), #### b, \boxed{b}.
# Every repetition is bounded or unambiguous: a response may be thousands of spaces.
_LETTER = r"[*_ ]{0,4}(?:\(\s?([A-Ea-e])\s?\)|([A-E])(?![A-Za-z0-9'^/]|\s?[=+^]|\*\w))"
_STATED = re.compile(
    "|".join(
        (
            rf"\b(?i:answer|ans|option|choice)\b\W{{0,4}}(?i:(?:is|be|will be|would be|must be)\b)?[\s:*]{{0,4}}"
            rf"(?i:option|choice)?{_LETTER}",
            r"(?<![A-Za-z0-9])([A-E])\)?[*_]{0,2} is (?:the )?(?:correct|right)\b",
            r"####[ \t]*\(?([A-Ea-e])\)?(?![A-Za-z0-9])",
            r"\\boxed\s*\{(?:\s|\\(?:text|textbf|mathrm|mathbf)\b|[{(])*([A-Ea-e])(?:[\s})]*|[).:][^{}]*)\}",
            r"^[ \t]*[*_]{0,3}\(?([A-E])[.)]?\)?[*_]{0,3}\.?[ \t]*$",
        )
    ),
    re.MULTILINE,
)
_CHOICE_STRICT = re.compile(r"####[ \t]*\(?([A-Ea-e])\)?(?![A-Za-z0-9])")


def gsm8k(response: str, ground_truth: str) -> Verdict:
    """1 when the number after the first `####` equals the truth.

    Thousands commas, a dollar sign and a final full stop are ignored. Numbers are compared exactly by value: 18.0 is
    18.
    """
    match = _GSM8K_ANSWER.search(response)
    return _number_verdict(None if match is None else match.group(1), ground_truth)


def gsm8k_flexible(response: str, ground_truth: str) -> Verdict:
    """1 if the last number of the response equals the truth; numbers as in `gsm8k`.

    Only written digits count: the last number of 1/2 is 2, of 5% it is 5.
    """
    found = _ANY_NUMBER.findall(response)
    return _number_verdict(found[-1] if found else None, ground_truth)


def exact(response: str, ground_truth: str) -> Verdict:
    """1 if the response equals the truth, except for surrounding white space."""
    score = float(response.strip() == ground_truth.strip())
    return Verdict(score, {"exact": score}, response.strip())


def behind_tools(response: str, ground_truth: str) -> Verdict:
    """1 if the text after the last `]]`, the end of a tool's answer in the plain format, equals the truth."""
    return exact(response.rpartition("]]")[2], ground_truth)


def mentions(response: str, ground_truth: str) -> Verdict:
    """1 if the response contains the truth, a word, in singular or plural and in any case."""
    return Verdict(float(re.search(rf"\b{re.escape(ground_truth)}s?\b", response, re.IGNORECASE) is not None), {})


def choice(response: str, ground_truth: str) -> Verdict:
    r"""1 if the last stated option is the truth, a letter from A to E.

    Stated is what follows `answer`, `option` or `choice` ('the answer is (B)', 'Ans: B'), 'B is correct',
    `#### B`, `\boxed{B}`, `\boxed{B) 5}`, and a letter that has a line to itself ('B', '(B)', '**B.**').
    """
    found = list(_STATED.finditer(response))
    letter = next(group for group in found[-1].groups() if group) if found else None
    return _letter_verdict(letter, ground_truth)


def choice_strict(response: str, ground_truth: str) -> Verdict:
    """1 if the letter after the first `####` is the truth, a letter from A to E."""
    match = _CHOICE_STRICT.search(response)
    return _letter_verdict(None if match is None else match.group(1), ground_truth)


def math_verify(response: str, ground_truth: str) -> Verdict:
    r"""1 when the last `\boxed{}` of the response equals the truth as mathematics, by math-verify.

    The truth may be boxed or not. 1/2 equals 0.5, and (x+1)^2 equals x^2+2x+1. Without a closed box the score is 0.
    Some formulas take long or much memory, so `graders.py` runs this rule in the pool.
    """
    truth = boxed(ground_truth) if r"\boxed" in ground_truth else ground_truth.strip().strip("$")
    if not truth:
        raise ValueError(f"ground_truth={ground_truth!r} has no answer")
    answer = boxed(response)
    if not answer:
        return Verdict(0.0, {"exact": 0.0, "answered": 0.0}, "")
    plain = "".join(answer.split())
    same = plain == "".join(truth.split()) or _equal(truth, answer)
    return Verdict(float(same), {"exact": float(same), "answered": 1.0}, plain)


def boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`, with nested braces; None without a closed one."""
    start = text.rfind(r"\boxed")
    opening = re.compile(r"\\boxed\s*\{").match(text, start) if start >= 0 else None
    if opening is None:
        return None
    depth, escaped = 1, False
    for i in range(opening.end(), len(text)):
        c = text[i]
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif c in "{}":
            depth += 1 if c == "{" else -1
            if depth == 0:
                return text[opening.end() : i].strip()
    return None


def _equal(truth: str, answer: str) -> bool:
    try:
        import math_verify as library  # half a second of sympy
    except ImportError as e:
        raise ImportError("the package math-verify is not installed; run `pip install 'jppo[math]'`") from e

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    config = [library.LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> object:
        # math-verify's own time limit is a signal, which only the main thread can have: the pool has a deadline
        return library.parse(rf"\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)

    of_truth = parsed(truth)
    if not of_truth:
        raise ValueError(f"ground_truth={truth!r} cannot be read as mathematics")
    return bool(library.verify(of_truth, parsed(answer), timeout_seconds=None))


def _letter_verdict(letter: str | None, ground_truth: str) -> Verdict:
    truth = ground_truth.strip().upper()
    if truth not in ("A", "B", "C", "D", "E"):
        raise ValueError(f"ground_truth={ground_truth!r} is not a letter from A to E")
    stated = "" if letter is None else letter.upper()
    score = float(stated == truth)
    return Verdict(score, {"exact": score, "answered": float(letter is not None)}, stated)


def _number_verdict(answer: str | None, ground_truth: str) -> Verdict:
    truth = _number(ground_truth)
    if truth is None:
        raise ValueError(f"ground_truth={ground_truth!r} is not a number")
    number = None if answer is None else _number(answer)
    score = float(number is not None and number == truth)
    return Verdict(
        score, {"exact": score, "answered": float(number is not None)}, "" if number is None else _one_form(number)
    )


def _one_form(number: decimal.Decimal) -> str:
    """Returns the same text for 18, 18.0 and 018, without rounding."""
    whole, _, rest = f"{abs(number) if number == 0 else number:f}".partition(".")
    return f"{whole}.{rest.rstrip('0')}".rstrip(".")


def _number(text: str) -> decimal.Decimal | None:
    """Parses a number; None for texts like 1.2.3."""
    try:
        number = decimal.Decimal(text.replace(",", "").replace("$", "").strip().rstrip("."))
    except decimal.InvalidOperation:
        return None
    return number if number.is_finite() else None
