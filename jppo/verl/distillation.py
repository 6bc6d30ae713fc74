"""verl's distillation: a teacher in the reward or in the loss."""

from collections.abc import Callable
from typing import Any

from jppo.verl.name import Look, Unfit, need, off_or


def estimator(value: str, look: Look) -> str:
    """Returns the estimator; those that compare samples have the score itself for one sample a prompt."""
    if look("distillation.enabled") and not rewarded(look):
        return "distill"
    alone = look("R.n") == 1 and value in ("grpo", "rloo", "opo")
    return "reinforce_no_baseline" if alone else value


_DISTILLED = "distillation.distillation_loss"
_KINDS = {"kl": "kl", "k1": "kl", "abs": "abs", "mse": "mse", "k2": "mse", "low_var_kl": "low_var_kl",
  "k3": "low_var_kl", "forward_kl_topk": "forward_kl_topk"}  # fmt: skip


def rewarded(look: Look) -> bool:
    """Whether the score is learned beside the teacher, as by default."""
    return bool(off_or(look(f"{_DISTILLED}.use_task_rewards"), True))


def distilled(setting: str) -> Callable[[Look], Any]:
    """Makes the value of a setting that distillation implies, None without it."""

    def value(look: Look) -> Any:
        if not look("distillation.enabled"):
            return None
        kind = _KINDS.get(look(f"{_DISTILLED}.loss_mode") or "k3")
        if look(f"{_DISTILLED}.use_policy_gradient"):
            found = {"algorithm.use_kl_in_reward": True, "algorithm.kl_coef": 1.0, "algorithm.gamma": 0.0}
            return (found | {"algorithm.kl_penalty": kind}).get(setting)
        coef = off_or(look(f"{_DISTILLED}.distillation_loss_coef"), 1.0) if rewarded(look) else 1.0
        loss = {"actor.use_kl_loss": True, "actor.kl_loss_coef": coef, "actor.kl_loss_type": kind}
        return loss.get(setting)

    return value


DISTILLED = ("algorithm.use_kl_in_reward", "algorithm.kl_coef", "algorithm.kl_penalty", "algorithm.gamma",
  "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type")  # fmt: skip


def teacher_clamp(value: float | None, look: Look) -> float | None:
    if value is not None and look(f"{_DISTILLED}.use_policy_gradient"):
        raise Unfit("the KL in the reward is not clamped")
    return need(value, look("distillation.enabled"), "distillation.enabled is False")


def untaught(key: str, value: Any, look: Look) -> str:
    """Why a key of distillation has no counterpart, or ''."""
    if not key.startswith("distillation.") or not look("distillation.enabled"):
        return ""
    gradient = look(f"{_DISTILLED}.use_policy_gradient")
    if key == f"{_DISTILLED}.loss_mode" and (value not in _KINDS or (gradient and value == "forward_kl_topk")):
        return f"a distillation loss of jppo named {value!r}{' in the reward' if gradient else ''}"
    if key == f"{_DISTILLED}.use_policy_gradient" and gradient and rewarded(look):
        return (
            "the teacher in the reward together with a score; set use_task_rewards=False, or use_policy_gradient=False"
        )
    models = key.removeprefix("distillation.teacher_models.")
    several = models != key and not models.startswith("teacher_model.")
    return (
        "several teachers; leave out distillation.teacher_models, serve each by vLLM, and set"
        " ref.url=SOURCE=ADDRESS,SOURCE=ADDRESS with the data_source of its rows"
        if several
        else ""
    )
