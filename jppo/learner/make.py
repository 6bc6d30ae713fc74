"""From the settings to a learner: mesh, models, algorithm, optimizers, shapes of rows; and what compiles them.

Everything of the learner that reads settings is here, and the verbs of its other modules take values.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import jppo.process  # noqa: F401  # corrects the sums of XLA, whoever makes a learner
from jppo.algorithms import kl
from jppo.errors import UserError
from jppo.learner import catalogue, cost, estimate, optim, packing, ppo, programs, score, sharding, state, update
from jppo.learner.algorithm import Algorithm
from jppo.learner.ppo import Learner, ModelConfigs, StepLearner
from jppo.learner.trainable import CompiledLoss, Trainable
from jppo.models import attention, experts, fused, hf, lora, modules, placing, sequence_parallel
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.decoder import Decoder, Remat, attention_settings
from jppo.models.lora import Base, Lora
from jppo.models.params import Head
from jppo.settings import (
    Common,
    Critic,
    FineTuning,
    Loop,
    Model,
    Optimizer,
    PreferenceTuning,
    Settings,
    Training,
    importance_band,
    optimizers,
    parts,
    rejection_rules,
)
from jppo.types import Array, Params, TrainState


def make_mesh(c: Common, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Makes the mesh of the config from the given devices, by default this machine's.

    Described devices can be given: programs compile for them but cannot run.
    """
    if devices is None:
        devices = jax.devices()
        require_host_memory(c, devices[0])
    shape = sharding.mesh_shape(len(devices), **{axis: getattr(c.mesh, axis) for axis in sharding.AXES})
    return sharding.mesh_of_shape(shape, devices)


Configs = tuple[ModelConfig, ModelConfig | None, ModelConfig | None]  # of policy, critic and reference


def read_models_of_run(c: Settings, *, weights: bool = True) -> Configs:
    """Reads the configs of the models that a PPO run needs, and checks the headers of their `weights`."""
    with_reference = wants_reference(c) and not c.ref.url
    return read_models(c, with_critic=wants_critic(c), with_reference=with_reference, weights=weights)


def read_models(c: Loop, *, with_critic: bool, with_reference: bool, weights: bool = True) -> Configs:
    """Reads the configs of the policy, and of critic and reference if wanted; checks the headers of their `weights`."""

    def read(path: str, head: Head, init: str) -> ModelConfig:
        _, cfg = hf.read_config(path, longest=c.data.longest_row)
        if head == "value":
            cfg = dataclasses.replace(cfg, value_bins=c.critic.value_bins or 1, value_head_std=c.critic.value_head_std)
        if weights and init == "pretrained":
            hf.check_weights(path, cfg, head=head)
        return cfg

    policy = read(c.model.path, "lm", c.model.init)
    critic = read(path_of_critic(c), "value", critic_init(c)) if with_critic else None
    if not with_reference:
        return policy, critic, None
    reference = policy if c.ref.path == "policy" else read(c.ref.path, "lm", "pretrained")
    if reference.vocab_size != policy.vocab_size:
        raise UserError(
            f"ref.path={c.ref.path}: a reference has the policy's vocabulary, {policy.vocab_size} tokens, and this one"
            f" has {reference.vocab_size}; use a model with that vocab_size"
        )
    return policy, critic, reference


def require_models_fit(inputs: ModelConfigs, mesh: Mesh) -> None:
    """Runs `require_divisible` for every model of a run, before a server starts."""
    for cfg in (inputs.policy, inputs.critic, inputs.reference):
        if cfg is not None:
            sharding.require_divisible(cfg, mesh)


def path_of_critic(c: Loop) -> str:
    """Returns the path of the critic's initial weights; the policy's by default."""
    return c.critic.path if c.critic.path else c.model.path


def critic_init(c: Loop) -> str:
    """Returns how the critic starts: by `model.init` on the policy's model; a model of its own is never random."""
    return c.model.init if path_of_critic(c) == c.model.path else "pretrained"


