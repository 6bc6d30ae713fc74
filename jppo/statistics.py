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
    """Returns the mean of one value a prompt, and its standard error: s / √N with s over N - 1."""
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
    ways = math.comb(len(scores), k)
    return math.fsum(math.comb(i, k - 1) / ways * score for i, score in enumerate(sorted(scores)))


def worst_at(scores: Sequence[float], k: int) -> float:
    """The expected worst score of k of the n samples."""
    return -best_at([-score for score in scores], k)


def maj_at(samples: Samples, k: int) -> float:
    """The expected score of the most common answer of k of the n samples; ties are split evenly.

    Samples without an answer have no vote, and count only if none of the k has one. Samples with the same answer
    may differ in score: it has their mean.
    """
    of_answer: dict[str, list[float]] = collections.defaultdict(list)
    for score, answer in zip(*samples, strict=True):
        of_answer[answer or ""].append(score)
    silent = of_answer.pop("", [])
    chance = wins(tuple(sorted(map(len, of_answer.values()))), len(silent), k)
    total = math.fsum(chance[len(scores)] * math.fsum(scores) / len(scores) for scores in of_answer.values())
    if len(silent) < k:
        return total
    none = math.comb(len(silent), k) / math.comb(len(silent) + sum(map(len, of_answer.values())), k)
    return total + none * math.fsum(silent) / len(silent)


@functools.lru_cache(maxsize=2**16)  # prompts with equally many samples mostly split in a few ways
def wins(counts: tuple[int, ...], silent: int, k: int) -> dict[int, float]:
    """Returns the chance of an answer that c samples give to win a vote of k, for each c in `counts`.

    The votes of answers are independent binomial draws, given that they add up to k. Their product is a polynomial
    in votes and ties, and a tie of t + 1 answers is split evenly.
    """
    n = sum(counts) + silent
    if k == n:
        most = max(counts, default=0)
        return {c: (c == most) / counts.count(most) for c in counts}
    pmf = {m: _binomial(m, k / n) for m in {*counts, silent, n}}
    chance = dict.fromkeys(counts, 0.0)
    for c in chance:
        others = list(counts)
        others.remove(c)
        for votes in range(1, min(c, k) + 1):
            left = k - votes
            product = np.zeros((left + 1, left // votes + 1))  # [votes of others, answers tied with this one]
            some = pmf[silent][: left + 1]
            product[: len(some), 0] = some
            for other in others:
                product = _times(product, pmf[other], votes)
            split = product[left] / np.arange(1, product.shape[1] + 1)
            chance[c] += float(pmf[c][votes] * split.sum() / pmf[n][k])
    return chance


def _times(product: np.ndarray, pmf: np.ndarray, votes: int) -> np.ndarray:
    """Multiplies the product by one more answer, which has fewer votes or is tied."""
    out = np.zeros_like(product)
    for i in range(min(votes + 1, len(pmf), len(product))):
        tied = int(i == votes)
        out[i:, tied:] += pmf[i] * product[: len(product) - i, : product.shape[1] - tied]
    return out


def _binomial(n: int, p: float) -> np.ndarray:
    """Computes by logarithms: C(n, i) itself may be too large for a float."""
    ways = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(n + 1)]
    return np.exp([w + i * math.log(p) + (n - i) * math.log1p(-p) for i, w in enumerate(ways)])


def ladder(n: int) -> list[int]:
    """Returns the values of k: 2, 4, 8 ... below n, and n; nothing for n = 1."""
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * (n > 1)


def summarise(prompts: Sequence[Samples], n: int) -> dict[str, MeanSe]:
    """Summarises `score`, and with n > 1 `pass@k` from 1 on and `best@k`, `worst@k` and `maj@k` from 2 on, k up to n.

    Prompts without a sample are left out; so is maj@k if the grader looks for no answers.
    """
    summary = {"score": mean_se([math.fsum(s.scores) / len(s.scores) for s in prompts if s.scores])}
    if n == 1:
        return summary
    of_scores: dict[str, Callable[[Sequence[float], int], float]]
    of_scores = {"pass": pass_at, "best": best_at, "worst": worst_at}
    answered = [s for s in prompts if None not in s.answers]
    for k in [1, *ladder(n)]:
        enough = [s.scores for s in prompts if len(s.scores) >= k]
        for name, at in of_scores.items():
            if k > 1 or name == "pass":
                summary[f"{name}@{k}"] = mean_se([at(scores, k) for scores in enough])
        if k > 1 and any(s.scores for s in answered):
            summary[f"maj@{k}"] = mean_se([maj_at(s, k) for s in answered if len(s.scores) >= k])
    return summary
