"""How a token is chosen: against the rule written as a loop, and against frequencies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.models import config_reader, decoder, generate, heads
from jppo.models.cache import make_attend_cached
from jppo.models.generate import SamplingRule
from jppo.types import OVERFLOW
from tests.models.conftest import config_of


@functools.partial(jax.jit, static_argnames="cut")
def choose(logits, seed, position, choice, cut):
    return generate.sample_tokens(generate.filter_logits(logits, choice, cut=cut), seed, position, choice)


def choice(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0):
    return SamplingRule(np.float32(temperature), np.float32(top_p), np.int32(top_k), np.float32(min_p), np.False_)


def left(logits, top_k, top_p, min_p=0.0):
    """The distribution over what stays: min_p of the likeliest, the top_k, the fewest of these with top_p of them."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = [i for i in order if np.exp(np.float64(logits[i]) - logits[order[0]]) >= min_p]
    order = order[:top_k] if top_k > 0 else order
    weight = {i: np.exp(np.float64(logits[i])) for i in order}
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p and top_p < 1:
            break
        kept.append(i)
        mass += weight[i] / sum(weight.values())
    total = sum(weight[i] for i in kept)
    return np.array([weight[i] / total if i in kept else 0.0 for i in range(len(logits))])


@pytest.mark.parametrize("min_p", [0.0, 0.1, 0.99])
@pytest.mark.parametrize("top_k,top_p", [(-1, 1.0), (0, 0.9), (3, 1.0), (5, 0.6), (1, 0.5), (99, 1e-6), (4, 0.999)])
def test_what_is_left_is_what_the_rule_says(top_k, top_p, min_p):
    logits = np.random.default_rng(0).normal(0, 2, (6, 11)).astype(np.float32)
    numbers = np.int32(top_k), np.float32(top_p), np.float32(min_p)
    found = jax.nn.softmax(generate.keep_likeliest(jnp.asarray(logits), *numbers), axis=-1)
    np.testing.assert_allclose(found, [left(row, top_k, top_p, min_p) for row in logits], atol=1e-6)


def test_top_p_is_a_share_of_what_min_p_leaves():
    """Of 0.5, 0.2, 0.2, 0.1 a min_p of 0.3 leaves 0.5, 0.2, 0.2; half of these 0.9 is the first alone."""
    logits = jnp.log(jnp.array([[0.5, 0.2, 0.2, 0.1]]))
    found = [generate.keep_likeliest(logits, np.int32(-1), np.float32(0.54), np.float32(m))[0] for m in (0.0, 0.3)]
    assert [int((row > heads.NO_TOKEN).sum()) for row in found] == [3, 1]  # 0.54 of 1.0 needs a second, and its equal


def test_nothing_is_cut_from_a_flat_tail_where_both_are_off():
    logits = jnp.concatenate([jnp.zeros((1, 1)), jnp.full((1, 200_000), -30.0)], axis=1)
    assert np.array_equal(generate.keep_likeliest(logits, np.int32(-1), np.float32(1.0), np.float32(0.0)), logits)


def test_tokens_of_a_large_vocabulary_come_as_often_as_their_log_probs_say():
    """Of several groups of chunks, the last one not full: by thirds of the vocabulary, and by the place in a chunk."""
    logits = np.random.default_rng(5).normal(0, 2, 9000).astype(np.float32)
    logits[4000:4200] = heads.NO_TOKEN  # a whole chunk and parts of two
    count = 6_000
    rows, seeds = jnp.broadcast_to(jnp.asarray(logits)[None], (count, 9000)), jnp.arange(count, dtype=jnp.uint32)
    parts = [
        choose(rows[:2000], seeds[i : i + 2000], jnp.zeros(2000, jnp.int32), choice(), cut=False)
        for i in range(0, count, 2000)
    ]
    token, logp = (np.concatenate(part) for part in zip(*parts, strict=True))
    probs = np.exp(np.float64(logits)) / np.exp(np.float64(logits)).sum()
    np.testing.assert_allclose(np.exp(logp), probs[token], rtol=2e-5)
    for of in (np.arange(9000) // 1000, np.arange(9000) % 128 // 16, np.arange(9000) // 128 % 32 // 4):
        np.testing.assert_allclose(np.bincount(of[token]) / count, np.bincount(of, probs), atol=0.016)


@pytest.mark.parametrize(
    "temperature,top_p,top_k,min_p", [(1.0, 1.0, -1, 0.0), (0.5, 1.0, -1, 0.0), (2.0, 0.8, 4, 0.0), (1.5, 0.9, 5, 0.3)]
)
def test_tokens_come_as_often_as_their_log_probs_say(temperature, top_p, top_k, min_p):
    logits = np.random.default_rng(1).normal(0, 1.5, 7).astype(np.float32)
    count = 20_000
    rows = jnp.broadcast_to(jnp.asarray(logits)[None], (count, 7))
    seeds, position = jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 3, jnp.int32)
    token, logp = choose(rows, seeds, position, choice(temperature, top_p, top_k, min_p), cut=top_k > 0)
    expected = left(logits / temperature, top_k, top_p, min_p)
    np.testing.assert_allclose(np.bincount(token, minlength=7) / count, expected, atol=0.012)  # three deviations
    np.testing.assert_allclose(np.exp(logp), expected[np.asarray(token)], rtol=1e-5)


