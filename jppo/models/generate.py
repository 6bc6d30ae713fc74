"""Token-by-token sampling over a cache, with continuous batching of rows. Pure.

    prefill(...)    computes the cache of prompts
    place(...)      puts prompts into free rows
    next_tokens(...)    gives every live row its next tokens, one a step, until enough rows are free

A token's random key depends on its row's seed and its position alone, not on other rows, on its row or on the time.
`jppo/rollout/inprocess.py` schedules the rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo.models import decoder, heads, lora
from jppo.models.attention import Attend
from jppo.models.cache import AttendCached, Cache, count_slots, empty_cache, write_prompts
from jppo.models.config import ModelConfig
from jppo.models.kernels import is_quantized
from jppo.models.lora import Weights
from jppo.types import OVERFLOW, Params

WIDE = ("scale", "correction", "a_log", "dt_bias")  # parameters that are used in f32
_CHUNK = 128  # logits that are summed together before one of them is sampled
_GROUP = 32  # chunks that are summed together

Constrain = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Rows in progress; T is the longest prompt and response. A row is live while `last < until`, else free."""

    cache: Cache  # of every token before the last one
    slot: jax.Array  # [] i32, of the cache, for the rows' last tokens
    tokens: jax.Array  # [R, T] i32, prompt and response
    logprob: jax.Array  # [R, T] f32, of the sampled tokens
    last: jax.Array  # [R] i32, the position of the last token so far
    until: jax.Array  # [R] i32, the largest allowed position
    seed: jax.Array  # [R] u32
    experts: jax.Array | None = None  # [R, T - 1, L, active] i16, by which each token was read; None: not kept
    kept: jax.Array | None = None  # [R, T, K] i32, as in Trajectory; None: not returned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filled:
    """Prompts [N, P] and what the model computed of all but their last tokens."""

    tokens: jax.Array  # [N, P] i32
    cache: Cache  # of positions 0 to P - 2
    experts: jax.Array | None  # [N, P - 1, L, active] i16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The tokens of one call of `next_tokens`, by its steps."""

    token: jax.Array  # [steps, R] i32
    logprob: jax.Array  # [steps, R] f32
    experts: jax.Array | None  # [steps, R, L, active] i16
    kept: jax.Array | None  # [steps, R, K] i32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRule:
    """The sampling parameters, from the fields of `Sampling`."""

    temperature: jax.Array  # [] f32
    top_p: jax.Array  # [] f32
    top_k: jax.Array  # [] i32
    min_p: jax.Array  # [] f32
    ignore_eos: jax.Array  # [] bool


def empty_slots(
    cfg: ModelConfig, *, rows: int, length: int, slots: int, dtype: Any, experts: bool = False, kept: int = 0
) -> Slots:
    """Allocates free rows of `length` tokens each, with a cache of `slots` in `dtype`.

    `experts` reserves room for the experts of every token, `kept` for up to so many kept tokens of each.
    """
    counts, spec = jnp.zeros((rows,), jnp.int32), cfg.experts if experts else None
    return Slots(
        cache=empty_cache(cfg, rows=rows, length=slots, dtype=dtype),
        slot=jnp.int32(0),
        tokens=jnp.zeros((rows, length), jnp.int32),
        logprob=jnp.zeros((rows, length), jnp.float32),
        last=counts,
        until=counts,
        seed=counts.astype(jnp.uint32),
        experts=None if spec is None else jnp.zeros((rows, max(1, length - 1), cfg.num_layers, spec.active), jnp.int16),
        kept=jnp.full((rows, length, min(kept, cfg.vocab_size)), -1, jnp.int32) if kept else None,
    )


def prepare_model(model: Weights, cfg: ModelConfig, *, dtype: Any) -> Params:
    """Prepares the model for sampling: layers apart, kernels decoded, in `dtype`; `WIDE` unchanged."""
    variables = lora.variables(model)
    head = {} if cfg.tie_word_embeddings else {"lm_head": variables["params"]["lm_head"]}
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key in WIDE else x.astype(dtype),
        decoder.split_layers(variables, cfg) | head,
        is_leaf=is_quantized,
    )


