"""The experts that a config.json asks for."""

import dataclasses

from jppo.models import config_routing
from jppo.models.config_fields import Fields
from jppo.models.config_routing import Routing


@dataclasses.dataclass(frozen=True)
class Names:
    """A family's names, in config.json and of its tensors."""

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""  # of the expert that every token uses; "": there is none
    shared_gate: bool = False  # that expert has a gate
    normalized: bool | None = None  # None: by the field norm_topk_prob
    normalized_default: bool = False  # of this field
    mixed: bool = True  # config.json may give some layers an MLP in place of experts
    deepseek: config_routing.Version | None = None  # whose fields it has
    router: str = "gate"
    fused: tuple[str, str] | None = None  # a layer's experts are one tensor: axes of gates and ups, and of downs
    biased: bool = False  # experts and router have biases, and the gate is clamped
    active: str = "num_experts_per_tok"
    switch: str = ""  # a field that is true if the model has experts; "": it always does
    beside: bool = False  # experts are beside an MLP; the router's input is normed, and its weights have factors


QWEN2 = Names(shared="shared_expert", shared_gate=True)
QWEN3 = Names()
QWEN3_NEXT = dataclasses.replace(QWEN2, normalized_default=True)
QWEN35 = dataclasses.replace(QWEN2, normalized=True, mixed=False)
OLMOE = Names(width="intermediate_size", mixed=False)
MIXTRAL = Names(
    "num_local_experts", "intermediate_size", "block_sparse_moe", "w1", "w3", "w2", normalized=True, mixed=False
)
DEEPSEEK_V2 = Names("n_routed_experts", shared="shared_experts", deepseek=config_routing.V2)
DEEPSEEK_V3 = Names("n_routed_experts", shared="shared_experts", deepseek=config_routing.V3)
GPT_OSS = Names(
    "num_local_experts",
    "intermediate_size",
    normalized=True,
    mixed=False,
    router="router",
    fused=("E D MN", "E M D"),
    biased=True,
)
GEMMA4 = Names(
    module="",
    normalized=True,
    mixed=False,
    router="router.proj",
    fused=("E NM D", "E D M"),
    active="top_k_experts",
    switch="enable_moe_block",
    beside=True,
)


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a model's sparse layers."""

    count: int  # E
    active: int  # of each token
    width: int  # M
    shared_width: int  # S, of the expert that every token uses; 0: there is none
    normalized: bool  # the weights of a token's active experts sum to 1
    sparse: tuple[bool, ...]  # [L], whether a layer has experts
    names: Names
    routing: Routing
    clamp: tuple[float, float] | None = None  # alpha and limit of a clamped gate; None: the model's activation

    @property
    def widths(self) -> tuple[int, ...]:
        """Returns the widths of the experts."""
        return (self.width, self.shared_width) if self.shared_width else (self.width,)


def read(fields: Fields, names: Names | None, num_layers: int) -> Experts | None:
    """Reads the experts; None if no layer has any."""
    if names is None or (names.switch and not fields.get(names.switch, bool, False)):
        return None
    sparse = (True,) * num_layers
    if names.mixed:
        sparse = (
            _sparse(fields, num_layers) if names.deepseek is None else _after_dense(fields, names.deepseek, num_layers)
        )
    if not any(sparse):
        return None
    # transformers 5 writes num_experts under its other name.
    counted = "num_local_experts" if "num_local_experts" in fields else names.count
    count, active = fields.get(counted, int), fields.get(names.active, int)
    if active > count:
        raise fields.refuse(names.active, f"must be at most {counted}={count}")
    width = fields.get(names.width, int)
    shared_width = fields.get("shared_expert_intermediate_size", int) if names.shared_gate else 0
    if names.deepseek is not None:
        shared_width = width * fields.get("n_shared_experts", int)
    clamp = None
    if names.biased:
        clamp = fields.above_zero("swiglu_alpha", 1.702), fields.above_zero("swiglu_limit", 7.0)
    return Experts(
        count=count,
        active=active,
        width=width,
        shared_width=shared_width,
        normalized=_normalized(fields, names),
        sparse=sparse,
        names=names,
        routing=Routing() if names.deepseek is None else config_routing.read(fields, names.deepseek, count, active),
        clamp=clamp,
    )


def _normalized(fields: Fields, names: Names) -> bool:
    if names.normalized is not None:
        return names.normalized
    default = names.normalized_default if names.deepseek is None else names.deepseek.normalized
    return bool(fields.or_null("norm_topk_prob", bool, default))  # null is false, as in transformers


def _after_dense(fields: Fields, version: config_routing.Version, num_layers: int) -> tuple[bool, ...]:
    dense = fields.from_zero("first_k_dense_replace", version.dense_layers)
    return tuple(i >= dense for i in range(num_layers))


def _sparse(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    every = fields.get("decoder_sparse_step", int, 1)
    dense = fields.get("mlp_only_layers", list, [])
    if not all(isinstance(i, int) and 0 <= i < num_layers for i in dense):
        raise fields.refuse("mlp_only_layers", f"must hold layers from 0 to {num_layers - 1}")
    return tuple(i not in dense and (i + 1) % every == 0 for i in range(num_layers))