def make_adapters(c: Common, critic: Critic | None = None) -> Lora | None:
    """Makes the LoRA settings of the policy, or of a `critic` with its own rank and alpha; None: full fine-tuning."""
    targets = lora.parse_targets(c.model.target_modules)  # validates unused settings, too
    rank, alpha = c.model.lora_rank, c.model.lora_alpha
    if critic is not None:
        rank = rank if critic.lora_rank is None else critic.lora_rank
        alpha = alpha if critic.lora_alpha is None else critic.lora_alpha
    dropout = c.model.lora_dropout if critic is None and isinstance(c.model, Model) else 0.0
    adapters = None if rank == 0 else Lora(rank, alpha, targets, dropout, c.model.base_quantization)
    if critic is None and adapters is not None and isinstance(c.model, Model) and c.model.lora_adapter_path:
        hf.adapter_slots(c.model.lora_adapter_path, adapters)
    return adapters


def wants_critic(c: Settings) -> bool:
    """Whether the estimator reads values."""
    return parts.estimator(c).critic


def wants_reference(c: Settings) -> bool:
    """Whether a KL is used."""
    return c.algorithm.use_kl_in_reward or c.actor.use_kl_loss


OFFLOADABLE = {
    "policy": ("actor", "param_offload"),
    "policy's optimizer": ("actor", "optimizer_offload"),
    "critic": ("critic", "param_offload"),
    "critic's optimizer": ("critic", "optimizer_offload"),
    "reference": ("ref", "param_offload"),
    "optimizer": ("optim", "optimizer_offload"),
}


def offloaded_parts(c: Common) -> list[str]:
    """Returns the parts to offload, named as in OFFLOADABLE."""
    owner = {part: getattr(c, section, None) for part, (section, _) in OFFLOADABLE.items()}
    return [part for part, (_, leaf) in OFFLOADABLE.items() if owner[part] is not None and getattr(owner[part], leaf)]


def require_host_memory(c: Common, device: jax.Device) -> None:
    """Raises UserError where a part is to be offloaded and the devices have no host memory kind."""
    for part in offloaded_parts(c):
        if placing.host_kind(device) is None:
            kinds = ", ".join(memory.kind for memory in device.addressable_memories())
            raise UserError(
                f"{'.'.join(OFFLOADABLE[part])}=True: {device.device_kind} has no memory of the host to copy from"
                f" ({placing.KINDS[0]}), only {kinds}; leave it at False"
            )


def describe_offload(c: Common, inputs: ModelConfigs | None, device: jax.Device) -> str | None:
    """Describes the offloaded parts in a line for the console; None without any. `inputs` tell which models exist."""
    names = offloaded_parts(c)
    if inputs is not None and inputs.critic is None:
        names = [part for part in names if not part.startswith("critic")]
    if inputs is not None and inputs.reference is None:
        names = [part for part in names if part != "reference"]
    if not names:
        return None
    cpu_note = "; on a CPU that is the same memory, and nothing is gained" if device.platform == "cpu" else ""
    return f"offloaded to {placing.host_kind(device)} memory between their uses: {', '.join(names)}{cpu_note}"


def attention_kernel(c: Common, cfg: ModelConfig, mesh: Any) -> tuple[str, str | None, fused.Needs]:
    """Returns the attention kernel, why `auto` takes a slower one, if so, and the model's requirements."""
    if cfg.delta is not None and shared_prompts(c, mesh) is not None:
        raise UserError(
            f"data.packing=prefix: the gated delta nets of a {cfg.family} model have one state per row, and samples"
            " that share a prompt need one each; use data.packing=buckets"
        )
    needs = fused.Needs(
        **attention_settings(cfg),
        head_dim=cfg.kernel_dim,
        dtype=c.model.compute_dtype,
        one_segment=packing_kind(c, mesh) in ("buckets", "none"),
        shared=shared_prompts(c, mesh),
        longest=c.data.longest_row,
        sinks=cfg.sinks,
    )
    gpu = fused.capability(mesh.devices.flat[0])
    return *fused.choose_kernel(c.model.attention, needs, backend=sharding.platform(mesh), gpu=gpu), needs


