"""jppo's own parts by the names of settings: estimators and policy losses of a run's settings, optimizers of a section.

Each setting that a part reads has a line here that reads it by its name. A user-defined part is such a function in
another file, named as 'path.py:name'.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import optax

from jppo.algorithms import advantage, losses, masked, values
from jppo.errors import UserError
from jppo.learner import estimators, optim
from jppo.learner.algorithm import Algorithm, Term
from jppo.learner.views import BeforeView, LossView, ValueView
from jppo.models import router
from jppo.settings import Critic, Optimizer, Settings
from jppo.settings.table_training import Actor
from jppo.settings.table_training import Algorithm as AlgorithmSection
from jppo.types import Array


def by_std(algorithm: AlgorithmSection) -> dict[str, Any]:
    """Returns the keyword argument of GRPO's relatives: whether they divide by a group's standard deviation."""
    return dict(norm_adv_by_std=algorithm.norm_adv_by_std_in_grpo)


def clips(actor: Actor) -> dict[str, Any]:
    """Returns the clip range of a ratio; an unset bound is `actor.clip_ratio`."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return dict(clip_low=actor.clip_ratio if low is None else low, clip_high=actor.clip_ratio if high is None else high)


def surrogate(
    loss: Callable[..., losses.PolicyLoss],
    mark_tokens: Callable[[BeforeView], Array] | None = None,
    *,
    aggregation: str | None = None,
    by_sequence: bool = False,
) -> Algorithm:
    """Makes a policy loss of a function (logp, old_logp, advantage, mask, segment), as in `algorithms/losses.py`.

    It may treat tokens differently that `mark_tokens` has marked, as clip_cov and kl_cov do.
    """

    def loss_by_token(view: LossView) -> tuple[Array, dict[str, Array]]:
        arrays = view.logprob, view.old_logprob, view.advantage, view.mask, view.segment
        return with_clips(loss(*arrays) if mark_tokens is None else loss(*arrays, view.before))

    term = Term(loss_by_token, "actor/pg_loss", aggregation=aggregation, by_sequence=by_sequence)
    return Algorithm(terms=(term,), before=mark_tokens)


def with_clips(policy_loss: losses.PolicyLoss) -> tuple[Array, dict[str, Array]]:
    """Returns the loss of each token, and its two masks of clipped tokens as metrics."""
    return policy_loss[0], {"actor/pg_clipfrac": policy_loss[1], "actor/pg_clipfrac_lower": policy_loss[2]}


def gpg() -> Algorithm:
    """Makes REINFORCE, which reads no old policy."""

    def loss_by_token(view: LossView) -> tuple[Array, dict[str, Array]]:
        old_logp = view.logprob  # which it ignores
        return with_clips(losses.gpg(view.logprob, old_logp, view.advantage, view.mask, view.segment))

    return Algorithm(terms=(Term(loss_by_token, "actor/pg_loss"),))


def dro(beta: float | None) -> Algorithm:
    """Makes DRO; raises UserError without its β."""
    if beta is None:
        raise UserError("actor.dro_beta=None: actor.loss_mode='dro' needs a number above 0; set it, as in 0.1")
    return surrogate(partial(losses.dro, dro_beta=beta))


def clip_cov(*, ratio: float, low: float, high: float, clip_low: float, clip_high: float) -> Algorithm:
    """Makes Clip-Cov, which leaves tokens of high covariance out."""
    clip = dict[str, Any](clip_low=clip_low, clip_high=clip_high)

    def mark_tokens(view: BeforeView) -> Array:
        arrays = view.logprob, view.old_logprob, view.advantage, view.mask
        return losses.drawn_by_covariance(view.key, *arrays, count=view.count(ratio), low=low, high=high, **clip)

    return surrogate(partial(losses.clip_cov, **clip), mark_tokens)


def kl_cov(*, ratio: float, coef: float) -> Algorithm:
    """Makes KL-Cov, with a KL on the tokens of the highest covariance."""

    def mark_tokens(view: BeforeView) -> Array:
        return losses.highest_covariance(view.logprob, view.advantage, view.mask, count=view.count(ratio))

    return surrogate(partial(losses.kl_cov, ppo_kl_coef=coef), mark_tokens)


def regularisers(actor: Actor) -> tuple[Term, ...]:
    """Makes the terms that settings of the actor add to its policy loss: entropy, KL, positive examples, routers."""
    clamp = actor.kl_loss_max_clamp

    def clamped_kl(view: LossView) -> Array:
        return view.kl if clamp is None else jnp.clip(view.kl, -clamp, clamp)

    def balance(view: LossView) -> Array:
        return router.balance_loss(view.router, view.load, view.tokens)

    terms = []
    if actor.entropy_coeff:
        terms.append(Term(lambda view: view.entropy, "", -actor.entropy_coeff, corrected=False))
    if actor.use_kl_loss:
        terms.append(Term(clamped_kl, "actor/kl_loss", actor.kl_loss_coef, corrected=False))
    if actor.positive_lm_coef:  # the mean of -log π over the positive examples' tokens (VAPO, arXiv:2504.05118, eq. 9)
        mean = Term(lambda view: -view.positive * view.logprob, "actor/positive_lm_loss", actor.positive_lm_coef)
        terms.append(dataclasses.replace(mean, aggregation="token-sum", corrected=False))
    if actor.router_z_loss_coef:
        z = Term(lambda view: router.z_loss(view.router, view.tokens), "actor/router_z_loss", actor.router_z_loss_coef)
        terms.append(z)
    if actor.router_aux_loss_coef:
        terms.append(Term(balance, "actor/router_aux_loss", actor.router_aux_loss_coef))
    return tuple(terms)