def prefill(
    model: Params,
    cfg: ModelConfig,
    prompts: jax.Array,
    length: jax.Array,
    *,
    dtype: Any,
    attend: Attend,
    constrain: Constrain = decoder.identity,
    mesh: Mesh | None = None,
) -> Filled:
    """Computes the cache of prompts [N, P] of `length` [N]; a shorter one is padded.

    Its last token is left to `next_tokens`, which samples after it as after any other.
    """
    chex.assert_rank([prompts, length], [2, 1])
    N, P = prompts.shape
    if P == 1:
        return Filled(prompts, empty_cache(cfg, rows=N, length=0, dtype=dtype), None)
    segment = (jnp.arange(P - 1, dtype=jnp.int32)[None] < length[:, None] - 1).astype(jnp.int32)
    _, cache, experts = decoder.forward_prompts(
        model, cfg, prompts[:, :-1], segment, dtype=dtype, attend=attend, constrain=constrain, mesh=mesh
    )
    return Filled(prompts, cache, experts)


def place(
    slots: Slots, filled: Filled, source: jax.Array, length: jax.Array, until: jax.Array, seed: jax.Array
) -> Slots:
    """Puts prompt `source` [R] of `length` [N] into each row; -1 leaves the row unchanged."""
    chex.assert_rank([source, length, until, seed], [1, 1, 1, 1])
    is_new, prompt_index = source >= 0, jnp.maximum(source, 0)

    def write_rows(old: jax.Array, new: jax.Array) -> jax.Array:  # new [N, P', ...] into old [R, T, ...]
        width = new.shape[1]
        mask = is_new.reshape(-1, *[1] * (old.ndim - 1))
        return old.at[:, :width].set(jnp.where(mask, new[prompt_index].astype(old.dtype), old[:, :width]))

    experts = slots.experts
    if experts is not None and filled.experts is not None:
        experts = write_rows(experts, filled.experts)
    return dataclasses.replace(
        slots,
        cache=write_prompts(slots.cache, filled.cache, source, length - 1, slots.slot),
        tokens=write_rows(slots.tokens, filled.tokens),
        last=jnp.where(is_new, length[prompt_index] - 1, slots.last),
        until=jnp.where(is_new, until, slots.until),
        seed=jnp.where(is_new, seed, slots.seed),
        experts=experts,
    )


def next_tokens(
    model: Params,
    cfg: ModelConfig,
    slots: Slots,
    rule: SamplingRule,
    free_rows_wanted: jax.Array,
    *,
    ends: tuple[int, ...],
    steps: int,
    cut: bool,
    dtype: Any,
    attend: AttendCached,
    constrain: Constrain = decoder.identity,
    mesh: Mesh | None = None,
) -> Slots:
    """Gives every live row a token in each step; stops after `steps`, or when `free_rows_wanted` [] rows are free.

    A row is free after one of the tokens `ends`, unless these are ignored, or at its `until`. `cut`: top_p, top_k and
    min_p apply.
    """
    chex.assert_equal_shape([slots.last, slots.until, slots.seed])
    kernel = decoder.head_kernel(model, cfg)
    forward = functools.partial(
        decoder.forward_token, model, cfg, dtype=dtype, attend=attend, constrain=constrain, mesh=mesh
    )
    slot_count = count_slots(slots.cache) or 1

    def unfinished(state: tuple[jax.Array, jax.Array, Slots, Sampled]) -> jax.Array:
        step_index, _, rows, _ = state
        return (step_index < steps) & (jnp.sum(rows.last >= rows.until) < free_rows_wanted)

    def step(state: tuple[jax.Array, jax.Array, Slots, Sampled]) -> tuple[jax.Array, jax.Array, Slots, Sampled]:
        step_index, token, rows, sampled = state
        live = rows.last < rows.until
        hidden, cache, chosen = forward(token, rows.last, rows.cache, rows.slot)
        logits = filter_logits(heads.logits_of((hidden, kernel, cfg))[:, 0], rule, cut=cut)
        token, logprob = sample_tokens(logits, rows.seed, rows.last + 1, rule)
        last = jnp.where(live, rows.last + 1, rows.last)
        is_end_token = jnp.any(token[:, None] == jnp.asarray(ends, jnp.int32)[None], axis=1)
        ended = live & is_end_token & ~rule.ignore_eos
        until = jnp.where(ended, last, rows.until)
        new = Sampled(token, logprob, None, None)
        if sampled.experts is not None and chosen is not None:
            new = dataclasses.replace(new, experts=chosen[:, 0].astype(jnp.int16))
        if sampled.kept is not None:
            kept = kept_tokens(logits, cfg.vocab_size, sampled.kept.shape[2]) if cut else sampled.kept[0]
            new = dataclasses.replace(new, kept=kept)
        sampled = jax.tree.map(lambda x, now: x.at[step_index].set(now), sampled, new)
        slot = (rows.slot + 1) % slot_count
        return step_index + 1, token, dataclasses.replace(rows, cache=cache, slot=slot, last=last, until=until), sampled

    token = jnp.take_along_axis(slots.tokens, slots.last[:, None], axis=1)[:, 0]
    _, _, rows, sampled = jax.lax.while_loop(
        unfinished, step, (jnp.int32(0), token, slots, _none_sampled(slots, steps))
    )
    return _record(rows, sampled, slots.last)


