"""The gap between the sampler's policy and the trainer's: measured in every step, mended where it is asked for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.algorithms import correction, masked
from jppo.learner import batch
from jppo.structs import Array, Rows, Scored


@dataclasses.dataclass(frozen=True)
class Correction:
    """What `algorithm.old_logprob='correction'` does: importance weights, rejection, or both."""

    level: str | None  # token or sequence; None: no weights
    lower: float | None
    upper: float
    normalize: bool
    rules: tuple[correction.Rule, ...]  # empty: nothing is rejected


def make_gap() -> Callable[[Rows, Array], dict[str, Array]]:
    """(rows, logp) -> sums and extremes of the trainer's log-probs less the sampler's."""

    def gap(rows: Rows, logp: Array) -> dict[str, Array]:
        difference = jnp.where(rows.mask, logp - rows.sampler_logp, 0.0)
        return correction.divergence_sums(difference, rows.mask, rows.segment) | {
            "tokens": jnp.sum(rows.mask, dtype=jnp.float32),
            "sequences": sequences(rows.mask, rows.mask, rows.segment),
            "gap": jnp.sum(jnp.abs(difference)),
            "gap_max": jnp.max(jnp.abs(difference)),
            "ratio_min": jnp.exp(jnp.maximum(jnp.min(difference), -masked.FAR)),
            "ratio_max": jnp.exp(jnp.minimum(jnp.max(difference), masked.FAR)),
        }

    return gap


def sequences(where: Array, mask: Array, segment: Array) -> Array:  # [] f32
    """How many sequences have a kept entry at which `where` holds."""
    some = masked.sequence_sum(where.astype(jnp.float32), mask, segment) > 0
    return jnp.sum(some & masked.last_of_sequence(mask, segment), dtype=jnp.float32)


def make_correct(what: Correction) -> Callable[[Rows, Array], tuple[Array | None, Array, dict[str, Array]]]:
    """(rows, logp) -> weights before they are normalized, the tokens that are kept, and sums for both."""

    def correct(rows: Rows, logp: Array) -> tuple[Array | None, Array, dict[str, Array]]:
        log_ratio, mask, segment = logp - rows.sampler_logp, rows.mask, rows.segment
        kept = correction.keep(log_ratio, mask, segment, rules=what.rules)
        rejected = mask & ~kept
        sums = {
            "rejected": jnp.sum(rejected, dtype=jnp.float32),
            "rejected_sequences": sequences(rejected, mask, segment),
        }
        if what.level is None:
            return None, kept, sums
        raw = correction.raw_weights(log_ratio, mask, segment, level=what.level)
        weight = correction.bounded(raw, lower=what.lower, upper=what.upper)
        total, count = correction.weight_sums(weight, mask, segment, level=what.level)
        sums |= correction.importance_sums(weight, mask) | {"total": total, "count": count}
        return weight, kept, sums

    return correct


def gap_metrics(gaps: Sequence[dict[str, Array]]) -> dict[str, float]:
    """How far the sampler's log-probs lie from the trainer's for the same tokens and weights."""
    host = jax.device_get(list(gaps))
    tokens, whole = (max(_sum(host, key), 1.0) for key in ("tokens", "sequences"))
    return {
        "rollout/logp_gap_mean": _sum(host, "gap") / tokens,
        "rollout/logp_gap_max": _max(host, "gap_max"),
        "rollout/ratio_min": -_max([{"x": -one["ratio_min"]} for one in host], "x"),
        "rollout/ratio_max": _max(host, "ratio_max"),
        "rollout_corr/kl": _sum(host, "kl") / tokens,
        "rollout_corr/k3_kl": _sum(host, "k3_kl") / tokens,
        "rollout_corr/chi2_token": _sum(host, "chi2_token") / tokens - 1.0,
        "rollout_corr/chi2_seq": _sum(host, "chi2_seq") / whole - 1.0,
    }


def corrected(
    passes: Any, what: Correction, scored: Sequence[Scored], gap: Sequence[dict[str, Array]]
) -> tuple[list[Scored], dict[str, float]]:
    """The batch with its weights, and without the tokens that were rejected; and the metrics of both."""
    found = batch.each(passes.correct, [one.rows for one in scored], [one.logp for one in scored])
    host = jax.device_get([sums for _, _, sums in found])
    counts = jax.device_get(list(gap))
    tokens, whole = (max(_sum(counts, key), 1.0) for key in ("tokens", "sequences"))
    metrics = {
        "rollout_corr/rollout_rs_masked_fraction": _sum(host, "rejected") / tokens,
        "rollout_corr/rollout_rs_seq_masked_fraction": _sum(host, "rejected_sequences") / whole,
    }
    weights = [weight for weight, _, _ in found]
    if what.level is not None:
        total, squares = _sum(host, "weights"), _sum(host, "squares")
        metrics |= {
            "rollout_corr/rollout_is_mean": total / tokens,
            "rollout_corr/rollout_is_max": _max(host, "is_max"),
            "rollout_corr/rollout_is_min": -_max([{"x": -one["is_min"]} for one in host], "x"),
            "rollout_corr/rollout_is_eff_sample_size": total**2 / max(tokens * squares, 1e-30),
        }
        if what.normalize:
            mean = np.float32(_sum(host, "total") / max(_sum(host, "count"), 1.0))
            weights = batch.each(lambda weight: passes.normalized(weight, mean=mean), weights)
    out = [
        dataclasses.replace(one, rows=dataclasses.replace(one.rows, mask=kept), weight=weight)
        for one, weight, (_, kept, _) in zip(scored, weights, found, strict=True)
    ]
    return out, metrics


def _sum(parts: Sequence[dict[str, Any]], key: str) -> float:
    return float(sum(float(part[key]) for part in parts))


def _max(parts: Sequence[dict[str, Any]], key: str) -> float:
    return float(max(float(part[key]) for part in parts))
