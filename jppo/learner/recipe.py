"""Parts of a learner from the settings: estimator, policy loss, KL, rollout correction, optimizers, shapes of rows."""

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jppo.algorithms import kl, losses
from jppo.errors import UserError
from jppo.learner import cost, estimate, optim, packing, ppo, sharding, state
from jppo.learner.estimate import Estimator
from jppo.learner.policy_losses import Objective
from jppo.models import attention
from jppo.models.config import ModelConfig
from jppo.settings import Common, Optimizer, Settings, importance_band, optimizers, parts, rejection_rules
from jppo.types import Array


def make_estimator(c: Settings) -> Estimator:
    """Makes the estimator that `algorithm.adv_estimator` names."""
    estimator = parts.estimator(c)
    assert isinstance(estimator, Estimator)
    return estimator


def make_objective(c: Settings) -> Objective:
    """Makes the policy loss that `actor.loss_mode` names."""
    objective = parts.objective(c)
    assert isinstance(objective, Objective)
    return objective


def kl_name(name: str, setting: str) -> str:
    """Returns a KL estimator's name in `kl.ESTIMATORS`; registers a user-defined one."""
    if name not in kl.BY_NAME:
        estimate: Any = parts.KL_ESTIMATORS.find(name, setting)
        kl.ESTIMATORS[name] = estimate
    return name


def make_correction(c: Settings) -> estimate.Correction | None:
    """Makes the correction of the log-prob mismatch, if any."""
    a = c.algorithm
    rules = rejection_rules(a.rollout_rs, a.rollout_rs_threshold)
    if a.rollout_is == "none" and not rules:
        return None
    lower, upper = importance_band(a.rollout_is_threshold)
    return estimate.Correction(
        level=None if a.rollout_is == "none" else a.rollout_is,
        lower=lower,
        upper=upper,
        normalize=a.rollout_is_batch_normalize,
        rules=rules,
    )


def make_kl_controller(c: Settings) -> Callable[[Array, Array], Array] | None:
    """Makes the `algorithm.kl_ctrl_type` update of the KL coefficient; None: the coefficient is fixed."""
    a = c.algorithm
    if a.kl_ctrl_type == "fixed":
        return None
    return jax.jit(functools.partial(kl.adaptive, steps=sequences_of_step(c), target=a.target_kl, horizon=a.horizon))


def make_recipe(c: Settings) -> ppo.Recipe:
    """Makes the algorithm's functions from the config."""
    a, v, talk = c.actor, c.critic, c.rollout.multi_turn
    objective = make_objective(c)
    mode = a.loss_agg_mode if objective.aggregation is None else objective.aggregation
    value_mode = a.loss_agg_mode if v.loss_agg_mode is None else v.loss_agg_mode
    scale = float(c.data.max_response_length) if a.loss_scale_factor is None else a.loss_scale_factor
    value_scale = scale if v.loss_scale_factor is None else v.loss_scale_factor
    return ppo.Recipe(
        estimator=make_estimator(c),
        policy_loss=objective.loss,
        by_sequence=objective.by_sequence,
        selection=objective.selection,
        weigh=functools.partial(losses.token_weights, mode=mode, scale=scale),
        weigh_value=functools.partial(losses.token_weights, mode=value_mode, scale=value_scale),
        cliprange_value=v.cliprange_value,
        entropy_coeff=a.entropy_coeff,
        entropy_metric=a.calculate_entropy,
        kl_penalty=kl_name(c.algorithm.kl_penalty, "algorithm.kl_penalty") if c.algorithm.use_kl_in_reward else None,
        kl_loss_type=kl_name(a.kl_loss_type, "actor.kl_loss_type") if a.use_kl_loss else None,
        kl_loss_coef=a.kl_loss_coef,
        kl_loss_max_clamp=a.kl_loss_max_clamp,
        kl_topk=(("topk", a.kl_topk), ("min_logp", a.kl_log_prob_min_clamp)),
        bypass=c.algorithm.old_logprob == "bypass",
        correction=make_correction(c),
        adapt_kl=make_kl_controller(c),
        value_norm_decay=v.value_norm_decay,
        value_range=v.value_range if v.value_bins else None,
        positive_lm_coef=a.positive_lm_coef,
        router_aux_loss_coef=a.router_aux_loss_coef,
        router_z_loss_coef=a.router_z_loss_coef,
        branches=c.rollout.has_branches,
        earns=bool(c.reward.function or c.reward.model.step_aggregation or talk.enable or c.rollout.agent),
    )


