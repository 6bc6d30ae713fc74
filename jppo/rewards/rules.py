r"""The rules: pure functions of a response and the row's ground truth. `graders.py` maps sources to rules.

jppo's own read answers as numbers, letters or mathematics. Below them are those of verl 0.9.1 for its own data sources:
the same score for the same response and truth, reimplemented from their behaviour, quirks included, and tested against
`tests/rewards/golden`. They are linear in the length of a response. Their truths are compared as text, so but for
`search_r1` none is rejected: if no answer can equal it, every answer scores as wrong.

Rules run in the trainer and in worker processes, so only the standard library is imported here. A wrong or missing
answer is 0, of `math_dapo` -1. A rule raises if it cannot judge, which the caller turns into the sample's error.
"""

import decimal
import functools
import json
import logging
import re
import string
from collections.abc import Callable
from typing import NamedTuple


class Verdict(NamedTuple):
    """The result of a rule."""

    score: float
    parts: dict[str, float]
    answer: str | None = None  # canonical form, equal for equal answers; '' without one; None: not extracted


Rule = Callable[[str, str], Verdict]  # (response, ground truth) -> verdict

_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"  # hyphens and minuses of Unicode
_AS_MINUS = str.maketrans(dict.fromkeys(_MINUS, "-"))
_SIGN, _CURRENCY = f"[-+{_MINUS}]", r"(?:\\?[$€£¥₹])"
_IGNORED = re.compile(f",|{_CURRENCY}")
# Commas only between groups of three digits. Possessive: of 1,80 and 1.8.0 no part is a number.
_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++"
_NUMBER = re.compile(rf"{_SIGN}?{_CURRENCY}?{_SIGN}?(?>{_DIGITS})")
_GSM8K_ANSWER = re.compile(rf"####[ \t]*(?={_SIGN}?{_CURRENCY}?{_SIGN}?\.?[0-9])")
# After a number: a unit, closing punctuation and markup, then the end of the line, the sentence or the word.
_UNIT = r"(?:[cmk]m|ft|mi|mph|[km]?g|lbs?|oz|m[lL]|hrs?|mins?|secs?|[ap]m|USD|dollars?|cents?)\b"
_CLOSING = r"""(?:[.,;:?%‰°*_`"'’”»)\]}>|~$€£¥₹¢]|\\[)\]%$])"""
# In the same line, a digit or an operator with one goes on with it: 18 / 2, 18 000, 1 1/2.
_GOES_ON = r"""(?:[^\w\s(\[{"'#=≈]*+|x)[^\S\n]*+[0-9½¼¾π]|√|\\(?:times|cdot|div|[dt]?frac|sqrt|pi)"""
_END = re.compile(rf"(?:{_UNIT})?{_CLOSING}*+(?:$|\n|</|<\||(?<=[.;?])\s|[^\S\n]++(?!{_GOES_ON}))")
# A minus right after a digit, a letter or a bracket is an operator: the last number of 10-4 is 4.
_ANY_NUMBER = re.compile(rf"(?:(?<![\w)\]}}]){_SIGN})?(?:[$€£¥₹]{_SIGN}?)?\.?[0-9][0-9.,]*")

# Statements of options. Lower case only in unambiguous places: (b), #### b, \boxed{b}.
# Every repetition is bounded or unambiguous: a response may be thousands of spaces.
_ALONE = r"(?![A-Za-z0-9'^/]|\s?[=+^]|\*\w)"
_LETTER = rf"[*_ ]{{0,4}}(?:\(\s?([A-Ea-e])\s?\)|([A-E]){_ALONE})"
_AFTER_MARK = rf"####[ \t]*\(?([A-Ea-e])\)?+{_ALONE}"
_STATED = re.compile(
    "|".join(
        (
            rf"\b(?i:answer|ans|option|choice)\b\W{{0,4}}(?i:(?:is|be|will be|would be|must be)\b)?[\s:*]{{0,4}}"
            rf"(?i:option|choice)?{_LETTER}",
            r"(?<![A-Za-z0-9])([A-E])\)?[*_]{0,2} is (?:the )?(?:correct|right)\b",
            _AFTER_MARK,
            r"\\boxed\s*\{(?:\s|\\(?:text|textbf|mathrm|mathbf)\b|[{(])*([A-Ea-e])(?:[\s})]*|[).:][^{}]*)\}",
            r"^[ \t]*[*_]{0,3}\(?([A-E])[.)]?\)?[*_]{0,3}\.?[ \t]*$",
        )
    ),
    re.MULTILINE,
)
_CHOICE_STRICT = re.compile(_AFTER_MARK)