def value_terms(critic: Critic) -> tuple[Term, ...]:
    """Makes the critic's loss: of a histogram, or the clipped squared error."""
    limits, clip = critic.value_range, critic.cliprange_value

    def histogram_loss(view: ValueView) -> tuple[Array, dict[str, Array]]:
        by_token, clipped = values.histogram_loss(view.logits, view.returns, limits)
        return by_token, {"critic/vf_clipfrac": clipped}

    def squared_loss(view: ValueView) -> tuple[Array, dict[str, Array]]:
        by_token, clipped = losses.clipped_value(view.value, view.old_value, view.returns, cliprange_value=clip)
        return by_token, {"critic/vf_clipfrac": clipped}

    return (Term(histogram_loss if critic.value_bins else squared_loss, "critic/vf_loss"),)


ESTIMATORS: dict[str, Callable[[Settings], Algorithm]] = {
    "gae": lambda c: estimators.gae(
        gamma=c.algorithm.gamma,
        gamma_by=c.algorithm.gamma_by,
        lam=c.algorithm.lam,
        lam_alpha=c.algorithm.lam_alpha,
        critic_lam=c.critic.lam,
    ),
    "reinforce_plus_plus": lambda c: estimators.reinforce_plus_plus(
        gamma=c.algorithm.gamma, gamma_by=c.algorithm.gamma_by
    ),
    "distill": lambda c: estimators.distill(gamma=c.algorithm.gamma),
    "remax": lambda _: estimators.remax(),
    "reinforce_no_baseline": lambda _: estimators.reinforce_no_baseline(),
    "grpo": lambda c: estimators.by_group(advantage.grpo, **by_std(c.algorithm)),
    "grpo_vectorized": lambda c: estimators.by_group(advantage.grpo, **by_std(c.algorithm)),
    "grpo_passk": lambda c: estimators.by_group(advantage.grpo_passk, **by_std(c.algorithm)),
    "rloo": lambda _: estimators.by_group(advantage.rloo),
    "rloo_vectorized": lambda _: estimators.by_group(advantage.rloo_vectorized),
    "reinforce_plus_plus_baseline": lambda _: estimators.by_group(
        advantage.reinforce_plus_plus_baseline, (masked.whiten,)
    ),
    "opo": lambda _: estimators.opo(),
    "gpg": lambda _: estimators.gpg(),
    "gdpo": lambda c: estimators.gdpo(
        keys=c.algorithm.gdpo_reward_keys, weights=c.algorithm.gdpo_reward_weights, **by_std(c.algorithm)
    ),
    "optimal_token_baseline": lambda _: estimators.token_baseline(by_kept=False),
    "tir_optimal_token_baseline": lambda _: estimators.token_baseline(by_kept=True),
}

BY_SEQUENCE = "seq-mean-token-mean"
POLICY_LOSSES: dict[str, Callable[[Settings], Algorithm]] = {
    "vanilla": lambda c: surrogate(partial(losses.clipped, **clips(c.actor), clip_c=c.actor.clip_ratio_c)),
    "gspo": lambda c: surrogate(partial(losses.gspo, **clips(c.actor))),
    "geo_mean": lambda c: surrogate(
        partial(losses.geo_mean, **clips(c.actor)), by_sequence=True, aggregation=BY_SEQUENCE
    ),
    "cispo": lambda c: surrogate(partial(losses.cispo, **clips(c.actor))),
    "sapo": lambda c: surrogate(
        partial(losses.sapo, tau_pos=c.actor.tau_pos, tau_neg=c.actor.tau_neg), aggregation=BY_SEQUENCE
    ),
    "gpg": lambda _: gpg(),
    "dro": lambda c: dro(c.actor.dro_beta),
    "dppo_tv": lambda c: surrogate(partial(losses.dppo_tv, **clips(c.actor), clip_c=c.actor.clip_ratio_c)),
    "dppo_kl": lambda c: surrogate(partial(losses.dppo_kl, **clips(c.actor), clip_c=c.actor.clip_ratio_c)),
    "clip_cov": lambda c: clip_cov(
        ratio=c.actor.clip_cov_ratio, low=c.actor.clip_cov_lb, high=c.actor.clip_cov_ub, **clips(c.actor)
    ),
    "kl_cov": lambda c: kl_cov(ratio=c.actor.kl_cov_ratio, coef=c.actor.ppo_kl_coef),
}


# (section, learning rate, the matrices among the parameters as `optim.muon` takes them) -> an optax chain
OPTIMIZERS: dict[str, Callable[[Optimizer, Any, Any], Any]] = {
    "adamw": lambda section, lr, _: optax.adamw(lr, *section.betas, weight_decay=section.weight_decay),
    "muon": lambda section, lr, matrices: optim.muon(lr, section.betas, section.weight_decay, matrices),
    "adafactor": lambda section, lr, _: optim.adafactor(lr, weight_decay=section.weight_decay),
    "lion": lambda section, lr, _: optax.lion(lr, *section.betas, weight_decay=section.weight_decay),
    "sgd": lambda section, lr, _: optim.sgd(lr, section.betas[0], section.weight_decay),
}
