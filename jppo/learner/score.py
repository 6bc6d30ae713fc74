"""Passes over rows: log-probs, values, the reference and its KL. Policy and critic passes are differentiable."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo.algorithms import hl_gauss, kl
from jppo.models import decoder, heads, lora, router_sums
from jppo.models.config import ModelConfig
from jppo.models.lora import Weights
from jppo.models.router_sums import RouterSums
from jppo.models.vocabulary import Vocabulary
from jppo.types import Array, Rows

LogProb = Callable[[Weights, Rows], tuple[Array, Array]]  # -> log-probs, entropy: [R, T] f32
Value = Callable[[Weights, Rows], Array]  # -> [R, T] f32; of a head of B bins the logits, [R, T, B] f32
# (policy, reference, rows) -> log-probs, entropy, the reference's log-probs, KL: [R, T] f32; routers' sums if asked
Exact = Callable[[Weights, Weights, Rows], tuple[Any, ...]]


class Scores(NamedTuple):
    """The policy's outputs that its loss is made of."""

    logprob: Array  # [R, T] f32
    entropy: Array  # [R, T] f32
    penalty: Array | None = None  # [R, T] f32, of the KL to the reference; None if not requested
    router: RouterSums | None = None  # over the mask; None without experts


LogProbKL = Callable[[Weights, Weights | None, Rows, Array | None], Scores]  # (policy, reference, rows, ref_logprob)


def _state(model: tuple[Any, ModelConfig], params: Weights, rows: Rows) -> heads.State:
    """Computes hidden states of the rows; returns them with the inputs of the logits."""
    return _state_and_router(model, params, rows, False)[0]


def _state_and_router(
    model: tuple[Any, ModelConfig], params: Weights, rows: Rows, routed: bool
) -> tuple[heads.State, RouterSums | None]:
    """Computes the same, and the routers' sums over the mask if the model is `routed`."""
    variables, router = lora.variables(params), None
    inputs = rows.inputs, rows.segment, rows.position
    if routed:
        hidden, left = model[0].apply(variables, *inputs, jnp.asarray(rows.mask), mutable=[router_sums.COLLECTION])
        router = router_sums.collected(left, model[1])
    else:
        hidden = model[0].apply(variables, *inputs)
    return (hidden, decoder.head_kernel(variables["params"], model[1]), model[1]), router


def make_router_load(model: Any, cfg: ModelConfig) -> Callable[[Weights, Rows], Array]:
    """Makes (policy, rows) -> tokens of the mask by layer and expert, [layers, E] f32."""

    def load(params: Weights, rows: Rows) -> Array:
        router = _state_and_router((model, cfg), params, rows, True)[1]
        assert router is not None
        return router.load

    return load


def make_logprob(
    model: Any,
    cfg: ModelConfig,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    mesh: Mesh | None = None,
) -> LogProb:
    """Makes log π(target) and the entropy of π at each entry of the mask, 0 elsewhere, at the sampling temperature.

    Differentiable.
    """
    scores = make_scores(
        model, cfg, temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=with_entropy, mesh=mesh
    )

    def logprob(params: Weights, rows: Rows) -> tuple[Array, Array]:
        found = scores(params, rows)
        return found.logprob, found.entropy

    return logprob


def make_scores(
    model: Any,
    cfg: ModelConfig,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    routed: bool = False,
    mesh: Mesh | None = None,
) -> Callable[[Weights, Rows], Scores]:
    """Makes the same, with the sums of routers if `routed`, for `make_logprob_kl`."""

    def scores(params: Weights, rows: Rows) -> Scores:
        state, router = _state_and_router((model, cfg), params, rows, routed)
        logprob, entropy = heads.logprob_entropy(
            state,
            jnp.asarray(rows.targets),
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
            mask=jnp.asarray(rows.mask),
            mesh=mesh,
        )
        return Scores(logprob, entropy, router=router)

    return scores


