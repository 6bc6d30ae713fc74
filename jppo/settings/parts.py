"""The registries of parts that settings name; a user-defined part is an entry like these (docs/extending.md)."""

from collections import ChainMap
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from jppo.registry import Registry, resolve

if TYPE_CHECKING:
    from jppo.settings.table import Settings

Part = Callable[..., object]

ESTIMATORS = Registry[Part](
    "estimators", "jppo.learner.estimators:ESTIMATORS", returns="jppo.learner.estimate:Estimator"
)
POLICY_LOSSES = Registry[Part](
    "policy_losses", "jppo.learner.policy_losses:POLICY_LOSSES", returns="jppo.learner.policy_losses:Objective"
)
OPTIMIZERS = Registry[Part]("optimizers", "jppo.learner.optim:OPTIMIZERS", returns="optax:GradientTransformation")
KL_ESTIMATORS = Registry[Part]("kl_estimators", "jppo.algorithms.kl:BY_NAME")


def _imported(where: str) -> Part:
    """Makes a function that imports 'module:name' at the first call."""

    def part(*given: object, **named: object) -> object:
        return resolve(where, "rollout.name")(*given, **named)

    return part


_SERVED = _imported("jppo.rollout.make:start_engine")
ENGINES = Registry[Part](
    "engines",
    {"vllm": _SERVED, "sglang": _SERVED, "inprocess": _imported("jppo.rollout.make:start_inprocess")},
)


class EstimatorFields(Protocol):
    """The fields of an advantage estimator that rules between settings read."""

    @property
    def compares(self) -> bool:
        """Whether a prompt's samples are compared with each other."""

    @property
    def scored(self) -> bool:
        """Whether it reads the score."""

    @property
    def critic(self) -> bool:
        """Whether it reads values."""

    @property
    def by_turn(self) -> bool:
        """Whether it discounts from turn to turn."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the reward that it reads in place of the score."""

    @property
    def energy(self) -> bool:
        """Whether it reads the old policy's probabilities of all tokens."""


class PolicyLossFields(Protocol):
    """The fields of a policy loss that rules between settings read."""

    @property
    def aggregation(self) -> str | None:
        """The required aggregation over tokens; None for any."""

    @property
    def ratio(self) -> bool:
        """Whether it has a probability ratio."""


def estimator(config: "Settings") -> EstimatorFields:
    """Returns the estimator that `algorithm.adv_estimator` names; `critic.lam` is its `critic_lam`."""
    values = ChainMap[str, object](dict(critic_lam=config.critic.lam), vars(config.algorithm))
    made = ESTIMATORS.make(config.algorithm.adv_estimator, "algorithm.adv_estimator", values)
    return cast(EstimatorFields, made)  # `make` has checked the class


def objective(config: "Settings") -> PolicyLossFields:
    """Returns the policy loss that `actor.loss_mode` names; unset clip ranges are `clip_ratio`."""
    a = config.actor
    low = a.clip_ratio if a.clip_ratio_low is None else a.clip_ratio_low
    high = a.clip_ratio if a.clip_ratio_high is None else a.clip_ratio_high
    values = ChainMap[str, object](dict(clip_ratio_low=low, clip_ratio_high=high), vars(a))
    return cast(PolicyLossFields, POLICY_LOSSES.make(a.loss_mode, "actor.loss_mode", values))
