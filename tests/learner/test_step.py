"""The step's state after a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.learner import step
from jppo.types import TrainState

OLD, NEW = np.float32([0.5, 1.0, 4.0]), np.float32([0.75, 3.0, 3.5])


@pytest.mark.parametrize(
    "bad,learned,norm,expected", [(False, True, NEW, NEW), (True, True, NEW * np.nan, OLD), (False, False, NEW, OLD)]
)
def test_statistics_of_returns_are_kept_where_nothing_was_learned(make_recipe, bad, learned, norm, expected):
    now = TrainState(
        step=jnp.int32(3), policy=None, policy_opt=None, value=None, value_opt=None, kl_coef=jnp.float32(0.1),
        bad_steps=jnp.int32(0), key=jax.random.key(0), value_norm=jnp.asarray(OLD),
    )  # fmt: skip
    after = step.advance(make_recipe(), now, 0.0, bad=bad, learned=learned, value_norm=norm)
    np.testing.assert_array_equal(after.value_norm, expected)
    assert int(after.step) == 4 and int(after.bad_steps) == (bad and learned)
