"""Embeddings in every layer, as of Gemma 4: of each token, and of its state before the first layer."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.models.config import ModelConfig
from jppo.models.embedding import Embed, Lookup
from jppo.models.modules import Project, RMSNorm
from jppo.models.stacks import Group


class PerLayer(nn.Module):
    """Computes the embeddings of all layers [R, T, L, P] from tokens [R, T] and the inputs of the first layer."""

    cfg: ModelConfig
    param_dtype: Any
    lookup: Lookup

    @nn.compact
    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        assert cfg.gemma4 is not None
        D, L, P = cfg.hidden_size, cfg.num_layers, cfg.gemma4.per_layer
        of_token = Embed(cfg, self.param_dtype, x.dtype, self.lookup, L * P, name="embed")(tokens)
        of_token *= jnp.asarray(P**0.5, x.dtype)
        project = Project("rtd,dm->rtm", (D, L * P), None, cfg.initializer_range, self.param_dtype, name="project")
        of_state, of_token = (y.reshape(*y.shape[:2], L, P) for y in (project(x) * D**-0.5, of_token))
        return (RMSNorm(cfg, self.param_dtype, name="norm")(of_state) + of_token) * 2**-0.5


def by_stack(found: jax.Array | None, group: Group) -> tuple[jax.Array | None, ...]:
    """Splits embeddings [R, T, L, P] by the stacks of a scan: [layers, R, T, P]."""
    if found is None:
        return (None,) * len(group)
    return tuple(jnp.moveaxis(found[:, :, stack.layers], 2, 0) for stack in group)
