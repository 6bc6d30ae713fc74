"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from one small latent of each token.

Over whole rows, keys and values are expanded from the latents, and any attention kernel mixes them. With a cache, only
the latents and the rotary keys are kept. Queries are taken to the latents instead, and attend to these as one head.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.models import cache, lora
from jppo.models.attention import Attend
from jppo.models.cache import LayerCache
from jppo.models.config import ModelConfig
from jppo.models.modules import Project, RMSNorm
from jppo.models.product import product
from jppo.models.rotary import Place, rotate

NORM_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps is: as in transformers


class LatentAttention(nn.Module):
    """Attention by latents with rotary positions in a part of each head; against a cache if there is one."""

    cfg: ModelConfig
    param_dtype: Any
    attend: Attend
    attend_cached: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, place: Place, held: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        cfg, spec = self.cfg, self.cfg.latent
        assert spec is not None
        D, H, C, N, W = cfg.hidden_size, cfg.num_heads, spec.rank, spec.plain_dim, spec.value_dim

        def project(name: str, equation: str, *shape: int, bias: bool = False) -> Project:
            return Project(
                equation, shape, shape[-1:] if bias else None, cfg.initializer_range, self.param_dtype, name=name
            )

        def norm(name: str, y: jax.Array) -> jax.Array:
            return RMSNorm(cfg, self.param_dtype, eps=NORM_EPS, name=name)(y)

        if spec.query_rank is None:
            q = project("q", "rtd,dha->rtha", D, H, spec.head_dim)(x)
        else:
            low = norm("q_norm", project("q_a", "rtd,dq->rtq", D, spec.query_rank, bias=cfg.qkv_bias)(x))
            q = project("q_b", "rtq,qha->rtha", spec.query_rank, H, spec.head_dim)(low)
        plain, turned = q[..., :N], self._rotate(q[..., N:], place)
        both = project("kv_a", "rtd,dj->rtj", D, spec.cached_dim, bias=cfg.qkv_bias)(x)
        latent, key = norm("kv_norm", both[..., :C]), self._rotate(both[:, :, None, C:], place)
        if held is None:
            assert place.segment is not None
            pair = project("kv_b", "rtc,chu->rthu", C, H, N + W)(latent)
            key = jnp.broadcast_to(key, (*pair.shape[:3], key.shape[-1]))
            q, k = (jnp.concatenate(parts, axis=-1) for parts in ((plain, turned), (pair[..., :N], key)))
            mixed = self.attend(q, k, pair[..., N:], place.segment, place.kind)  # [R, T, H, W]
        else:
            held = cache.extend(held, jnp.concatenate([latent[:, :, None], key], axis=-1), None, place.position)
            kernel = self._expanding(x.dtype)
            q = jnp.concatenate([product("rthn,chn->rthc", plain, kernel[..., :N]), turned], axis=-1)
            near = self.attend_cached(q, held.k, held.k[..., :C], place.position, place.kind)
            mixed = product("rthc,chw->rthw", near, kernel[..., N:])
        return project("o", "rthw,hwd->rtd", H, W, D, bias=cfg.o_bias)(mixed), held

    def _rotate(self, x: jax.Array, place: Place) -> jax.Array:
        """Rotates a part of each head [R, T, heads, P]; interleaved pairs are put in halves, as the keys' are."""
        assert self.cfg.latent is not None
        if self.cfg.latent.interleaved:
            x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        return rotate(x, place.cos, place.sin)

    def _expanding(self, dtype: Any) -> jax.Array:
        """Returns the kernel from latents to keys and values [C, H, N + W], its adapter merged."""
        own = self.variables
        kernel: jax.Array = own["params"]["kv_b"]["kernel"].astype(dtype)
        beside = own.get(lora.COLLECTION, {}).get("kv_b")
        return kernel if beside is None else kernel + product("cz,zhu->chu", beside["a"].astype(dtype), beside["b"])
