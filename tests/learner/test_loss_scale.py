"""The loss scale against torch.amp.GradScaler; scaled float16 gradients against float32 gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jppo.learner import loss_scale, optim, sharding, update
from tests.learner.conftest import ADAMW, Learner, draw


def make_step(params, scale, *, good=0):
    """A step of SGD with a rate of 0.1: (params, optimizer state, gradient, loss=, learns=) -> as of `make_apply`."""
    mesh = sharding.mesh_of_shape((1, 1, 1))
    place = sharding.replicated(mesh)
    tx = loss_scale.scale_loss(optim.make_optimizer(lambda rate: optax.sgd(rate), grad_clip=1e9))
    opt = jax.device_put(tx.init(params)._replace(scale=jnp.float32(scale), good=jnp.int32(good)), place)
    places = jax.tree.map(lambda _: place, (params, opt))
    apply = update.make_apply(tx, lambda _: jnp.float32(0.1), shardings=places)

    def step(params, opt, gradient, *, loss=1.0, learns=True):
        carry = jax.device_put(({"w": gradient}, np.float32(loss)), place)
        return apply(jax.device_put(params, places[0]), opt, carry, np.int32(0), np.bool_(learns))

    return step, opt


def test_the_scale_and_the_steps_are_those_of_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    assert torch.amp.GradScaler("cpu").get_scale() == loss_scale.BEGIN
    assert torch.amp.GradScaler("cpu").get_growth_factor() == loss_scale.GROWTH
    assert torch.amp.GradScaler("cpu").get_backoff_factor() == loss_scale.BACKOFF
    theirs = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer, scaler = torch.optim.SGD([theirs], lr=0.1), torch.amp.GradScaler("cpu", growth_interval=3)
    params = {"w": np.float32([3.0, 4.0])}
    step, opt = make_step(params, loss_scale.BEGIN)
    finite = [True, True, True, True, False, True, True, False, False, True, True, True, True, True, True, True]
    for number, is_finite in enumerate(finite):
        gradient = np.float32([0.5 + number, 1.2 if is_finite else np.inf])
        theirs.grad = torch.tensor(gradient) * scaler.get_scale()
        scaler.scale(torch.zeros(1))  # makes the scale
        scaler.step(optimizer)
        scaler.update()
        params, opt, stats = step(params, opt, gradient)
        assert float(opt.scale) == scaler.get_scale()
        assert (float(stats["overflowed"]), float(stats["skipped"])) == (not is_finite, 0)
        np.testing.assert_allclose(params["w"], theirs.detach().numpy(), rtol=1e-5)
    assert float(opt.scale) == loss_scale.BEGIN * 2 / 8 * 4


# An overflow is the scale's, unless that is the smallest; a loss that is not finite, or no token, says nothing of it.
@pytest.mark.parametrize(
    "scale, gradient, loss, learns, after, good, overflowed, skipped",
    [
        (8.0, np.nan, 1.0, True, 4.0, 0, 1, 0),
        (2.0, np.inf, 1.0, True, 1.0, 0, 1, 0),
        (1.0, np.inf, 1.0, True, 1.0, 7, 0, 1),
        (8.0, np.inf, np.inf, True, 8.0, 7, 0, 1),
        (8.0, 0.5, np.nan, True, 8.0, 7, 0, 1),
        (8.0, 0.5, 1.0, False, 8.0, 7, 0, 0),
        (8.0, 0.5, 1.0, True, 8.0, 8, 0, 0),
    ],
)
def test_an_overflow_halves_the_scale_and_is_no_skipped_step(
    scale, gradient, loss, learns, after, good, overflowed, skipped
):
    step, opt = make_step(params := {"w": np.float32([3.0, 4.0])}, scale, good=7)
    new, opt, stats = step(params, opt, np.float32([gradient, 1.2]), loss=loss, learns=learns)
    assert (float(opt.scale), int(opt.good)) == (after, good)
    assert (float(stats["overflowed"]), float(stats["skipped"])) == (overflowed, skipped)
    assert float(stats["loss_scale"]) == scale
    changed = learns and np.isfinite([gradient, loss]).all()
    np.testing.assert_allclose(new["w"], params["w"] - changed * 0.1 * np.float32([gradient if changed else 0, 1.2]))


def test_a_scale_ends_below_infinity():
    step, opt = make_step(params := {"w": np.float32([3.0])}, 2.0**127, good=loss_scale.INTERVAL - 1)
    assert float(step(params, opt, np.float32([1.0]))[1].scale) == 2.0**127


@pytest.fixture(scope="module")
def gradients():
    """(dtype, scale, size of the loss, tokens of a micro-batch) -> the actor's gradient, one array, and its loss."""
    learners = {dtype: Learner(dtype=dtype) for dtype in ("float32", "float16")}
    trajectories, scores = draw(8)
    with jax.default_matmul_precision("highest"):
        whole = learners["float32"]
        plan = whole.plan("none", 10**6, 8)
        policy, reference, value = whole.weights("actor", 0), whole.weights("actor", 1), whole.weights("critic", 2)
        models = dict(policy=policy, reference=reference, value=value)
        flat, _ = whole.score(trajectories, scores, plan=plan, **models)

    def gradient(dtype, scale, *, size=1.0, tokens=10**6):
        how = learners[dtype]
        plan = how.plan("none", tokens, 8)
        [mini] = how.minis(flat, trajectories, plan=plan, mini=8)
        counts = mini.counts  # more tokens than there are: a smaller loss
        counts = type(counts)(counts.tokens / size, counts.sequences)
        carry, scale = how.zeros["actor"](), None if scale is None else jnp.float32(scale)
        for micro in mini.micros:
            carry, _ = how.passes.actor.accumulate(policy, None, carry, micro, counts, scale, reference)
        assert len(mini.micros) == (1 if tokens == 10**6 else 4)
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(carry[0])]), float(carry[1])

    return gradient