def test_greedy_takes_the_likeliest_whatever_else_is_asked_and_gives_its_plain_log_prob():
    logits = np.random.default_rng(2).normal(0, 1, (5, 9)).astype(np.float32)
    token, logp = choose(
        jnp.asarray(logits), jnp.zeros(5, jnp.uint32), jnp.zeros(5, jnp.int32), choice(0.0, 0.3, 1, 0.5), cut=True
    )
    assert np.array_equal(token, logits.argmax(1))
    np.testing.assert_allclose(logp, jax.nn.log_softmax(logits)[np.arange(5), logits.argmax(1)], rtol=1e-6)


def test_a_draw_depends_on_seed_and_position_alone():
    logits = jnp.asarray(np.random.default_rng(3).normal(0, 1, (64, 13)), jnp.float32)
    seeds, position = jnp.arange(64, dtype=jnp.uint32), jnp.arange(64, dtype=jnp.int32) % 5
    token, _ = choose(logits, seeds, position, choice(), cut=False)
    order = np.random.default_rng(4).permutation(64)[:40]
    fewer, _ = choose(logits[order], seeds[order], position[order], choice(), cut=False)
    assert np.array_equal(fewer, token[order])
    for changed in ((seeds + 1, position), (seeds, position + 1)):
        assert not np.array_equal(choose(logits, *changed, choice(), cut=False)[0], token)


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_what_is_no_token_is_never_drawn(temperature):
    """Also where all tokens are as unlikely as can be."""
    logits = jnp.full((500, 8), -1e4).at[:, 5:].set(heads.NO_TOKEN)
    seeds = jnp.arange(500, dtype=jnp.uint32)
    for cut in (False, True):
        drawn = choice(temperature, 0.9 if cut else 1.0, 7 if cut else -1, 0.1 if cut else 0.0)
        token, logp = choose(logits, seeds, jnp.zeros(500, jnp.int32), drawn, cut=cut)
        assert int(token.max()) == 4 and np.isfinite(logp).all()


@pytest.mark.parametrize("enough, turns, taken", [(1, 9, 2), (2, 9, 3), (3, 9, 7), (4, 9, 7), (3, 4, 4)])
def test_rows_go_on_until_enough_of_them_are_free(enough, turns, taken):
    """Rows of 2, 3 and 7 tokens to go."""
    cfg = config_reader.parse_config(config_of("qwen3-tied"), path="config.json")
    model = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype=jnp.float32)
    slots = generate.empty_slots(cfg, rows=3, length=9, slots=8, dtype=jnp.float32)
    slots = dataclasses.replace(slots, until=jnp.array([2, 3, 7], jnp.int32))
    slots = generate.next_tokens(
        generate.prepare_model(model, cfg, dtype=jnp.float32),
        cfg,
        slots,
        choice(),
        enough,
        ends=(),
        steps=turns,
        cut=False,
        dtype=jnp.float32,
        attend=make_attend_cached(scale=cfg.query_scale, softcap=cfg.attn_softcap),
    )
    assert slots.last.tolist() == [min(taken, until) for until in (2, 3, 7)]


def test_nothing_is_kept_of_tokens_that_were_not_sampled():
    cfg = config_reader.parse_config(config_of("qwen3-tied"), path="config.json")
    slots = generate.empty_slots(cfg, rows=2, length=5, slots=4, dtype=jnp.float32, kept=3)
    np.testing.assert_array_equal(slots.kept, np.full((2, 5, 3), -1))


def test_kept_tokens_are_those_that_are_left():
    """Two of four, all of them, and more than there is room for."""
    left = jnp.array([[0.0, 2.0, 1.0, 3.0], [0.0, 2.0, 1.0, 3.0], [0.0, 2.0, 1.0, 3.0]])
    logits = jnp.where(jnp.array([[0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 0, 1]]) > 0, left, heads.NO_TOKEN)
    found = generate.kept_tokens(logits, 4, 2).tolist()
    assert [sorted(row) for row in found] == [[1, 3], [-1, -1], sorted([OVERFLOW, -1])] and found[2][0] == OVERFLOW
    assert generate.kept_tokens(logits[:1], 4, 3).tolist() == [[3, 1, -1]]
