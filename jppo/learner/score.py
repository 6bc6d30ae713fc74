"""Passes over rows: log-probs, values, the reference and its KL. Policy and critic passes are differentiable.

If the rows have the kept tokens of truncated sampling, every distribution, the reference's too, is renormalised over
them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo.algorithms import kl
from jppo.learner.views import Statistic
from jppo.models import decoder, heads, lora, router
from jppo.models.config import ModelConfig
from jppo.models.heads import Vocabulary
from jppo.models.lora import Weights
from jppo.models.router import RouterSums
from jppo.types import Array, Rows


class Scores(NamedTuple):
    """A policy's scores of rows, [R, T] f32; None: not requested."""

    logprob: Array
    entropy: Array
    penalty: Array | None = None  # of the KL to the reference
    router: RouterSums | None = None  # over the mask
    routing_differs: Array | None = None  # share of the rows' experts that the policy would not choose
    statistics: dict[str, Array] | None = None  # of the logits, by name


Statistics = Sequence[tuple[str, Statistic]]  # functions of the logits, with their names
LogProb = Callable[[Weights, Rows], Scores]
Value = Callable[[Weights, Rows], Array]  # -> [R, T] f32; of a head of B bins the logits, [R, T, B] f32
# (policy, reference, rows) -> the policy's scores, the reference's log-probs [R, T] f32
Exact = Callable[[Weights, Weights, Rows], tuple[Scores, Array]]
# (policy, reference, rows, ref_logprob) -> scores
LogProbKL = Callable[[Weights, Weights | None, Rows, Array | None], Scores]


def _run_trunk(
    model: tuple[Any, ModelConfig], params: Weights, rows: Rows, *, compare: bool = False, routed: bool = False
) -> tuple[heads.State, dict[str, Any]]:
    """Runs a model up to its head; returns the hidden states with what the logits need, and `Scores` of the routers.

    These are, if `routed`, the routers' sums over the mask; with `compare`, the share of the rows' replayed experts
    that the routers would not choose.
    """
    (module, cfg), variables, scores = model, lora.variables(params, rows.dropout), dict[str, Any]()
    compare = compare and rows.experts is not None
    collections_to_read = [name for name, requested in ((router.SUMS, routed), (router.CHOICES, compare)) if requested]
    counted = jnp.asarray(rows.mask) if routed else None
    out = module.apply(
        variables, rows.inputs, rows.segment, rows.position, counted, rows.experts, mutable=collections_to_read or False
    )
    hidden, collections = out if collections_to_read else (out, {})
    if routed:
        scores["router"] = router.collected_sums(collections, cfg)
    if compare:
        scores["routing_differs"] = router.differing_share(collections, jnp.asarray(rows.experts), cfg)
    return (hidden, decoder.head_kernel(variables["params"], cfg), cfg), scores


def _without_replay(rows: Rows) -> Rows:
    """Returns the rows without replayed experts, for another model than the one that sampled them."""
    return dataclasses.replace(rows, experts=None)


def make_router_load(model: Any, cfg: ModelConfig) -> Callable[[Weights, Rows], Array]:
    """Makes (policy, rows) -> tokens of the mask by layer and expert, [layers, E] f32."""

    def count_tokens(params: Weights, rows: Rows) -> Array:
        load: Array = _run_trunk((model, cfg), params, rows, routed=True)[1]["router"].load
        return load

    return count_tokens


def make_logprob(
    model: Any,
    cfg: ModelConfig,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    compare: bool = False,
    routed: bool = False,
    statistics: Statistics = (),
    mesh: Mesh | None = None,
) -> LogProb:
    """Makes log π(target) and the entropy of π at each entry of the mask, 0 elsewhere, at the sampling temperature.

    With `compare`, also the share of replayed experts that the policy would not choose; if `routed`, the routers' sums;
    and the `statistics` of the logits. Differentiable.
    """

    def logprob(params: Weights, rows: Rows) -> Scores:
        state, routers = _run_trunk((model, cfg), params, rows, compare=compare, routed=routed)
        logprobs, entropy, *extra = heads.logprob_entropy(
            state,
            jnp.asarray(rows.targets),
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
            mask=jnp.asarray(rows.mask),
            kept=rows.kept,
            mesh=mesh,
            more=[function for _, function in statistics],
        )
        return Scores(logprobs, entropy, **routers, statistics=dict(zip(dict(statistics), extra, strict=True)))

    return logprob


def make_value(model: Any) -> Value:
    """Makes the value of the state before each entry's target. Differentiable."""

    def value(params: Weights, rows: Rows) -> Array:
        variables = lora.variables(params)
        hidden = model.apply(variables, rows.inputs, rows.segment, rows.position)
        return heads.values(hidden, variables["params"]["score"]["kernel"])

    return value


