"""Losses and their gradients against loops written from the papers, by hand, in special cases, and far out."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.algorithms import losses

FEW = settings(max_examples=5, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**16)
CLIP = dict(clip_low=0.2, clip_high=0.3)
LOSSES = {
    "clipped": CLIP | dict(clip_c=1.4),
    "gspo": dict(clip_low=0.04, clip_high=0.06),
    "geo_mean": CLIP,
    "cispo": CLIP,
    "sapo": dict(tau_pos=1.0, tau_neg=2.5),
    "gpg": {},
    "dro": dict(dro_beta=0.7),
    "dppo_tv": dict(clip_low=0.02, clip_high=0.03, clip_c=1.2),
}
FIELDS = "logp old_logp advantage mask segment"


# What the papers say of one sequence. `fixed` is logp once more: what takes part in the gradient is `logp` alone, what
# the paper holds still reads `fixed`. Each gives the loss of each token and where it was clipped, either way.


def paper_clipped(logp, fixed, old, advantage, *, clip_low, clip_high, clip_c):
    out = []
    for new, before, a in zip(logp, old, advantage, strict=True):
        ratio = np.exp(new - before)
        objective = min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
        clipped, lower = objective < ratio * a, a < 0 and objective < clip_c * a
        out.append((-clip_c * a if lower else -objective, clipped, lower))
    return out


def paper_gspo(logp, fixed, old, advantage, *, clip_low, clip_high):
    whole = np.exp(sum(fixed[t] - old[t] for t in range(len(old))) / max(len(old), 1))
    out = []
    for t, a in enumerate(advantage):
        ratio = whole * np.exp(logp[t]) / np.exp(fixed[t])
        objective = min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
        out.append((-objective, objective < ratio * a, False))
    return out


def paper_geo_mean(logp, fixed, old, advantage, *, clip_low, clip_high):
    """(Π of the ratios, each held back in the direction of A alone, between e^-ε_low and e^ε_high) to the 1/n."""
    product, n = 1.0, len(old)
    beyond = []
    for t, a in enumerate(advantage):
        ratio = np.exp(logp[t] - old[t])
        if a > 0:
            product *= min(ratio, np.exp(clip_high))
        elif a < 0:
            product *= max(ratio, np.exp(-clip_low))
        outside = not np.exp(-clip_low) <= ratio <= np.exp(clip_high)
        beyond.append((outside and a > 0, outside and a < 0))
    loss = -np.mean(advantage) * product ** (1 / n) if n else 0.0
    return [(loss, *two) for two in beyond]


def paper_cispo(logp, fixed, old, advantage, *, clip_low, clip_high):
    out = []
    for t, a in enumerate(advantage):
        ratio = np.exp(fixed[t] - old[t])
        weight = min(max(ratio, 1 - clip_low), 1 + clip_high)
        out.append((-weight * a * logp[t], weight != ratio, False))
    return out


def paper_sapo(logp, fixed, old, advantage, *, tau_pos, tau_neg):
    out = []
    for t, a in enumerate(advantage):
        tau = tau_pos if a > 0 else tau_neg
        gate = 4 / tau / (1 + np.exp(-tau * (np.exp(logp[t] - old[t]) - 1)))
        out.append((-gate * a, False, False))
    return out


def paper_gpg(logp, fixed, old, advantage):
    return [(-a * new, False, False) for new, a in zip(logp, advantage, strict=True)]


def paper_dro(logp, fixed, old, advantage, *, dro_beta):
    triples = zip(logp, old, advantage, strict=True)
    return [(-(new * a - dro_beta / 2 * (new - before) ** 2), False, False) for new, before, a in triples]


def paper_dppo_tv(logp, fixed, old, advantage, *, clip_low, clip_high, clip_c):
    out = []
    for t, a in enumerate(advantage):
        now, before = np.exp(fixed[t]), np.exp(old[t])
        left_out = now - before > clip_high if a > 0 else before - now > clip_low
        loss = 0.0 if left_out else -a * min(now / before, clip_c) * logp[t]
        out.append((loss, left_out, not left_out and now / before > clip_c))
    return out


PAPERS = {name: globals()[f"paper_{name}"] for name in LOSSES}


def slopes(paper, s, changes):
    """d Σ weight · loss / d log π by central differences, token by token."""

    def total(logp):
        return sum(
            w * loss
            for w, (loss, *_) in zip(
                s["weight"], paper(logp, s["logp"], s["old_logp"], s["advantage"], **changes), strict=True
            )
        )

    out, step = [], 1e-6
    for t in range(s["logp"].size):
        move = np.zeros(s["logp"].size)
        move[t] = step
        out.append((total(s["logp"] + move) - total(s["logp"] - move)) / (2 * step))
    return out


@functools.cache
def asked(name, **changes):
    """The loss's outputs and the gradient of Σ weight · loss, compiled once for each loss, setting and shape."""

    def total(logp, old_logp, advantage, mask, segment, weight):
        loss, clipped, lower = getattr(losses, name)(logp, old_logp, advantage, mask, segment, **changes)
        # Weights are 0 outside the mask, as `token_weights` and `raw_weights` make them.
        return jnp.sum(jnp.where(mask, loss, 0.0) * jnp.where(mask, weight, 0.0)), (loss, clipped, lower)

    @jax.jit
    def both(*x):
        (_, out), grad = jax.value_and_grad(total, has_aux=True)(*x)
        return (*(jnp.where(x[3], o, jnp.zeros_like(o)) for o in out), grad)

    return both


