"""The losses of a loop on `jppo.open`.

A loss is one of jppo's by name, or a pure function of a view, whose arrays are [R, T] in the rows' layout:

    logprob, entropy              of the policy, with a gradient
    value                         of the critic, with a gradient; then it is the critic's loss
    old_logprob, ref_logprob, old_value, advantage, returns    of the batch, f32
    mask, segment                 the trained tokens, and the number of the response in the row

It returns the loss of every token, [R, T], or with a pair also metrics by name, as a term of an `Algorithm` does.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax.numpy as jnp

from jppo.algorithms import kl
from jppo.errors import UserError
from jppo.learner import ppo, score, sharding, update
from jppo.learner.algorithm import Term
from jppo.learner.ppo import ModelConfigs
from jppo.learner.stats import Outputs, stats_of
from jppo.learner.trainable import CompiledLoss, make_before
from jppo.learner.views import SHAPE, LossView, ValueView, record
from jppo.models.lora import Weights
from jppo.registry import did_you_mean, explain
from jppo.run.make import make_loop_recipe, make_models
from jppo.settings import Loop, changed, check, parts, table, without_unread
from jppo.types import Array, Counts, Scored

Function = Callable[[Any], Any]
BATCH_FIELD_OF = {name: name for name in ("old_logprob", "ref_logprob", "advantage", "returns")} | {
    "old_value": "value"
}
READ = ("logprob", "entropy", "value", *BATCH_FIELD_OF, "mask", "segment")
VALUE = "value"


class ResponsesView(LossView, ValueView):
    """What a loss of a loop may read: the arrays of READ."""


# The options of a loss are settings of `actor`, or of `critic` for "value". A custom loss function gets those of MEAN.
MEAN = ("loss_agg_mode", "loss_scale_factor")
OF_POLICY = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "dro_beta",
             "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "entropy_coeff",
             "calculate_entropy", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "kl_loss_max_clamp", "kl_topk",
             "kl_log_prob_min_clamp", "router_aux_loss_coef", "router_z_loss_coef")  # fmt: skip


def cross_entropy(view: ResponsesView) -> Array:
    """-log π(target)."""
    return -view.logprob


def importance_sampling(view: ResponsesView) -> Array:
    """-A π / π_old: REINFORCE on samples of another policy, without a clip."""
    return -view.advantage * jnp.exp(jnp.where(view.mask, view.logprob - view.old_logprob, 0.0))


NO_REFERENCE = "this model has no reference; open it with ref=dict(path='policy'), or another path"
FUNCTIONS: dict[str, Function] = {f.__name__: f for f in (cross_entropy, importance_sampling)}


@dataclasses.dataclass(frozen=True)
class BatchLoss:
    """A loss over a batch of responses, with the arrays that it reads."""

    compiled: CompiledLoss
    of_critic: bool
    needs: tuple[str, ...]  # arrays of the batch
    reads_reference: bool = False  # its weights


class Losses:
    """The losses of a learner; each is compiled once."""

    def __init__(self, c: Loop, inputs: ModelConfigs, mesh: Any, passes: ppo.Passes):
        self._c, self._mesh, self._passes = c, mesh, passes
        self._models, self._heads = make_models(c, inputs, mesh)
        self._options = sharding.compiler_options(mesh, c.model.compiler_options)
        self._by_key: dict[Any, BatchLoss] = {}
        self._load = passes.actor.load

    def find(self, loss: str | Function | None, options: Mapping[str, Any]) -> BatchLoss:
        """Returns the loss of this name or function; None is the one of the settings.

        `options` are settings of `actor`, or of `critic` for a loss of values. Raises UserError by the rules of
        `jppo.train`.
        """
        function = loss if callable(loss) else FUNCTIONS.get(str(loss))
        is_function = function is not None
        of_critic = loss == VALUE or (function is not None and VALUE in _record_reads(function))
        section = "critic" if of_critic else "actor"
        known = MEAN if is_function else (*MEAN, "cliprange_value") if of_critic else (*MEAN, *OF_POLICY)
        for name in options.keys() - {*known}:
            raise UserError(
                f"{name!r} is no option of a loss like this; use {', '.join(known)}{did_you_mean(name, known)}"
            )
        changes: dict[str, Any] = {f"{section}.{name}": value for name, value in options.items()}
        for name, value in changes.items():
            setting = table.TABLE[name]
            kind = int | float if setting.type is float else setting.type
            is_valid = isinstance(value, kind) and isinstance(value, bool) == (setting.type is bool)
            if not is_valid and not (value is None and setting.optional):
                raise UserError(f"{name}={value!r} is of type {type(value).__name__}; give a {setting.type.__name__}")
            setting.check(cast(Any, value))
        if loss not in (None, VALUE):
            changes["actor.loss_mode"] = "vanilla" if is_function or loss == "ppo" else self._require_policy_loss(loss)
        key = (loss, tuple(sorted(changes.items())))
        if key not in self._by_key:
            c = without_unread(changed(self._c, changes), changes)
            check(c)
            if function is not None:
                self._by_key[key] = self._make_custom_loss(function, c)
            else:
                self._by_key[key] = (
                    self._make_value_loss(c) if of_critic else self._make_policy_loss(c, is_configured=loss is None)
                )
        return self._by_key[key]

    def _require_policy_loss(self, loss: Any) -> str:
        """Returns the name of a policy loss; raises UserError for an unknown one."""
        if isinstance(loss, str) and (loss in parts.POLICY_LOSSES or ":" in loss):
            return loss
        known = (*FUNCTIONS, "ppo", *parts.POLICY_LOSSES, VALUE)
        raise UserError(
            f"loss={loss!r} is not known; it is one of {', '.join(map(repr, known))}, or a function of a view"
            f"{did_you_mean(str(loss), known)}"
        )

    def _make_policy_loss(self, c: Loop, *, is_configured: bool) -> BatchLoss:
        """Makes the policy loss of these settings; the program of the model's own settings is compiled already."""
        recipe = make_loop_recipe(c)
        exact = recipe.kl_loss_type in kl.EXACT
        if exact and self._models.reference is None:
            raise UserError(
                f"actor.kl_loss_type={recipe.kl_loss_type!r} reads the reference's weights, and {NO_REFERENCE}"
            )
        sampled_kl = recipe.kl_loss_type is not None and not exact
        needs = ("old_logprob", "advantage", *(["ref_logprob"] if sampled_kl else []))
        if is_configured and c.actor == self._c.actor:
            return BatchLoss(self._passes.actor, False, needs, exact)  # training's own program
        loss = ppo.actor_loss_of(self._models, recipe, by_token=True, **self._heads)
        if self._load is None:
            self._load = ppo.make_router_load(self._models, recipe, self._mesh, self._options)
        load = self._load if "load" in recipe.algorithm.loss_reads else None
        before = make_before(recipe.algorithm, self._passes.logprob)
        compiled = self._compile_loss(loss, ppo.actor_reads(recipe), load=load, before=before)
        return BatchLoss(compiled, False, needs, exact)

    def _make_value_loss(self, c: Loop) -> BatchLoss:
        """Makes the critic's loss of these settings."""
        if self._models.critic is None or self._passes.critic is None:
            raise UserError(f"loss={VALUE!r} is of a critic, and this model has none; open it with critic=True")
        if c.critic == self._c.critic:
            return BatchLoss(self._passes.critic, True, ppo.VALUE_READS)
        loss = ppo.make_critic(self._models.critic, make_loop_recipe(c))[1]
        return BatchLoss(self._compile_loss(loss, ppo.VALUE_READS), True, ppo.VALUE_READS)

    def _compile_loss(self, loss: update.Loss, reads: tuple[str, ...], **ahead: Any) -> CompiledLoss:
        """Compiles a loss that reads these arrays; `ahead` are its fields for reading a whole mini-batch first."""
        return CompiledLoss(update.make_accumulate(loss, mesh=self._mesh, options=self._options), reads, **ahead)

    def _make_custom_loss(self, function: Function, c: Loop) -> BatchLoss:
        """Makes the loss of a user's function of tokens."""
        reads, recipe = _record_reads(function), make_loop_recipe(c)
        of_critic = VALUE in reads
        if not of_critic:
            logprob = score.make_logprob(*self._models.policy, with_entropy="entropy" in reads, **self._heads)
        elif self._models.critic is None:
            raise UserError(
                f"{_describe(function)} reads 'value', and this model has no critic; open it with critic=True"
            )
        else:
            value = ppo.make_critic(self._models.critic, recipe)[0]
        mean = recipe.value_mean if of_critic else recipe.mean
        terms = (Term(function, "critic/vf_loss" if of_critic else "actor/loss"),)

        def custom_loss(params: Weights, scored: Scored, counts: Counts, *_: Any) -> tuple[Array, Outputs]:
            arrays: dict[str, Any] = {name: scored.arrays.get(field) for name, field in BATCH_FIELD_OF.items()}
            arrays |= {"mask": scored.rows.mask, "segment": scored.rows.segment, "weight": scored.arrays.get("weight")}
            arrays |= {VALUE: value(params, scored.rows)} if of_critic else logprob(params, scored.rows)._asdict()
            out, sums = update.add_terms(
                terms, ResponsesView, reads, plain=arrays, corrected=arrays, counts=counts, mean=mean
            )
            return out, Outputs(stats_of(sums), {} if of_critic else {"logprob": arrays["logprob"]})

        needs = tuple(field for name, field in BATCH_FIELD_OF.items() if name in reads)
        return BatchLoss(self._compile_loss(custom_loss, ("weight", *needs)), of_critic, needs)


