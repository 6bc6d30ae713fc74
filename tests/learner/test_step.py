"""The step's state after a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.learner import state as step
from jppo.types import TrainState
from tests.learner.test_compilations import compilations

OLD, NEW = np.float32([0.5, 1.0, 4.0]), np.float32([0.75, 3.0, 3.5])


def state(*, step=3, bad_steps=0, value_norm=None):
    return TrainState(
        step=jnp.int32(step), policy=None, policy_opt=None, value=None, value_opt=None, kl_coef=jnp.float32(0.1),
        bad_steps=jnp.int32(bad_steps), key=jax.random.key(0), value_norm=value_norm,
    )  # fmt: skip


@pytest.mark.parametrize(
    "bad,learned,norm,expected", [(False, True, NEW, NEW), (True, True, NEW * np.nan, OLD), (False, False, NEW, OLD)]
)
def test_statistics_of_returns_are_kept_where_nothing_was_learned(bad, learned, norm, expected):
    now = state(value_norm=jnp.asarray(OLD))
    after = step.next_step(now, 0.0, bad=bad, learned=learned, value_norm=norm)
    np.testing.assert_array_equal(after.value_norm, expected)
    assert int(after.step) == 4 and int(after.bad_steps) == (bad and learned)


@pytest.mark.parametrize("bad, expected", [(False, 0.3), (True, 0.1)])
def test_the_kl_coefficient_adapts_unless_an_update_was_skipped(bad, expected):
    after = step.next_step(state(), 0.2, bad=bad, learned=True, adapt_kl=lambda old, kl: old + kl)
    np.testing.assert_allclose(after.kl_coef, expected, rtol=1e-6)
    np.testing.assert_allclose(step.next_step(state(), 0.2, bad=bad, learned=True).kl_coef, 0.1, rtol=1e-6)


@pytest.mark.parametrize("before, bad, expected", [(0, False, 0), (2, True, 3), (2, False, 0)])
def test_skipped_steps_are_counted_in_a_row(before, bad, expected):
    after = step.next_step(state(bad_steps=before), 0.0, bad=bad, learned=True)
    assert int(after.bad_steps) == expected


def test_the_order_is_drawn_anew_for_each_step_model_and_epoch():
    orders = [step.order(state(step=s), m, e, 50, shuffle=True) for s in (3, 4) for m in (0, 1) for e in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 8
    np.testing.assert_array_equal(step.order(state(), 0, 0, 50, shuffle=True), orders[0])
    np.testing.assert_array_equal(step.order(state(), 0, 0, 5, shuffle=False), range(5))


def test_a_step_of_another_size_is_ordered_by_the_same_program():
    """A short step of dynamic sampling, or branches of agents: the program was compiled before the first step."""
    step.order(state(), 0, 0, 0, shuffle=True, max_count=40)
    with compilations() as seen:
        orders = [
            step.order(state(step=s), 0, 0, count, shuffle=True, max_count=40)
            for s in range(3)
            for count in (40, 31, 7)
        ]
    assert not seen
    assert [sorted(order) for order in orders] == [list(range(count)) for count in (40, 31, 7)] * 3
    assert len({tuple(order) for order in orders}) == 9
    np.testing.assert_array_equal(orders[0], step.order(state(step=0), 0, 0, 40, shuffle=True))
