"""Statistics of n samples per prompt, such as pass@k and maj@k: means over prompts, with standard errors.

Numpy on the host, no jax: scores are a few floats a prompt and come ragged. Every estimate is the mean over all ways
to choose k of the n samples, computed by counting, not drawn. So it is unbiased for k fresh samples. A prompt with
fewer than k samples is left out for k.
"""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

PASS = 1.0 - 1e-9  # the lowest score of a right response: a sum of weighted parts may round


class MeanSe(NamedTuple):
    """A mean over prompts."""

    mean: float  # NaN without a prompt
    se: float  # its standard error; NaN with fewer than two
    prompts: int


class Samples(NamedTuple):
    """The scores and answers of one prompt's samples."""

    scores: Sequence[float]
    answers: Sequence[str | None]  # '': no answer; None: the grader looks for none


def mean_se(values: Sequence[float]) -> MeanSe:
    """Returns the mean over prompts, and its standard error: s / √N with s over N - 1."""
    x = np.asarray(values, np.float64)
    if len(x) == 0:
        return MeanSe(math.nan, math.nan, 0)
    se = float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan
    return MeanSe(float(x.mean()), se, len(x))


def pass_at(scores: Sequence[float], k: int) -> float:
    """1 - C(n - c, k) / C(n, k), where c of the n samples are right (arXiv 2107.03374, eq. 1)."""
    n, c = len(scores), sum(score >= PASS for score in scores)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at(scores: Sequence[float], k: int) -> float:
    """The expected best score of k of the n samples: Σ_i C(i - 1, k - 1) x_(i) / C(n, k), x_(1) <= x_(2) <= ..."""
    subset_count = math.comb(len(scores), k)
    return math.fsum(math.comb(i, k - 1) / subset_count * score for i, score in enumerate(sorted(scores)))


def worst_at(scores: Sequence[float], k: int) -> float:
    return -best_at([-score for score in scores], k)


def maj_at(samples: Samples, k: int) -> float:
    """The expected score of the most common answer of k of the n samples; ties are split evenly.

    Samples without an answer have no vote, and count only if none of the k has one. Samples with the same answer
    may differ in score: it has their mean.
    """
    scores_of: dict[str, list[float]] = collections.defaultdict(list)
    for score, answer in zip(*samples, strict=True):
        scores_of[answer or ""].append(score)
    unanswered = scores_of.pop("", [])
    chance_of = win_chances(tuple(sorted(map(len, scores_of.values()))), len(unanswered), k)
    total = math.fsum(chance_of[len(scores)] * math.fsum(scores) / len(scores) for scores in scores_of.values())
    if len(unanswered) < k:
        return total
    no_answer_chance = math.comb(len(unanswered), k) / math.comb(len(unanswered) + sum(map(len, scores_of.values())), k)
    return total + no_answer_chance * math.fsum(unanswered) / len(unanswered)


@functools.lru_cache(maxsize=2**16)  # prompts with equally many samples mostly split in a few ways
def win_chances(counts: tuple[int, ...], unanswered: int, k: int) -> dict[int, float]:
    """Returns the chance of an answer that c samples give to win a vote of k, for each c in `counts`.

    The votes of answers are independent binomial draws, given that they add up to k. Their product is a polynomial
    in votes and ties, and a tie of t + 1 answers is split evenly.
    """
    n = sum(counts) + unanswered
    if k == n:
        max_count = max(counts, default=0)
        return {c: (c == max_count) / counts.count(max_count) for c in counts}
    pmf = {m: _binomial_pmf(m, k / n) for m in {*counts, unanswered, n}}
    chance = dict.fromkeys(counts, 0.0)
    for c in chance:
        rivals = list(counts)
        rivals.remove(c)
        for votes in range(1, min(c, k) + 1):
            others = k - votes
            product = np.zeros((others + 1, others // votes + 1))  # [votes of others, answers tied with this one]
            silent_pmf = pmf[unanswered][: others + 1]
            product[: len(silent_pmf), 0] = silent_pmf
            for rival in rivals:
                product = _add_answer(product, pmf[rival], votes)
            split = product[others] / np.arange(1, product.shape[1] + 1)
            chance[c] += float(pmf[c][votes] * split.sum() / pmf[n][k])
    return chance


def _add_answer(product: np.ndarray, pmf: np.ndarray, votes: int) -> np.ndarray:
    """Multiplies the polynomial of votes and ties by one more answer, which has fewer votes or is tied."""
    result = np.zeros_like(product)
    for i in range(min(votes + 1, len(pmf), len(product))):
        is_tied = int(i == votes)
        result[i:, is_tied:] += pmf[i] * product[: len(product) - i, : product.shape[1] - is_tied]
    return result


def _binomial_pmf(n: int, p: float) -> np.ndarray:
    """Returns the binomial probabilities of 0 to n successes, by logarithms: C(n, i) may be too large for a float."""
    log_ways = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(n + 1)]
    return np.exp([log_way + i * math.log(p) + (n - i) * math.log1p(-p) for i, log_way in enumerate(log_ways)])


def ladder(n: int) -> list[int]:
    """Returns the values of k: 2, 4, 8 ... below n, and n; nothing for n = 1."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * (n > 1)


def summarise(prompts: Sequence[Samples], n: int) -> dict[str, MeanSe]:
    """Returns means over prompts: `score`, and with n > 1 `pass@k`, `best@k`, `worst@k` and `maj@k`, k up to n.

    Prompts without a sample are left out; so is maj@k if the grader looks for no answers, and pass@k if a score is
    above 1, or none is 1 and some are fractions.
    """
    summary = {"score": mean_se([math.fsum(s.scores) / len(s.scores) for s in prompts if s.scores])}
    if n == 1:
        return summary
    estimates: dict[str, Callable[[Sequence[float], int], float]]
    estimates = {"best": best_at, "worst": worst_at}
    scores = [score for s in prompts for score in s.scores]
    top = max(scores, default=0.0)
    if top <= 2 - PASS and (top >= PASS or all(score % 1 == 0 for score in scores)):
        estimates = {"pass": pass_at} | estimates
    with_answers = [s for s in prompts if None not in s.answers]
    for k in [1, *ladder(n)]:
        scores_of = [s.scores for s in prompts if len(s.scores) >= k]
        for name, estimate in estimates.items():
            if k > 1 or name == "pass":
                summary[f"{name}@{k}"] = mean_se([estimate(scores, k) for scores in scores_of])
        if k > 1 and any(s.scores for s in with_answers):
            summary[f"maj@{k}"] = mean_se([maj_at(s, k) for s in with_answers if len(s.scores) >= k])
    return summary
