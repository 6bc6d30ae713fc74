"""Rule graders and the table that gives each data source its own. After the rollout, before packing.

A grader takes a response and the row's ground truth and says what the response is worth. A wrong or missing
answer is a score of 0; a grader that fails is an error, which is counted and shown and never passes for a 0.
"""

import decimal
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from jppo.config import UserError
from jppo.structs import Prompt, Reward

Grader = Callable[[str, str], Reward]  # (response, ground truth) -> reward

_GSM8K_ANSWER = re.compile(r"####[ \t]*([-+]?\$?[-+]?[0-9.,]*[0-9][0-9.,]*)")


def gsm8k(response: str, ground_truth: str) -> Reward:
    """1 when the number after the first `####` equals the truth: strict, as in the recipe.

    Thousands commas, a dollar sign and a full stop at the end are no part of the number. Numbers are compared
    as numbers, exactly: 18.0 is 18.
    """
    truth = _number(ground_truth)
    if truth is None:
        raise ValueError(f"ground_truth={ground_truth!r} is not a number")
    match = _GSM8K_ANSWER.search(response)
    answer = None if match is None else _number(match.group(1))
    score = float(answer is not None and answer == truth)
    return Reward(score, {"exact": score, "answered": float(answer is not None)}, error=None)


def exact(response: str, ground_truth: str) -> Reward:
    """1 when the response is the truth, but for white space around it."""
    score = float(response.strip() == ground_truth.strip())
    return Reward(score, {"exact": score}, error=None)


# Which data source gets which grader; `reward.grader` names one of these keys to overrule it for all rows.
GRADERS: dict[str, Grader] = {
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "arithmetic": exact,
    "exact": exact,
}


def graders_for(data_sources: Iterable[str], *, override: str = "") -> dict[str, Grader]:
    """The grader of each data source, found before training starts; one that has none is an error."""
    return {source: _grader(source, override) for source in sorted(set(data_sources))}


def grade(responses: Sequence[str], prompts: Sequence[Prompt], graders: Mapping[str, Grader]) -> list[Reward]:
    """The reward of each response to the prompt beside it, [B]."""
    pairs = zip(responses, prompts, strict=True)
    return [_safely(graders[prompt.data_source], response, prompt.ground_truth) for response, prompt in pairs]


def _grader(source: str, override: str) -> Grader:
    name, setting = (override, "reward.grader") if override else (source, "data_source")
    if name not in GRADERS:
        raise UserError(
            f"{setting}={name!r} has no grader; known are {', '.join(GRADERS)}; rename the source in the "
            "data file, "
            "or choose one with reward.grader"
        )
    return GRADERS[name]


def _safely(grader: Grader, response: str, ground_truth: str) -> Reward:
    try:
        reward = grader(response, ground_truth)
        if not math.isfinite(reward.score):
            raise ValueError(f"the score is {reward.score}; it must be a finite number")
        return reward
    except Exception as e:  # whatever a grader raises costs its own sample only, and is reported with it
        return Reward(score=float("nan"), parts={}, error=f"{type(e).__name__}: {e}")


def _number(text: str) -> decimal.Decimal | None:
    """The number that is written, or None for things like 1.2.3."""
    try:
        number = decimal.Decimal(text.replace(",", "").replace("$", "").strip().rstrip("."))
    except decimal.InvalidOperation:
        return None
    return number if number.is_finite() else None
