"""Fits a critic on samples that do not change, with the batches, loss and optimizer of a PPO run's critic.

The targets are discounted returns, with critic.lam=1 whatever the settings say. An epoch goes over all samples in a new
order, in batches of a run's step; after each, the explained variance on held-out prompts is measured.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jppo.algorithms import values
from jppo.errors import UserError
from jppo.learner import batch, estimate, estimators, make, packing, ppo
from jppo.learner.streams import Start, fold
from jppo.learner.trainable import Trainable
from jppo.models import hf_write
from jppo.models.config import ModelConfig, pad_vocab
from jppo.plugins.critic_fit.explained import ValuedTokens, explained_variance
from jppo.plugins.critic_fit.logged import Logged
from jppo.run import make as run_make
from jppo.settings import Settings
from jppo.types import Batch, Params

PATIENCE = 2  # epochs without a better one, after which the fit ends


@dataclasses.dataclass(frozen=True)
class Fit:
    """The critic's programs and the shapes of its batches."""

    c: Settings
    mesh: Any
    cfg: ModelConfig
    plan: packing.Plan
    passes: ppo.Passes
    trainable: Trainable
    estimate_returns: Any  # compiled: (batch, KL coefficient) -> arrays with the returns as `advantage`, metrics
    norm: Any  # [3] f32, the statistics that normalise values; weight 0: they are not


def open_fit(c: Settings, samples: Sequence[Logged], epochs: int) -> tuple[Fit, Params, Any]:
    """Loads the critic; returns the fit, the critic's weights and its optimizer's state."""
    mesh, steps = make.open_mesh(c), epochs * -(-len(samples) // c.sequences_of_step)
    models = run_make.read_models(c, with_critic=True, with_reference=False)
    inputs = dataclasses.replace(models, total_steps=steps)
    policy, critic = inputs.policy, inputs.critic
    passes = run_make.make_passes(c, run_make.make_loop_recipe(c), inputs, mesh)
    assert critic is not None and passes.critic is not None
    cfg = pad_vocab(critic, mesh.shape["tensor"])
    trained = make.load_trained(
        c, mesh, cfg, run_make.path_of_critic(c), head="value", init=run_make.critic_init(c),
        key=fold(jax.random.key(c.trainer.seed), Start.CRITIC), adapters=inputs.critic_adapters,
        frozen=inputs.critic_frozen,
    )  # fmt: skip
    trained = make.offload_if(trained, c.critic.param_offload)
    loss, scaled = passes.critic, c.model.scales_loss
    trainable, opt = make.make_trainable(c.critic, "critic", loss, trained, steps, scaled=scaled)
    plan = run_make.plan_mini_batches(c, mesh, policy, steps, (run_make.make_epochs(c)[1].mini_batch_size,))
    # Its advantages are the returns of λ = 1, which no value enters.
    algorithm = estimators.reinforce_plus_plus(gamma=c.algorithm.gamma, gamma_by=c.algorithm.gamma_by)
    algorithm = dataclasses.replace(algorithm, transforms=())
    returns = jax.jit(estimate.make_advantages(algorithm, kl_penalty=None, correction=None, bypass=True))
    fit = Fit(c, mesh, cfg, plan, passes, trainable, returns, np.zeros(3, np.float32))
    return dataclasses.replace(fit, norm=measure_norm(fit, samples)), trained.learned, opt


def measure_norm(fit: Fit, samples: Sequence[Logged]) -> Any:
    """Returns the statistics that normalise values, if they are: of a former fit, or of the samples' returns."""
    if fit.c.critic.value_norm_decay is None:
        return fit.norm
    former = np.asarray(run_make.value_norm_of(fit.c), np.float32)
    if former[0] > 0:
        return former
    returns = np.concatenate([data["returns"][data.mask] for _, data in batches(fit, samples)])
    return np.asarray(values.update_statistics(former, returns, np.ones(len(returns), bool), decay=0.0))


def batches(fit: Fit, samples: Sequence[Logged]) -> Iterator[tuple[Sequence[Logged], Batch]]:
    """Yields the samples in batches of a run's step, each with its flat batch, which has the `returns`."""
    size, shape = fit.c.sequences_of_step, run_make.batch_shape(fit.c, fit.mesh)
    for first in range(0, len(samples), size):
        part = samples[first : first + size]
        sequences = [one.trajectory for one in part], [one.reward for one in part]
        data = batch.flatten(*sequences, np.arange(len(part)), shape=shape, has_earned=True)
        added, _ = fit.estimate_returns(data.with_arrays(old_logprob=data.rollout_logprob), np.float32(0.0))
        yield part, data.with_arrays(returns=np.asarray(added["advantage"]))


def with_values(fit: Fit, params: Params, part: Sequence[Logged], data: Batch) -> Batch:
    """Adds the critic's outputs to a batch of samples as `value`."""
    micros = batch.pack_micros(data, [one.trajectory for one in part], plan=fit.plan, mesh=fit.mesh)
    return ppo.with_values(fit.passes, data, micros, fit.trainable.model(params))


def value_tokens(fit: Fit, params: Params, samples: Sequence[Logged]) -> ValuedTokens:
    """Returns the trained tokens of the samples, with the critic's values on the scale of the rewards."""
    parts = list[tuple[np.ndarray, ...]]()
    for part, data in batches(fit, samples):
        outputs, mask = with_values(fit, params, part, data)["value"], np.asarray(data.mask)
        row, position = np.nonzero(mask)
        turn = np.cumsum(mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1], axis=1) - 1
        source = np.array([one.source for one in part])[row]
        returns, predicted = np.asarray(data["returns"]), np.asarray(values.denormalise(outputs, fit.norm))
        parts.append((returns[mask], predicted[mask], position, turn[mask], source))
    return ValuedTokens(*map(np.concatenate, zip(*parts, strict=True)))


