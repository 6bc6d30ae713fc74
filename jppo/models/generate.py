"""Token-by-token sampling over a cache, with continuous batching of rows. Pure.

    fill(...)       puts prompts into free rows
    advance(...)    gives every live row its next tokens, one a turn, until enough rows are free

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
from jppo.models.attention import Cache, cache_dtype, empty_cache
from jppo.models.config import ModelConfig
from jppo.models.kernels import is_quantized
from jppo.models.lora import Weights
from jppo.types import OVERFLOW, Params

WIDE = ("scale", "correction", "a_log", "dt_bias")  # parameters that are used in f32

Constrain = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Rows in progress; T is the longest prompt and response. A row is live while `last < until`, else free."""

    cache: Cache  # of every token before the last one; T - 1 positions
    tokens: jax.Array  # [R, T] i32, prompt and response
    logprob: jax.Array  # [R, T] f32, of the sampled tokens
    last: jax.Array  # [R] i32, the position of the last token so far
    until: jax.Array  # [R] i32, the largest allowed position
    seed: jax.Array  # [R] u32
    experts: jax.Array | None = None  # [R, T - 1, L, active] i16, by which each token was read; None: not kept
    kept: jax.Array | None = None  # [R, T, K] i32, as in Trajectory; None: not returned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRule:
    """The sampling parameters, from the fields of `Sampling`."""

    temperature: jax.Array  # [] f32
    top_p: jax.Array  # [] f32
    top_k: jax.Array  # [] i32
    min_p: jax.Array  # [] f32
    ignore_eos: jax.Array  # [] bool


def empty_slots(cfg: ModelConfig, *, rows: int, length: int, dtype: Any, experts: bool = False, kept: int = 0) -> Slots:
    """Allocates free rows of `length` tokens each.

    `experts` reserves room for the experts of every token, `kept` for up to so many kept tokens of each.
    """
    counts, spec = jnp.zeros((rows,), jnp.int32), cfg.experts if experts else None
    return Slots(
        cache=empty_cache(cfg, rows=rows, length=max(1, length - 1), dtype=dtype),
        tokens=jnp.zeros((rows, length), jnp.int32),
        logprob=jnp.zeros((rows, length), jnp.float32),
        last=counts,
        until=counts,
        seed=counts.astype(jnp.uint32),
        experts=None if spec is None else jnp.zeros((rows, max(1, length - 1), cfg.num_layers, spec.active), jnp.int16),
        kept=jnp.full((rows, length, min(kept, cfg.vocab_size)), -1, jnp.int32) if kept else None,
    )


def prepare_model(model: Weights, cfg: ModelConfig, *, dtype: Any) -> Params:
    """Prepares the model for `fill` and `advance`: layers apart, kernels decoded, in `dtype`; `WIDE` unchanged."""
    variables = lora.variables(model)
    head = {} if cfg.tie_word_embeddings else {"lm_head": variables["params"]["lm_head"]}
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if path[-1].key in WIDE else x.astype(dtype),
        decoder.split_layers(variables, cfg) | head,
        is_leaf=is_quantized,
    )


