"""Latent attention as a config.json asks for it (DeepSeek-V2, arXiv:2405.04434)."""

import dataclasses

from jppo.models import config_rotary
from jppo.models.config_fields import Fields
from jppo.models.rotary import Rotary

NORM_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps is: as in transformers


@dataclasses.dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are computed from one latent of each token."""

    query_rank: int | None  # Q, of the queries' own latent; None: queries are computed from the hidden state
    rank: int  # C, of the latent of keys and values
    plain_dim: int  # of a head's queries and keys: the part without a position
    rotary_dim: int  # P, the rest; all heads share the key's
    value_dim: int  # W
    interleaved: bool  # neighbours are rotated as pairs; otherwise the two halves

    @property
    def head_dim(self) -> int:
        """Returns the size of a head's queries and keys, A."""
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Returns the numbers that the cache holds of a token in a layer, J."""
        return self.rank + self.rotary_dim


def read(fields: Fields, num_heads: int) -> Latent:
    """Reads the sizes of latent attention."""
    kv_heads = fields.get("num_key_value_heads", int, num_heads)
    if kv_heads != num_heads:
        raise fields.refuse("num_key_value_heads", f"must be num_attention_heads={num_heads}: heads share one latent")
    rotary_dim = fields.get("qk_rope_head_dim", int)
    if rotary_dim % 2:
        raise fields.refuse("qk_rope_head_dim", "must be even: rotary embedding turns pairs")
    if fields.get("head_dim", int, rotary_dim) != rotary_dim:
        raise fields.refuse("head_dim", f"must be qk_rope_head_dim={rotary_dim} or absent")
    return Latent(
        query_rank=fields.or_null("q_lora_rank", int, 1536),
        rank=fields.get("kv_lora_rank", int),
        plain_dim=fields.get("qk_nope_head_dim", int),
        rotary_dim=rotary_dim,
        value_dim=fields.get("v_head_dim", int),
        interleaved=bool(fields.or_null("rope_interleave", bool, True)),
    )


def query_scale(fields: Fields, head_dim: int, rotary: Rotary) -> float:
    """Returns the scale of scores; YaRN's `mscale_all_dim` raises it."""
    rope = fields.config.get("rope_scaling") or fields.config.get("rope_parameters") or {}
    stretch = config_rotary.mscale(rotary.factor, Fields(rope, fields.path).get("mscale_all_dim", float, 0.0))
    return float(head_dim**-0.5 * stretch**2)
