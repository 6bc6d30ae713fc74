"""jppo's own parts by the names of settings: estimators and policy losses of a run's settings, optimizers of a section.

Each setting that a part reads has a line here that reads it by its name. A user-defined part is such a function in
another file, named as 'path.py:name'.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jppo.algorithms import losses
from jppo.errors import UserError
from jppo.learner import estimators, optim
from jppo.learner.algorithm import Algorithm
from jppo.learner.policy_losses import Objective, Selection
from jppo.settings import Optimizer, Settings
from jppo.settings.table_training import Actor
from jppo.settings.table_training import Algorithm as AlgorithmSection
from jppo.types import Array


def by_std(algorithm: AlgorithmSection) -> dict[str, bool]:
    """Returns the option of estimators that compare a group."""
    return dict(norm_adv_by_std=algorithm.norm_adv_by_std_in_grpo)


def clips(actor: Actor) -> dict[str, Any]:
    """Returns the clip range of a ratio; an unset bound is `actor.clip_ratio`."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return dict(clip_low=actor.clip_ratio if low is None else low, clip_high=actor.clip_ratio if high is None else high)


def dual_clips(actor: Actor) -> dict[str, Any]:
    """Returns the clip range with the bound of losses of negative advantages."""
    return clips(actor) | dict(clip_c=actor.clip_ratio_c)


def make_dro(actor: Actor) -> Objective:
    """Makes DRO; raises UserError without its β."""
    if actor.dro_beta is None:
        raise UserError("actor.dro_beta=None: actor.loss_mode='dro' needs a number above 0; set it, as in 0.1")
    return Objective(partial(losses.dro, dro_beta=actor.dro_beta))


def make_clip_cov(actor: Actor) -> Objective:
    """Makes Clip-Cov, which leaves tokens of high covariance out."""
    band = dict[str, Any](low=actor.clip_cov_lb, high=actor.clip_cov_ub)
    choose = partial(losses.drawn_by_covariance, **band, **clips(actor))
    return Objective(partial(losses.clip_cov, **clips(actor)), selection=Selection(choose, actor.clip_cov_ratio))


def make_kl_cov(actor: Actor) -> Objective:
    """Makes KL-Cov, with a KL on the tokens of the highest covariance."""

    def choose(_: Array, logp: Array, __: Array, advantage: Array, mask: Array, *, count: Array) -> Array:
        return losses.highest_covariance(logp, advantage, mask, count=count)

    loss = partial(losses.kl_cov, ppo_kl_coef=actor.ppo_kl_coef)
    return Objective(loss, selection=Selection(choose, actor.kl_cov_ratio))


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
    "grpo": lambda c: estimators.grpo(**by_std(c.algorithm)),
    "grpo_vectorized": lambda c: estimators.grpo(**by_std(c.algorithm)),
    "grpo_passk": lambda c: estimators.grpo_passk(**by_std(c.algorithm)),
    "rloo": lambda _: estimators.rloo(),
    "rloo_vectorized": lambda _: estimators.rloo_vectorized(),
    "reinforce_plus_plus_baseline": lambda _: estimators.reinforce_plus_plus_baseline(),
    "opo": lambda _: estimators.opo(),
    "gpg": lambda _: estimators.gpg(),
    "gdpo": lambda c: estimators.gdpo(
        keys=c.algorithm.gdpo_reward_keys, weights=c.algorithm.gdpo_reward_weights, **by_std(c.algorithm)
    ),
    "optimal_token_baseline": lambda _: estimators.token_baseline(by_kept=False),
    "tir_optimal_token_baseline": lambda _: estimators.token_baseline(by_kept=True),
}

BY_SEQUENCE = "seq-mean-token-mean"
POLICY_LOSSES: dict[str, Callable[[Settings], Objective]] = {
    "vanilla": lambda c: Objective(partial(losses.clipped, **dual_clips(c.actor))),
    "gspo": lambda c: Objective(partial(losses.gspo, **clips(c.actor))),
    "geo_mean": lambda c: Objective(
        partial(losses.geo_mean, **clips(c.actor)), by_sequence=True, aggregation=BY_SEQUENCE
    ),
    "cispo": lambda c: Objective(partial(losses.cispo, **clips(c.actor))),
    "sapo": lambda c: Objective(
        partial(losses.sapo, tau_pos=c.actor.tau_pos, tau_neg=c.actor.tau_neg), aggregation=BY_SEQUENCE
    ),
    "gpg": lambda _: Objective(losses.gpg, ratio=False),
    "dro": lambda c: make_dro(c.actor),
    "dppo_tv": lambda c: Objective(partial(losses.dppo_tv, **dual_clips(c.actor))),
    "dppo_kl": lambda c: Objective(partial(losses.dppo_kl, **dual_clips(c.actor))),
    "clip_cov": lambda c: make_clip_cov(c.actor),
    "kl_cov": lambda c: make_kl_cov(c.actor),
}


def momenta(section: Optimizer) -> dict[str, Any]:
    """Returns the options that most optimizers share."""
    return dict(betas=section.betas, weight_decay=section.weight_decay)


# (section, learning rate, the matrices among the parameters as `optim.muon` takes them) -> an optax chain
OPTIMIZERS: dict[str, Callable[[Optimizer, Any, Any], Any]] = {
    "adamw": lambda section, lr, _: optim.adamw(lr, **momenta(section)),
    "muon": lambda section, lr, matrices: optim.muon(lr, **momenta(section), matrices=matrices),
    "adafactor": lambda section, lr, _: optim.adafactor(lr, weight_decay=section.weight_decay),
    "lion": lambda section, lr, _: optim.lion(lr, **momenta(section)),
    "sgd": lambda section, lr, _: optim.sgd(lr, **momenta(section)),
}