def make_exact(
    divergence: Callable[..., jax.Array],
    policy: tuple[Any, ModelConfig],
    reference: tuple[Any, ModelConfig],
    *,
    temperature: float,
    chunk_tokens: int,
    compare: bool = False,
    routed: bool = False,
    statistics: Statistics = (),
    mesh: Mesh | None = None,
) -> Exact:
    """Makes one pass of both models with a divergence over all tokens, one of `kl.EXACT`, in token chunks.

    `compare`, `routed` and `statistics` are as in `make_logprob`, of the policy.
    """

    def exact(params: Weights, ref_params: Weights, rows: Rows) -> tuple[Scores, Array]:
        """Runs policy and reference over rows; returns the policy's scores and the reference's log-probs."""

        def score_chunk(
            vocabulary: Vocabulary, targets: jax.Array, logits: jax.Array, ref_logits: jax.Array
        ) -> tuple[jax.Array, ...]:
            """Returns log π, entropy, log π_ref, their divergence and the statistics of a chunk of tokens."""
            logprobs = heads.logprob_of(logits, targets, vocabulary)
            ref_logprob = heads.logprob_of(ref_logits, targets, vocabulary)
            sharded = dict(log_softmax=vocabulary.log_softmax, total=vocabulary.total, largest=vocabulary.largest)
            penalty = divergence(logits, ref_logits, **sharded)
            extra = [function(logits, targets, vocabulary) for _, function in statistics]
            return logprobs, heads.entropy_of(logits, vocabulary), ref_logprob, penalty, *extra

        policy_state, routers = _run_trunk(policy, params, rows, compare=compare, routed=routed)
        states = [policy_state, _run_trunk(reference, jax.lax.stop_gradient(ref_params), _without_replay(rows))[0]]
        options = dict[str, Any](temperature=temperature, chunk_tokens=chunk_tokens, mesh=mesh)
        options |= dict(mask=jnp.asarray(rows.mask), kept=rows.kept)
        logprobs, entropy, ref_logprob, penalty, *extra = heads.by_logits(
            score_chunk, states, jnp.asarray(rows.targets), **options
        )
        by_name: dict[str, Array] = dict(zip(dict(statistics), extra, strict=True))
        return Scores(logprobs, entropy, penalty, **routers, statistics=by_name), ref_logprob

    return exact


def make_logprob_kl(kind: kl.Kind | None, logprob: LogProb, exact: Exact | None) -> LogProbKL:
    """Makes log-probs and entropy with the KL to the reference that `kind` names. Differentiable in the policy."""

    def with_kl(params: Weights, reference: Weights | None, rows: Rows, ref_logprob: Array | None) -> Scores:
        if kind in kl.EXACT:
            assert exact is not None and reference is not None
            scores, ref_logprob = exact(params, reference, rows)
        else:
            scores = logprob(params, rows)
        if kind is None or (kind in kl.EXACT and kind != "full+"):
            return scores
        assert ref_logprob is not None  # masked below: no infinity from masked entries
        masked_logprobs = (jnp.where(rows.mask, x, 0.0) for x in (scores.logprob, ref_logprob))
        if scores.penalty is None:
            return scores._replace(penalty=kl.estimator(kind)(*masked_logprobs))
        return scores._replace(penalty=kl.with_gradient_of_k2(scores.penalty, *masked_logprobs))

    return with_kl


def make_reference(
    penalty_kind: kl.Kind | None, loss_kind: kl.Kind | None, reference: LogProb, exact: Exact | None, *,
    sampled: bool = False,
) -> Callable[[Weights, Weights | None, Rows], tuple[Array | None, Array | None]] | None:  # fmt: skip
    """Makes (reference, policy, rows) -> the reference's log-probs, and the reward's exact KL or None.

    The log-probs are computed if a KL by sampled tokens needs them, or if `sampled`. None if nothing is.
    """
    sampled = sampled or any(kind is not None and kind not in kl.EXACT for kind in (penalty_kind, loss_kind))
    if not sampled and penalty_kind not in kl.EXACT:
        return None

    def score_reference(ref_params: Weights, params: Weights | None, rows: Rows) -> tuple[Array | None, Array | None]:
        ref_logprob = reference(ref_params, _without_replay(rows)).logprob if sampled else None
        if penalty_kind not in kl.EXACT:
            return ref_logprob, None
        assert exact is not None and params is not None
        return ref_logprob, exact(params, ref_params, rows)[0].penalty

    return score_reference
