"""The gated delta nets that a config.json asks for."""

import dataclasses
from typing import Literal

from jppo.models.config_fields import Fields

Layout = Literal["split", "joined"]  # a projection each for q k v, z, b and a; or one for q k v z and one for b a


@dataclasses.dataclass(frozen=True)
class Delta:
    """The gated delta nets of a model's linear layers."""

    key_heads: int  # N
    value_heads: int  # U; each key head has U/N of them
    key_dim: int
    value_dim: int  # W
    taps: int  # inputs of the convolution over tokens
    joined: bool  # q k v z are one projection by key head, b a another
    linear: tuple[bool, ...]  # [L], whether a layer has one in place of attention

    @property
    def channels(self) -> int:
        """Returns the number of channels C of the convolution: those of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def joined_at(self) -> tuple[int, int, int]:
        """Returns where a key head's q, k, v and z begin in the joined projection, without 0."""
        values = self.value_heads // self.key_heads * self.value_dim
        return self.key_dim, 2 * self.key_dim, 2 * self.key_dim + values

    @property
    def joined_widths(self) -> tuple[int, int]:
        """Returns the outputs of each key head in the joined projections."""
        group = self.value_heads // self.key_heads
        return 2 * self.key_dim + 2 * group * self.value_dim, 2 * group

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of a row's recurrent state and of the convolution's last inputs."""
        group = self.value_heads // self.key_heads
        return (self.key_heads, group, self.key_dim, self.value_dim), (self.taps - 1, self.channels)


def read(fields: Fields, layout: Layout, num_layers: int) -> Delta | None:
    """Reads the delta nets; None if every layer has attention."""
    linear = _linear(fields, num_layers)
    if not any(linear):
        return None
    key_heads, value_heads = fields.get("linear_num_key_heads", int, 16), fields.get("linear_num_value_heads", int, 32)
    if value_heads % key_heads:
        raise fields.refuse("linear_num_value_heads", f"must be a multiple of linear_num_key_heads={key_heads}")
    return Delta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.get("linear_key_head_dim", int, 128),
        value_dim=fields.get("linear_value_head_dim", int, 128),
        taps=fields.get("linear_conv_kernel_dim", int, 4),
        joined=layout == "joined",
        linear=linear,
    )


def _linear(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    types = fields.get("layer_types", list, None)
    if types is None:
        every = fields.get("full_attention_interval", int, 4)
        return tuple((i + 1) % every != 0 for i in range(num_layers))
    if len(types) != num_layers or not set(types) <= {"linear_attention", "full_attention"}:
        raise fields.refuse("layer_types", f"must be {num_layers} of linear_attention and full_attention")
    return tuple(kind == "linear_attention" for kind in types)
