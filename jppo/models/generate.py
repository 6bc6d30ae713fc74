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

from jppo.models import decoder, experts, heads, lora
from jppo.models.attention import Cache, cache_dtype, empty_cache
from jppo.models.config import ModelConfig
from jppo.models.experts import Mix
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

    `experts` keeps the experts of every token, `kept` up to so many tokens of which each was sampled.
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
    mix: Mix = experts.mix,
) -> Slots:
    """Puts prompt `source` [R] of `prompts` [N, P] into each row; -1 leaves the row unchanged.

    A prompt's length [R] may be below P: its padding is overwritten before it is seen. Its last token is left to
    `advance`, which samples after it as after any other.
    """
    chex.assert_rank([prompts, source, length, until, seed], [2, 1, 1, 1, 1])
    N, P = prompts.shape
    new = source >= 0
    which = jnp.maximum(source, 0)

    def put(old: jax.Array, fresh: jax.Array) -> jax.Array:  # new [N, P', ...] into old [R, T, ...]
        width = fresh.shape[1]
        here = new.reshape(-1, *[1] * (old.ndim - 1))
        return old.at[:, :width].set(jnp.where(here, fresh[which].astype(old.dtype), old[:, :width]))

    cache, read = empty_cache(cfg, rows=N, length=P - 1, dtype=cache_dtype(slots.cache)), slots.experts
    if P > 1:
        position = jnp.broadcast_to(jnp.arange(P - 1, dtype=jnp.int32)[None], (N, P - 1))
        lengths = jnp.zeros((N,), jnp.int32).at[jnp.where(new, source, N)].set(length, mode="drop")
        real = (position < lengths[:, None] - 1).astype(jnp.int32)
        settings = dict[str, Any](constrain=constrain, mix=mix)
        _, cache, chosen = decoder.forward_cached(model, cfg, prompts[:, :-1], position, cache, real, **settings)
        read = None if read is None or chosen is None else put(read, chosen)
    return Slots(
        cache=jax.tree.map(put, slots.cache, cache),
        tokens=put(slots.tokens, prompts),
        logprob=slots.logprob,
        last=jnp.where(new, length - 1, slots.last),
        until=jnp.where(new, until, slots.until),
        seed=jnp.where(new, seed, slots.seed),
        experts=read,
        kept=slots.kept,
    )