def distance(a, b):
    return np.linalg.norm(a[0] - b[0]) / np.linalg.norm(b[0])


def test_scaled_gradients_of_float16_are_those_of_float32(gradients):
    exact = gradients("float32", None)
    assert distance(gradients("float32", 1024.0), exact) < 1e-6
    found = gradients("float16", 1024.0)
    assert 1e-5 < distance(found, exact) < 2e-2
    assert found[1] == pytest.approx(exact[1], rel=1e-2)  # the loss is not scaled
    cut = gradients("float16", 1024.0, tokens=48)
    assert distance(cut, exact) < 2e-2 and cut[1] == pytest.approx(exact[1], rel=1e-2)


def test_small_gradients_need_the_scale(gradients):
    """Gradients of a loss of 1e-6, which underflow in float16."""
    exact = gradients("float32", None, size=1e-6)
    assert distance(gradients("float16", 1.0, size=1e-6), exact) > 0.3
    assert distance(gradients("float16", loss_scale.BEGIN, size=1e-6), exact) < 2e-2


def test_a_large_scale_overflows(gradients):
    assert not np.isfinite(gradients("float16", 2.0**24)[0]).all()
    assert np.isfinite(gradients("float32", 2.0**24)[0]).all()


def test_an_update_finds_its_scale(monkeypatch):
    """It begins with one that overflows: mini-batches change nothing until it is low enough."""
    monkeypatch.setattr(loss_scale, "BEGIN", 2.0**26)
    trajectories, scores = draw(16)
    how = Learner(dtype="float16")
    after, metrics, _ = how.update(trajectories, scores, tx=loss_scale.scale_loss(ADAMW), epochs=8)
    assert metrics["actor/skipped"] == metrics["critic/skipped"] == 0
    count = 16 * metrics["actor/overflowed"]  # of 16 mini-batches
    assert count == round(count) and 0 < count < 16
    scales = 2.0**26 / 2.0 ** np.minimum(np.arange(16), count)
    assert metrics["actor/loss_scale"] == pytest.approx(scales.mean())
    before = jax.device_get(how.weights("actor", 0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after["actor"]), strict=True))
