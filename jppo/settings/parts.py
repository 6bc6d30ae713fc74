"""The registries of parts that settings name; a user-defined part is an entry like these (docs/extending.md)."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jppo.errors import UserError
from jppo.registry import Registry, at_line, explain
from jppo.settings.options import EXTENSION, Option, Options, read_signature, refuse_all, resolve_options
from jppo.settings.texts import check_factors

if TYPE_CHECKING:
    from jppo.settings.table import Loop, Settings

Part = Callable[..., Any]
Algorithm = Any  # a jppo.learner.algorithm.Algorithm, of a layer above

ESTIMATORS = Registry[Part](
    "estimators", "jppo.learner.catalogue:ESTIMATORS", returns="jppo.learner.algorithm:Algorithm"
)
EXTENSIONS = Registry[Part]("extensions", {}, returns="jppo.learner.algorithm:Algorithm")
POLICY_LOSSES = Registry[Part](
    "policy_losses", "jppo.learner.catalogue:POLICY_LOSSES", returns="jppo.learner.algorithm:Algorithm"
)
OPTIMIZERS = Registry[Part]("optimizers", "jppo.learner.catalogue:OPTIMIZERS", returns="optax:GradientTransformation")
KL_ESTIMATORS = Registry[Part]("kl_estimators", "jppo.algorithms.kl:BY_NAME")


ENGINES = Registry[Part](
    "engines",
    {
        "vllm": "jppo.rollout.servers.make:start_vllm_engine",
        "sglang": "jppo.plugins.sglang.make:start_engine",
        "inprocess": "jppo.rollout.make:start_inprocess",
    },
)

# Groups of a run's own metrics, and those among them that terms of a loss have.
_GROUPS = "actor critic perf timing_s trainer train training val rollout rollout_corr reward response_length"
OWN = tuple(f"{group}/" for group in f"{_GROUPS} prompt_length given agent judge".split())
OF_TERMS = ("actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_loss", "critic/vf_clipfrac")


def options_of(spec: str) -> dict[str, Option]:
    """Returns the options of the extension `spec` by name."""
    return read_signature(EXTENSIONS.find(spec, EXTENSION), f"{EXTENSION}={spec!r}")


def options(config: "Loop") -> Options:
    """Returns the checked options of the extension, with its defaults; raises a UserError for each fault."""
    spec, values = config.users_algorithm
    if spec:
        return resolve_options(values, options_of(spec), f"{EXTENSION}={spec!r}")
    refuse_all(values)
    return values


def extension(config: "Loop") -> Algorithm | None:
    """Makes the user's algorithm; None if `algorithm.extension` is empty."""
    spec, _ = config.users_algorithm
    return EXTENSIONS.make(spec, EXTENSION, **options(config)) if spec else None


def estimate_setting(config: "Settings") -> str:
    """Returns the setting that the advantages come from and its value, as errors begin: `actor.lr=0.1`."""
    a, users = config.algorithm, extension(config)
    if users is None or users.advantage is None:
        return f"algorithm.adv_estimator={a.adv_estimator!r}"
    return f"{EXTENSION}={a.extension!r}"


def host_setting(config: "Settings") -> str:
    """Returns the setting of an algorithm's host functions and its value, as errors begin: `actor.lr=0.1`."""
    a = config.algorithm
    return f"{EXTENSION}={a.extension!r}" if a.extension else f"algorithm.adv_estimator={a.adv_estimator!r}"


def estimator(config: "Settings") -> Algorithm:
    """Returns the algorithm that estimates advantages: of `algorithm.extension`, else of `algorithm.adv_estimator`."""
    a = config.algorithm
    own = a.adv_estimator in ESTIMATORS.own and not a.extension
    return (_make_own_estimator if own else _make_estimator)(config)