def optimizer_of(section: Optimizer, name: str, layout: state.ModelLayout) -> Any:
    """Makes the optimizer of a section of the config; `name` as in `make_trainable`."""
    chain = make_chain(section, name if name in ("actor", "critic") else "optim", layout.matrices)
    narrow = any(x.dtype != jnp.float32 for x in jax.tree.leaves(layout.shapes))
    return optim.make_optimizer(
        chain,
        grad_clip=section.grad_clip,
        moments_dtype=section.moments_dtype,
        master=section.master_dtype == "float32" and narrow,
        still=layout.still,
    )


def make_chain(section: Optimizer, name: str, matrices: Any = None) -> optim.Chain:
    """Returns the optax chain of `optimizer` in section `name`, as a function of the learning rate.

    Given `Hyperparameters`, AdamW takes all of them, another optimizer the learning rate alone.
    """

    def chain(learning_rate: Any) -> optax.GradientTransformation:
        given = {"learning_rate": learning_rate}
        if isinstance(learning_rate, optim.Hyperparameters):
            h = learning_rate
            given = dict(learning_rate=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay)
            given = given if section.optimizer == "adamw" else {"learning_rate": h.lr}
        values = ChainMap(given, {"matrices": matrices}, vars(section))
        transformation = parts.OPTIMIZERS.make(section.optimizer, f"{name}.optimizer", values)
        return cast(optax.GradientTransformation, transformation)  # `make` has checked the class

    chain(0.0)
    return chain


def rate_schedule(section: Optimizer, total_steps: int) -> Callable[[Array], Array]:
    """Makes the learning rate of a section of the config by step."""
    by_ratio = section.lr_warmup_steps == -1
    return optim.make_schedule(
        section.lr_scheduler_type,
        lr=section.lr,
        warmup_steps=int(section.lr_warmup_steps_ratio * total_steps) if by_ratio else section.lr_warmup_steps,
        total_steps=total_steps,
        min_lr_ratio=section.min_lr_ratio,
        init_lr_ratio=section.init_lr_ratio,
    )


def require_optimizers(c: Settings) -> None:
    """Raises UserError for an invalid optimizer; before servers start."""
    for name, section in optimizers(c).items():
        make_chain(section, name)


# Four row lengths instead of one are up to 21 further programs, some seconds each, and save at most 3/8 of the entries.
WORTH_S = 300.0  # assumed, as the next two
REACHED, CPU_FLOPS = 0.4, 1e11  # share of a device's peak; rate of all cores of a CPU


def packing_kind(c: Common, mesh: Any) -> str:
    """Returns the packing kind. Shared rows need a fused segment kernel: else their mask is quadratic."""
    if c.data.packing != "auto":
        return c.data.packing
    return "segments" if sharding.platform(mesh) == "tpu" and c.model.attention in ("auto", "splash") else "buckets"


def shared_prompts(c: Common, mesh: Any) -> tuple[int, int] | None:
    """Returns the longest prompt and response where n responses share one prompt."""
    return (c.data.max_prompt_length, c.data.max_response_length) if packing_kind(c, mesh) == "prefix" else None


def row_length_count(c: Common, mesh: Any, policy: ModelConfig, sequences: int) -> int:
    """Returns `data.row_lengths`; if it is open, 1 for a run whose `sequences` take little time at full length."""
    if c.data.row_lengths != -1:
        return c.data.row_lengths
    learned = 3 * sequences * cost.forward(policy, [c.data.longest_row], head_tokens=c.data.max_response_length)
    peak = sharding.known_peak(mesh.devices.flat[0].device_kind, c.model.compute_dtype)
    rate = CPU_FLOPS if peak is None else mesh.size * peak * REACHED
    return 4 if learned / rate > WORTH_S else 1


