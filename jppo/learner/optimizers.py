"""Optimizers from their settings, user-defined ones included."""

from collections import ChainMap
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jppo.learner import optim, state
from jppo.settings import Optimizer, Settings, optimizers, parts


def make_optimizer(section: Optimizer, name: str, what: state.Weights) -> Any:
    """Makes the optimizer of a section of the config; `name` as in `make_descent`."""
    chain = make_chain(section, name if name in ("actor", "critic") else "optim", what.matrices)
    narrow = any(x.dtype != jnp.float32 for x in jax.tree.leaves(what.shapes))
    return optim.make_optimizer(
        chain,
        grad_clip=section.grad_clip,
        moments_dtype=section.moments_dtype,
        master=section.master_dtype == "float32" and narrow,
        still=what.still,
    )


def make_chain(section: Optimizer, name: str, matrices: Any = None) -> optim.Chain:
    """Returns the optax chain of `optimizer` in section `name`, as a function of the learning rate."""

    def chain(learning_rate: Any) -> optax.GradientTransformation:
        values = ChainMap({"learning_rate": learning_rate, "matrices": matrices}, vars(section))
        made = parts.OPTIMIZERS.make(section.optimizer, f"{name}.optimizer", values)
        return cast(optax.GradientTransformation, made)  # `make` has checked the class

    chain(0.0)
    return chain


def require_optimizers(c: Settings) -> None:
    """Raises UserError for an invalid optimizer; before servers start."""
    for name, section in optimizers(c).items():
        make_chain(section, name)
