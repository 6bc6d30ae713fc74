r"""verl 0.9.1's rules for its own data sources: the same score for the same response and truth.

Reimplemented from their behaviour, quirks included, and tested against `tests/rewards/golden`. `rules.py` has jppo's
own rules, which read answers as numbers or as mathematics. Standard library only; linear in the length of a response.
Truths are compared as text, so none is rejected: if no answer can equal it, every answer scores as wrong.
"""

import functools
import json
import re
import string

from jppo.rewards.rules import Verdict

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
    found = _GSM8K.findall(response[-_GSM8K_END:])
    return _verdict(found[-1].replace(",", "") if found else None, ground_truth)


def math_reward(response: str, ground_truth: str) -> Verdict:
    r"""1 if the last `\boxed{}`, or the text from the last `\boxed ` to a `$`, equals the truth, both normalised.

    The normalisation of Hendrycks et al. 2021: spellings of fractions and roots, units, degrees and percent.
    """
    answer = last_box(response)
    if answer is None:
        return _verdict(None, ground_truth)
    try:
        same = normal_math(answer) == normal_math(ground_truth)
    except ValueError:  # one of them cannot be normalised: both are compared as written
        same = answer == ground_truth
    return Verdict(float(same), {"exact": float(same), "answered": 1.0}, answer)


def math_dapo(response: str, ground_truth: str) -> Verdict:
    r"""1, else -1: the text after the last `Answer:` of the last 300 characters is the truth, both normalised.

    Without an `Answer:`, the last `\boxed{}` of the last 100 characters is compared with the truth as text.
    """
    found = _DAPO_ANSWER.findall(response[-_DAPO_END:])
    answer: str | None = normal_minerva(found[-1] if found else _NO_ANSWER)
    right = answer == normal_minerva(ground_truth)
    if answer == _NO_ANSWER:
        end = response[-_DAPO_BOX_END:]
        start = end.rfind(r"\boxed{")
        box = None if start < 0 else _to_closing_brace(end[start:])
        answer = None if box is None else box[len(r"\boxed{") : -1]
        right = right if answer is None else answer == ground_truth
    parts = {"exact": float(right), "answered": float(answer is not None)}
    return Verdict(1.0 if right else -1.0, parts, answer or "")


def search_r1(response: str, ground_truth: str) -> Verdict:
    """1 if the last `<answer>` is one of the truths, ignoring case, punctuation, articles and white space.

    The truth is text, or JSON with one text or a list of texts as `target`. More than ten opening or closing tags cost
    three quarters of the score.
    """
    answer = _last_answer(response)
    wanted = {_normal_words(target) for target in _targets(ground_truth)}
    right = answer is not None and _normal_words(answer) in wanted
    many = max(response.count("<answer>"), response.count("</answer>")) > _MANY_TAGS
    score = (0.25 if many else 1.0) * right
    return Verdict(score, {"exact": float(right), "answered": float(answer is not None)}, answer or "")


def normal_math(text: str) -> str:
    """Normalises by Hendrycks' rules; raises ValueError if they fail."""
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


def normal_minerva(text: str) -> str:
    """Normalises by Minerva's rules."""
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
    found = None if start < 0 else _to_closing_brace(response[start:])
    return found[len(r"\boxed{") : -1] if found and found.startswith(r"\boxed{") else None


def _verdict(answer: str | None, ground_truth: str) -> Verdict:
    right = float(answer == ground_truth)
    return Verdict(right, {"exact": right, "answered": float(answer is not None)}, answer or "")


def _to_closing_brace(text: str) -> str | None:
    """Returns the text up to the brace that closes its first one."""
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0 and brace.group() == "}":
            return text[: brace.end()]
    return None


def _braced_roots(text: str) -> str:
    first, *others = text.split(r"\sqrt")
    if "" in others:
        raise ValueError(f"{text!r} ends in a root of nothing")
    return first + "".join(rf"\sqrt{one}" if one[0] == "{" else rf"\sqrt{{{one[0]}}}{one[1:]}" for one in others)


def _braced_fractions(text: str) -> str:
    r"""Rewrites \frac12 and \frac1{2} as \frac{1}{2}; unchanged where a fraction has one character."""
    first, *others = text.split(r"\frac")
    braced = [first]
    for one in others:
        if not one:
            raise ValueError(f"{text!r} has a fraction of nothing")
        if one[0] != "{":
            if len(one) < 2:
                return text
            one = f"{{{one[0]}}}{one[1:]}" if one[1] == "{" else f"{{{one[0]}}}{{{one[1]}}}{one[2:]}"
        braced.append(one)
    return r"\frac".join(braced)


def _spelt_fraction(text: str) -> str:
    """Rewrites 3/4 as a fraction if both are integers as Python writes them."""
    match = _SHORT_FRACTION.fullmatch(text)
    written = match is not None and all(_is_written_integer(number) for number in match.groups())
    return rf"\frac{{{match.group(1)}}}{{{match.group(2)}}}" if match is not None and written else text


def _is_written_integer(number: str) -> bool:
    digits = number.removeprefix("-")
    return number == "0" or (digits[0] != "0" and len(digits) <= 4300)  # Python's limit of digits


def _last_answer(response: str) -> str | None:
    answer, start = None, 0
    while (opening := response.find("<answer>", start)) >= 0:
        closing = response.find("</answer>", opening)
        if closing < 0:
            break
        answer, start = response[opening + len("<answer>") : closing].strip(), closing + len("</answer>")
    return answer


def _normal_words(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@functools.lru_cache(maxsize=1024)  # a prompt's responses share one truth
def _targets(ground_truth: str) -> tuple[str, ...]:
    try:
        held = json.loads(ground_truth)
    except ValueError:
        return (ground_truth,)
    target = held.get("target") if isinstance(held, dict) else ground_truth
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise ValueError(f"ground_truth={ground_truth[:60]!r} must be text, or JSON with text or texts as 'target'")
    return tuple(targets)
