"""Routers' sums and the losses of them against transformers' functions, and against a decoder's own layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.models import config_reader, decoder, router
from jppo.models.config import Experts, Routing
from jppo.models.families import QWEN3
from tests.make import whole
from tests.models.conftest import config_of

torch = pytest.importorskip("torch")
HOW = Experts(6, 2, 8, 0, normalized=True, sparse=(True, True), names=QWEN3, routing=Routing())


@pytest.fixture
def routed(rng):
    """Logits of two layers, [L, R, T, E], and the counted tokens [R, T]."""
    return rng.normal(size=(2, 3, 7, 6), scale=2).astype(np.float32), rng.random((3, 7)) < 0.6


def sums_of(logits, counted, how=HOW):
    """The sums of both layers."""
    rows = [router.sums_by_row(x, how, router.choose_experts(x, how)[1], counted) for x in logits]
    return jax.tree.map(lambda *parts: jnp.stack([jnp.sum(x, axis=0) for x in parts]), *rows)


def test_the_load_balancing_loss_and_its_gradient_are_those_of_transformers(routed):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits, counted = routed
    theirs = torch.tensor(logits, requires_grad=True)
    mask = torch.from_numpy(counted)
    each = [mixtral.load_balancing_loss_func((x.reshape(-1, 6),), 6, 2, mask) for x in theirs]
    (sum(each) / 2).backward()

    def loss(logits):
        sums, tokens = sums_of(logits, counted), np.float32(counted.sum())
        return router.balance_loss(sums, sums.load, tokens)

    value, slope = jax.value_and_grad(loss)(jnp.asarray(logits))
    np.testing.assert_allclose(value, float(sum(each).detach()) / 2, rtol=1e-6)
    np.testing.assert_allclose(slope, theirs.grad.numpy(), rtol=1e-4, atol=1e-8)
    assert not slope[:, ~counted].any() and np.abs(slope).max() > 1e-3


def test_the_z_loss_is_that_of_transformers(routed):
    switch = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    logits, counted = routed
    expected = [float(switch.router_z_loss_func(torch.from_numpy(x[counted][None]))) for x in logits]
    found = router.z_loss(sums_of(logits, counted), np.float32(counted.sum()))
    np.testing.assert_allclose(found, np.mean(expected), rtol=1e-6)


def test_metrics_are_relative_to_an_even_load(routed):
    logits, counted = routed
    tokens = np.float32(counted.sum())
    sums = sums_of(logits, counted)
    p = np.asarray(jax.nn.softmax(logits))[:, counted].astype(np.float64)
    np.testing.assert_allclose(np.mean(sums.entropy) / tokens, -np.sum(p * np.log(p), -1).mean(), rtol=1e-5)
    chosen = np.argsort(-logits[:, counted], axis=-1)[..., :2]
    load = np.stack([np.bincount(layer.reshape(-1), minlength=6) for layer in chosen]) / (tokens * 2 / 6)
    extremes = router.load_extremes(np.asarray(sums.load / tokens))
    assert extremes == pytest.approx((load.max(), load.min()), rel=1e-6)


def test_the_probability_of_a_sigmoid_router_is_an_experts_share_of_the_scores(routed):
    logits, counted = routed
    sums = sums_of(logits, counted, dataclasses.replace(HOW, routing=Routing(scoring="sigmoid")))
    score = 1 / (1 + np.exp(-logits.astype(np.float64)))
    p = (score / score.sum(-1, keepdims=True))[:, counted]
    np.testing.assert_allclose(sums.prob, p.sum(1), rtol=1e-5)
    np.testing.assert_allclose(sums.entropy, -np.sum(p * np.log(p), (1, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    "how", [dict(remat="full"), *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, dict(scan_layers=False)))]
)
def test_every_sparse_layer_of_a_decoder_leaves_its_sums_and_the_output_is_the_same(rng, how):
    cfg = config_reader.parse_config(config_of("qwen2-moe-mixed"), path="config.json")
    tokens = rng.integers(0, cfg.vocab_size, (2, 9)).astype(np.int32)
    counted = np.arange(9) < np.array([[9], [4]])
    model = decoder.Decoder(cfg, **how)
    draw = functools.partial(decoder.init_params, cfg, head="lm", param_dtype=jnp.float32)
    values = {"params": jax.jit(draw)(jax.random.key(0))}
    summed = jax.jit(lambda values: model.apply(values, tokens, *whole(tokens), counted, mutable=[router.SUMS]))
    hidden, left = summed(values)
    plain = jax.jit(lambda values: model.apply(values, tokens, *whole(tokens)))(values)
    np.testing.assert_array_equal(hidden, plain)
    sums = router.collected_sums(left, cfg)
    assert sums.load.shape == (sum(cfg.experts.sparse), cfg.experts.count) and sums.z.shape == sums.load.shape[:1]
    np.testing.assert_array_equal(sums.load.sum(axis=1), 13 * cfg.experts.active)
    np.testing.assert_allclose(sums.prob.sum(axis=1), 13, rtol=1e-6)
