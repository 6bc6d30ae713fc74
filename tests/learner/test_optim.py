"""AdamW is torch's with clip_grad_norm_, other optimizers are optax's; the schedule is verl's, by hand."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jppo.learner import catalogue, optim, sharding, state
from jppo.learner import make as of_learner
from jppo.models import config_reader
from jppo.models.config import pad_vocab
from jppo.settings import table_training
from tests.models.conftest import config_of

BETAS = (0.8, 0.95)
MATRIX = optax.contrib.MuonDimensionNumbers((1,), (2,))


def make(name="adamw", *, betas=BETAS, weight_decay=0.3, grad_clip=0.7, matrices=None, **how):
    section = dataclasses.replace(table_training.Optimizer(), betas=betas, weight_decay=weight_decay)
    chain = catalogue.OPTIMIZERS[name]
    return optim.make_optimizer(lambda rate: chain(section, rate, matrices), grad_clip=grad_clip, **how)


def drawn(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.normal(size=(2, 5, 3)), dtype), "b": jnp.asarray(rng.normal(size=3), dtype)}


def stepped(tx, params, *, steps, grad, lr):
    """Parameters and optimizer's state after so many steps with one gradient."""
    chex.clear_trace_counter()
    step = jax.jit(
        chex.assert_max_traces(lambda params, opt: optim.apply_gradients(tx, params, opt, grad, jnp.float32(lr)), 1)
    )
    opt = tx.init(optim.in_f32(params))
    for _ in range(steps):
        params, opt = step(params, opt)
    return params, opt


def test_adamw_is_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=(5, 3)), "b": rng.normal(size=3)}
    theirs = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
    reference = torch.optim.AdamW(theirs.values(), lr=3e-2, betas=BETAS, eps=1e-8, weight_decay=0.3)
    tx = make()
    params = {k: jnp.float32(v) for k, v in start.items()}
    opt = tx.init(params)
    for step in range(6):
        size = 5.0 if step % 2 else 0.05  # above the clip and below
        grads = {k: size * rng.normal(size=v.shape) for k, v in start.items()}
        for k, p in theirs.items():
            p.grad = torch.tensor(grads[k])
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.7)
        reference.step()
        params, opt = optim.apply_gradients(
            tx, params, opt, {k: jnp.float32(g) for k, g in grads.items()}, jnp.float32(3e-2)
        )
        for k in start:
            np.testing.assert_allclose(params[k], theirs[k].detach().numpy(), rtol=1e-4, atol=1e-5)


