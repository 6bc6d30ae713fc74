"""Rematerialisation: the outputs of a layer that are saved for its backward pass."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from jppo.models import attention, product

Remat = Literal["none", "dots", "attention", "full"]


def _keep(*names: str) -> Callable[..., Any]:
    """Makes the policy that saves named outputs and the output of cuDNN's attention, which cannot have a name."""
    named = jax.checkpoint_policies.save_only_these_names(*names)
    return lambda primitive, *args, **how: primitive.name == _CUDNN or named(primitive, *args, **how)


_CUDNN = "dot_product_attention_fwd_wrapper"
POLICIES = {
    # Saves the products with weights, in the activations' dtype, and attention; recomputes the rest.
    "dots": _keep(product.NAME, attention.NAME),
    "attention": _keep(attention.NAME),
    "full": jax.checkpoint_policies.nothing_saveable,
}
