"""Published numbers: what verl 0.9.1 computed in float64, gradients too, for what jppo has so far."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import advantage, kl, losses, masked
from jppo.models import heads

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


@pytest.fixture(autouse=True)
def double():
    """As the numbers were made."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def cases(shared):
    """pattern -> (name, settings, arrays) of each matching file; at least one."""

    def read(pattern):
        files = sorted((shared / "golden").glob(pattern))
        assert files, f"no case matches {pattern}"
        for file in files:
            with np.load(file) as z:
                arrays = {k: z[k] for k in z.files if k != "meta"}
                meta = json.loads(str(z["meta"]))
            yield file.stem, meta, arrays | {"mask": arrays["in_mask"] > 0}

    return read


def test_gae_whitened_over_the_mask(cases):
    for name, meta, a in cases("advantage/gae-*.npz"):
        reward, value, mask = a["in_rewards"], a["in_values"], a["mask"]
        segment = np.ones(mask.shape, np.int32)
        raw, returns = advantage.gae(reward, value, mask, segment, gamma=meta["gamma"], lam=meta["lam"])
        # Whitened from the moments of two halves, as over two micro-batches.
        halves = [masked.moments(raw[i], mask[i]) for i in (np.s_[:5], np.s_[5:])]
        _, mean, var = masked.combine(halves)
        white = masked.whiten(raw, mask, mean=mean, var=var)
        np.testing.assert_allclose(white, np.where(mask, a["out_advantages"], 0), err_msg=name, **TIGHT)
        assert returns.dtype == np.float64
        np.testing.assert_allclose(np.asarray(returns)[mask], a["out_returns"][mask], err_msg=name, **TIGHT)


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
def test_kl_and_its_gradient(cases, kind):
    for name, meta, a in cases(f"kl/{kind}-*.npz"):
        estimate = kl.ESTIMATORS[meta["kind"]]
        logp, ref = a["in_logprob"], a["in_ref_logprob"]
        np.testing.assert_allclose(estimate(logp, ref), a["out_kl"], err_msg=name, **TIGHT)
        grad = jax.grad(lambda x, f=estimate, r=ref, m=a["mask"]: masked.masked_sum(f(x, r), m))(logp)
        expected = np.where(a["mask"], a["out_grad"], 0.0)
        np.testing.assert_allclose(grad, expected, err_msg=name, **TIGHT)


def test_value_loss(cases):
    for name, meta, a in cases("value_loss/token-mean-*.npz"):
        mask = a["mask"]

        def loss(v, a=a, mask=mask, c=meta["cliprange_value"]):
            each, held = losses.clipped_value(v, a["in_values"], a["in_returns"], cliprange_value=c)
            return masked.masked_sum(each, mask) / mask.sum(), held

        (found, held), grad = jax.value_and_grad(loss, has_aux=True)(a["in_vpreds"])
        np.testing.assert_allclose(found, a["out_loss"], err_msg=name, rtol=1e-7)  # verl divides by n + 1e-8
        np.testing.assert_allclose(grad, a["out_grad"], err_msg=name, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(np.mean(held[mask]), meta["clipfrac"], err_msg=name, rtol=1e-7)


def test_policy_loss_where_the_dual_clip_does_not_hold(cases):
    """verl's bound -A c for A < 0 is not among ours: its tokens are added by the definition."""
    seen = 0
    for name, meta, a in cases("policy_loss/vanilla-*.npz"):
        symmetric = meta["clip_ratio_low"] == meta["clip_ratio_high"]
        if meta["mode"] != "token-mean" or not symmetric or any("weight" in key for key in a):
            continue
        seen += 1
        mask, A, n = a["mask"], a["in_advantages"], a["mask"].sum()
        ratio = np.exp(a["in_logprob"] - a["in_old_logprob"])
        bound = mask & (A < 0) & (ratio > meta["clip_ratio_c"])
        assert bound.sum() / n == pytest.approx(meta["metrics"]["actor/pg_clipfrac_lower"])

        def loss(logp, a=a, A=A, n=n, kept=mask & ~bound, eps=meta["clip_ratio_low"]):
            each, held = losses.clipped_policy(logp, a["in_old_logprob"], A, clip_ratio=eps)
            return masked.masked_sum(each, kept) / n, held

        (found, held), grad = jax.value_and_grad(loss, has_aux=True)(a["in_logprob"])
        found += (-A * meta["clip_ratio_c"])[bound].sum() / n
        np.testing.assert_allclose(found, a["out_loss"], err_msg=name, rtol=1e-7)
        np.testing.assert_allclose(grad, a["out_grad"], err_msg=name, rtol=1e-7, atol=1e-10)
        clipped = meta["metrics"]["actor/pg_clipfrac"]
        np.testing.assert_allclose(np.mean(held[mask]), clipped, err_msg=name, rtol=1e-7)
    assert seen >= 4


def test_entropy(cases):
    """The logits are put through the head as hidden states of an identity kernel."""
    for name, _, a in cases("entropy/*.npz"):
        logits, mask = a["in_logits"], a["mask"]
        _, entropy = heads.logprob_entropy(
            jnp.asarray(logits, jnp.float32),
            jnp.eye(logits.shape[-1], dtype=jnp.float32),
            jnp.zeros(mask.shape, jnp.int32),
            temperature=1.0,
            chunk_tokens=64,
            with_entropy=True,
        )
        found = masked.masked_sum(entropy, mask) / mask.sum()
        np.testing.assert_allclose(found, a["out_loss"], err_msg=name, rtol=1e-5)