OPTAX = {  # as optax's users write them, the learning rate 0.03
    "adamw": lambda: optax.adamw(0.03, *BETAS, weight_decay=0.3),
    "lion": lambda: optax.lion(0.03, *BETAS, weight_decay=0.3),
    "sgd": lambda: optax.chain(optax.trace(BETAS[0]), optax.add_decayed_weights(0.3), optax.scale(-0.03)),
    "adafactor": lambda: optax.adafactor(0.03, multiply_by_parameter_scale=False, weight_decay_rate=0.3 * 0.03),
    "muon": lambda: optax.contrib.muon(
        0.03, adam_b1=BETAS[0], adam_b2=BETAS[1], weight_decay=0.3, adam_weight_decay=0.3, consistent_rms=0.2,
        muon_weight_dimension_numbers={"w": MATRIX, "b": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTAX)
def test_a_named_optimizer_is_optaxs_after_its_clipping(name):
    tx = make(name, matrices={"w": MATRIX, "b": None} if name == "muon" else None)
    assert set(catalogue.OPTIMIZERS) == set(OPTAX)
    theirs = optax.chain(optax.clip_by_global_norm(0.7), OPTAX[name]())
    params = expected = drawn()
    opt, their_opt = tx.init(params), theirs.init(params)
    for step in range(4):
        grads = jax.tree.map(lambda g, size=(5.0, 0.05)[step % 2]: size * g, drawn(step + 1))
        params, opt = optim.apply_gradients(tx, params, opt, grads, jnp.float32(0.03))
        updates, their_opt = theirs.update(grads, their_opt, expected)
        expected = optax.apply_updates(expected, updates)
        chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)


def test_hyperparameters_of_a_step_replace_adamws_settings_and_anothers_rate_alone():
    given = optim.Hyperparameters(lr=0.2, beta1=0.5, beta2=0.6, eps=0.1, weight_decay=0.7, grad_clip=1.0)
    for name, theirs in (
        ("adamw", optax.adamw(0.2, 0.5, 0.6, eps=0.1, weight_decay=0.7)),
        ("lion", optax.lion(0.2, *BETAS, weight_decay=0.3)),
    ):
        section = dataclasses.replace(table_training.Optimizer(), optimizer=name, betas=BETAS, weight_decay=0.3)
        ours = of_learner.make_chain(section, "optim")(given)
        params, grads = drawn(), drawn(1)
        expected, _ = theirs.update(grads, theirs.init(params), params)
        found, _ = ours.update(grads, ours.init(params), params)
        chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_muons_other_parameters_have_nesterov_momentum():
    """Adam with the first moment of the next gradient (Dozat): b1 m / (1 - b1^(t+1)) + (1 - b1) g / (1 - b1^t)."""
    (b1, b2), rate = BETAS, 0.03
    tx = make("muon", matrices={"w": MATRIX, "b": None}, grad_clip=1e9, weight_decay=0.0)
    params = drawn()
    opt, expected = tx.init(params), np.asarray(params["b"], np.float64)
    m = v = np.zeros_like(expected)
    for t in range(1, 5):
        grads = drawn(t)
        params, opt = optim.apply_gradients(tx, params, opt, grads, jnp.float32(rate))
        g = np.asarray(grads["b"], np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        expected = expected - rate * ahead / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        np.testing.assert_allclose(params["b"], expected, rtol=1e-5, atol=1e-6)


def test_a_matrix_without_gradients_moves_on_with_muon_and_slows_down_with_adamw():
    """As that of an expert without tokens: 20 steps later the momentum is 0.95^20 = 0.36 and 0.9^20 = 0.12."""
    moved = {}
    for name in ("muon", "adamw"):
        how = dict(grad_clip=1e9, weight_decay=0.0, betas=(0.9, 0.95))
        tx = make(name, **how, **({"matrices": {"w": MATRIX, "b": None}} if name == "muon" else {}))
        params = drawn()
        opt, sizes = tx.init(params), []
        for step in range(21):
            grads = jax.tree.map(lambda g, on=float(step == 0): on * g, drawn(1))
            after, opt = optim.apply_gradients(tx, params, opt, grads, jnp.float32(0.03))
            sizes.append(float(jnp.linalg.norm(after["w"] - params["w"])))
            params = after
        moved[name] = sizes[-1] / sizes[0]
    assert moved["muon"] > 0.9 and moved["adamw"] < 0.4, moved


@pytest.mark.parametrize("shape,factored", [((4, 256, 128), True), ((4, 256, 127), False), ((24, 576, 16), False)])
def test_adafactor_factors_where_two_axes_have_128_entries(shape, factored):
    state = make("adafactor").init({"w": jnp.zeros(shape)})
    numbers = sum(x.size for x in jax.tree.leaves(state))
    assert (numbers < 0.05 * np.prod(shape)) == factored and (numbers >= np.prod(shape)) == (not factored)


def test_a_rate_of_0_changes_nothing_and_keeps_the_dtype():
    tx, params = make(), {"w": jnp.ones((3,), jnp.bfloat16)}
    after, _ = optim.apply_gradients(tx, params, tx.init(optim.in_f32(params)), {"w": jnp.ones((3,))}, jnp.float32(0.0))
    assert after["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(after["w"], params["w"])


def test_small_steps_add_up_in_a_master_copy_alone():
    """1000 steps of 1e-5 down from 0.5 and 4, where bf16 goes down by 0.00098 and 0.0078."""
    params = {"w": jnp.array([0.5, 4.0], jnp.bfloat16)}
    how = dict(grad_clip=1e9, betas=(0.9, 0.999), weight_decay=0.0)
    run = dict(steps=1000, grad={"w": jnp.ones(2)}, lr=1e-5)  # Adam's direction is 1
    kept, opt = stepped(make(**how, master=True), params, **run)
    np.testing.assert_allclose(opt.master["w"], [0.49, 3.99], rtol=1e-4)
    assert kept["w"].dtype == jnp.bfloat16 and opt.master["w"].dtype == jnp.float32
    np.testing.assert_array_equal(kept["w"], jnp.array([0.49, 3.99]).astype(jnp.bfloat16))
    lost, _ = stepped(make(**how), params, **run)
    np.testing.assert_array_equal(lost["w"], params["w"])


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_master_copy_has_the_numbers_of_f32_parameters(name):
    start = drawn(dtype=jnp.bfloat16)
    run = dict(steps=5, grad=drawn(1), lr=0.03)
    _, opt = stepped(make(name, master=True), start, **run)
    expected, _ = stepped(make(name), optim.in_f32(start), **run)
    chex.assert_trees_all_close(opt.master, expected, rtol=1e-6)


def test_bfloat16_moments_follow_the_squares_down():
    """After gradients of 1 there are none: in 1000 steps the mean of their squares falls to 0.999**1000 of itself."""
    tx = make(grad_clip=1e9, betas=(0.9, 0.999), weight_decay=0.0, moments_dtype="bfloat16")
    params = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
    opt = optax.tree.set(tx.init(params), nu=jax.tree.map(lambda p: jnp.ones_like(p, jnp.bfloat16), params))
    moments = (optax.tree.get(opt, "mu"), optax.tree.get(opt, "nu"))
    assert {x.dtype for x in jax.tree.leaves(moments)} == {jnp.dtype("bfloat16")}
    zero = jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(lambda opt: tx.update(zero, opt, params, learning_rate=0.0)[1])
    for _ in range(1000):
        opt = step(opt)
    for name, spread in (("w", 0.01), ("b", 0.05)):
        found = optax.tree.get(opt, "nu")[name].astype(jnp.float32)
        assert abs(float(jnp.mean(found)) / 0.999**1000 - 1) < spread
    nearest = jnp.bfloat16(1)
    for _ in range(1000):
        nearest = (nearest.astype(jnp.float32) * jnp.float32(0.999)).astype(jnp.bfloat16)
    assert nearest == 1  # what the nearest would have come to


def test_stochastic_rounding_takes_a_neighbour_and_is_right_in_the_mean():
    x = jnp.full((256, 256), -1 - 0.25 / 128)  # a quarter of the way from -1 to its neighbour
    found = optim.rounded_bf16(x, jnp.int32(3), 1).astype(jnp.float32)
    assert set(np.unique(found)) == {-1.0, np.float32(-1 - 1 / 128)}
    np.testing.assert_allclose(np.mean(np.asarray(found) != -1), 0.25, atol=0.01)
    other = optim.rounded_bf16(x, jnp.int32(4), 1).astype(jnp.float32)
    np.testing.assert_allclose(np.mean(np.asarray(found != other)), 2 * 0.25 * 0.75, atol=0.01)  # independent draws


@pytest.mark.parametrize("name", list(catalogue.OPTIMIZERS))
@pytest.mark.parametrize("master,moments_dtype", [(False, "float32"), (True, "bfloat16")])
def test_a_skipped_step_changes_no_bit(name, master, moments_dtype):
    params = drawn(dtype=jnp.bfloat16 if master else jnp.float32)
    tx = make(name, matrices={"w": MATRIX, "b": None} if name == "muon" else None, master=master,
              moments_dtype=moments_dtype)  # fmt: skip
    params, opt = stepped(tx, params, steps=3, grad=drawn(1), lr=1e-2)
    bad = jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), params)
    after = optim.apply_gradients(tx, params, opt, bad, jnp.float32(1e-2), jnp.bool_(False))
    chex.assert_trees_all_equal(after, (params, opt))
    good = optim.apply_gradients(tx, params, opt, drawn(2), jnp.float32(1e-2), jnp.bool_(True))
    assert np.any(good[0]["w"] != params["w"])


@pytest.mark.parametrize("good", [True, False])
def test_the_step_of_cpus_and_that_of_gpus_are_one(good):
    tx, params = make(), drawn()

    def step(params, opt):
        updates, opt = tx.update(drawn(1), opt, params, learning_rate=0.03)
        return optax.apply_updates(params, updates), opt

    old = params, tx.init(params)
    found = [
        jax.jit(functools.partial(how, good, step))(*old) for how in (optim.step_by_branch, optim.step_by_selection)
    ]
    chex.assert_trees_all_close(*found, rtol=1e-6)
    assert bool(jnp.all(found[0][0]["w"] == params["w"])) is not good


def test_skipped_steps_are_those_of_apply_if_finite():
    """Non-finite gradients among finite ones; optax's wrapper gives up after 100."""
    tx, params = make(grad_clip=1e9), drawn()
    theirs = optax.apply_if_finite(OPTAX["adamw"](), 100)
    opt, expected, their_opt = tx.init(params), params, theirs.init(params)
    for step in range(6):
        grads = jax.tree.map(lambda g, bad=step % 3 == 1: jnp.where(bad, jnp.inf, g), drawn(step))
        good = jnp.isfinite(optax.tree.norm(grads))
        params, opt = optim.apply_gradients(tx, params, opt, grads, jnp.float32(0.03), good)
        updates, their_opt = theirs.update(grads, their_opt, expected)
        expected = optax.apply_updates(expected, updates)
    chex.assert_trees_all_close(params, expected, rtol=1e-6)
    assert optax.tree.get(opt, "count") == optax.tree.get(their_opt, "count") == 4


def test_padding_stays_zero_whatever_the_optimizer():
    noisy = lambda rate: optax.chain(optax.add_noise(1.0, 0.0, jax.random.key(0)), optax.sgd(rate))  # noqa: E731
    params = {"w": jnp.zeros((6, 3)), "b": jnp.zeros(3)}
    tx = optim.make_optimizer(noisy, grad_clip=1.0, still={"w": 2, "b": 0})
    after, _ = optim.apply_gradients(tx, params, tx.init(params), jax.tree.map(jnp.ones_like, params), jnp.float32(0.1))
    assert (np.asarray(after["w"][4:]) == 0).all()
    assert (np.asarray(after["w"][:4]) != 0).all() and (np.asarray(after["b"]) != 0).all()


def test_weight_decay_leaves_a_buffer_of_the_model_alone():
    cfg = config_reader.parse_config(config_of("deepseek3-halves"), path="here")
    what = state.model_weights(cfg, sharding.mesh_of_shape((1, 1, 1)), head="lm", param_dtype=jnp.bfloat16)
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), what.shapes)
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = optim.make_optimizer(
        functools.partial(optax.adamw, b1=0.9, b2=0.99, weight_decay=0.5), grad_clip=1.0, still=what.still
    )
    after, _ = optim.apply_gradients(tx, params, tx.init(optim.in_f32(params)), zeros, jnp.float32(0.1))
    still = {jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(after) if (x == 1).all()}
    assert still == {"['layers']['experts']['correction']"}
    assert after["layers"]["experts"]["correction"].dtype == jnp.float32


