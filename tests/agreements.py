"""Cases of the agreement check of rollout engine and trainer: right and wrong weights of an engine.

Every case samples tokens from an engine, in contexts that the right model sampled, and judges their log-probs as a run
does: before step 1, and after a publish. The engine is jppo's decoder in float32 or bfloat16, the trainer is the same
decoder in float32. The engine's weights are right, or wrong in one way. Right engines also have the spread of log-probs
that others published.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.models import decoder, heads
from jppo.models.config import ModelConfig
from jppo.run.agreement import PROBE_ROUNDS, PROBES, TOLERANCE, LogpGap, MismatchLimits
from jppo.types import Params

PROMPT, RESPONSES, TOKENS = 4, 16, 16
SEEDS = 10_000  # of the cases: others than those that the bounds and looks were chosen by
POOL = 32  # contexts of a model, each case takes some
SHAPE = dict(
    model_type="qwen3_moe", hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, intermediate_size=128, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2,
    norm_topk_prob=True, vocab_size=128, rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=True,
    rope_theta=1e4, hidden_act="silu", initializer_range=0.1,
)  # fmt: skip
RATE = 1e-2  # of the one AdamW step that a stale version lacks
UNLOADED = 1e-3  # largest weight that vLLM's dummy loader leaves in a tensor


LogProbs = Callable[[Params, jax.Array, str], jax.Array]  # (values, rows, dtype) -> of next tokens, [B, TOKENS, V] f32


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's weights in float32, and contexts that it sampled."""

    cfg: ModelConfig
    values: Params
    rows: jax.Array  # [POOL, PROMPT + TOKENS] i32
    logprobs: LogProbs


Fault = Callable[[Model, Params, jax.Array, jax.Array], tuple[Params, Params]]  # -> weights of engine and trainer


def make_model(cfg: ModelConfig, values: Params) -> Model:
    """Samples the contexts."""

    def logits(values: Params, rows: jax.Array, dtype: str) -> jax.Array:
        position = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        model = decoder.Decoder(cfg, dtype=dtype)
        hidden: Any = model.apply({"params": values}, rows, jnp.ones_like(rows), position)
        return heads.logits_of((hidden, decoder.head_kernel(values, cfg), cfg))[..., : cfg.vocab_size]

    def logprobs(values: Params, rows: jax.Array, dtype: str) -> jax.Array:
        return jax.nn.log_softmax(logits(values, rows[:, :-1], dtype)[:, PROMPT - 1 :])

    @jax.jit
    def contexts(values: Params, key: jax.Array) -> jax.Array:
        def more(t: jax.Array, rows: jax.Array) -> jax.Array:
            now = logits(values, rows, "float32")[:, t - 1]
            return rows.at[:, t].set(jax.random.categorical(jax.random.fold_in(key, t), now))

        rows = jnp.zeros((POOL, PROMPT + TOKENS), jnp.int32)
        rows = rows.at[:, :PROMPT].set(jax.random.randint(key, (POOL, PROMPT), 3, cfg.vocab_size))
        return jax.lax.fori_loop(PROMPT, PROMPT + TOKENS, more, rows)

    return Model(cfg, values, contexts(values, jax.random.key(0)), logprobs)


def rounded(values: Params, dtype: str) -> Params:
    """Returns the weights as they are published."""
    return jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), values)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gaps(logprobs: LogProbs, dtype: str, engine: Params, trainer: Params, rows: jax.Array, key: jax.Array) -> jax.Array:
    """Returns |trainer's log-prob - engine's| of tokens that the engine sampled, [RESPONSES, TOKENS]."""
    theirs, ours = logprobs(rounded(engine, dtype), rows, dtype), logprobs(trainer, rows, "float32")
    taken = jax.random.categorical(key, theirs)[..., None]
    return jnp.abs(jnp.take_along_axis(theirs - ours, taken, axis=2)[..., 0])


def another_seed(model: Model, values: Params, rows: jax.Array, key: jax.Array) -> tuple[Params, Params]:
    """The engine has the weights of another initialisation."""
    return decoder.init_params(model.cfg, key, head="lm", param_dtype=jnp.float32), values


def missing_layer(model: Model, values: Params, rows: jax.Array, key: jax.Array) -> tuple[Params, Params]:
    """One layer of the engine has what vLLM's dummy loader left there."""
    leaves, tree = jax.tree.flatten(values["layers"])
    first, *keys = jax.random.split(key, 1 + len(leaves))
    layer = jax.random.randint(first, (), 0, model.cfg.num_layers)
    left = [
        x.at[layer].set(jax.random.uniform(k, x.shape[1:], x.dtype, -UNLOADED, UNLOADED))
        for x, k in zip(leaves, keys, strict=True)
    ]
    return values | {"layers": jax.tree.unflatten(tree, left)}, values


