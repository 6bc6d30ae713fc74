"""The stages of a PPO step between rollout and publish, each over a whole batch: what `train.py` calls by name."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jppo.algorithms import masked
from jppo.learner import batch, packing, score, sharding, update
from jppo.models.families import ModelConfig
from jppo.structs import Array, Params, Rows, Scored


@dataclasses.dataclass(frozen=True)
class Statics:
    """The numbers that close over the compiled passes."""

    temperature: float
    chunk_tokens: int
    gamma: float
    lam: float
    kl_penalty: str | None  # of the KL in the reward; None: there is none
    clip_ratio: float
    entropy_coeff: float
    kl_loss_coef: float
    kl_loss_type: str | None  # of the KL in the loss; None: there is none
    cliprange_value: float


@dataclasses.dataclass(frozen=True)
class Passes:
    """The compiled functions of a step; one compilation of each for every shape of rows."""

    logprob: score.LogProb
    reference: score.LogProb  # without the entropy, which nobody asks of it
    value: score.Value
    gap: Callable[[Rows, Array], Array]
    entropy: Callable[[Rows, Array], Array]
    advantage: Callable[..., dict[str, Array]]
    whiten: Callable[..., Array]
    actor: Callable[..., tuple[Params, dict[str, Array]]]
    critic: Callable[..., tuple[Params, dict[str, Array]]]


def make_passes(
    policy: Any, critic: Any, cfg: ModelConfig, statics: Statics, *, estimator: Callable[..., Any]
) -> Passes:
    """Closes the pure functions over the models and the numbers, and compiles them on first use."""
    s = statics

    def logprob(with_entropy: bool) -> score.LogProb:
        return score.make_logprob(
            policy, cfg, temperature=s.temperature, chunk_tokens=s.chunk_tokens, with_entropy=with_entropy
        )

    value = score.make_value(critic)
    actor_loss = update.make_actor_loss(
        logprob(with_entropy=s.entropy_coeff != 0.0),
        clip_ratio=s.clip_ratio,
        entropy_coeff=s.entropy_coeff,
        kl_loss_coef=s.kl_loss_coef,
        kl_loss_type=s.kl_loss_type,
    )
    return Passes(
        logprob=jax.jit(logprob(with_entropy=True)),
        reference=jax.jit(logprob(with_entropy=False)),
        value=jax.jit(value),
        gap=jax.jit(score.sampler_gap),
        entropy=jax.jit(score.entropy_sum),
        advantage=jax.jit(estimator(gamma=s.gamma, lam=s.lam, kl_penalty=s.kl_penalty)),
        whiten=jax.jit(masked.whiten),
        actor=update.make_accumulate(actor_loss),
        critic=update.make_accumulate(update.make_critic_loss(value, cliprange_value=s.cliprange_value)),
    )


def compile_all(
    passes: Passes,
    plan: packing.Plan,
    mesh: Mesh,
    *,
    policy: Params,
    reference: Params | None,
    value: Params,
    zeros: tuple[Callable[[], Params], Callable[[], Params]],
) -> None:
    """Runs every pass once on empty rows of every shape, so that no later step compiles."""
    kl_coef = jax.device_put(jnp.float32(0), sharding.replicated(mesh))  # placed as the state's is
    for shape in plan.shapes:
        rows = sharding.put_rows(packing.empty_rows(shape), mesh)
        logp, entropy = passes.logprob(policy, rows)
        passes.entropy(rows, entropy)
        if reference is not None:
            passes.reference(reference, rows)
        values = passes.value(value, rows)
        passes.gap(rows, logp)
        reward = jax.device_put(np.zeros(shape, np.float32), sharding.rows_sharding(mesh))
        scored, _ = _advantages(passes, [[rows]], [[reward]], [[values]], [[logp]], [[logp]], kl_coef)
        passes.actor(policy, zeros[0](), scored[0][0], jnp.float32(1))
        jax.block_until_ready(passes.critic(value, zeros[1](), scored[0][0], jnp.float32(1)))


def advantages(
    passes: Passes,
    rows: list[list[Rows]],
    scores: np.ndarray,
    values: batch.Nested,
    logp: batch.Nested,
    ref_logp: batch.Nested,
    kl_coef: Array,
) -> tuple[list[list[Scored]], dict[str, float]]:
    """Places the sequence rewards [B], estimates advantages and whitens them over the whole batch."""

    place = cast(jax.Array, rows[0][0].inputs).sharding
    reward = [[jax.device_put(packing.place_rewards(one, scores), place) for one in mini] for mini in rows]
    scored, found = _advantages(passes, rows, reward, values, logp, ref_logp, kl_coef)
    tokens, advantage_mean, _ = found["moments"]
    _, return_mean, return_var = found["return_moments"]
    _, value_mean, _ = found["value_moments"]
    explained = 1.0 - found["error_moments"][2] / (return_var + 1e-5)
    return scored, {
        "critic/advantages/mean": advantage_mean,
        "critic/returns/mean": return_mean,
        "critic/values/mean": value_mean,
        "critic/vf_explained_var": explained,
        "actor/reward_kl_penalty": found["kl_sum"] / max(tokens, 1.0),
    }


def _advantages(passes, rows, reward, values, logp, ref_logp, kl_coef):
    raw = batch.each(lambda *micro: passes.advantage(*micro, kl_coef), rows, reward, values, logp, ref_logp)
    host = jax.device_get(
        [{k: v for k, v in micro.items() if k.endswith(("moments", "sum"))} for micro in batch.flat(raw)]
    )
    found: dict[str, Any] = {
        name: masked.combine([micro[name] for micro in host]) for name in host[0] if name.endswith("moments")
    }
    found["kl_sum"] = float(sum(micro["kl_sum"] for micro in host))
    _, mean, var = (np.float32(x) for x in found["moments"])

    def scored(rows, raw, values, logp, ref_logp):
        white = passes.whiten(raw["advantage"], rows.mask, mean=mean, var=var)
        return Scored(rows, logp, ref_logp, values, white, raw["returns"])

    return batch.each(scored, rows, raw, values, logp, ref_logp), found


def gap_metrics(gaps: batch.Nested, tokens: list[Array]) -> dict[str, float]:
    """How far the sampler's log-probs lie from the trainer's for the same tokens and weights."""
    host = np.stack(jax.device_get(batch.flat(gaps)))  # [micro-batches, 4]
    return {
        "rollout/logp_gap_mean": float(host[:, 0].sum() / sum(float(n) for n in tokens)),
        "rollout/logp_gap_max": float(host[:, 1].max()),
        "rollout/ratio_min": float(host[:, 2].min()),
        "rollout/ratio_max": float(host[:, 3].max()),
    }


@dataclasses.dataclass(frozen=True)
class Descent:
    """What one model is trained by: its compiled gradient, optimizer step and accumulator."""

    accumulate: Callable[..., tuple[Params, dict[str, Array]]]
    apply: Callable[..., tuple[Params, Any, dict[str, Array]]]
    zeros: Callable[[], Params]
    epochs: int
    name: str  # 'actor' or 'critic', of its metrics


def descend(
    how: Descent, params: Params, opt: Any, step: Array, minis: list[list[Any]], tokens: list[Array]
) -> tuple[Params, Any, dict[str, float]]:
    """One optimizer step a mini-batch and epoch, gradients accumulated over its micro-batches."""
    history = []
    for _ in range(how.epochs):
        for mini, count in zip(minis, tokens, strict=True):
            grads, sums = how.zeros(), []
            for micro in mini:
                grads, part = how.accumulate(params, grads, micro, count)
                sums.append(part)
            params, opt, stats = how.apply(params, opt, grads, step)
            history.append((sums, stats))
    jax.block_until_ready(params)
    return params, opt, _mean_metrics(jax.device_get(history), how.name)


def _mean_metrics(history: list[tuple[list[dict[str, Any]], dict[str, Any]]], name: str) -> dict[str, float]:
    """Micro-batches add up to their mini-batch, except for extremes; mini-batches are averaged."""
    minis = []
    for sums, stats in history:
        mini = {key: float(sum(part[key] for part in sums)) for key in sums[0] if not key.endswith(("_max", "_min"))}
        mini |= {key: float(max(part[key] for part in sums)) for key in sums[0] if key.endswith("_max")}
        mini |= {key: float(min(part[key] for part in sums)) for key in sums[0] if key.endswith("_min")}
        minis.append(mini | {f"{name}/{key}": float(value) for key, value in stats.items()})
    out = {key: float(np.mean([mini[key] for mini in minis])) for key in minis[0]}
    out |= {key: max(mini[key] for mini in minis) for key in out if key.endswith("_max")}
    out |= {key: min(mini[key] for mini in minis) for key in out if key.endswith("_min")}
    return out


def mean_over(sums: batch.Nested, tokens: list[Array]) -> float:
    """The mean over the batch's tokens of what was summed by micro-batch."""
    return float(sum(jax.device_get(batch.flat(sums))) / sum(float(n) for n in tokens))
