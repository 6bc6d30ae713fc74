"""Parts of a learner from the settings: estimator, policy loss, KL, rollout correction, optimizers."""

import functools
from collections import ChainMap
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jppo.algorithms import kl, losses
from jppo.learner import correct, optim, ppo, state
from jppo.learner.estimate import Estimator
from jppo.learner.plan import sequences_of_step
from jppo.learner.policy_losses import Objective
from jppo.settings import Optimizer, Settings, has_branches, importance_band, optimizers, parts, rejection_rules
from jppo.types import Array


def make_estimator(c: Settings) -> Estimator:
    """Makes the estimator that `algorithm.adv_estimator` names."""
    found = parts.estimator(c)
    assert isinstance(found, Estimator)
    return found


def make_objective(c: Settings) -> Objective:
    """Makes the policy loss that `actor.loss_mode` names."""
    found = parts.objective(c)
    assert isinstance(found, Objective)
    return found


def kl_name(name: str, setting: str) -> str:
    """Returns a KL estimator's name in `kl.ESTIMATORS`; registers a user-defined one."""
    if name not in kl.BY_NAME:
        estimate: Any = parts.KL_ESTIMATORS.find(name, setting)
        kl.ESTIMATORS[name] = estimate
    return name


def make_correction(c: Settings) -> correct.Correction | None:
    """Makes the correction of the log-prob mismatch, if any."""
    a = c.algorithm
    rules = rejection_rules(a.rollout_rs, a.rollout_rs_threshold)
    if a.rollout_is == "none" and not rules:
        return None
    lower, upper = importance_band(a.rollout_is_threshold)
    return correct.Correction(
        level=None if a.rollout_is == "none" else a.rollout_is,
        lower=lower,
        upper=upper,
        normalize=a.rollout_is_batch_normalize,
        rules=rules,
    )


def make_kl_controller(c: Settings) -> Callable[[Array, Array], Array] | None:
    """Makes the `algorithm.kl_ctrl_type` update of the KL coefficient; None: the coefficient is fixed."""
    a = c.algorithm
    if a.kl_ctrl_type == "fixed":
        return None
    return jax.jit(functools.partial(kl.adaptive, steps=sequences_of_step(c), target=a.target_kl, horizon=a.horizon))


def make_recipe(c: Settings) -> ppo.Recipe:
    """Makes the algorithm's functions from the config."""
    a, v, talk = c.actor, c.critic, c.rollout.multi_turn
    objective = make_objective(c)
    mode = a.loss_agg_mode if objective.aggregation is None else objective.aggregation
    value_mode = a.loss_agg_mode if v.loss_agg_mode is None else v.loss_agg_mode
    scale = float(c.data.max_response_length) if a.loss_scale_factor is None else a.loss_scale_factor
    value_scale = scale if v.loss_scale_factor is None else v.loss_scale_factor
    return ppo.Recipe(
        estimator=make_estimator(c),
        policy_loss=objective.loss,
        by_sequence=objective.by_sequence,
        selection=objective.selection,
        weigh=functools.partial(losses.token_weights, mode=mode, scale=scale),
        weigh_value=functools.partial(losses.token_weights, mode=value_mode, scale=value_scale),
        cliprange_value=v.cliprange_value,
        entropy_coeff=a.entropy_coeff,
        entropy_metric=a.calculate_entropy,
        kl_penalty=kl_name(c.algorithm.kl_penalty, "algorithm.kl_penalty") if c.algorithm.use_kl_in_reward else None,
        kl_loss_type=kl_name(a.kl_loss_type, "actor.kl_loss_type") if a.use_kl_loss else None,
        kl_loss_coef=a.kl_loss_coef,
        kl_loss_max_clamp=a.kl_loss_max_clamp,
        kl_topk=(("topk", a.kl_topk), ("min_logp", a.kl_log_prob_min_clamp)),
        bypass=c.algorithm.old_logprob == "bypass",
        correction=make_correction(c),
        adapt_kl=make_kl_controller(c),
        value_norm_decay=v.value_norm_decay,
        value_range=v.value_range if v.value_bins else None,
        positive_lm_coef=a.positive_lm_coef,
        router_aux_loss_coef=a.router_aux_loss_coef,
        router_z_loss_coef=a.router_z_loss_coef,
        branches=has_branches(c.rollout),
        earns=bool(c.reward.function or c.reward.model.step_aggregation or talk.enable or c.rollout.agent),
    )


def make_optimizer(section: Optimizer, name: str, what: state.Weights) -> Any:
    """Makes the optimizer of a section of the config; `name` as in `make_descent`."""
    chain = make_chain(section, name if name in ("actor", "critic") else "optim", what.matrices)
    narrow = any(x.dtype != jnp.float32 for x in jax.tree.leaves(what.shapes))
    return optim.make_optimizer(
        chain,
        grad_clip=section.grad_clip,
        moments_dtype=section.moments_dtype,
        master=section.master_dtype == "float32" and narrow,
        still=what.still,
    )


def make_chain(section: Optimizer, name: str, matrices: Any = None) -> optim.Chain:
    """Returns the optax chain of `optimizer` in section `name`, as a function of the learning rate."""

    def chain(learning_rate: Any) -> optax.GradientTransformation:
        values = ChainMap({"learning_rate": learning_rate, "matrices": matrices}, vars(section))
        made = parts.OPTIMIZERS.make(section.optimizer, f"{name}.optimizer", values)
        return cast(optax.GradientTransformation, made)  # `make` has checked the class

    chain(0.0)
    return chain


def require_optimizers(c: Settings) -> None:
    """Raises UserError for an invalid optimizer; before servers start."""
    for name, section in optimizers(c).items():
        make_chain(section, name)