def swapped_experts(model: Model, values: Params, rows: jax.Array, key: jax.Array) -> tuple[Params, Params]:
    """Two experts of one layer of the engine have each other's place."""
    assert model.cfg.experts is not None
    first, second = jax.random.split(key)
    layer = jax.random.randint(first, (), 0, model.cfg.num_layers)
    pair = jax.random.choice(second, model.cfg.experts.count, (2,), replace=False)
    layers = values["layers"]
    swap = {n: x.at[layer, pair].set(x[layer, pair[::-1]]) for n, x in layers["experts"].items() if n != "router"}
    return values | {"layers": layers | {"experts": layers["experts"] | swap}}, values


def stale(model: Model, values: Params, rows: jax.Array, key: jax.Array) -> tuple[Params, Params]:
    """The engine lacks the trainer's last step, of policy gradient and AdamW."""
    advantage = jax.random.rademacher(key, (RESPONSES, 1), jnp.float32)

    def loss(values: Params) -> jax.Array:
        each = model.logprobs(values, rows, "float32")
        return -jnp.mean(advantage * jnp.take_along_axis(each, rows[:, PROMPT:, None], axis=2)[..., 0])

    return values, jax.tree.map(lambda x, g: x - RATE * g / (jnp.abs(g) + 1e-8), values, jax.grad(loss)(values))


def right(model: Model, values: Params, rows: jax.Array, key: jax.Array) -> tuple[Params, Params]:
    """Both have the same weights."""
    return values, values


def faults(model: Model) -> Iterator[tuple[str, Fault]]:
    """Yields the faults of this model."""
    yield "another seed", another_seed
    yield "a layer not loaded", missing_layer
    if model.cfg.experts is not None:
        yield "two experts swapped", swapped_experts
    yield "stale by a step", stale


def stopped(mismatches: np.ndarray, dtype: str) -> dict[str, bool]:
    """Returns which of a run's two checks end it, by the mismatches of one engine, [RESPONSES, TOKENS]."""
    bound = MismatchLimits.of(TOLERANCE[dtype])
    return {
        "start": not LogpGap(mismatches).within(bound),
        "publish": all(not LogpGap(mismatches[:PROBES, :n]).within(bound, part) for n, part in PROBE_ROUNDS),
    }


def row(about: dict[str, Any], mismatches: list[np.ndarray], dtype: str) -> dict[str, Any]:
    """Returns how many of the cases of one kind each check stops."""
    ends = [stopped(case, dtype) for case in mismatches]
    return about | {"dtype": dtype, "cases": len(mismatches)} | {n: sum(e[n] for e in ends) for n in ends[0]}


def of_model(name: str, model: Model, cases: int, rights: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of one model."""
    for kind, fault in (("right", right), *faults(model)):
        make_weights = jax.jit(functools.partial(fault, model))
        for dtype in ("float16", "bfloat16") if kind == "right" else ("float32", "float16", "bfloat16"):
            mismatches = []
            for i in range(rights if kind == "right" else cases):
                rng = np.random.default_rng(SEEDS + i)
                first, second = jax.random.split(jax.random.key(SEEDS + i))
                rows = model.rows[rng.choice(POOL, RESPONSES, replace=False)]
                mismatches.append(
                    np.asarray(gaps(model.logprobs, dtype, *make_weights(model.values, rows, first), rows, second))
                )
            yield row({"model": name, "weights": kind}, mismatches, dtype)


# Published mismatches of right engines: huggingface/trl#6789, Qwen2.5-0.5B-Instruct in bfloat16, 3,916 tokens: standard
# deviation 0.0499, 95% quantile 0.113, largest 0.477 to vLLM; 0.0554, 0.117, 0.656 between batch sizes of a trainer.
# Laplace in a part of the tokens, 0 in the others has all three. docs/rollout.md: a trained mixture of experts, 2,048
# tokens, mean 0.044, largest 5.4; log-normal has both, here up to the table's largest. 21 models in float32: 1.3e-4.
PUBLISHED: dict[tuple[str, str], Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    ("21 models, vLLM", "float32"): lambda rng, shape: np.abs(rng.normal(0, 4e-5, shape)),
    ("dense, vLLM", "bfloat16"): lambda rng, shape: np.abs(rng.laplace(0, 0.0644, shape)) * (rng.random(shape) < 0.3),
    ("dense, two batch sizes", "bfloat16"): lambda rng, shape: (
        np.abs(rng.laplace(0, 0.0944, shape)) * (rng.random(shape) < 0.172)
    ),
    ("mixture of experts, vLLM", "bfloat16"): lambda rng, shape: np.minimum(rng.lognormal(-5.48, 2.17, shape), 12.1),
}


def published(rights: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of right engines with the published spreads."""
    for (name, dtype), draw in PUBLISHED.items():
        rng = np.random.default_rng(0)
        mismatches = [draw(rng, (RESPONSES, TOKENS)) for _ in range(rights)]
        yield row({"model": f"published spread: {name}", "weights": "right"}, mismatches, dtype)