def make_value(model: Any) -> Value:
    """Makes the value of the state before each entry's target. Differentiable."""

    def value(params: Weights, rows: Rows) -> Array:
        variables = lora.variables(params)
        hidden = model.apply(variables, rows.inputs, rows.segment, rows.position)
        return heads.values(hidden, variables["params"]["score"]["kernel"])

    return value


def make_expected(value: Value, value_range: tuple[float, float] | None) -> Value:
    """Makes the values of a critic; with `value_range`, `value` returns the logits of a histogram."""
    return value if value_range is None else lambda params, rows: hl_gauss.value(value(params, rows), value_range)


def make_exact(
    divergence: Callable[..., jax.Array],
    policy: tuple[Any, ModelConfig],
    reference: tuple[Any, ModelConfig],
    *,
    temperature: float,
    chunk_tokens: int,
    routed: bool = False,
    mesh: Mesh | None = None,
) -> Exact:
    """Makes one pass of both models with a divergence over the whole vocabulary, one of `kl.EXACT`, in token chunks."""

    def exact(params: Weights, ref_params: Weights, rows: Rows) -> tuple[Any, ...]:
        def body(
            vocabulary: Vocabulary, targets: jax.Array, logits: jax.Array, ref_logits: jax.Array
        ) -> tuple[jax.Array, ...]:
            logprobs = heads.logprob_of(logits, targets, vocabulary)
            ref_logprob = heads.logprob_of(ref_logits, targets, vocabulary)
            penalty = divergence(logits, ref_logits, log_softmax=vocabulary.log_softmax, total=vocabulary.total)
            return logprobs, heads.entropy_of(logits, vocabulary), ref_logprob, penalty

        state, router = _state_and_router(policy, params, rows, routed)
        states = [state, _state(reference, jax.lax.stop_gradient(ref_params), rows)]
        targets, mask = jnp.asarray(rows.targets), jnp.asarray(rows.mask)
        found = heads.by_logits(
            body, states, targets, temperature=temperature, chunk_tokens=chunk_tokens, mask=mask, mesh=mesh
        )
        return (*found, router) if routed else found

    return exact


def make_logprob_kl(kind: str | None, scores: Callable[..., tuple[Any, ...]], exact: Exact | None) -> LogProbKL:
    """Makes log-probs and entropy with the KL to the reference that `kind` names. Differentiable in the policy."""

    def sampled(params: Weights, reference: Weights | None, rows: Rows, ref_logprob: Array | None) -> Scores:
        found = Scores(*scores(params, rows))
        if kind is None:
            return found
        assert ref_logprob is not None
        here = (jnp.where(rows.mask, x, 0.0) for x in (found.logprob, ref_logprob))  # no infinity from masked entries
        return found._replace(penalty=kl.ESTIMATORS[kind](*here))

    def whole(params: Weights, reference: Weights | None, rows: Rows, ref_logprob: Array | None) -> Scores:
        assert exact is not None and reference is not None
        logprobs, entropy, ref_logprob, found, *router = exact(params, reference, rows)
        if kind == "full+":
            here = (jnp.where(rows.mask, x, 0.0) for x in (logprobs, ref_logprob))
            found = kl.with_gradient_of_k2(found, *here)
        return Scores(logprobs, entropy, found, *router)

    return whole if kind in kl.EXACT else sampled


def make_reference(
    penalty_kind: str | None, loss_kind: str | None, reference: LogProb, exact: Exact | None
) -> Callable[[Weights, Weights | None, Rows], tuple[Array | None, Array | None]]:
    """Makes (reference, policy, rows) -> the reference's log-probs, and the reward's exact KL or None."""
    sampled = any(kind is not None and kind not in kl.EXACT for kind in (penalty_kind, loss_kind))

    def passed(ref_params: Weights, params: Weights | None, rows: Rows) -> tuple[Array | None, Array | None]:
        ref_logprob = reference(ref_params, rows)[0] if sampled else None
        if penalty_kind not in kl.EXACT:
            return ref_logprob, None
        assert exact is not None and params is not None
        return ref_logprob, exact(params, ref_params, rows)[3]

    return passed
