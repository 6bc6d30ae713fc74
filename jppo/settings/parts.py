"""The registries of parts that settings name; a user-defined part is an entry like these (docs/extending.md)."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from jppo.errors import UserError
from jppo.registry import Registry, resolve, said
from jppo.settings.texts import check_factors

if TYPE_CHECKING:
    from jppo.settings.table import Settings

Part = Callable[..., object]

ESTIMATORS = Registry[Part](
    "estimators", "jppo.learner.catalogue:ESTIMATORS", returns="jppo.learner.algorithm:Algorithm"
)
POLICY_LOSSES = Registry[Part](
    "policy_losses", "jppo.learner.catalogue:POLICY_LOSSES", returns="jppo.learner.algorithm:Algorithm"
)
OPTIMIZERS = Registry[Part]("optimizers", "jppo.learner.catalogue:OPTIMIZERS", returns="optax:GradientTransformation")
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
    def old_logits(self) -> bool:
        """Whether it reads statistics of the old policy's logits."""

    @property
    def given(self) -> Callable[..., Sequence[str]] | None:
        """The function of a prompt that returns texts for places of its samples; None: all are sampled."""


class PolicyLossFields(Protocol):
    """The fields of a policy loss that rules between settings read."""

    @property
    def terms(self) -> tuple[object, ...]:
        """The terms of the loss."""

    @property
    def aggregation(self) -> str | None:
        """The required aggregation over tokens; None for any."""

    @property
    def ratio(self) -> bool:
        """Whether it reads the old policy."""


def estimator(config: "Settings") -> EstimatorFields:
    """Returns the estimator that `algorithm.adv_estimator` names."""
    return (_make_own_estimator if config.algorithm.adv_estimator in ESTIMATORS.own else _make_estimator)(config)


def _make_estimator(c: "Settings") -> EstimatorFields:
    a = c.algorithm
    check_factors(a.gdpo_reward_keys, a.gdpo_reward_weights, "algorithm.gdpo_reward_weights")
    if a.adv_estimator == "gdpo" and not a.gdpo_reward_keys:
        raise UserError(
            "algorithm.gdpo_reward_keys is empty, and algorithm.adv_estimator='gdpo' normalizes parts of the reward"
            " apart; name some, such as rule_score,format_score"
        )
    made = cast(EstimatorFields, ESTIMATORS.make(a.adv_estimator, "algorithm.adv_estimator", c))
    _run_on_shapes(made, "parts", f"algorithm.adv_estimator={a.adv_estimator!r}")
    return made


# The rules between settings ask for it several times; a user's file may change between two calls, and jppo's may not.
_make_own_estimator = functools.lru_cache(maxsize=64)(_make_estimator)


def policy_loss(config: "Settings") -> PolicyLossFields:
    """Returns the policy loss that `actor.loss_mode` names."""
    return (_make_own_loss if config.actor.loss_mode in POLICY_LOSSES.own else _make_loss)(config)


def _make_loss(c: "Settings") -> PolicyLossFields:
    made = cast(PolicyLossFields, POLICY_LOSSES.make(c.actor.loss_mode, "actor.loss_mode", c))
    if not made.terms:
        raise UserError(f"actor.loss_mode={c.actor.loss_mode!r}: its Algorithm has no terms; give it some")
    _run_on_shapes(made, "ratio", f"actor.loss_mode={c.actor.loss_mode!r}")
    return made


_make_own_loss = functools.lru_cache(maxsize=64)(_make_loss)


def _run_on_shapes(made: object, reads: str, setting: str) -> None:
    """Runs the functions of an algorithm on shapes, once; raises a UserError that begins with the setting."""
    try:
        getattr(made, reads)
    except Exception as e:  # a user's function may raise anything
        raise UserError(f"{setting}: a function of it, traced by JAX, raises {said(e)}; correct it") from e