@pytest.mark.parametrize("name", list(catalogue.OPTIMIZERS))
def test_state_of_any_optimizer_is_sharded_as_its_parameters(name):
    """Moments by the parameter's axes, adafactor's factors by those they have, counts on every device."""
    mesh = sharding.mesh_of_shape((1, 2, 2, 2))
    shape = dict(
        model_type="qwen2", num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=1001, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e4,
        hidden_act="silu",
    )  # fmt: skip
    cfg = pad_vocab(config_reader.parse_config(shape, path="here"), mesh.shape["tensor"])
    what = state.model_weights(cfg, mesh, head="lm", param_dtype=jnp.float32)
    tx = make(name, matrices=what.matrices if name == "muon" else None)
    opt, places = state.init_optimizer(tx, what, state.abstract(what))
    seen = set()

    def look(leaf, shape, place):
        size = int(np.prod(shape.shape)) // int(np.prod(place.sharding.shard_shape(shape.shape)))
        parts = int(np.prod(leaf.shape)) // int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        assert leaf.shape != shape.shape or leaf.sharding == place.sharding
        seen.add((len(leaf.shape) < len(shape.shape) and leaf.shape != (1,), parts > 1, size > 1))

    optim.map_state(look, opt, what.shapes, state.abstract(what), other=lambda leaf: leaf.sharding.is_fully_replicated)
    factored = (True, True, True) in seen
    assert factored == (name == "adafactor") and ((False, True, True) in seen or factored)
    spare = {"policy_opt": state.spare_of_optimizer(tx, what)}
    values = jax.tree.map(lambda x, at: jax.device_put(jnp.ones(x.shape, x.dtype), at), opt, places)
    whole = state.begin_state(
        state.load_sharded(what, "", init="random", key=jax.random.key(0)), values, None, None, seed=0
    )
    portable = state.remove_padding(whole, spare)
    cut, back = portable.policy_opt, state.restore_padding(portable, spare, whole).policy_opt
    assert jax.tree.map(lambda x: (x.shape, x.sharding), back) == jax.tree.map(lambda x: (x.shape, x.sharding), values)
    short = [x for x in jax.tree.leaves(cut) if x.shape[:1] == (1001,)]
    assert len(short) == sum(1 for n in jax.tree.leaves(spare) if n) > 0