def learn_epoch(fit: Fit, params: Params, opt: Any, samples: Sequence[Logged], epoch: int) -> tuple[Params, Any, float]:
    """Goes over the samples once, in a new order; returns weights, optimizer and the mean loss."""
    losses, size = list[float](), run_make.make_epochs(fit.c)[1].mini_batch_size
    order = np.random.default_rng([fit.c.trainer.seed, epoch]).permutation(len(samples))
    first = epoch * -(-len(samples) // fit.c.sequences_of_step)
    for step, (part, data) in enumerate(batches(fit, [samples[i] for i in order]), first):
        data = with_values(fit, params, part, data)  # the old values of the clip
        targets = np.where(data.mask, values.normalise(data["returns"], fit.norm), 0.0)
        minis = batch.mini_batches(
            data.with_arrays(returns=targets), [one.trajectory for one in part], reads=fit.trainable.loss.reads,
            order=np.arange(len(part)), mini_batch_size=size, plan=fit.plan, mesh=fit.mesh,
        )  # fmt: skip
        params, opt, metrics = fit.trainable.learn(params, opt, np.asarray(step, np.int32), minis)
        if metrics["critic/skipped"]:
            raise UserError(f"the critic's loss or gradient is not finite; lower critic.lr={fit.c.critic.lr}")
        losses.append(metrics["critic/vf_loss"])
    return params, opt, float(np.mean(losses))


def fit_critic(
    c: Settings, train: Sequence[Logged], held_out: Sequence[Logged], out: pathlib.Path, *, epochs: int, pad: int | None
) -> ValuedTokens:
    """Fits until two epochs explain held-out prompts no better; writes the best critic, returns its held-out tokens."""
    fit, params, opt = open_fit(c, train, epochs)
    best = value_tokens(fit, params, held_out)
    scores = [explained_variance(best.returns, best.values)]
    print(f"before: held-out explained variance {scores[0]:.4f}", flush=True)
    for epoch in range(epochs):
        params, opt, loss = learn_epoch(fit, params, opt, train, epoch)
        tokens = value_tokens(fit, params, held_out)
        score = explained_variance(tokens.returns, tokens.values)
        print(f"epoch {epoch + 1}: loss {loss:.5f}, held-out explained variance {score:.4f}", flush=True)
        if score > max(scores):
            best = tokens
            write_critic(fit, params, out / "hf", pad)
        scores.append(score)
        if len(scores) - int(np.argmax(scores)) > PATIENCE:
            break
    if np.argmax(scores) == 0:
        raise UserError(
            f"no epoch explains more of the held-out returns than the start, {scores[0]:.4f}, and nothing was written;"
            f" change critic.lr={c.critic.lr}, or use more samples or --epochs"
        )
    return best


def write_critic(fit: Fit, params: Params, path: pathlib.Path, pad: int | None) -> None:
    """Writes the critic as a sequence classifier of one label, with the statistics that normalise its values."""
    source = run_make.path_of_critic(fit.c)
    norm = fit.norm.tolist() if fit.norm[0] > 0 else None
    changes = hf_write.classifier_changes(source, pad_token_id=pad) | {run_make.VALUE_NORM: norm}
    options = dict[str, Any](source=source, dtype=fit.c.model.param_dtype, head="value", changes=changes)
    hf_write.save_model(path, fit.trainable.model(params), fit.cfg, **options)
