"""The optimizer is torch's AdamW with clip_grad_norm_; the schedule is verl's, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jppo.learner import optim


def test_adamw_is_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=(5, 3)), "b": rng.normal(size=3)}
    theirs = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
    reference = torch.optim.AdamW(theirs.values(), lr=3e-2, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.3)
    tx = optim.make_optimizer(grad_clip=0.7, betas=(0.8, 0.95), weight_decay=0.3)
    params = {k: jnp.float32(v) for k, v in start.items()}
    opt = tx.init(params)
    for step in range(6):
        size = 5.0 if step % 2 else 0.05  # above the clip and below
        grads = {k: size * rng.normal(size=v.shape) for k, v in start.items()}
        for k, p in theirs.items():
            p.grad = torch.tensor(grads[k])
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.7)
        reference.step()
        params, opt = optim.descend(tx, params, opt, {k: jnp.float32(g) for k, g in grads.items()}, jnp.float32(3e-2))
        for k in start:
            np.testing.assert_allclose(params[k], theirs[k].detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_rate_of_0_changes_nothing_and_keeps_the_dtype():
    tx = optim.make_optimizer(grad_clip=1.0, betas=(0.9, 0.999), weight_decay=0.1)
    params = {"w": jnp.ones((3,), jnp.bfloat16)}
    after, _ = optim.descend(tx, params, tx.init(params), {"w": jnp.ones((3,))}, jnp.float32(0.0))
    assert after["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(after["w"], params["w"])


@pytest.mark.parametrize(
    "kind,warmup,ratio,expected",
    [
        ("constant", 0, 0.0, {0: 1.0, 7: 1.0, 100: 1.0}),
        ("constant", 4, 0.0, {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0, 9: 1.0}),
        ("cosine", 0, 0.0, {0: 1.0, 5: 0.5, 10: 0.0, 12: 0.0}),
        ("cosine", 2, 0.2, {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.2 + 0.4 * (1 + 0.5**0.5), 6: 0.6, 10: 0.2, 50: 0.2}),
    ],
)
def test_schedule_by_hand(kind, warmup, ratio, expected):
    rate = optim.make_schedule(kind, lr=2.0, warmup_steps=warmup, total_steps=10, min_lr_ratio=ratio)
    for step, share in expected.items():
        np.testing.assert_allclose(rate(jnp.int32(step)), 2.0 * share, rtol=1e-6, atol=1e-6)
        assert rate(jnp.int32(step)).dtype == jnp.float32