@pytest.mark.parametrize(
    "kind,warmup,ratio,expected",
    [
        ("constant", 0, 0.0, {0: 1.0, 7: 1.0, 100: 1.0}),
        ("constant", 4, 0.0, {0: 0.0, 1: 0.25, 3: 0.75, 4: 1.0, 9: 1.0}),
        ("linear", 2, 0.2, {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.8, 6: 0.6, 10: 0.2, 50: 0.2}),
        ("cosine", 0, 0.0, {0: 1.0, 5: 0.5, 10: 0.0, 12: 0.0}),
        ("cosine", 2, 0.2, {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.2 + 0.4 * (1 + 0.5**0.5), 6: 0.6, 10: 0.2, 50: 0.2}),
    ],
)
def test_schedule_by_hand(kind, warmup, ratio, expected):
    rate = optim.make_schedule(kind, lr=2.0, warmup_steps=warmup, total_steps=10, min_lr_ratio=ratio)
    for step, share in expected.items():
        np.testing.assert_allclose(rate(jnp.int32(step)), 2.0 * share, rtol=1e-6, atol=1e-6)
        assert rate(jnp.int32(step)).dtype == jnp.float32


def test_a_warm_up_from_a_share_of_the_rate():
    rate = optim.make_schedule("constant", lr=2.0, warmup_steps=4, total_steps=9, min_lr_ratio=0.0, init_lr_ratio=0.2)
    np.testing.assert_allclose([rate(jnp.int32(step)) for step in (0, 1, 4, 5)], [0.4, 0.8, 2.0, 2.0], rtol=1e-6)