def _none_sampled(slots: Slots, steps: int) -> Sampled:
    """Allocates the tokens of so many steps."""

    def by_step(x: jax.Array, fill: float = 0) -> jax.Array:
        return jnp.full((steps, x.shape[0], *x.shape[2:]), fill, x.dtype)

    experts = None if slots.experts is None else by_step(slots.experts)
    kept = None if slots.kept is None else by_step(slots.kept, -1)
    return Sampled(by_step(slots.tokens), by_step(slots.logprob), experts, kept)


def _record(slots: Slots, sampled: Sampled, begin: jax.Array) -> Slots:
    """Writes the tokens that rows took since they were at `begin` [R]."""
    steps, R = sampled.token.shape
    row, step = jnp.arange(R, dtype=jnp.int32)[:, None], jnp.arange(steps, dtype=jnp.int32)[None]
    taken = step < (slots.last - begin)[:, None]

    def write(x: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
        position = jnp.where(taken, first[:, None] + step, x.shape[1])  # beyond the end: dropped
        return x.at[row, position].set(new.swapaxes(0, 1), mode="drop")

    changes: dict[str, Any] = dict(tokens=write(slots.tokens, sampled.token, begin + 1))
    changes |= dict(logprob=write(slots.logprob, sampled.logprob, begin + 1))
    if slots.experts is not None and sampled.experts is not None:  # of the token that was read, not of the sampled one
        changes |= dict(experts=write(slots.experts, sampled.experts, begin))
    if slots.kept is not None and sampled.kept is not None:
        changes |= dict(kept=write(slots.kept, sampled.kept, begin + 1))
    return dataclasses.replace(slots, **changes)


def filter_logits(logits: jax.Array, rule: SamplingRule, *, cut: bool) -> jax.Array:
    """Divides the logits [R, V] by the temperature; with `cut`, removes tokens by min_p, top_k and top_p.

    At temperature 0 they are unchanged.
    """
    greedy = rule.temperature == 0.0
    logits = logits / jnp.where(greedy, 1.0, rule.temperature)
    return jnp.where(greedy, logits, keep_likeliest(logits, rule.top_k, rule.top_p, rule.min_p)) if cut else logits


def sample_tokens(
    logits: jax.Array, seed: jax.Array, position: jax.Array, rule: SamplingRule
) -> tuple[jax.Array, jax.Array]:
    """Samples a token for each row of filtered logits [R, V]; returns also its log-prob in softmax(logits).

    Samples a group of chunks of the vocabulary, then a chunk, then a token, so that a token needs three random numbers
    and not V. Temperature 0 takes the first of the likeliest tokens.
    """
    chex.assert_rank([logits, seed, position], [2, 1, 1])
    chunks = _in_parts(logits, _CHUNK, -jnp.inf)  # [R, N, C]
    chunk_max = jnp.max(chunks, axis=-1)
    row_max = jnp.max(chunk_max, axis=-1, keepdims=True)
    mass = jnp.sum(jnp.exp(chunks - row_max[:, :, None]), axis=-1)  # [R, N]
    greedy = rule.temperature == 0.0

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (3,))

    uniform = jnp.where(greedy, 0.0, jax.vmap(draw)(seed, position))
    groups = _in_parts(jnp.where(greedy, chunk_max == row_max, mass), _GROUP, 0.0)  # [R, N / G, G]
    group = _pick(jnp.sum(groups, axis=-1), uniform[:, 0])
    chunk = group * _GROUP + _pick(_take(groups, group), uniform[:, 1])
    chosen = _take(chunks, chunk)  # [R, C]
    place = _pick(jnp.where(greedy, chosen == row_max, jnp.exp(chosen - row_max)), uniform[:, 2])
    logit = jnp.take_along_axis(chosen, place[:, None], axis=1)
    logprob = logit - row_max - jnp.log(jnp.sum(mass, axis=-1, keepdims=True))
    return chunk * _CHUNK + place, logprob[:, 0]