def _make_estimator(c: "Settings") -> Algorithm:
    """Makes `estimator`'s result, and traces it once; raises UserError for an Algorithm that is no estimator."""
    a = c.algorithm
    check_factors(a.gdpo_reward_keys, a.gdpo_reward_weights, "algorithm.gdpo_reward_weights")
    if a.adv_estimator == "gdpo" and not a.gdpo_reward_keys:
        raise UserError(
            "algorithm.gdpo_reward_keys is empty, and algorithm.adv_estimator='gdpo' normalizes parts of the reward"
            " apart; name some, such as rule_score,format_score"
        )
    algorithm: Algorithm = ESTIMATORS.make(a.adv_estimator, "algorithm.adv_estimator", c)
    if algorithm.terms or algorithm.more_terms:
        raise UserError(
            f"algorithm.adv_estimator={a.adv_estimator!r}: its Algorithm has terms of a loss, which only"
            " algorithm.extension and actor.loss_mode may have; leave them out, or name it by one of these"
        )
    if algorithm.advantage is None:
        raise UserError(f"algorithm.adv_estimator={a.adv_estimator!r}: its Algorithm has no advantage; give it one")
    users = extension(c)
    algorithm = algorithm if users is None else users.over(algorithm)
    run_on_shapes(algorithm, "parts", estimate_setting(c))
    return algorithm


# The rules between settings ask for it several times; a user's file may change between two calls, and jppo's may not.
_make_own_estimator = functools.lru_cache(maxsize=64)(_make_estimator)


def policy_loss(config: "Loop") -> Algorithm:
    """Returns the policy loss of a run: the terms of `algorithm.extension`, else those that `actor.loss_mode` names."""
    own = config.actor.loss_mode in POLICY_LOSSES.own and extension(config) is None
    return (_make_own_loss if own else _make_loss)(config)


def _make_loss(c: "Loop") -> Algorithm:
    """Makes `policy_loss`'s result, and traces it once; raises UserError for a metric of a reserved name."""
    users, loss = extension(c), _make_named_loss(c)
    loss = loss if users is None else users.over(loss)
    for reads in ("loss_reads", "value_reads", "metrics"):
        run_on_shapes(loss, reads, loss_setting(c))
    is_custom = users is not None or c.actor.loss_mode not in POLICY_LOSSES.own
    reserved = [name for name in loss.metrics if is_custom and name not in OF_TERMS and name.startswith(OWN)]
    if reserved or any("/" not in name for name in loss.metrics):
        name = (reserved or [name for name in loss.metrics if "/" not in name])[0]
        raise UserError(f"{loss_setting(c)}: a term has the metric {name!r}; name it as in mine/{name.split('/')[-1]}")
    return loss


def _make_named_loss(c: "Loop") -> Algorithm:
    """Makes the loss that `actor.loss_mode` names; raises UserError for an Algorithm that is no loss."""
    loss: Algorithm = POLICY_LOSSES.make(c.actor.loss_mode, "actor.loss_mode", c)
    if not loss.terms:
        raise UserError(f"actor.loss_mode={c.actor.loss_mode!r}: its Algorithm has no terms; give it some")
    if loss.advantage is not None:
        raise UserError(
            f"actor.loss_mode={c.actor.loss_mode!r}: its Algorithm has an advantage, which only algorithm.extension and"
            " algorithm.adv_estimator may have; leave it out, or name it by one of these"
        )
    return loss


_make_own_loss = functools.lru_cache(maxsize=64)(_make_loss)


def loss_setting(config: "Loop") -> str:
    """Returns the setting that the policy's loss comes from and its value, as errors begin: `actor.lr=0.1`."""
    users = extension(config)
    if users is None or not (users.terms or users.more_terms):
        return f"actor.loss_mode={config.actor.loss_mode!r}"
    return f"{EXTENSION}={config.users_algorithm[0]!r}"


def algorithm(config: "Settings") -> Algorithm:
    """Returns the whole algorithm of the settings."""
    return estimator(config).over(_make_named_loss(config))


def run_on_shapes(made: object, reads: str, setting: str) -> None:
    """Runs the functions of an algorithm on shapes, once; raises a UserError that begins with the setting."""
    try:
        getattr(made, reads)
    except Exception as e:  # a user's function may raise anything
        raise UserError(
            f"{setting}: a function of it, traced by JAX, raises {explain(e)}; correct it{at_line(e)}"
        ) from e
