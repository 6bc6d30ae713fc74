"""What only Gemma 4 has: embeddings in every layer, and layers that share keys and values."""

import dataclasses
from typing import Any

from jppo.models.config_fields import Fields
from jppo.models.stacks import Heads, Keys, Sort
from jppo.settings import UserError

GLOBAL_HEAD_DIM = 512  # of layers without a window, where config.json has none


@dataclasses.dataclass(frozen=True)
class Gemma4:
    """Parts of the decoder that only Gemma 4 has, besides norms of values and a fixed factor of each layer's output."""

    per_layer: int  # P, the width of the embeddings in every layer; 0: there are none
    shared_layers: int  # last layers, which take the keys and values of the last one before them with such a window
    double_shared: bool  # their MLPs are twice as wide
    joined: bool  # in layers without a window keys and values are one projection

    def sorts(self, sorts: tuple[Sort, ...], kinds: tuple[int, ...], windows: tuple[bool, ...]) -> tuple[Sort, ...]:
        """Returns the modules of each layer; `sorts` are those by its experts, `windows` whether it has one."""
        first = len(sorts) - self.shared_layers
        kept = {max(i for i in range(first) if kinds[i] == kind) for kind in set(kinds[first:])}

        def keys(i: int) -> Keys:
            return "shared" if i >= first else "kept" if i in kept else "own"

        return tuple(
            sort._replace(beside=sort.sparse, kind=kinds[i], keys=keys(i), joined=self.joined and not windows[i])
            for i, sort in enumerate(sorts)
        )


def read(fields: Fields, windows: list[int | None], vocab_size: int) -> Gemma4:
    """Reads these parts of a model with such windows."""
    null = "hidden_size_per_layer_input" in fields.config and "hidden_size_per_layer_input" not in fields
    per_layer = 0 if null else fields.from_zero("hidden_size_per_layer_input", 256)
    name = "vocab_size_per_layer_input"
    if per_layer and fields.get(name, int, 262144) != vocab_size:
        raise fields.refuse(name, f"must be vocab_size={vocab_size}")
    shared, whole = fields.from_zero("num_kv_shared_layers", 0), [window is None for window in windows]
    first = len(windows) - shared
    if first < 1 or not set(whole[first:]) <= set(whole[:first]):
        raise fields.refuse("num_kv_shared_layers", "must leave an earlier layer of each kind with keys of its own")
    return Gemma4(
        per_layer=per_layer,
        shared_layers=shared,
        double_shared=fields.get("use_double_wide_mlp", bool, False),
        joined=fields.get("attention_k_eq_v", bool, False),
    )


def whole_heads(fields: Fields, windows: list[int | None], num_heads: int, num_kv_heads: int, head_dim: int) -> Heads:
    """Returns the sizes of layers without a window."""
    own: Any = {"head_dim": fields.get("global_head_dim", int, GLOBAL_HEAD_DIM)}
    if fields.get("attention_k_eq_v", bool, False):
        own |= {"num_key_value_heads": fields.get("num_global_key_value_heads", int, num_kv_heads)}
    if "per_layer_config" in fields.config:  # as transformers 5 writes it
        given = fields.get("per_layer_config", dict, {})
        whole = {str(i) for i, window in enumerate(windows) if window is None}
        own = next(iter(given.values()), {})
        alike = all(one == own for one in given.values()) and set(map(str, given)) == (whole if given else set())
        if not alike or not isinstance(own, dict) or not set(own) <= {"head_dim", "num_key_value_heads"}:
            raise fields.refuse(
                "per_layer_config", "must give all layers without a window, and no others, the same head sizes"
            )
    inner = Fields(own, f"{fields.path}: per_layer_config")
    heads, size = inner.get("num_key_value_heads", int, num_kv_heads), inner.get("head_dim", int, head_dim)
    if num_heads % heads or size % 2:
        raise UserError(
            f"{fields.path}: layers without a window have num_key_value_heads={heads}, which must divide"
            f" num_attention_heads={num_heads}, and head_dim={size}, which must be even"
        )
    return Heads(heads, size)
