"""verl's rollout correction: old log-probs, the loss of bypass mode, importance weights and rejection."""

from typing import Any

from jppo.verl.name import Look, Unfit, commas, need, off_or


def bypasses(look: Look) -> bool:
    """Whether the old log-probs are the rollout engine's."""
    return bool(look("CORRECTION.bypass_mode") and not look("async_training.compute_prox_log_prob"))


def old_logprob(value: bool | None, look: Look) -> str:
    asked = any(look(f"CORRECTION.{name}") not in (None, "none", "") for name in ("rollout_is", "rollout_rs"))
    return "bypass" if bypasses(look) else "correction" if asked else "decoupled"


def reinforces(look: Look) -> bool:
    """Whether bypass mode has verl's policy-gradient loss."""
    return bypasses(look) and look("CORRECTION.loss_type") == "reinforce"


def loss_mode(value: str, look: Look) -> str:
    """Returns the policy loss; `bypass_mode` is verl's name for the two of bypass."""
    forced = value == "bypass_mode" or (bypasses(look) and look("trainer.use_v1") is False)
    return "gpg" if reinforces(look) else "vanilla" if forced else value


def weights(value: Any, look: Look) -> str:
    off, ratio = value in (None, "none", "", False), bypasses(look) and not reinforces(look)
    return "none" if off else str(need(value, not ratio, "in bypass mode verl's clipped loss has no weights"))


def weighted(value: Any, look: Look) -> Any:
    used = look("CORRECTION.rollout_is") not in (None, "none", "", False) and (reinforces(look) or not bypasses(look))
    value = need(value, used, "read only with rollout_is, without the clipped loss of bypass mode")
    return value if isinstance(value, bool) else str(value)


def normalized(value: bool, look: Look) -> bool:
    if weighted(value, look) and bypasses(look):
        raise Unfit("in bypass mode the weights change with every mini-batch, and their mean would follow its cut")
    return value


_OLD_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def rejection(value: Any, _: Look) -> str:
    """Returns the rules; each of verl's older ones is a k1 of today."""
    return "" if value in (None, "none", "", False) else _OLD_RULES.get(value, commas(value))


def rejected(value: Any, look: Look) -> str:
    """Returns the thresholds of the rules; an older rule's band is LOW_HIGH, with 1 / HIGH for a missing LOW."""
    rule = look("CORRECTION.rollout_rs")
    if value in (None, "none", "", False):
        return ""
    if need(rule, rule, "read only with rollout_rs") in _OLD_RULES:
        return f"{off_or(look('CORRECTION.rollout_rs_threshold_lower'), 1 / value):g}_{value:g}"
    return commas(value)