def gsm8k(response: str, ground_truth: str) -> Verdict:
    """1 when the number after the first `####` equals the truth; numbers are compared exactly by value.

    It may have a sign, a currency, commas between groups of three digits, and a unit. The line, the sentence or the
    word ends behind it: 18/2, 18^2, 18:30 and 1,8 are no numbers.
    """
    match = _GSM8K_ANSWER.search(response)
    number = None if match is None else _NUMBER.match(response, match.end())
    ends_there = number is not None and _END.match(response, number.end()) is not None
    return _number_verdict(number.group() if number is not None and ends_there else None, ground_truth)


def gsm8k_flexible(response: str, ground_truth: str) -> Verdict:
    """1 if the last number of the response equals the truth; numbers as in `gsm8k`.

    Only written digits count: the last number of 1/2 is 2, of 5% it is 5. 1,8 and 1.2.3 are no numbers.
    """
    numbers = _ANY_NUMBER.findall(response)
    is_number = bool(numbers) and _NUMBER.fullmatch(numbers[-1].rstrip(".,")) is not None
    return _number_verdict(numbers[-1] if is_number else None, ground_truth)


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
    matches = list(_STATED.finditer(response))
    letter = next(group for group in matches[-1].groups() if group) if matches else None
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
    truth = _respelled(boxed(ground_truth) if r"\boxed" in ground_truth else ground_truth.strip().strip("$"))
    if not truth:
        raise ValueError(f"ground_truth={ground_truth!r} has no answer")
    answer = _respelled(boxed(response))
    if not answer:
        return _verdict(False, None)
    plain = _SPACE.sub("", answer)
    return _verdict(plain == _SPACE.sub("", truth) or _equal_as_math(truth, answer), plain)


_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")  # between two digits one has a meaning
_GAP = r"(?:\\[,;:! ]|[ ~])+"
_GAP_OF_GROUPS = re.compile(rf"(?<=[0-9]){_GAP}(?=[0-9]{{3}}(?![0-9/]))")
_MIXED = re.compile(rf"(?<![0-9.])([0-9]+){_GAP}([0-9]+)/([0-9]+)")
_CLOSING_MARK = re.compile(r"(?<![\\.]) ?[.,;:]\Z")  # not of a space, as \;, or of an ellipsis


def _respelled(formula: str | None) -> str:
    r"""Returns a formula as math-verify reads it: 1\,234 or 1 234 is 1234, 3 1/2 is 3\frac{1}{2}, and 5. is 5."""
    text = _CLOSING_MARK.sub("", " ".join((formula or "").split()))
    return _MIXED.sub(r"\1\\frac{\2}{\3}", _GAP_OF_GROUPS.sub("", text))


_WORD = r"(?:[^\s{}$]|\{(?:[^{}]|\{[^{}]*\})*\})+"
_BOX = re.compile(rf"\\boxed(?![A-Za-z])\s*+(?:(\{{)|((?:\\\$|[^\n$])+?)(?:\$|\\[)\]])|({_WORD}))")


def boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`, with nested braces, or of `\boxed 42`; None without a closed one.

    The latter ends with its formula, or in plain text with its word.
    """
    start = text.rfind(r"\boxed")
    opening = _BOX.match(text, start) if start >= 0 else None
    if opening is None or not opening.group(1):
        return None if opening is None else (opening.group(2) or opening.group(3).rstrip(".,;:")).strip()
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


def _equal_as_math(truth: str, answer: str) -> bool:
    """Whether two formulas are equal by math-verify; ValueError if the truth cannot be parsed."""
    try:
        import math_verify as library  # half a second of sympy
    except ImportError as e:
        raise ImportError("the package math-verify is not installed; run `pip install 'jppo[math]'`") from e

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    config = [library.LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> object:
        # math-verify's own time limit is a signal, which only the main thread can have: the pool has a deadline
        return library.parse(rf"\boxed{{{text}}}", extraction_config=config, parsing_timeout=None)

    parsed_truth = parsed(truth)
    if not parsed_truth:
        raise ValueError(f"ground_truth={truth!r} cannot be read as mathematics")
    return bool(library.verify(parsed_truth, parsed(answer), timeout_seconds=None))


def _verdict(right: bool, answer: str | None, score: float | None = None) -> Verdict:
    """Returns the verdict on an answer, None without one; the score is 1 or 0 unless it is given."""
    parts = {"exact": float(right), "answered": float(answer is not None)}
    return Verdict(float(right) if score is None else score, parts, answer or "")


def _letter_verdict(letter: str | None, ground_truth: str) -> Verdict:
    """Compares a stated option with the truth; ValueError if the truth is no letter from A to E."""
    truth = ground_truth.strip().upper()
    if truth not in ("A", "B", "C", "D", "E"):
        raise ValueError(f"ground_truth={ground_truth!r} is not a letter from A to E")
    stated = None if letter is None else letter.upper()
    return _verdict(stated == truth, stated)


def _number_verdict(answer: str | None, ground_truth: str) -> Verdict:
    """Compares a number's text with the truth by value; ValueError if the truth is no number."""
    truth = _number(ground_truth)
    if truth is None:
        raise ValueError(f"ground_truth={ground_truth!r} is not a number")
    number = None if answer is None else _number(answer)
    return _verdict(number == truth, None if number is None else _canonical(number))


def _canonical(number: decimal.Decimal) -> str:
    """Returns a number's only spelling, without rounding: the same for 18, 18.0 and 018."""
    integer, _, fraction = f"{abs(number) if number == 0 else number:f}".partition(".")
    return f"{integer}.{fraction.rstrip('0')}".rstrip(".")


def _number(text: str) -> decimal.Decimal | None:
    """Parses a number with commas, currency and any minus; None for texts like 1.2.3."""
    try:
        number = decimal.Decimal(_IGNORED.sub("", text.translate(_AS_MINUS)).strip().rstrip("."))
    except decimal.InvalidOperation:
        return None
    return number if number.is_finite() else None


_GSM8K = re.compile(r"#### (-?[0-9.,]+)")
_GSM8K_END = 300  # characters of the response that are read
_SHORT_FRACTION = re.compile(r"([0-9]+|-[0-9]+)/([0-9]+|-[0-9]+)")

_DAPO_END, _DAPO_BOX_END = 300, 100
_DAPO_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NO_ANSWER = "[INVALID]"
# The normalisation of Minerva (Lewkowycz et al. 2022, appendix D): replaced in this order, then removed in this order.
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{(.*{lazy})\}}") for name, lazy in
                   (("text", "?"), ("textbf", "?"), ("overline", "?"), ("boxed", "")))  # fmt: skip

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MANY_TAGS = 10


def gsm8k_strict(response: str, ground_truth: str) -> Verdict:
    """1 if the number after the last `#### ` of the last 300 characters is the truth, as text without commas."""
    numbers = _GSM8K.findall(response[-_GSM8K_END:])
    answer = numbers[-1].replace(",", "") if numbers else None
    return _verdict(answer == ground_truth, answer)


def math_reward(response: str, ground_truth: str) -> Verdict:
    r"""1 if the last `\boxed{}`, or the text from the last `\boxed ` to a `$`, equals the truth, both normalised.

    The normalisation of Hendrycks et al. 2021: spellings of fractions and roots, units, degrees and percent.
    """
    answer = last_box(response)
    if answer is None:
        return _verdict(False, None)
    try:
        is_equal = _normalize_hendrycks(answer) == _normalize_hendrycks(ground_truth)
    except ValueError:  # one of them cannot be normalised: both are compared as written
        is_equal = answer == ground_truth
    return _verdict(is_equal, answer)


def math_dapo(response: str, ground_truth: str) -> Verdict:
    r"""1, else -1: the text after the last `Answer:` of the last 300 characters is the truth, both normalised.

    Without an `Answer:`, the last `\boxed{}` of the last 100 characters is compared with the truth as text.
    """
    answers = _DAPO_ANSWER.findall(response[-_DAPO_END:])
    answer: str | None = _normalize_minerva(answers[-1] if answers else _NO_ANSWER)
    right = answer == _normalize_minerva(ground_truth)
    if answer == _NO_ANSWER:
        end = response[-_DAPO_BOX_END:]
        start = end.rfind(r"\boxed{")
        box = None if start < 0 else _to_closing_brace(end[start:])
        answer = None if box is None else box[len(r"\boxed{") : -1]
        right = right if answer is None else answer == ground_truth
    return _verdict(right, answer, 1.0 if right else -1.0)


def search_r1(response: str, ground_truth: str) -> Verdict:
    """1 if the last `<answer>` is one of the truths, ignoring case, punctuation, articles and white space.

    The truth is text, or JSON with one text or a list of texts as `target`. More than ten opening or closing tags cost
    three quarters of the score.
    """
    answer = _last_answer(response)
    accepted = {_normalize_words(target) for target in _read_targets(ground_truth)}
    right = answer is not None and _normalize_words(answer) in accepted
    too_many_tags = max(response.count("<answer>"), response.count("</answer>")) > _MANY_TAGS
    return _verdict(right, answer, (0.25 if too_many_tags else 1.0) * right)


