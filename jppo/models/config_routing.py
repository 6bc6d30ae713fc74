"""The routing that a config.json asks for: how a router's logits become experts and weights."""

import dataclasses
from typing import Any, Literal

from jppo.models.config_fields import Fields

Scoring = Literal["softmax", "sigmoid"]


@dataclasses.dataclass(frozen=True)
class Routing:
    """How experts are scored and chosen. By default: the highest of the softmax."""

    scoring: Scoring = "softmax"  # of the logits; the scores are the weights, too
    groups: int = 1  # experts are chosen from the best groups; a softmax's by its highest score, a sigmoid's by two
    best_groups: int = 1
    scale: float = 1.0  # of the weights
    corrected: bool = False  # a buffer of the model is added to the scores for the choice, not for the weights


@dataclasses.dataclass(frozen=True)
class Version:
    """The differences between DeepSeek's versions."""

    scoring: Scoring
    methods: tuple[str, ...]  # values of `topk_method`, the default first
    # Defaults of fields
    dense_layers: int
    normalized: bool
    scale: float


GROUPED = "group_limited_greedy"
V2 = Version("softmax", ("greedy", GROUPED), dense_layers=0, normalized=False, scale=1.0)
V3 = Version("sigmoid", ("noaux_tc",), dense_layers=3, normalized=True, scale=2.5)


def read(fields: Fields, version: Version, count: int, active: int) -> Routing:
    """Reads a DeepSeek model's routing."""
    method = fields.get("topk_method", str, version.methods[0])
    said: dict[str, tuple[Any, tuple[Any, ...]]] = {"topk_method": (method, version.methods)}
    said["scoring_func"] = (fields.get("scoring_func", str, version.scoring), (version.scoring,))
    # transformers knows neither other strides of sparse layers nor, in version 2, normalized weights.
    said["moe_layer_freq"] = (fields.get("moe_layer_freq", int, 1), (1,))
    if version is V2:
        said["norm_topk_prob"] = (fields.get("norm_topk_prob", bool, version.normalized), (False,))
    for key, (value, known) in said.items():
        if value not in known:
            raise fields.refuse(key, f"is not supported; only {' or '.join(map(repr, known))}")
    groups, best = 1, 1
    if method != "greedy":
        groups, best = fields.get("n_group", int), fields.get("topk_group", int)
    least = 2 if version is V3 else 1  # experts that score a group
    if count % groups or count // groups < least:
        raise fields.refuse("n_group", f"must divide n_routed_experts={count} into groups of {least} or more")
    if best > groups or active > best * (count // groups):
        raise fields.refuse(
            "topk_group", f"must be at most n_group={groups}, with num_experts_per_tok={active} experts"
        )
    scale = fields.above_zero("routed_scaling_factor", version.scale)
    return Routing(version.scoring, groups, best, scale, corrected=version is V3)