def make_decoder(c: Common, cfg: ModelConfig, mesh: Any) -> Decoder:
    """Makes the transformer of `cfg` with activations sharded over the mesh as the rows are."""
    sharding.require_divisible(cfg, mesh)
    kernel, _, needs = attention_kernel(c, cfg, mesh)
    return Decoder(
        cfg,
        attend=sequence_parallel.exchanged(fused.make_attention(kernel, needs, mesh=mesh), mesh),
        dtype=c.model.compute_dtype,
        param_dtype=c.model.param_dtype,
        scan_layers=c.model.scan_layers,
        remat=cast(Remat, c.model.remat),
        constrain=sharding.constrain_to_rows(mesh),
        lookup=modules.make_lookup(mesh),
        mix=experts.make_mix(mesh),
    )


def chunk_tokens(model: Model, cfg: ModelConfig, mesh: Any) -> int:
    """Returns the number of tokens whose f32 logits are in memory at a time.

    A chunk without a sampled token is skipped, so small ones are faster on a CPU, whose rows are few: the head takes
    half the time with a vocabulary of 49,152. With a larger one, or smaller chunks, the sum of the kernel's gradient
    takes longer.
    """
    size = model.logprob_chunk_bytes
    if size == -1:
        size = 2**26 if sharding.platform(mesh) == "cpu" else 2**29
    return max(1, size // (4 * cfg.vocab_size))


def logprob_of_texts(c: FineTuning | PreferenceTuning, cfg: ModelConfig, mesh: Any) -> score.LogProb:
    """Makes log π(target) of a policy that is trained on given texts."""
    decoder, chunk = make_decoder(c, cfg, mesh), chunk_tokens(c.model, cfg, mesh)
    return score.make_logprob(decoder, cfg, temperature=1.0, chunk_tokens=chunk, with_entropy=False, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A loaded model: its trained and its frozen weights."""

    layout: state.ModelLayout  # shapes and shardings of the trained weights
    learned: Params  # the trained weights
    base: Base | None  # None: all is trained


def load_trained(
    c: Common,
    mesh: Any,
    cfg: ModelConfig,
    path: str,
    *,
    head: Head,
    key: jax.Array,
    adapters: Lora | None,
    init: str | None = None,
    trunk: Params | None = None,
) -> Trained:
    """Loads the model at `path` into its shards for training, or takes the weights of a loaded `trunk`.

    `key` initialises weights that the files lack, or all if `init` (None: `model.init`) is 'random'.
    """
    layout = state.model_weights(cfg, mesh, head=head, param_dtype=c.model.param_dtype, adapters=adapters)
    if trunk is None:
        values = state.load_sharded(layout, path, init=init or c.model.init, key=key)
    else:
        values = trunk if head == "lm" else state.on_trunk(layout, trunk, key=key)
    if adapters is None:
        return Trained(layout, values, None)
    layout = state.adapters(cfg, mesh, adapters, head=head)
    start = c.model.lora_adapter_path if isinstance(c.model, Model) and head == "lm" else ""
    learned, base = state.adapt(layout, values, adapters, key=key, path=start)
    return Trained(layout, learned, base)


def sketch_trained(
    c: Common,
    mesh: Any,
    cfg: ModelConfig,
    path: str,
    *,
    head: Head,
    adapters: Lora | None,
    trunk: Params | None = None,
    **__: Any,
) -> Trained:
    """Makes the model of `load_trained` with shapes in place of arrays; reads no file."""
    layout = state.model_weights(cfg, mesh, head=head, param_dtype=c.model.param_dtype, adapters=adapters)
    values = state.abstract(layout)
    values |= {name: part for name, part in (trunk or {}).items() if name in values}
    if adapters is None:
        return Trained(layout, values, None)
    layout = state.adapters(cfg, mesh, adapters, head=head)
    frozen = {name: part for name, part in values.items() if head == "lm" or name != "score"}  # a new head is trained
    return Trained(layout, state.abstract(layout), Base(frozen, adapters.scale, adapters.dropout))


def copy_weights(tree: Params, offload: bool) -> Params:
    """Copies weights into device memory, or, one array on the devices at a time, to the host."""
    if not offload and not any(map(placing.is_offloaded, jax.tree.leaves(tree))):
        shardings = jax.tree.map(lambda x: x.sharding, tree)
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(tree)

    def copy_array(x: jax.Array) -> jax.Array:
        copy: jax.Array = placing.to_device(x).copy()
        return placing.to_host(copy) if offload else copy

    return jax.tree.map(copy_array, tree)


@dataclasses.dataclass(frozen=True)
class Maker:
    """The functions that make a learner's arrays: LOADED loads weights, SHAPES makes shapes for forecasts."""

    load: Callable[..., Trained]
    begin_optimizer: Callable[..., tuple[Any, Any]]  # (tx, layout, learned) -> its state, the shardings
    copy: Callable[[Params, bool], Params]  # (weights, whether to the host) -> a copy
    put: Callable[[Any, Any], Any]  # (values, sharding)


LOADED = Maker(load_trained, state.init_optimizer, copy_weights, placing.put)
SHAPES = Maker(sketch_trained, state.abstract_optimizer, placing.copy_shapes, placing.shapes)


def offload_if(trained: Trained, offloaded: bool, *, shared: bool = False) -> Trained:
    """Moves the model to host memory if `offloaded`; a base that is `shared` with another model is not moved."""
    if not offloaded:
        return trained
    base = trained.base if shared else placing.to_host(trained.base)
    return dataclasses.replace(trained, learned=placing.to_host(trained.learned), base=base)


def make_algorithm(c: Settings) -> Algorithm:
    """Makes the algorithm of the settings: the extension, estimator and losses, and terms that other settings add."""
    algorithm = parts.algorithm(c)
    assert isinstance(algorithm, Algorithm)
    algorithm = dataclasses.replace(algorithm, terms=(*algorithm.terms, *catalogue.regularisers(c.actor)))
    algorithm = algorithm.over(Algorithm(value_terms=catalogue.value_terms(c.critic)))
    parts.run_on_shapes(algorithm, "metrics", parts.loss_setting(c))  # raises where terms of the two share one
    return algorithm


def make_loss(c: Loop) -> Algorithm:
    """Makes the losses of policy and critic that `actor` and `critic` set, without an estimate of advantages."""
    algorithm = parts.policy_loss(c)
    assert isinstance(algorithm, Algorithm)
    algorithm = dataclasses.replace(algorithm, terms=(*algorithm.terms, *catalogue.regularisers(c.actor)))
    return algorithm.over(Algorithm(value_terms=catalogue.value_terms(c.critic)))


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
    return jax.jit(functools.partial(kl.adaptive, steps=c.sequences_of_step, target=a.target_kl, horizon=a.horizon))


def make_recipe(c: Settings) -> ppo.Recipe:
    """Makes the recipe of a PPO run: the algorithm of the settings, and the computations around it."""
    talk = c.rollout.multi_turn
    return dataclasses.replace(
        _make_recipe(c, make_algorithm(c)),
        bypass=c.algorithm.old_logprob == "bypass",
        correction=make_correction(c),
        kl_penalty=kl_name(c.algorithm.kl_penalty, "algorithm.kl_penalty") if c.algorithm.use_kl_in_reward else None,
        adapt_kl=make_kl_controller(c),
        value_norm_decay=c.critic.value_norm_decay,
        earns=bool(c.reward.function or c.reward.model.step_aggregation or talk.enable or c.rollout.agent),
        branches=c.rollout.has_branches,
    )


def make_loop_recipe(c: Loop) -> ppo.Recipe:
    """Makes the losses of a user's loop, and passes of log-probs, of the reference by token as for a KL in a reward."""
    return _make_recipe(c, make_loss(c), kl_penalty="kl")


def _make_recipe(c: Loop, algorithm: Algorithm, kl_penalty: str | None = None) -> ppo.Recipe:
    """Makes the parts of a recipe that a PPO run and a user's loop share: losses, their means, KL and metrics."""
    a, v = c.actor, c.critic
    value_mode = a.loss_agg_mode if v.loss_agg_mode is None else v.loss_agg_mode
    scale = float(c.data.max_response_length) if a.loss_scale_factor is None else a.loss_scale_factor
    value_scale = scale if v.loss_scale_factor is None else v.loss_scale_factor
    return ppo.Recipe(
        algorithm=algorithm,
        bypass=False,
        correction=None,
        kl_penalty=kl_penalty,
        kl_loss_type=kl_name(a.kl_loss_type, "actor.kl_loss_type") if a.use_kl_loss else None,
        kl_topk=(("topk", a.kl_topk), ("min_logp", a.kl_log_prob_min_clamp)),
        mean=functools.partial(update.aggregate, usual=algorithm.aggregation or a.loss_agg_mode, scale=scale),
        value_mean=functools.partial(update.aggregate, usual=value_mode, scale=value_scale),
        value_range=v.value_range if v.value_bins else None,
        entropy_metric=a.calculate_entropy,
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
        if isinstance(learning_rate, optim.Hyperparameters):
            h, learning_rate = learning_rate, learning_rate.lr
            if section.optimizer == "adamw":
                adamw = optim.adamw(h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay)
                return cast(optax.GradientTransformation, adamw)
        arguments = (section, learning_rate, matrices)
        transformation = parts.OPTIMIZERS.make(section.optimizer, f"{name}.optimizer", *arguments)
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


def require_optimizers(c: Common) -> None:
    """Raises UserError for an invalid optimizer; before servers start."""
    for name, section in optimizers(c).items():
        make_chain(section, name)


# Four row lengths instead of one are up to 21 further programs, some seconds each, and save at most 3/8 of the entries.
WORTH_S = 300.0  # assumed, as the next two
REACHED, CPU_FLOPS = 0.4, 1e11  # share of a device's peak; rate of all cores of a CPU


def packing_kind(c: Common, mesh: Any) -> str:
    """Returns `data.packing`; 'auto' shares rows only where a fused kernel keeps their mask from being quadratic."""
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
    forward = cost.forward(policy, [c.data.longest_row], head_tokens=c.data.max_response_length)
    train_flops = 3 * sequences * forward  # forward, and backward twice that
    peak = sharding.known_peak(mesh.devices.flat[0].device_kind, c.model.compute_dtype)
    rate = CPU_FLOPS if peak is None else mesh.size * peak * REACHED
    return 4 if train_flops / rate > WORTH_S else 1


def plan_rows(
    c: Training | Loop,
    mesh: Any,
    *,
    tokens_per_device: int,
    sequences: int,
    steps: int,
    policy: ModelConfig,
    extra_tokens: int = 0,
    sizes: Sequence[int] = (),
) -> packing.Plan:
    """Plans the row shapes of a run of `steps` batches; `extra_tokens` are of a sequence beyond prompt and response.

    With shared prompts, the policy's cost model sets the lengths. `sizes` is as in `packing.make_plan`.
    """
    multiple, length_multiple = sharding.row_multiple(mesh), sharding.length_multiple(mesh)
    row, per_device, shared = c.data.max_tokens_per_row, tokens_per_device * length_multiple, shared_prompts(c, mesh)
    prompt_options = dict[str, Any]()
    if shared is not None and isinstance(c, Loop):
        if row == -1:
            row = min(per_device, packing.longest_row(*shared, samples=c.rollout.n))

        def price(length: int) -> float:
            return cost.price(policy, attention.computed(length, shared) / length)

        prompt_options = dict(price=price, shared=shared)
    max_length = c.data.longest_row + extra_tokens
    return packing.make_plan(
        packing_kind(c, mesh),
        max_length=max_length,
        row_lengths=row_length_count(c, mesh, policy, steps * c.sequences_of_step),
        max_tokens_per_row=max_length if row == -1 else row,
        tokens_per_micro=per_device * multiple,
        sequences=sequences,
        row_multiple=multiple,
        length_multiple=length_multiple,
        sizes=sizes,
        **prompt_options,
    )


def plan_of_run(c: Settings, mesh: Any, policy: ModelConfig, steps: int) -> packing.Plan:
    """Plans the row shapes of a PPO run of `steps`."""
    return plan_mini_batches(c, mesh, policy, steps, tuple(epochs.mini_batch_size for epochs in make_epochs(c)))


def plan_mini_batches(c: Loop, mesh: Any, policy: ModelConfig, steps: int, sizes: tuple[int, ...]) -> packing.Plan:
    """Plans the row shapes of `steps` whose mini-batches have these sizes."""
    plan = plan_rows(
        c, mesh, tokens_per_device=c.actor.max_tokens_per_device, sequences=max(sizes), steps=steps,
        policy=policy, sizes=() if c.rollout.has_branches else sizes,
    )  # fmt: skip
    return dataclasses.replace(plan, experts=replayed_experts(c, policy), kept=kept_tokens(c, policy))


def kept_tokens(c: Loop, policy: ModelConfig) -> int:
    """Returns how many tokens of each truncated distribution the engine returns to be replayed; 0: none."""
    return min(c.rollout.mask_replay_tokens, policy.vocab_size) if c.rollout.mask_replay else 0


def replayed_experts(c: Loop, policy: ModelConfig) -> tuple[int, int] | None:
    """Returns (layers, active experts of a token) if the engine's experts are replayed; UserError without experts."""
    if not c.rollout.routing_replay:
        return None
    if policy.experts is None:
        raise UserError(
            f"rollout.routing_replay=True: the {policy.family} model of model.path has no experts; set it to False"
        )
    return policy.num_layers, policy.experts.active


def make_epochs(c: Settings) -> tuple[ppo.Epochs, ppo.Epochs]:
    """Returns how actor and critic go over the batch of a step."""
    a, v = c.actor, c.critic
    size = a.ppo_mini_batch_size if v.ppo_mini_batch_size is None else v.ppo_mini_batch_size
    count = a.ppo_epochs if v.ppo_epochs is None else v.ppo_epochs
    warmup_count = count if v.warmup_epochs is None else v.warmup_epochs
    shared_options = dict(most_sequences=most_sequences(c), warmup=c.trainer.critic_warmup)
    return (
        ppo.Epochs(a.ppo_epochs, a.ppo_mini_batch_size, a.shuffle, in_warmup=0, **shared_options),
        ppo.Epochs(count, size, v.shuffle, in_warmup=warmup_count, **shared_options),
    )


def most_sequences(c: Settings) -> int:
    """Returns the most trajectories of a step, the branches of episodes included."""
    return c.sequences_of_step * (c.rollout.agent_branches if c.rollout.has_branches else 1)


def batch_shape(c: Settings, mesh: Any) -> tuple[int, int]:
    """Returns a step's flat batch [B, L]: trajectories with branches, padded for the mesh, by the longest response."""
    devices = sharding.whole_row_multiple(mesh)
    return -(-most_sequences(c) // devices) * devices, c.data.max_response_length


def make_models(c: Loop, inputs: ModelConfigs, mesh: Any) -> tuple[ppo.Models, dict[str, Any]]:
    """Makes the modules of the models, and the arguments of `score.make_logprob` for the policy."""

    def model(cfg: ModelConfig) -> ppo.Model:
        cfg = pad_vocab(cfg, mesh.shape["tensor"])
        return make_decoder(c, cfg, mesh), cfg

    policy = model(inputs.policy)
    critic = None if inputs.critic is None else model(inputs.critic)
    reference = None if inputs.reference is None else model(inputs.reference)
    heads = dict(temperature=c.rollout.temperature, chunk_tokens=chunk_tokens(c.model, policy[1], mesh), mesh=mesh)
    return ppo.Models(policy, critic, reference), heads


def make_passes(c: Loop, recipe: ppo.Recipe, inputs: ModelConfigs, mesh: Any) -> ppo.Passes:
    """Makes the passes of a recipe; loads and compiles nothing."""
    models, heads = make_models(c, inputs, mesh)
    options = sharding.compiler_options(mesh, c.model.compiler_options)
    return ppo.make_passes(models, recipe, **heads, options=options)


def shares_trunk(c: Loop, inputs: ModelConfigs) -> bool:
    """Whether critic and policy share one frozen base in memory."""
    return inputs.adapters is not None and inputs.critic_adapters is not None and path_of_critic(c) == c.model.path


def make_learner(c: Settings, inputs: ModelConfigs, mesh: Any, maker: Maker = LOADED) -> tuple[StepLearner, TrainState]:
    """Loads the models of a PPO run into their shards; returns the learner and the state before the first step."""
    recipe, plan = make_recipe(c), plan_of_run(c, mesh, inputs.policy, inputs.total_steps)
    warmup, coefficient = c.trainer.critic_warmup, c.algorithm.kl_coef
    learner, begin = load_learner(c, inputs, mesh, recipe, plan, maker, warmup=warmup, kl_coef=coefficient)
    actor_epochs, critic_epochs = make_epochs(c)
    step_fields = dict[str, Any](shape=batch_shape(c, mesh), actor_epochs=actor_epochs, critic_epochs=critic_epochs)
    return StepLearner(**vars(learner), **step_fields), begin


def make_loop_learner(c: Loop, inputs: ModelConfigs, mesh: Any) -> tuple[Learner, TrainState]:
    """Loads the models of a user's loop into their shards and makes the passes."""
    plan = plan_mini_batches(c, mesh, inputs.policy, inputs.total_steps, (c.actor.ppo_mini_batch_size,))
    return load_learner(c, inputs, mesh, make_loop_recipe(c), plan)


def load_learner(
    c: Loop, inputs: ModelConfigs, mesh: Any, recipe: ppo.Recipe, plan: packing.Plan, maker: Maker = LOADED, *,
    warmup: int = 0, kl_coef: float = 0.0,
) -> tuple[Learner, TrainState]:  # fmt: skip
    """Loads the models and makes their passes; `warmup` is the number of first steps without the policy's update."""
    passes, seed, steps = make_passes(c, recipe, inputs, mesh), c.trainer.seed, inputs.total_steps
    policy, value = load_models(c, inputs, mesh, seed, maker)
    actor, policy_opt = make_trainable(c.actor, "actor", passes.actor, policy, steps - warmup, maker)
    critic = value_opt = reference = None
    if value is not None and passes.critic is not None:
        critic, value_opt = make_trainable(c.critic, "critic", passes.critic, value, steps, maker)
    if inputs.reference is not None:
        key, cfg = jax.random.fold_in(jax.random.key(seed), 2), pad_vocab(inputs.reference, mesh.shape["tensor"])
        reference = load_reference(c, mesh, cfg, policy, key, maker)
    cfg = pad_vocab(inputs.policy, mesh.shape["tensor"])
    learner = Learner(
        mesh=mesh, cfg=cfg, plan=plan, recipe=recipe, passes=passes, actor=actor, critic=critic, reference=reference
    )
    begin = state.begin_state(
        policy.learned, policy_opt, None if value is None else value.learned, value_opt, kl_coef=kl_coef, seed=seed,
        value_norm=recipe.value_norm_decay is not None, put=maker.put,
    )  # fmt: skip
    return learner, begin


def load_models(
    c: Loop, inputs: ModelConfigs, mesh: Any, seed: int, maker: Maker = LOADED,
    bases: tuple[Base | None, Base | None] = (None, None),
) -> tuple[Trained, Trained | None]:  # fmt: skip
    """Loads policy and critic; `bases` are their frozen weights, where these are in memory already."""
    base, critic_base = bases
    key = jax.random.key(seed)
    policy = maker.load(
        c, mesh, pad_vocab(inputs.policy, mesh.shape["tensor"]), c.model.path, head="lm",
        key=jax.random.fold_in(key, 0), adapters=inputs.adapters, trunk=None if base is None else base.params,
    )  # fmt: skip
    policy = offload_if(policy, c.actor.param_offload, shared=base is not None)
    if inputs.critic is None:
        return policy, None
    path, trunk = path_of_critic(c), critic_base
    if shares_trunk(c, inputs):
        trunk = policy.base
    elif path != c.model.path:  # a critic's files have its head, too
        trunk = None
    critic = maker.load(
        c, mesh, pad_vocab(inputs.critic, mesh.shape["tensor"]), path, head="value", init=critic_init(c),
        key=jax.random.fold_in(key, 1), adapters=inputs.critic_adapters, trunk=None if trunk is None else trunk.params,
    )  # fmt: skip
    return policy, offload_if(critic, c.critic.param_offload, shared=trunk is not None)


def begin_further_state(c: Loop, inputs: ModelConfigs, learner: Learner, seed: int) -> TrainState:
    """Makes the initial state of further trained weights for a learner's programs; frozen bases are shared."""
    bases = learner.actor.base, None if learner.critic is None else learner.critic.base
    policy, value = load_models(c, inputs, learner.mesh, seed, bases=bases)
    init_opt = functools.partial(begin_optimizer, c, inputs, learner)
    critic_state = (None, None) if value is None else (value.learned, init_opt("value", value.learned))
    return state.begin_state(policy.learned, init_opt("policy", policy.learned), *critic_state, seed=seed)


def begin_optimizer(c: Loop, inputs: ModelConfigs, learner: Learner, field: str, learned: Params) -> Any:
    """Returns the initial optimizer state of `policy` or `value`, for loaded parameters."""
    head, cfg, adapters = head_config_adapters(inputs, learner, field)
    section, name = (c.actor, "actor") if head == "lm" else (c.critic, "critic")
    if adapters is None:
        layout = state.model_weights(cfg, learner.mesh, head=head, param_dtype=c.model.param_dtype)
    else:
        layout = state.adapters(cfg, learner.mesh, adapters, head=head)
    opt, _ = state.init_optimizer(optimizer_of(section, name, layout), layout, learned)
    return placing.to_host(opt) if section.optimizer_offload else opt


def head_config_adapters(inputs: ModelConfigs, learner: Learner, field: str) -> tuple[Head, ModelConfig, Lora | None]:
    """Returns head, config and adapters of the model in a field of the train state, `policy` or `value`."""
    if field == "policy" or inputs.critic is None:
        return "lm", learner.cfg, inputs.adapters
    return "value", pad_vocab(inputs.critic, learner.mesh.shape["tensor"]), inputs.critic_adapters


def list_run_programs(c: Settings, learner: StepLearner, now: TrainState) -> list[programs.Program]:
    """Lists the programs of a run's steps; learner and state may be of shapes."""
    shuffles = c.actor.shuffle or c.critic.shuffle
    return programs.list_programs(learner, now, shuffled=most_sequences(c) if shuffles else 0)


def run_programs(
    to_run: Sequence[programs.Program], progress: Callable[[str, int], Callable[[], None]] = lambda *_: ppo.silent
) -> None:
    """Runs the programs on zeros, so that no step compiles; `progress` gets a label and a total, and counts each."""
    count_one = progress("programs compiled", len(to_run))
    for program in to_run:
        program.run()
        count_one()


def load_reference(c: Loop, mesh: Any, cfg: ModelConfig, policy: Trained, key: jax.Array, maker: Maker) -> Params:
    """Makes the frozen reference of the KL: its own model, or a copy of the initial policy."""
    if c.ref.path != "policy":
        trained = maker.load(c, mesh, cfg, c.ref.path, head="lm", init="pretrained", key=key, adapters=None)
        return offload_if(trained, c.ref.param_offload).learned
    if policy.base is not None:  # LoRA: the loaded base is the reference
        return policy.base.params
    return maker.copy(policy.learned, c.ref.param_offload)


def make_trainable(
    section: Optimizer, name: str, loss: CompiledLoss, trained: Trained, total_steps: int, maker: Maker = LOADED
) -> tuple[Trainable, Any]:
    """Makes the Trainable of a loaded model by a section of the config, and the initial state of its optimizer."""
    tx = optimizer_of(section, name, trained.layout)
    opt, opt_shardings = maker.begin_optimizer(tx, trained.layout, trained.learned)
    apply = make_scheduled_apply(section, tx, trained.layout, opt_shardings, total_steps)
    apply_hyper = update.make_apply(tx, lambda hyper: hyper, shardings=(trained.layout.shardings, opt_shardings))
    zeros = update.make_zeros(trained.layout.shapes, trained.layout.shardings)
    spare = trained.layout.spare, state.spare_of_optimizer(tx, trained.layout)
    opt = placing.to_host(opt) if section.optimizer_offload else opt
    exchange = update.make_exchange(trained.layout.shardings)
    trainable = Trainable(name, loss, apply, zeros, exchange, base=trained.base, spare=spare, apply_hyper=apply_hyper)
    return trainable, opt


def make_scheduled_apply(section: Optimizer, tx: Any, layout: state.ModelLayout, places: Any, total_steps: int) -> Any:
    """Compiles the optimizer step with its schedule; `places` are the shardings of its state."""
    return update.make_apply(tx, rate_schedule(section, total_steps), shardings=(layout.shardings, places))