def fill(
    model: Params,
    cfg: ModelConfig,
    slots: Slots,
    prompts: jax.Array,
    source: jax.Array,
    length: jax.Array,
    until: jax.Array,
    seed: jax.Array,
    *,
    constrain: Constrain = decoder.identity,
    mesh: Mesh | None = None,
) -> Slots:
    """Puts prompt `source` [R] of `prompts` [N, P] into each row; -1 leaves the row unchanged.

    A prompt's length [R] may be below P: its padding is overwritten before it is seen. Its last token is left to
    `advance`, which samples after it as after any other.
    """
    chex.assert_rank([prompts, source, length, until, seed], [2, 1, 1, 1, 1])
    N, P = prompts.shape
    is_new = source >= 0
    prompt_index = jnp.maximum(source, 0)

    def write_rows(old: jax.Array, new_values: jax.Array) -> jax.Array:  # new [N, P', ...] into old [R, T, ...]
        width = new_values.shape[1]
        mask = is_new.reshape(-1, *[1] * (old.ndim - 1))
        return old.at[:, :width].set(jnp.where(mask, new_values[prompt_index].astype(old.dtype), old[:, :width]))

    cache, experts_read = empty_cache(cfg, rows=N, length=P - 1, dtype=cache_dtype(slots.cache)), slots.experts
    if P > 1:
        position = jnp.broadcast_to(jnp.arange(P - 1, dtype=jnp.int32)[None], (N, P - 1))
        lengths = jnp.zeros((N,), jnp.int32).at[jnp.where(is_new, source, N)].set(length, mode="drop")
        is_token = (position < lengths[:, None] - 1).astype(jnp.int32)
        _, cache, chosen = decoder.forward_cached(
            model, cfg, prompts[:, :-1], position, cache, is_token, constrain=constrain, mesh=mesh
        )
        experts_read = None if experts_read is None or chosen is None else write_rows(experts_read, chosen)
    return dataclasses.replace(
        slots,
        cache=jax.tree.map(write_rows, slots.cache, cache),
        tokens=write_rows(slots.tokens, prompts),
        last=jnp.where(is_new, length - 1, slots.last),
        until=jnp.where(is_new, until, slots.until),
        seed=jnp.where(is_new, seed, slots.seed),
        experts=experts_read,
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
    constrain: Constrain = decoder.identity,
    mesh: Mesh | None = None,
) -> Slots:
    """Gives every live row a token in each step; stops after `steps`, or when `free_rows_wanted` [] rows are free.

    A row is free after one of the tokens `ends`, unless these are ignored, or at its `until`. `cut`: top_p, top_k and
    min_p apply.
    """
    chex.assert_equal_shape([slots.last, slots.until, slots.seed])
    kernel = decoder.head_kernel(model, cfg)
    forward = functools.partial(decoder.forward_cached, model, cfg, constrain=constrain, mesh=mesh)
    row = jnp.arange(slots.last.shape[0], dtype=jnp.int32)

    def unfinished(state: tuple[jax.Array, Slots]) -> jax.Array:
        step_index, rows = state
        return (step_index < steps) & (jnp.sum(rows.last >= rows.until) < free_rows_wanted)

    def step(state: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
        step_index, rows = state
        live = rows.last < rows.until
        token = jnp.take_along_axis(rows.tokens, rows.last[:, None], axis=1)
        hidden, cache, chosen = forward(token, rows.last[:, None], rows.cache)
        routes = rows.experts
        if routes is not None and chosen is not None:
            routes = routes.at[row, jnp.where(live, rows.last, routes.shape[1])].set(chosen[:, 0], mode="drop")
        logits = heads.logits_of((hidden, kernel, cfg))[:, 0]
        logits = filter_logits(logits, rule, cut=cut)
        token_ids, logp = sample_tokens(logits, rows.seed, rows.last + 1, rule)
        last = jnp.where(live, rows.last + 1, rows.last)
        position = jnp.where(live, last, rows.tokens.shape[1])  # beyond the end: dropped
        is_end_token = jnp.any(token_ids[:, None] == jnp.asarray(ends, jnp.int32)[None], axis=1)
        ended = live & is_end_token & ~rule.ignore_eos
        kept = rows.kept
        if kept is not None:
            ids = kept_tokens(logits, cfg.vocab_size, kept.shape[2]) if cut else -1
            kept = kept.at[row, position].set(ids, mode="drop")
        return step_index + 1, dataclasses.replace(
            rows,
            cache=cache,
            tokens=rows.tokens.at[row, position].set(token_ids, mode="drop"),
            logprob=rows.logprob.at[row, position].set(logp, mode="drop"),
            last=last,
            until=jnp.where(ended, last, rows.until),
            experts=routes,
            kept=kept,
        )

    return jax.lax.while_loop(unfinished, step, (jnp.int32(0), slots))[1]


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

    Temperature 0 takes the likeliest token, as in vLLM.
    """
    chex.assert_rank([logits, seed, position], [2, 1, 1])

    def draw(seed: jax.Array, position: jax.Array, logits: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), logits)

    token = jax.lax.cond(
        rule.temperature == 0.0,
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
        lambda: jax.vmap(draw)(seed, position, logits).astype(jnp.int32),
    )
    return token, heads.logprob_of(logits, token)


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