def next_tokens(
    model: Params,
    cfg: ModelConfig,
    slots: Slots,
    choice: SamplingRule,
    enough: jax.Array,
    *,
    ends: tuple[int, ...],
    turns: int,
    cut: bool,
    constrain: Constrain = decoder.identity,
    mix: Mix = experts.mix,
) -> Slots:
    """Gives every live row a token a turn; stops after `turns`, or when `enough` [] rows are free.

    A row is free after one of the tokens `ends`, unless these are ignored, or at its `until`. `cut`: top_p, top_k and
    min_p apply.
    """
    chex.assert_equal_shape([slots.last, slots.until, slots.seed])
    kernel = decoder.head_kernel(model, cfg)
    forward = functools.partial(decoder.forward_cached, model, cfg, constrain=constrain, mix=mix)
    row = jnp.arange(slots.last.shape[0], dtype=jnp.int32)

    def going(state: tuple[jax.Array, Slots]) -> jax.Array:
        turn, now = state
        return (turn < turns) & (jnp.sum(now.last >= now.until) < enough)

    def take(state: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
        turn, now = state
        live = now.last < now.until
        token = jnp.take_along_axis(now.tokens, now.last[:, None], axis=1)
        hidden, held, chosen = forward(token, now.last[:, None], now.cache)
        read = now.experts
        if read is not None and chosen is not None:
            read = read.at[row, jnp.where(live, now.last, read.shape[1])].set(chosen[:, 0], mode="drop")
        logits = heads.logits_of((hidden, kernel, cfg))[:, 0]
        logits = filter_logits(logits, choice, cut=cut)
        new, logp = sample_tokens(logits, now.seed, now.last + 1, choice)
        last = jnp.where(live, now.last + 1, now.last)
        at = jnp.where(live, last, now.tokens.shape[1])  # beyond the end: dropped
        end = jnp.any(new[:, None] == jnp.asarray(ends, jnp.int32)[None], axis=1)
        ended = live & end & ~choice.ignore_eos
        kept = now.kept
        if kept is not None:
            ids = kept_of(logits, cfg.vocab_size, kept.shape[2]) if cut else -1
            kept = kept.at[row, at].set(ids, mode="drop")
        return turn + 1, Slots(
            cache=held,
            tokens=now.tokens.at[row, at].set(new, mode="drop"),
            logprob=now.logprob.at[row, at].set(logp, mode="drop"),
            last=last,
            until=jnp.where(ended, last, now.until),
            seed=now.seed,
            experts=read,
            kept=kept,
        )

    return jax.lax.while_loop(going, take, (jnp.int32(0), slots))[1]


def filter_logits(logits: jax.Array, choice: SamplingRule, *, cut: bool) -> jax.Array:
    """Divides the logits [R, V] by the temperature; with `cut`, removes tokens by min_p, top_k and top_p.

    At temperature 0 they are unchanged.
    """
    greedy = choice.temperature == 0.0
    logits = logits / jnp.where(greedy, 1.0, choice.temperature)
    return jnp.where(greedy, logits, likeliest(logits, choice.top_k, choice.top_p, choice.min_p)) if cut else logits


def sample_tokens(
    logits: jax.Array, seed: jax.Array, position: jax.Array, choice: SamplingRule
) -> tuple[jax.Array, jax.Array]:
    """Samples a token for each row of filtered logits [R, V]; returns also its log-prob in softmax(logits).

    Temperature 0 takes the likeliest token, as in vLLM.
    """
    chex.assert_rank([logits, seed, position], [2, 1, 1])

    def draw(seed: jax.Array, position: jax.Array, logits: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), logits)

    token = jax.lax.cond(
        choice.temperature == 0.0,
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
        lambda: jax.vmap(draw)(seed, position, logits).astype(jnp.int32),
    )
    return token, heads.logprob_of(logits, token)


def kept_of(logits: jax.Array, vocab_size: int, most: int) -> jax.Array:
    """Returns the tokens that are left in filtered logits [R, V], as in `Trajectory.kept`: [R, most] i32."""
    removed = heads.NO_TOKEN / 1e3  # at any temperature
    count = jnp.sum(logits > removed, axis=-1, keepdims=True)
    values, ids = jax.lax.top_k(logits, most)
    ids = jnp.where(values > removed, ids, -1)
    too_many = jnp.where(jnp.arange(most) == 0, OVERFLOW, -1)
    ids = jnp.where(count > most, too_many, ids)
    return jnp.where(count == vocab_size, -1, ids).astype(jnp.int32)


def likeliest(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Filters the logits [R, V]; removed tokens get the logit of no token. The order is vLLM's:

    tokens at least min_p times as likely as the likeliest, of these the top_k likeliest, and of these the fewest that
    have top_p of the remaining probability. A min_p of 0, top_k below 1 and top_p of 1 are off. Tokens as likely as the
    last kept one are kept too.
    """
    chex.assert_rank([logits, top_k, top_p, min_p], [2, 0, 0, 0])
    V = logits.shape[-1]
    falling = -jnp.sort(-logits, axis=-1)
    k = jnp.clip(jnp.where(top_k < 1, V, top_k), 1, V)
    stay = (falling >= falling[:, :1] + jnp.log(min_p)) & (falling >= falling[:, k - 1][:, None])
    share = jax.nn.softmax(jnp.where(stay, falling, heads.NO_TOKEN), axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    rank = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    stay &= (before < top_p) | (top_p >= 1.0) | (rank == 0)
    least = jnp.min(jnp.where(stay, falling, jnp.inf), axis=-1)
    return jnp.where(logits >= least[:, None], logits, heads.NO_TOKEN)
