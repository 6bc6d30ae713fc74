"""The passes over rows: the exact KL against a sum over the vocabulary in numpy, its gradient, what is asked for."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import kl
from jppo.learner import packing, score, sharding
from jppo.models import decoder, heads

TEMPERATURE = 0.8


@pytest.fixture
def setting(learner, drawn):
    """The pair of models, two sets of weights, and a micro-batch of shared rows."""
    ours = learner()
    trajectories, _ = drawn(8)
    rows = packing.pack(trajectories, range(8), ours.plan("segments", 10**6, 8))[0]
    rows = sharding.put_rows(rows, ours.mesh)
    model = (decoder.Decoder(ours.cfg), ours.cfg)
    return model, ours.weights("actor", 0), ours.weights("actor", 1), rows


def log_softmax(model, params, rows):
    """[R, T, V] in float64."""
    module, cfg = model
    hidden = module.apply({"params": params}, rows.inputs, rows.segment, rows.position)
    z = np.asarray(heads.logits_of((hidden, decoder.head_kernel(params, cfg), cfg)), np.float64) / TEMPERATURE
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.parametrize("chunk_tokens", [8, 10**6])
def test_exact_kl_is_the_sum_over_the_vocabulary(setting, chunk_tokens):
    model, policy, reference, rows = setting
    exact = score.make_exact(kl.full, model, model, temperature=TEMPERATURE, chunk_tokens=chunk_tokens)
    (logp, entropy, found, *_), ref_logp = jax.jit(exact)(policy, reference, rows)
    p, q = (log_softmax(model, params, rows) for params in (policy, reference))
    mask = np.asarray(rows.mask)
    expected = (np.exp(p) * (p - q)).sum(-1)
    assert expected[mask].mean() > 0.1
    np.testing.assert_allclose(found[mask], expected[mask], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(entropy[mask], -(np.exp(p) * p).sum(-1)[mask], rtol=1e-4, atol=1e-5)
    for logs, values in ((p, logp), (q, ref_logp)):
        chosen = np.take_along_axis(logs, np.asarray(rows.targets)[..., None], 2)[..., 0]
        np.testing.assert_allclose(np.asarray(values)[mask], chosen[mask], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jit(exact)(policy, policy, rows)[0].penalty, 0, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "full_forward", "forward_kl_topk"])
def test_exact_kl_both_ways_with_gradients(setting, name):
    """Of the chunks, and of the sum over all logits at once: Σ π (log π - log π_ref), and with the two exchanged."""
    model, policy, reference, rows = setting
    module, cfg = model
    how = dict(topk=7) if name == "forward_kl_topk" else {}
    divergence = functools.partial(kl.EXACT[name], **how)
    exact = score.make_exact(divergence, model, model, temperature=TEMPERATURE, chunk_tokens=16)

    def mean(found):
        return jnp.sum(jnp.where(rows.mask, found, 0.0)) / rows.mask.sum()

    def plain(params):
        def logs(weights):
            hidden = module.apply({"params": weights}, rows.inputs, rows.segment, rows.position)
            return jax.nn.log_softmax(heads.logits_of((hidden, decoder.head_kernel(weights, cfg), cfg)) / TEMPERATURE)

        p, q = logs(params), jax.lax.stop_gradient(logs(reference))
        p, q = (p, q) if name == "full" else (q, p)
        each = jnp.exp(p) * (p - q)
        if name == "forward_kl_topk":  # of the seven likeliest tokens, which no others equal
            each = jnp.where(p >= jnp.sort(p, axis=-1)[..., -7:-6], each, 0.0)
            return mean(jnp.maximum(jnp.sum(each, -1), 0.0))
        return mean(jnp.sum(each, -1))

    value, found = jax.jit(jax.value_and_grad(lambda params: mean(exact(params, reference, rows)[0].penalty)))(policy)
    expected_value, expected = jax.jit(jax.value_and_grad(plain))(policy)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * largest), found, expected)
    frozen = jax.grad(lambda ref: mean(exact(policy, ref, rows)[0].penalty))(reference)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(frozen)), "the reference does not learn"


@pytest.mark.parametrize(
    "penalty,loss,ref_logp,whole",
    [
        ("kl", None, True, False),
        (None, "k3", True, False),
        ("full", None, False, True),
        (None, "full+", False, False),
        (None, "full_forward", False, False),
        ("full", "k2", True, True),
    ],
)
def test_the_reference_gives_what_is_asked_for_and_no_more(setting, penalty, loss, ref_logp, whole):
    model, policy, reference, rows = setting
    how = dict(temperature=TEMPERATURE, chunk_tokens=64)
    exact = score.make_exact(kl.full, model, model, **how)
    logprob = score.make_logprob(*model, **how, with_entropy=False)
    passed = score.make_reference(penalty, loss, logprob, exact)
    if not (ref_logp or whole):
        assert passed is None
        return
    found = passed(reference, policy, rows)
    assert [x is not None for x in found] == [ref_logp, whole]


def test_the_exact_kl_with_a_plus_has_the_gradient_of_k2():
    mask, w = np.bool_([[1, 0, 1]]), jnp.float32([[0.5, jnp.nan, -1.0]])
    ref, kl_of = np.float32([[0.2, np.inf, 0.3]]), np.float32([[7.0, 8.0, 9.0]])
    make = functools.partial(score.make_logprob_kl, "full+", None)
    found = make(lambda params, *_: (score.Scores(params, params, kl_of), ref))

    def total(params):
        return jnp.sum(jnp.where(mask, found(params, params, types.SimpleNamespace(mask=mask), None).penalty, 0.0))

    value, slope = jax.value_and_grad(total)(w)
    assert float(value) == 16.0
    np.testing.assert_allclose(slope, [[0.3, 0.0, -1.3]], rtol=1e-6)  # of (log π - log π_ref)² / 2
