"""From the names in the settings to the functions of the mathematics, their numbers bound."""

import functools
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from jppo.algorithms import advantage, kl, losses
from jppo.assemble.rows import sequences_of_step
from jppo.config import importance_band, rejection_rules
from jppo.learner import correct, estimate, ppo
from jppo.learner.estimate import Estimator
from jppo.structs import Array


def make_estimator(c: ConfigDict) -> Estimator:
    """What `algorithm.adv_estimator` chooses from."""
    gamma, std = c.algorithm.gamma, c.algorithm.norm_adv_by_std_in_grpo
    gae = functools.partial(advantage.gae, gamma=gamma, lam=c.algorithm.lam)

    def twice(x: Array) -> tuple[Array, Array]:
        return x, x  # no critic reads the returns

    estimators = {
        "gae": lambda: Estimator(lambda reward, value, _, mask: gae(reward, value, mask), whiten=True, critic=True),
        "reinforce_plus_plus": lambda: Estimator(
            lambda reward, _, __, mask: twice(advantage.reinforce_plus_plus(reward, mask, gamma=gamma)),
            whiten=True,
        ),
        "remax": lambda: Estimator(
            lambda reward, _, greedy, mask: twice(advantage.remax(reward, greedy, mask)),
            greedy=True,
        ),
        "grpo": lambda: Estimator(
            estimate.spread, lambda score, _, group: advantage.grpo(score, group, norm_adv_by_std=std)
        ),
        "grpo_passk": lambda: Estimator(
            estimate.spread, lambda score, _, group: advantage.grpo_passk(score, group, norm_adv_by_std=std)
        ),
        "rloo": lambda: Estimator(estimate.spread, lambda score, _, group: advantage.rloo(score, group)),
        "rloo_vectorized": lambda: Estimator(
            estimate.spread, lambda score, _, group: advantage.rloo_vectorized(score, group)
        ),
        "reinforce_plus_plus_baseline": lambda: Estimator(
            estimate.spread,
            lambda score, _, group: advantage.reinforce_plus_plus_baseline(score, group),
            whiten=True,
        ),
        "opo": lambda: Estimator(estimate.spread, advantage.opo),
    }
    return estimators[c.algorithm.adv_estimator]()


def make_policy_loss(c: ConfigDict) -> Callable[..., losses.PolicyLoss]:
    """What `actor.loss_mode` chooses from."""
    a = c.actor
    low = a.clip_ratio if a.clip_ratio_low is None else a.clip_ratio_low
    high = a.clip_ratio if a.clip_ratio_high is None else a.clip_ratio_high
    clip = dict(clip_low=low, clip_high=high)
    losses_by_name: dict[str, Callable[..., losses.PolicyLoss]] = {
        "vanilla": functools.partial(losses.clipped, **clip, clip_c=a.clip_ratio_c),
        "gspo": functools.partial(losses.gspo, **clip),
        "geo_mean": functools.partial(losses.geo_mean, **clip),
        "cispo": functools.partial(losses.cispo, **clip),
        "sapo": functools.partial(losses.sapo, tau_pos=a.tau_pos, tau_neg=a.tau_neg),
        "gpg": losses.gpg,
    }
    return losses_by_name[a.loss_mode]


def make_correction(c: ConfigDict) -> correct.Correction | None:
    """What is done about the gap between sampler and trainer."""
    a = c.algorithm
    if a.old_logprob != "correction":
        return None
    lower, upper = importance_band(a.rollout_is_threshold)
    return correct.Correction(
        level=None if a.rollout_is == "none" else a.rollout_is,
        lower=lower,
        upper=upper,
        normalize=a.rollout_is_batch_normalize,
        rules=rejection_rules(a.rollout_rs, a.rollout_rs_threshold),
    )


def make_kl_controller(c: ConfigDict) -> Callable[[Array, Array], Array] | None:
    """What `algorithm.kl_ctrl_type` chooses: the next coefficient of the KL in the reward; None: it is fixed."""
    a = c.algorithm
    if a.kl_ctrl_type == "fixed":
        return None
    how = dict(steps=sequences_of_step(c), target=a.target_kl, horizon=a.horizon)
    return jax.jit(functools.partial(kl.adaptive, **how))


def make_recipe(c: ConfigDict) -> ppo.Recipe:
    """The mathematics that the config asks for."""
    a, v = c.actor, c.critic
    mode = "seq-mean-token-mean" if a.loss_mode in ("sapo", "geo_mean") else a.loss_agg_mode
    value_mode = a.loss_agg_mode if v.loss_agg_mode is None else v.loss_agg_mode
    scale = float(c.data.max_response_length) if a.loss_scale_factor is None else a.loss_scale_factor
    value_scale = scale if v.loss_scale_factor is None else v.loss_scale_factor
    return ppo.Recipe(
        estimator=make_estimator(c),
        policy_loss=make_policy_loss(c),
        by_sequence=a.loss_mode == "geo_mean",
        weigh=functools.partial(losses.token_weights, mode=mode, scale=scale),
        weigh_value=functools.partial(losses.token_weights, mode=value_mode, scale=value_scale),
        cliprange_value=v.cliprange_value,
        entropy_coeff=a.entropy_coeff,
        entropy_metric=a.calculate_entropy,
        kl_penalty=c.algorithm.kl_penalty if c.algorithm.use_kl_in_reward else None,
        kl_loss_type=a.kl_loss_type if a.use_kl_loss else None,
        kl_loss_coef=a.kl_loss_coef,
        bypass=c.algorithm.old_logprob == "bypass",
        correction=make_correction(c),
        adapt_kl=make_kl_controller(c),
    )