def plan_rows(
    c: Common,
    mesh: Any,
    *,
    tokens_per_device: int,
    sequences: int,
    steps: int,
    policy: ModelConfig,
    more: int = 0,
    sizes: Sequence[int] = (),
) -> packing.Plan:
    """Plans the row shapes of a run of `steps` batches; `more` is extra tokens per sequence beyond prompt and response.

    With shared prompts, the policy's cost model sets the lengths. `sizes` is as in `packing.make_plan`.
    """
    multiple, length_multiple = sharding.row_multiple(mesh), sharding.length_multiple(mesh)
    row, of_device, shared = c.data.max_tokens_per_row, tokens_per_device * length_multiple, shared_prompts(c, mesh)
    sharing = dict[str, Any]()
    if shared is not None and isinstance(c, Settings):
        if row == -1:
            row = min(of_device, packing.longest_row(*shared, samples=c.rollout.n))

        def price(length: int) -> float:
            return cost.price(policy, attention.computed(length, shared) / length)

        sharing = dict(price=price, shared=shared)
    longest = c.data.longest_row + more
    return packing.make_plan(
        packing_kind(c, mesh),
        max_length=longest,
        row_lengths=row_length_count(c, mesh, policy, steps * sequences_of_step(c)),
        max_tokens_per_row=longest if row == -1 else row,
        tokens_per_micro=of_device * multiple,
        sequences=sequences,
        row_multiple=multiple,
        length_multiple=length_multiple,
        sizes=sizes,
        **sharing,
    )


def plan_of_run(c: Settings, mesh: Any, policy: ModelConfig, steps: int) -> packing.Plan:
    """Plans the row shapes of a PPO run of `steps`."""
    sizes = tuple(epochs.mini_batch_size for epochs in make_epochs(c))
    plan = plan_rows(
        c, mesh, tokens_per_device=c.actor.max_tokens_per_device, sequences=max(sizes), steps=steps,
        policy=policy, sizes=() if c.rollout.has_branches else sizes,
    )  # fmt: skip
    return dataclasses.replace(plan, experts=replayed(c, policy), kept=kept_tokens(c, policy))


def kept_tokens(c: Settings, policy: ModelConfig) -> int:
    """Returns the most kept tokens of a sample that are replayed; 0: none."""
    return min(c.rollout.mask_replay_tokens, policy.vocab_size) if c.rollout.mask_replay else 0


def replayed(c: Settings, policy: ModelConfig) -> tuple[int, int] | None:
    """Returns the layers and the active experts of each token if experts are replayed; UserError without any."""
    if not c.rollout.routing_replay:
        return None
    if policy.experts is None:
        raise UserError(
            f"rollout.routing_replay=True: the {policy.family} model of model.path has no experts; set it to False"
        )
    return policy.num_layers, policy.experts.active


def make_epochs(c: Settings) -> tuple[ppo.Epochs, ppo.Epochs]:
    """Returns how actor and critic go over the batch of a step."""
    a, v, most, warmup = c.actor, c.critic, most_sequences(c), c.trainer.critic_warmup
    size = a.ppo_mini_batch_size if v.ppo_mini_batch_size is None else v.ppo_mini_batch_size
    count = a.ppo_epochs if v.ppo_epochs is None else v.ppo_epochs
    in_warmup = count if v.warmup_epochs is None else v.warmup_epochs
    return (
        ppo.Epochs(a.ppo_epochs, a.ppo_mini_batch_size, a.shuffle, most, warmup, 0),
        ppo.Epochs(count, size, v.shuffle, most, warmup, in_warmup),
    )


def sequences_of_step(c: Common) -> int:
    """Returns the trajectories per step."""
    return c.data.train_batch_size * (c.rollout.n if isinstance(c, Settings) else 1)


def most_sequences(c: Settings) -> int:
    """Returns the most trajectories of a step, the branches of episodes included."""
    return sequences_of_step(c) * (c.rollout.agent_branches if c.rollout.has_branches else 1)


def batch_shape(c: Settings, mesh: Any) -> tuple[int, int]:
    """Returns a step's flat batch [B, L]: trajectories with branches, padded for the mesh, by the longest response."""
    devices = sharding.whole_row_multiple(mesh)
    return -(-most_sequences(c) // devices) * devices, c.data.max_response_length
