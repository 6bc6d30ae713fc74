"""The statistics against every way to choose k of n samples, one by one, and against numbers worked by hand."""

import collections
import itertools
import math
import time

import numpy as np
import pytest

from jppo import statistics
from jppo.statistics import Samples


def over_subsets(value, n, k):
    """The mean of what each of the C(n, k) choices gives."""
    return np.mean([value(list(chosen)) for chosen in itertools.combinations(range(n), k)])


def vote(scores, answers, chosen):
    """The score of the answer most voted for among the chosen; ties and equal answers by their means."""
    given = collections.Counter(answers[i] for i in chosen if answers[i])
    if not given:
        return np.mean([scores[i] for i in chosen])
    winners = [answer for answer, votes in given.items() if votes == max(given.values())]
    return np.mean([np.mean([scores[i] for i in chosen if answers[i] == winner]) for winner in winners])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_every_estimate_is_the_mean_over_all_choices(n, seed):
    rng = np.random.default_rng([n, seed])
    scores = list(rng.choice([0.0, 0.3, 1.0, -2.0, 1.5], n))
    answers = list(rng.choice(["a", "b", "c", "d", ""], n))
    for k in range(1, n + 1):
        passed = over_subsets(lambda chosen: any(scores[i] >= 1 for i in chosen), n, k)
        assert statistics.pass_at(scores, k) == pytest.approx(passed, abs=1e-12)
        best = over_subsets(lambda chosen: max(scores[i] for i in chosen), n, k)
        assert statistics.best_at(scores, k) == pytest.approx(best, abs=1e-12)
        worst = over_subsets(lambda chosen: min(scores[i] for i in chosen), n, k)
        assert statistics.worst_at(scores, k) == pytest.approx(worst, abs=1e-12)
        voted = over_subsets(lambda chosen: vote(scores, answers, chosen), n, k)
        assert statistics.maj_at(Samples(scores, answers), k) == pytest.approx(voted, abs=1e-12)


def test_numbers_worked_by_hand():
    # 2 of 4 right: of the 6 pairs one has none that is right.
    assert statistics.pass_at([1, 0, 0, 1], 2) == pytest.approx(5 / 6)
    # Pairs of 0, 1, 3: their best are 1, 3 and 3, their worst 0, 0 and 1.
    assert statistics.best_at([3, 0, 1], 2) == pytest.approx(7 / 3)
    assert statistics.worst_at([3, 0, 1], 2) == pytest.approx(1 / 3)
    # a a b: the pairs are aa, ab, ab, of which the last two are ties.
    assert statistics.maj_at(Samples([1, 1, 0], "aab"), 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert statistics.maj_at(Samples([1, 1, 0], "aab"), 3) == 1.0
    # Whoever has no answer has no vote: one right answer beats two that are none.
    assert statistics.maj_at(Samples([1, 0, 0], ["a", "", ""]), 3) == 1.0


def test_a_mean_and_its_standard_error():
    found = statistics.mean_se([1, 2, 3, 6])
    assert found.mean == 3.0 and found.se == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3 / 4)) and found.prompts == 4
    assert statistics.mean_se([2.0])[0] == 2.0 and math.isnan(statistics.mean_se([2.0]).se)
    assert math.isnan(statistics.mean_se([]).mean)


def test_the_ladder_ends_with_n():
    assert [statistics.ladder(n) for n in (1, 2, 3, 4, 5, 16)] == [
        [], [2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 8, 16],
    ]  # fmt: skip


def test_a_summary_of_prompts_of_which_some_lack_samples():
    whole, short, empty = Samples([1, 0, 0], ["a", "b", "b"]), Samples([1, 1], ["a", "a"]), Samples([], [])
    found = statistics.summarise([whole, short, empty], 3)
    assert found["score"].mean == pytest.approx((1 / 3 + 1) / 2) and found["score"].prompts == 2
    assert found["pass@2"].mean == pytest.approx((2 / 3 + 1) / 2)
    assert found["pass@3"] == found["best@3"] and found["best@3"].prompts == 1 and found["maj@3"].mean == 0.0
    assert set(found) == {"score", "pass@1"} | {
        f"{what}@{k}" for what in ("pass", "best", "worst", "maj") for k in (2, 3)
    }
    assert set(statistics.summarise([Samples([1.0], [None])], 1)) == {"score"}
    assert not [name for name in statistics.summarise([Samples([1, 0], [None, None])], 2) if "maj" in name]


@pytest.mark.parametrize(
    "scores, passes",
    [
        ([0.0, 0.0], True),
        ([-1.0, 1.0], True),
        ([0.3, 1.0], True),
        ([0.3, 0.6], False),  # fractions, none of a right response
        ([1.0, 1.5], False),  # a sum of parts
        ([-2.3, 0.0], False),  # a reward model's
    ],
)
def test_pass_at_k_is_of_scores_that_tell_right_from_wrong(scores, passes):
    found = statistics.summarise([Samples(scores, [None, None])], 2)
    assert ("pass@1" in found) == ("pass@2" in found) == passes and "best@2" in found


def test_many_samples_overflow_nothing_and_end_soon():
    rng = np.random.default_rng(0)
    scores = list(rng.integers(0, 2, 2000))
    assert statistics.pass_at(scores, 1024) == 1.0 and statistics.best_at(scores, 1024) == pytest.approx(1.0)
    neither = math.prod((976 - i) / (2000 - i) for i in range(2))  # of two is among the 1,024 that vote
    assert statistics.win_chances((2,), 1998, 1024)[2] == pytest.approx(1 - neither)
    began = time.thread_time()
    votes = Samples([1] * 30 + [0] * 34, ["a"] * 30 + list("bbbbbbbbbbccccccccddddddeeeefgh") + [""] * 3)
    assert 0.95 < statistics.maj_at(votes, 32) <= 1.0
    assert statistics.maj_at(Samples(scores[:64], [str(i) for i in range(64)]), 32) == pytest.approx(
        np.mean(scores[:64])
    )
    assert time.thread_time() - began < 10