def _record_reads(function: Function) -> tuple[str, ...]:
    """Traces a loss function and returns the names that it reads of its view; raises UserError for others than READ."""
    try:
        reads, result = record(lambda take: function(ResponsesView(take)), {})
    except Exception as e:  # a user's function may raise anything
        raise UserError(f"{_describe(function)}, traced by JAX, raises {explain(e)}; correct it") from e
    by_token = result[0] if isinstance(result, tuple) else result
    if getattr(by_token, "shape", None) != SHAPE:
        shape = getattr(by_token, "shape", type(by_token).__name__)
        raise UserError(
            f"{_describe(function)} returned {shape} for rows of {SHAPE}; it must return the loss of every token"
        )
    if unknown := [name for name in reads if name not in READ]:
        raise UserError(f"{_describe(function)} reads {unknown[0]!r}; a loss of a loop reads {', '.join(READ)}")
    if (VALUE in reads) == bool({"logprob", "entropy"} & {*reads}):
        raise UserError(
            f"{_describe(function)} reads {', '.join(reads) or 'nothing'}; a loss reads logprob or entropy of the"
            " policy, or value of the critic, and not of both"
        )
    return reads


def _describe(function: Function) -> str:
    """Returns "loss 'NAME'" for errors about a user's function."""
    inner = function.func if isinstance(function, functools.partial) else function
    return f"loss {getattr(inner, '__name__', type(inner).__name__)!r}"