def plain(logp, old_logp, advantage, mask=None, segment=None):
    """One row of one sequence, nothing masked."""
    mask = np.ones((1, len(logp)), bool) if mask is None else mask
    segment = np.ones(mask.shape, np.int32) if segment is None else segment
    return [np.array([x]) for x in (logp, old_logp, advantage)] + [mask, segment]


@pytest.mark.parametrize("name", LOSSES)
@FEW
@given(seed=SEEDS)
def test_loss_clips_and_gradient_are_the_papers(packed, name, seed):
    batch = packed.draw(seed)
    laid = packed.lay(batch, gaps=seed)
    *found, grad = asked(name, **LOSSES[name])(*laid[FIELDS], *laid["weight"])
    papers = [PAPERS[name](s["logp"], s["logp"], s["old_logp"], s["advantage"], **LOSSES[name]) for s in batch]
    for k, part in enumerate(found):
        laid.assert_same(part, [np.array([token[k] for token in p]) for p in papers], rtol=1e-10)
    laid.assert_same(grad, [slopes(PAPERS[name], s, LOSSES[name]) for s in batch], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
@FEW
@given(seed=SEEDS)
def test_the_layout_changes_neither_loss_nor_gradient(packed, change, name, seed):
    batch = packed.draw(seed)
    before, after = packed.lay(batch), packed.lay(batch, **change)
    ask = asked(name, **LOSSES[name])
    for one, other in zip(ask(*before[FIELDS + " weight"]), ask(*after[FIELDS + " weight"]), strict=True):
        after.assert_same(other, before.back(one), rtol=1e-12, atol=1e-14)


# ratio, advantage -> loss, clipped, clipped the other way, d loss / d logp; ε = 0.2, c = 3
POLICY = [
    (1.0, 2.0, -2.0, False, False, -2.0),
    (1.1, 2.0, -2.2, False, False, -2.2),
    (1.5, 2.0, -2.4, True, False, 0.0),  # already better by more than ε: no more reward for it
    (0.5, 2.0, -1.0, False, False, -1.0),  # worse: pulled back
    (1.5, -2.0, 3.0, False, False, 3.0),
    (0.5, -2.0, 1.6, True, False, 0.0),
    (0.9, -2.0, 1.8, False, False, 1.8),
    (4.0, -2.0, 6.0, False, True, 0.0),  # worse by more than c: let go
    (4.0, 2.0, -2.4, True, False, 0.0),  # c is for negative advantages only
    (1.7, 0.0, 0.0, False, False, 0.0),
]


@pytest.mark.parametrize("ratio,advantage,loss,held,lower,slope", POLICY)
def test_clipped_by_hand(ratio, advantage, loss, held, lower, slope):
    x = plain([-2.0 + np.log(ratio)], [-2.0], [advantage])
    found = asked("clipped", clip_low=0.2, clip_high=0.2, clip_c=3.0)(*x, np.ones((1, 1)))
    np.testing.assert_allclose([part[0, 0] for part in found], [loss, held, lower, slope], rtol=1e-12, atol=1e-12)


def test_gspo_by_hand():
    """Ratios 2 and 1/8: s = √(2/8) = 1/2, clipped to 0.9 where A < 0 and kept where A > 0."""
    x = plain(np.log([0.5, 0.125]), np.log([0.25, 1.0]), [1.0, -1.0])
    loss, clipped, _, grad = asked("gspo", clip_low=0.1, clip_high=0.1)(*x, np.ones((1, 2)))
    np.testing.assert_allclose(loss, [[-0.5, 0.9]], rtol=1e-12)
    np.testing.assert_array_equal(clipped, [[False, True]])
    np.testing.assert_allclose(grad, [[-0.5, 0.0]], rtol=1e-12)


def test_geo_mean_by_hand():
    """Ratios 4 and 1, ε = log 2, A = 3: -3 √(2 · 1); the first token is held, the second has half the loss's slope."""
    x = plain(np.log([0.8, 0.5]), np.log([0.2, 0.5]), [3.0, 3.0])
    loss, clipped, lower, grad = asked("geo_mean", clip_low=np.log(2), clip_high=np.log(2))(*x, np.full((1, 2), 0.5))
    np.testing.assert_allclose(loss, np.full((1, 2), -3 * np.sqrt(2)), rtol=1e-12)
    np.testing.assert_array_equal([clipped, lower], [[[True, False]], [[False, False]]])
    np.testing.assert_allclose(grad, [[0.0, -1.5 * np.sqrt(2)]], rtol=1e-12, atol=1e-12)


def test_geo_mean_of_what_has_become_next_to_impossible():
    """A ratio of e^-30 is no number to hold: loss and slope are both -A e^-30."""
    loss, _, _, grad = asked("geo_mean", clip_low=0.4, clip_high=0.4)(*plain([-31.0], [-1.0], [2.0]), np.ones((1, 1)))
    np.testing.assert_allclose([loss[0, 0], grad[0, 0]], -2 * np.exp(-30.0), rtol=1e-12)


def test_cispo_by_hand():
    """A ratio of 2 counts as 1.3 and still has a gradient, unlike PPO's."""
    x = plain([-1.0], [-1.0 - np.log(2)], [2.0])
    loss, clipped, lower, grad = asked("cispo", **CLIP)(*x, np.ones((1, 1)))
    assert not lower.any()
    np.testing.assert_allclose([loss[0, 0], grad[0, 0]], [2.6, -2.6], rtol=1e-12)
    assert clipped[0, 0]


@pytest.mark.parametrize("advantage,counts", [(1.0, (False, True)), (-1.0, (True, False))])
def test_a_token_outside_the_kl_region_counts_if_its_gradient_leads_back(advantage, counts):
    """π_old = 1/2 and π = 3/4 or 1/4: both have a KL of ½ log 4/3 = 0.144, of at most 0.1; ratios 3/2, at most 1.2."""
    x = plain(np.log([0.75, 0.25]), np.log([0.5, 0.5]), [advantage, advantage])
    loss, left_out, truncated, grad = asked("dppo_kl", clip_low=0.1, clip_high=0.1, clip_c=1.2)(*x, np.ones((1, 2)))
    weights = -advantage * np.where(counts, [1.2, 0.5], 0.0)
    np.testing.assert_allclose([loss[0], grad[0]], [weights * np.log([0.75, 0.25]), weights], rtol=1e-6)
    np.testing.assert_array_equal([left_out[0], truncated[0]], [np.invert(counts), [counts[0], False]])
    inside = asked("dppo_kl", clip_low=0.15, clip_high=0.15, clip_c=1.2)(*x, np.ones((1, 2)))
    assert not inside[1].any()


@pytest.mark.parametrize("name", LOSSES)
def test_ratio_1_gives_the_plain_policy_gradient(packed, name):
    """-A / (sequences · length) for every loss, where a sequence has one advantage; not so at other ratios."""
    batch = packed.draw(4)
    for s in batch:
        s["advantage"][:] = s["advantage"][:1]
        s["weight"][:] = 1 / (6 * max(s["weight"].size, 1))
    laid = packed.lay([s | dict(old_logp=s["logp"]) for s in batch])
    grad = asked(name, **LOSSES[name])(*laid[FIELDS + " weight"])[-1]
    laid.assert_same(grad, [-s["advantage"] * s["weight"] for s in batch], rtol=1e-12)
    elsewhere = asked(name, **LOSSES[name])(*packed.lay(batch)[FIELDS + " weight"])[-1]
    assert np.allclose(elsewhere, grad) == (name == "gpg")


def test_without_a_second_bound_it_is_ppo(packed):
    laid = packed.lay(packed.draw(0))
    free = asked("clipped", **CLIP, clip_c=np.inf)(*laid[FIELDS + " weight"])
    bounded = asked("clipped", **CLIP, clip_c=1.4)(*laid[FIELDS + " weight"])
    papers = [
        [-min(r * a, np.clip(r, 0.8, 1.3) * a) for r, a in zip(np.exp(n - o), adv, strict=True)]
        for n, o, adv in zip(*map(laid.back, laid["logp old_logp advantage"]), strict=True)
    ]
    laid.assert_same(free[0], papers, rtol=1e-12)
    assert not free[2].any() and bounded[2].any()
    np.testing.assert_array_equal(free[0] != bounded[0], bounded[2])


def test_equal_bounds_are_one_clip_range_and_unequal_ones_are_not(packed):
    laid = packed.lay(packed.draw(1))
    logp, old, a = (np.concatenate(laid.back(x)) for x in laid["logp old_logp advantage"])
    ratio = np.exp(logp - old)
    one = np.maximum(-a * ratio, -a * (1 + np.clip(ratio - 1, -0.25, 0.25)))
    for low, high in [(0.25, 0.25), (0.05, 0.25), (0.25, 0.9)]:
        found = asked("clipped", clip_low=low, clip_high=high, clip_c=np.inf)(*laid[FIELDS + " weight"])[0]
        assert np.allclose(np.concatenate(laid.back(found)), one, rtol=1e-12) == (low == high)


def test_gspo_of_single_tokens_is_the_clipped_loss(packed):
    laid = packed.lay(packed.draw(2))
    alone = [*laid["logp old_logp advantage mask"], np.tile(np.arange(1, 21, dtype=np.int32), (7, 1)), *laid["weight"]]
    by_token = asked("clipped", **CLIP, clip_c=np.inf)
    for one, other in zip(asked("gspo", **CLIP)(*alone), by_token(*alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    together = laid[FIELDS + " weight"]
    assert not np.allclose(asked("gspo", **CLIP)(*together)[0], by_token(*together)[0])


def test_cispo_at_ratio_1_is_gpg(packed):
    laid = packed.lay(packed.draw(3))
    logp, old, *rest = laid[FIELDS + " weight"]
    for one, other in zip(asked("cispo", **CLIP)(logp, logp, *rest), asked("gpg")(logp, logp, *rest), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert not np.allclose(asked("cispo", **CLIP)(logp, old, *rest)[-1], asked("gpg")(logp, old, *rest)[-1])


def test_the_gate_of_sapo_flattens_by_the_temperature_of_the_advantages_sign():
    """A = 1, ρ = 2: -4/τ σ(τ). At ρ = 1 both temperatures have slope -A, further out the higher one less."""
    x = plain([np.log(2), np.log(2)], [0.0, 0.0], [1.0, -1.0])
    loss, *_, grad = asked("sapo", tau_pos=1.0, tau_neg=2.0)(*x, np.ones((1, 2)))
    np.testing.assert_allclose(loss, [[-4 / (1 + np.exp(-1)), 2 / (1 + np.exp(-2))]], rtol=1e-12)
    assert abs(grad[0, 0]) > abs(grad[0, 1]) > 0


def test_an_explicit_0_clips_everything_that_moved():
    x = plain([0.1, -0.1], [0.0, 0.0], [1.0, -1.0])
    loss, held, *_ = asked("clipped", clip_low=0.0, clip_high=0.0, clip_c=3.0)(*x, np.ones((1, 2)))
    np.testing.assert_array_equal(loss, [[-1.0, 1.0]])
    assert held.all()


@pytest.mark.parametrize("name", LOSSES)
def test_weights_of_1_change_nothing(packed, name):
    """A sampler that is the trainer has importance weights of 1; another one has not."""
    laid = packed.lay(packed.draw(5))
    none = np.where(laid.rows["mask"], 1.0, np.nan)
    mask, d = laid["mask ref_logp"]
    ones, others = (np.where(mask, np.exp(np.where(mask, x, 0.0)), 0.0) for x in (0.0, 0.1 * d))
    ask = asked(name, **LOSSES[name])
    before, same, changed = (ask(*laid[FIELDS], w)[-1] for w in (none, ones, others))
    np.testing.assert_array_equal(before, same)
    assert not np.allclose(before, changed)


# Far out


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_stay_finite_far_apart(packed, name, gap):
    with jax.enable_x64(False):
        batch = packed.draw(6)
        signs = [s | dict(logp=s["logp"] + gap * np.sign(s["reward"])) for s in batch]  # up and down in one sequence
        for far in (signs, [s | dict(logp=s["logp"] + gap) for s in batch]):
            laid = packed.lay(far, dtype=np.float32)
            found = asked(name, **LOSSES[name])(*laid[FIELDS + " weight"])
            for part in found:
                assert np.isfinite(part).all()
                np.testing.assert_array_equal(laid.rest(part), 0.0)
            assert found[0].dtype == found[-1].dtype == np.float32


def test_gspo_keeps_the_sequences_ratio_beside_a_huge_ratio_of_one_token():
    """Log-ratios 1e4 and -1e4 have mean 0: the ratio is 1, without the rounding of 1e4."""
    with jax.enable_x64(False):
        x = plain(np.float32([1e4, -1e4, 0.03]), np.float32([0, 0, 0]), np.float32([1, 1, 1]))
        loss, *_ = asked("gspo", clip_low=0.2, clip_high=0.2)(*x, np.ones((1, 3), np.float32))
        np.testing.assert_allclose(loss, np.full((1, 3), -np.exp(0.01)), rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_without_a_kept_token_have_no_loss(packed, name):
    with jax.enable_x64(False):
        laid = packed.lay(packed.draw(7), dtype=np.float32)
        logp, old, advantage, mask, segment, weight = laid[FIELDS + " weight"]
        for part in asked(name, **LOSSES[name])(logp, old, advantage, np.zeros_like(mask), segment, weight):
            np.testing.assert_array_equal(part, 0.0)


# The value


def paper_value(value, old, target, c):
    """The larger error of V and of V held within c of the old one; its slope is 0 where the second is the larger."""
    near = min(max(value, old - c), old + c)
    free, held = (value - target) ** 2, (near - target) ** 2
    return (free / 2, False, value - target) if free >= held else (held / 2, True, 0.0)


# new, old, return -> loss, clip holds, d loss / d new; c = 0.5
VALUE = [
    (1.0, 1.0, 3.0, 2.0, False, -2.0),
    (1.2, 1.0, 3.0, 1.62, False, -1.8),
    (2.0, 1.0, 3.0, 1.125, True, 0.0),  # moved towards the return by more than c
    (0.0, 1.0, 3.0, 4.5, False, -3.0),  # moved away: pulled back
    (0.0, 1.0, -1.0, 1.125, True, 0.0),  # held at 0.5
]


@jax.jit
def value_and_slope(value, old, target, c):
    def total(v):
        loss, held = losses.clipped_value(v, old, target, cliprange_value=c)
        return jnp.sum(loss), (loss, held)

    (_, (loss, held)), grad = jax.value_and_grad(total, has_aux=True)(value)
    return loss, held, grad


@pytest.mark.parametrize("new,old,target,loss,held,slope", VALUE)
def test_value_by_hand(new, old, target, loss, held, slope):
    found = value_and_slope(jnp.float64(new), old, target, 0.5)
    np.testing.assert_allclose(found, [loss, held, slope], rtol=1e-12, atol=1e-12)


@FEW
@given(seed=SEEDS, c=st.sampled_from([0.0, 0.3, 0.5, 5.0]))
def test_value_loss_is_the_papers(seed, c):
    new, old, target = np.random.default_rng(seed).normal(size=(3, 4, 5))
    found = value_and_slope(new, old, target, c)
    want = np.array([paper_value(*x, c) for x in zip(new.flat, old.flat, target.flat, strict=True)])
    for k, part in enumerate(found):
        np.testing.assert_allclose(np.ravel(part), want[:, k], rtol=1e-10)


def test_a_wide_value_clip_is_the_squared_error_and_a_narrow_one_is_not():
    new, old, target = np.random.default_rng(8).normal(size=(3, 50))
    for c in (np.inf, 1e3, 0.2):
        loss, held = losses.clipped_value(new, old, target, cliprange_value=c)
        assert np.allclose(loss, 0.5 * (new - target) ** 2, rtol=1e-12) == (not held.any()) == (c > 1)


def test_a_value_at_its_return_has_no_loss():
    x = np.float32([-1.0, 0.0, 2.5])
    loss, held = losses.clipped_value(x, x, x, cliprange_value=0.5)
    np.testing.assert_array_equal(loss, 0.0)
    assert not held.any()


# The weights that add up


def paper_weights(lengths, mode, scale):
    """Of each token of each sequence; a sequence of no kept token is not one."""
    tokens, sequences = sum(lengths), sum(n > 0 for n in lengths)
    each = {
        "token-mean": lambda n: 1 / tokens,
        "token-sum": lambda n: 1.0,
        "seq-mean-token-sum": lambda n: 1 / sequences,
        "seq-mean-token-mean": lambda n: 1 / sequences / n,
        "seq-mean-token-sum-norm": lambda n: 1 / sequences / scale,
    }[mode]
    return [[each(n)] * n if n else [] for n in lengths]


token_weights = jax.jit(losses.token_weights, static_argnames=("mode", "scale"))


@functools.partial(jax.jit, static_argnames="mode")
def weigh(mask, segment, tokens, *, mode):
    """Of a batch of six sequences that are not empty."""
    return losses.token_weights(mask, segment, mode=mode, tokens=tokens, sequences=jnp.float64(6), scale=13.0)


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
@FEW
@given(seed=SEEDS)
def test_weights_are_the_means_that_they_name(packed, mode, seed):
    laid = packed.lay(packed.draw(seed), gaps=seed)
    lengths = [at[0].size for at in laid.where]
    laid.assert_same(
        weigh(*laid["mask segment"], float(sum(lengths)), mode=mode), paper_weights(lengths, mode, 13.0), rtol=1e-12
    )


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
@FEW
@given(seed=SEEDS)
def test_weights_do_not_depend_on_the_layout_nor_on_the_cut(packed, change, mode, seed):
    batch = packed.draw(seed)
    before, after = packed.lay(batch), packed.lay(batch, **change)
    tokens = float(before.rows["mask"].sum())
    whole = weigh(*before["mask segment"], tokens, mode=mode)
    after.assert_same(weigh(*after["mask segment"], tokens, mode=mode), before.back(whole), rtol=1e-12)
    # Two micro-batches, each told the counts of both.
    parts = [weigh(*(x[rows] for x in before["mask segment"]), tokens, mode=mode) for rows in (slice(3), slice(3, 7))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_the_modes_differ_where_lengths_do_and_agree_where_they_do_not():
    mask, segment = np.ones((2, 4), bool), np.array([[1, 1, 1, 2], [1, 1, 2, 2]], np.int32)

    def total(mode, loss, mask):
        count = dict(tokens=jnp.float64(mask.sum()), sequences=jnp.float64(4), scale=2.0)
        return np.sum(token_weights(mask, segment, mode=mode, **count) * loss)

    loss = np.array([[1.0, 2.0, 3.0, 10.0], [4.0, 6.0, 0.0, 2.0]])
    # sequences: 1 2 3 | 10 | 4 6 | 0 2
    assert [total(mode, loss, mask) for mode in losses.AGGREGATIONS] == pytest.approx(
        [28 / 8, 28 / 4, 18 / 4, 28 / 8, 28]
    )
    one_each = np.array([[True, False, False, True], [True, False, False, True]])
    assert [total(mode, loss, one_each) for mode in losses.AGGREGATIONS] == pytest.approx([17 / 4] * 3 + [17 / 8, 17])


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_nothing_kept_has_no_weight(mode):
    count = dict(tokens=jnp.float32(0), sequences=jnp.float32(0), scale=2.0)
    found = token_weights(np.zeros((2, 3), bool), np.ones((2, 3), np.int32), mode=mode, **count)
    np.testing.assert_array_equal(found, 0.0)


def test_an_unknown_mode_lists_the_known_ones():
    count = dict(tokens=jnp.float32(1), sequences=jnp.float32(1), scale=1.0)
    with pytest.raises(ValueError, match=r"'mean' is not known.*token-mean, seq-mean-token-sum"):
        losses.token_weights(np.ones((1, 1), bool), np.ones((1, 1), np.int32), mode="mean", **count)


# Shapes and dtypes


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_and_vmap(packed, name, dtype):
    one, other = (packed.lay(packed.draw(seed), dtype=dtype)[FIELDS + " weight"] for seed in (0, 1))
    ask = asked(name, **LOSSES[name])
    both = jax.vmap(ask)(*(np.stack(x) for x in zip(one, other, strict=True)))
    for k, part in enumerate(ask(*other)):
        assert part.dtype == (dtype if k in (0, 3) else bool)
        np.testing.assert_allclose(both[k][1], part, rtol=1e-6 if dtype == np.float32 else 1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_of_value_loss_and_weights(dtype):
    x, one = np.ones((2, 3), dtype), jnp.asarray(1.0, dtype)
    assert jax.jit(functools.partial(losses.clipped_value, cliprange_value=0.5))(x, x, x)[0].dtype == dtype
    for mode in losses.AGGREGATIONS:
        weigh = functools.partial(losses.token_weights, mode=mode, scale=2.0)
        found = jax.jit(weigh)(x > 0, np.ones((2, 3), np.int32), tokens=one, sequences=one)
        assert found.dtype == dtype


# Means over the mask: log π -2, A 0; covariances 1, -2, 0, 2, -1.
LOGP = np.array([[-1.0, -1.0, np.nan, -2.0], [np.nan, -3.0, -3.0, np.nan]])
ADVANTAGE = np.array([[1.0, -2.0, np.nan, 2.0], [np.nan, -2.0, 1.0, np.nan]])
MASK = np.array([[True, True, False, True], [False, True, True, False]])


def places(selected):
    return [tuple(map(int, one)) for one in np.argwhere(np.asarray(selected))]


def test_each_tokens_covariance_by_hand():
    found = np.asarray(losses.covariance(LOGP, ADVANTAGE, MASK))
    np.testing.assert_allclose(found[MASK], [1, -2, 0, 2, -1], atol=1e-6)
    assert np.all(found[~MASK] == -np.inf)


@pytest.mark.parametrize(
    "count,expected", [(1, [(1, 1)]), (2, [(0, 0), (1, 1)]), (9, [(0, 0), (0, 1), (0, 3), (1, 1), (1, 2)])]
)
def test_the_highest_covariances_are_taken_and_nothing_outside_the_mask(count, expected):
    assert places(losses.highest_covariance(LOGP, ADVANTAGE, MASK, count=jnp.int32(count))) == expected


BAND = dict(low=-1.5, high=1.5, clip_low=0.2, clip_high=0.2)


def drawn_tokens(key, count, old=LOGP, **changes):
    key = jax.random.key(key)
    return places(losses.drawn_by_covariance(key, LOGP, old, ADVANTAGE, MASK, count=jnp.int32(count), **BAND | changes))


def test_only_tokens_of_the_band_are_drawn_and_at_most_so_many():
    assert drawn_tokens(0, 9) == [(0, 0), (0, 3), (1, 2)]
    assert drawn_tokens(0, 9, low=-9, high=0.5) == [(0, 1), (0, 3), (1, 2)]
    assert drawn_tokens(0, 9, low=5.0, high=6.0) == []
    assert drawn_tokens(0, 9, low=-1.0, high=1.0) == [(0, 3)], "neither bound is in the band"
    several = {tuple(drawn_tokens(key, 1)) for key in range(40)}
    assert several == {((0, 0),), ((0, 3),), ((1, 2),)}, "each token can be drawn"


def test_tokens_that_the_clip_holds_are_not_drawn():
    """The first has ratio 2 and A > 0, the last 2 and A > 0 too; the second would be held at a ratio below 0.8."""
    old = LOGP - np.log(2.0) * np.array([[1.0, 0, 0, 0], [0, 0, 1.0, 0]])
    assert drawn_tokens(0, 9, old) == [(0, 3)]
    positive, negative = [(0, 0), (0, 3), (1, 2)], [(0, 1), (1, 1)]  # by the sign of A
    for ratio, left in ((0.79, positive), (0.81, places(MASK)), (1.19, places(MASK)), (1.21, negative)):
        assert drawn_tokens(0, 9, LOGP - np.log(ratio), low=-9, high=9) == left, ratio


def test_selected_tokens_have_no_surrogate_in_clip_cov_and_a_penalty_in_kl_cov():
    """Ratios 2 and 1/2, A = 1 and -1, ε = 0.2: -1.2 and 0.8; β = 3: -2 and 1/2, and 3 log 2 more of the selected."""
    logp, old, a = np.log([[2.0, 0.5]]) - 3, np.full((1, 2), -3.0), np.array([[1.0, -1.0]])
    mask, segment = np.ones((1, 2), bool), np.ones((1, 2), np.int32)
    for selected in ([False, False], [True, False], [True, True]):
        chosen = np.array([selected])
        loss, held, lower = losses.clip_cov(logp, old, a, mask, segment, chosen, clip_low=0.2, clip_high=0.2)
        np.testing.assert_allclose(loss, np.where(chosen, 0.0, [[-1.2, 0.8]]), rtol=1e-6)
        np.testing.assert_array_equal(held, chosen)
        loss, held, lower = losses.kl_cov(logp, old, a, mask, segment, chosen, ppo_kl_coef=3.0)
        np.testing.assert_allclose(loss, [[-2.0, 0.5]] + 3 * np.log(2) * chosen, rtol=1e-6)
        assert not np.any(lower)


def test_bradley_terry_by_hand():
    # e^2 = 7.389056: σ(2) = 0.880797, -log of it 0.126928; σ(0) = 1/2; σ(-3 - 0.5) = 1 / (1 + e^3.5) = 0.029312
    chosen, rejected, margin = np.array([3.0, 1.0, -1.0]), np.array([1.0, 1.0, 2.0]), np.array([0.0, 0.0, 0.5])
    loss = losses.bradley_terry(chosen, rejected, margin, center=0.0)
    np.testing.assert_allclose(loss, [0.126928, math.log(2), 3.529750], atol=2e-6)
    centred = losses.bradley_terry(chosen, rejected, margin, center=0.1)
    np.testing.assert_allclose(centred - loss, [1.6, 0.4, 0.1], rtol=1e-5)


def test_dpo_and_ipo_by_hand():
    # β = 0.5: σ(1) = 0.731059 and σ(-0.5) = 0.377541, -log of them 0.313262 and 0.974077; IPO's aim is 1 / (2 * 0.2)
    chosen, rejected = np.array([3.0, 0.0]), np.array([1.0, 1.0])
    np.testing.assert_allclose(losses.dpo(chosen, rejected, beta=0.5), [0.313262, 0.974077], atol=2e-6)
    np.testing.assert_allclose(losses.ipo(chosen, rejected, beta=0.2), [(2 - 2.5) ** 2, (-1 - 2.5) ** 2], rtol=1e-6)


def test_far_scores_of_pairs_are_finite():
    far = np.array([1e4, -1e4], np.float32)
    slope = jax.grad(lambda x: losses.bradley_terry(x, -x, np.zeros(2, np.float32), center=0.0).sum())(far)
    np.testing.assert_allclose(losses.bradley_terry(far, -far, np.zeros(2, np.float32), center=0.0), [0.0, 2e4])
    np.testing.assert_allclose(slope, [0.0, -2.0])  # -2 (1 - σ(2x))


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_the_loss_of_pairs_and_its_slope_are_torchs(center):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    chosen, rejected, margin = rng.normal(0, 2, (3, 7)).astype(np.float32)
    theirs = [torch.tensor(x, requires_grad=True) for x in (chosen, rejected)]
    probability = 1 / (1 + torch.exp(-(theirs[0] - theirs[1] - torch.tensor(margin))))
    expected = (-torch.log(probability) + center * (theirs[0] + theirs[1]) ** 2).sum()
    expected.backward()
    loss, slopes = jax.value_and_grad(
        lambda pair: losses.bradley_terry(*pair, margin, center=center).sum(),
    )((chosen, rejected))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    for ours, tensor in zip(slopes, theirs, strict=True):
        np.testing.assert_allclose(ours, tensor.grad.numpy(), atol=1e-5)