def _in_parts(x: jax.Array, size: int, fill: float) -> jax.Array:
    """Divides the last axis of x [R, V] into parts: [R, N, size], the last one padded with `fill`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=fill).reshape(x.shape[0], -1, size)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns part `index` [R] of each row of x [R, N, C]."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns an index [R] into each row of weights [R, N], with probabilities in their proportion.

    It is the first index up to which the weights are more than the share `uniform` [R] of all, so never one of weight
    0: the sums are of all weights with the later ones set to 0, so they round alike and cannot fall.
    """
    index = jnp.arange(weights.shape[1], dtype=jnp.int32)
    until = (index[None] <= index[:, None])[None]
    sums = jnp.sum(jnp.where(until, weights[:, None], 0.0), axis=-1)
    return jnp.sum(sums <= uniform[:, None] * sums[:, -1:], axis=-1, dtype=jnp.int32)


def kept_tokens(logits: jax.Array, vocab_size: int, max_kept: int) -> jax.Array:
    """Returns the tokens that are left in filtered logits [R, V], as in `Trajectory.kept`: [R, max_kept] i32."""
    removed = heads.NO_TOKEN / 1e3  # at any temperature
    count = jnp.sum(logits > removed, axis=-1, keepdims=True)
    values, ids = jax.lax.top_k(logits, max_kept)
    ids = jnp.where(values > removed, ids, -1)
    too_many = jnp.where(jnp.arange(max_kept) == 0, OVERFLOW, -1)
    ids = jnp.where(count > max_kept, too_many, ids)
    return jnp.where(count == vocab_size, -1, ids).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Filters the logits [R, V]; removed tokens get the logit of no token. The order is vLLM's:

    tokens at least min_p times as likely as the likeliest, of these the top_k likeliest, and of these the fewest that
    have top_p of the remaining probability. A min_p of 0, top_k below 1 and top_p of 1 are off. Tokens as likely as the
    last kept one are kept too.
    """
    chex.assert_rank([logits, top_k, top_p, min_p], [2, 0, 0, 0])
    V = logits.shape[-1]
    ranked = -jnp.sort(-logits, axis=-1)
    k = jnp.clip(jnp.where(top_k < 1, V, top_k), 1, V)
    is_kept = (ranked >= ranked[:, :1] + jnp.log(min_p)) & (ranked >= ranked[:, k - 1][:, None])
    probs = jax.nn.softmax(jnp.where(is_kept, ranked, heads.NO_TOKEN), axis=-1)
    prob_before = jnp.cumsum(probs, axis=-1) - probs
    rank = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_kept &= (prob_before < top_p) | (top_p >= 1.0) | (rank == 0)
    threshold = jnp.min(jnp.where(is_kept, ranked, jnp.inf), axis=-1)
    return jnp.where(logits >= threshold[:, None], logits, heads.NO_TOKEN)
