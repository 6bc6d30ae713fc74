"""The optimizer is torch's AdamW with clip_grad_norm_; the schedule is verl's, by hand."""

import jax
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


def stepped(tx, params, *, steps, grad, lr):
    """Parameters and optimizer's state after so many steps with one gradient."""
    step = jax.jit(lambda params, opt: optim.descend(tx, params, opt, grad, jnp.float32(lr)))
    opt = tx.init(params)
    for _ in range(steps):
        params, opt = step(params, opt)
    return params, opt


def test_small_steps_add_up_in_a_master_copy_alone():
    """1000 steps of 1e-5 down from 0.5 and 4, where bf16 goes down by 0.00098 and 0.0078."""
    params = {"w": jnp.array([0.5, 4.0], jnp.bfloat16)}
    how = dict(grad_clip=1e9, betas=(0.9, 0.999), weight_decay=0.0)
    run = dict(steps=1000, grad={"w": jnp.ones(2)}, lr=1e-5)  # Adam's direction is 1
    kept, opt = stepped(optim.make_optimizer(**how, master=True), params, **run)
    np.testing.assert_allclose(opt.master["w"], [0.49, 3.99], rtol=1e-4)
    assert kept["w"].dtype == jnp.bfloat16 and opt.master["w"].dtype == jnp.float32
    np.testing.assert_array_equal(kept["w"], jnp.array([0.49, 3.99]).astype(jnp.bfloat16))
    lost, opt = stepped(optim.make_optimizer(**how), params, **run)
    np.testing.assert_array_equal(lost["w"], params["w"])
    assert opt.master is None


def test_means_of_bf16_follow_the_squares_down():
    """After gradients of 1 there are none: in 1000 steps the mean of their squares falls to 0.999**1000 of itself."""
    params = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
    how = dict(grad_clip=1e9, betas=(0.9, 0.999), weight_decay=0.0, moments_dtype="bfloat16")
    tx = optim.make_optimizer(**how)
    ones = jax.tree.map(jnp.ones_like, params)
    opt = tx.init(params)._replace(nu=jax.tree.map(lambda x: x.astype(jnp.bfloat16), ones))
    assert {x.dtype for x in jax.tree.leaves((opt.mu, opt.nu))} == {jnp.dtype("bfloat16")}
    zero = jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(lambda opt: tx.update(zero, opt, params)[1])
    for _ in range(1000):
        opt = step(opt)
    for name, spread in (("w", 0.01), ("b", 0.05)):
        assert abs(float(jnp.mean(opt.nu[name].astype(jnp.float32))) / 0.999**1000 - 1) < spread
    nearest = jnp.bfloat16(1)
    for _ in range(1000):
        nearest = (nearest.astype(jnp.float32) * jnp.float32(0.999)).astype(jnp.bfloat16)
    assert nearest == 1  # what the nearest would have come to


@pytest.mark.parametrize("master,moments_dtype", [(False, "float32"), (True, "bfloat16")])
def test_a_step_that_is_no_good_changes_no_bit(master, moments_dtype):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(5, 3)), jnp.bfloat16 if master else jnp.float32)}
    how = dict(grad_clip=1.0, betas=(0.9, 0.99), weight_decay=0.1)
    tx = optim.make_optimizer(**how, master=master, moments_dtype=moments_dtype)
    params, opt = stepped(tx, params, steps=3, grad={"w": jnp.asarray(rng.normal(size=(5, 3)))}, lr=1e-2)
    bad = {"w": jnp.full((5, 3), jnp.nan)}
    after = optim.descend(tx, params, opt, bad, jnp.float32(1e-2), jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, after, (params, opt))
    good = optim.descend(tx, params, opt, {"w": jnp.ones((5, 3))}, jnp.float32(1e-2), jnp.bool_(True))
    assert good[1].steps == 4 and np.any(good[0]["w"] != params["w"])


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
