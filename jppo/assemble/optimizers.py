"""Optimizers from their settings, user-defined ones too."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jppo.config import UserError
from jppo.data.userfile import said, user_class
from jppo.learner import optim, state


def make_optimizer(section: ConfigDict, name: str, what: state.Weights) -> Any:
    """The optimizer that a section of the config asks for; `name` as in `make_descent`."""
    if section.optimizer in optim.OPTIMIZERS:
        how = dict[str, Any](betas=tuple(section.betas), weight_decay=section.weight_decay)
        if section.optimizer == "muon":
            how["matrices"] = what.matrices
        chain: optim.Chain = functools.partial(optim.OPTIMIZERS[section.optimizer], **how)
    else:
        chain = custom_chain(section, f"{name if name in ('actor', 'critic') else 'optim'}.optimizer")
    narrow = any(x.dtype != jnp.float32 for x in jax.tree.leaves(what.shapes))
    return optim.make_optimizer(
        chain,
        grad_clip=section.grad_clip,
        moments_dtype=section.moments_dtype,
        master=section.master_dtype == "float32" and narrow,
        padding=what.spare,
    )


def custom_chain(section: ConfigDict, setting: str) -> optim.Chain:
    """A user-defined optimizer by 'path.py:name': `name(settings, learning_rate)` with the section's settings."""
    spec = section.optimizer
    make = user_class(spec, setting, kind="function", example="optimizer.py:chain")

    def chain(learning_rate: Any) -> optax.GradientTransformation:
        try:
            found = make(section, learning_rate)
        except Exception as e:  # a user's function may raise anything
            raise UserError(f"{setting}={spec} (settings, learning_rate) failed ({said(e)}); mend the function") from e
        if not isinstance(found, optax.GradientTransformation):
            raise UserError(
                f"{setting}={spec} must return an optax.GradientTransformation, not {type(found).__name__}; return"
                " one such as optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(learning_rate))"
            )
        return found

    chain(0.0)
    return chain


def require_optimizers(c: ConfigDict) -> None:
    """UserError where a user-defined optimizer cannot be made; before servers start."""
    for name in ("actor", "critic"):
        if c[name].optimizer not in optim.OPTIMIZERS:
            custom_chain(c[name], f"{name}.optimizer")