def _normalize_hendrycks(text: str) -> str:
    """Normalises a formula by the rules of Hendrycks et al.; ValueError if they fail."""
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""),
                     (r"\right", ""), (r"^{\circ}", ""), (r"^\circ", ""), (r"\$", "")):  # fmt: skip
        text = text.replace(old, new)
    before_unit, *units = text.split(r"\text{ ")
    if len(units) > 1:
        raise ValueError(f"{text!r} has two units")
    for old, new in ((r"\\%", ""), (r"\%", ""), (" .", " 0."), ("{.", "{0.")):
        before_unit = before_unit.replace(old, new)
    text = f"0{before_unit}" if before_unit.startswith(".") else before_unit
    name, *values = text.split("=")
    if len(values) == 1 and len(name) <= 2:
        text = values[0]
    text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    return _spelt_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _normalize_minerva(text: str) -> str:
    """Normalises an answer by the rules of Minerva."""
    text = text.split("=")[-1]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for wrapped in _UNWRAPPED:
        text = wrapped.sub(r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def last_box(response: str) -> str | None:
    r"""Returns the answer for `math_reward`: `\boxed 5` has priority over `\boxed{5}`; None if there is none."""
    if r"\boxed " in response:
        return response.rpartition(r"\boxed ")[2].partition("$")[0]
    start = response.rfind(r"\boxed")
    box = None if start < 0 else _to_closing_brace(response[start:])
    return box[len(r"\boxed{") : -1] if box and box.startswith(r"\boxed{") else None


def _to_closing_brace(text: str) -> str | None:
    """Returns the text up to the brace that closes its first one."""
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0 and brace.group() == "}":
            return text[: brace.end()]
    return None


def _braced_roots(text: str) -> str:
    r"""Rewrites \sqrt2 as \sqrt{2} by Hendrycks' rule: of "\sqrt 2" it takes the space. ValueError at a final \sqrt."""
    start, *parts = text.split(r"\sqrt")
    if "" in parts:
        raise ValueError(f"{text!r} ends in a root of nothing")
    return start + "".join(rf"\sqrt{part}" if part[0] == "{" else rf"\sqrt{{{part[0]}}}{part[1:]}" for part in parts)


def _braced_fractions(text: str) -> str:
    r"""Rewrites \frac12 and \frac1{2} as \frac{1}{2}; unchanged where a fraction has one character."""
    start, *parts = text.split(r"\frac")
    braced = [start]
    for part in parts:
        if not part:
            raise ValueError(f"{text!r} has a fraction of nothing")
        if part[0] != "{":
            if len(part) < 2:
                return text
            part = f"{{{part[0]}}}{part[1:]}" if part[1] == "{" else f"{{{part[0]}}}{{{part[1]}}}{part[2:]}"
        braced.append(part)
    return r"\frac".join(braced)


def _spelt_fraction(text: str) -> str:
    """Rewrites 3/4 as a fraction if both are integers as Python writes them."""
    match = _SHORT_FRACTION.fullmatch(text)
    if match is None:
        return text
    for number in match.groups():
        digits = number.removeprefix("-")
        if number != "0" and (digits[0] == "0" or len(digits) > 4300):  # Python's limit of digits
            return text
    return rf"\frac{{{match.group(1)}}}{{{match.group(2)}}}"


def _last_answer(response: str) -> str | None:
    """Returns the text of the last closed <answer> tag; None without one."""
    answer, start = None, 0
    while (opening := response.find("<answer>", start)) >= 0:
        closing = response.find("</answer>", opening)
        if closing < 0:
            break
        answer, start = response[opening + len("<answer>") : closing].strip(), closing + len("</answer>")
    return answer


def _normalize_words(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@functools.lru_cache(maxsize=1024)  # a prompt's responses share one truth
def _read_targets(ground_truth: str) -> tuple[str, ...]:
    """Returns the accepted answers of a ground truth: itself, or the `target` of its JSON."""
    try:
        parsed = json.loads(ground_truth)
    except ValueError:
        return (ground_truth,)
    target = parsed.get("target") if isinstance(parsed, dict) else ground_truth
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not all(isinstance(text, str) for text in targets):
        raise ValueError(f"ground_truth={ground_truth[:60]!r} must be text, or JSON with text or texts as 'target'")
    return tuple(targets)
