"""The compiled side of a run: mesh, sharded models, passes, optimizers; and their compilation before the first step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

import jppo.process  # noqa: F401  # corrects the sums of XLA, whoever makes a learner
from jppo.errors import UserError
from jppo.learner import model_configs, ppo, programs, score, sharding, state, update
from jppo.learner.model_configs import critic_init, path_of_critic
from jppo.learner.ppo import Learner, ModelConfigs
from jppo.learner.recipe import (
    batch_shape,
    make_epochs,
    make_recipe,
    most_sequences,
    optimizer_of,
    packing_kind,
    plan_of_run,
    rate_schedule,
    shared_prompts,
)
from jppo.learner.trainable import CompiledLoss, Trainable
from jppo.models import experts, fused, modules, placing, sequence_parallel
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.decoder import Decoder, Remat, attention_settings
from jppo.models.lora import Base, Lora
from jppo.models.params import Head
from jppo.settings import Common, FineTuning, Model, Optimizer, PreferenceTuning, Settings
from jppo.types import Params, TrainState


def make_mesh(c: Common, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Makes the mesh of the config from the given devices, by default this machine's.

    Described devices can be given: programs compile for them but cannot run.
    """
    if devices is None:
        devices = jax.devices()
        model_configs.require_host(c, devices[0])
    shape = sharding.mesh_shape(len(devices), **{axis: getattr(c.mesh, axis) for axis in sharding.AXES})
    return sharding.mesh_of_shape(shape, devices)


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
    learned: Params
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
    """Loads the model at `path` into its shards for training; a critic may use a loaded `trunk`.

    `key` initialises weights that the files lack, or all if `init` (None: `model.init`) is 'random'.
    """
    layout = state.model_weights(cfg, mesh, head=head, param_dtype=c.model.param_dtype, adapters=adapters)
    if trunk is None:
        values = state.load_sharded(layout, path, init=init or c.model.init, key=key)
    else:
        values = state.on_trunk(layout, trunk, key=key)
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
    _: str,
    *,
    head: Head,
    adapters: Lora | None,
    trunk: Params | None = None,
    **__: Any,
) -> Trained:
    """Does `load_trained` with shapes in place of arrays."""
    layout = state.model_weights(cfg, mesh, head=head, param_dtype=c.model.param_dtype, adapters=adapters)
    values = state.abstract(layout)
    values |= {name: part for name, part in (trunk or {}).items() if name in values}
    if adapters is None:
        return Trained(layout, values, None)
    layout = state.adapters(cfg, mesh, adapters, head=head)
    stays = {name: part for name, part in values.items() if head == "lm" or name != "score"}
    return Trained(layout, state.abstract(layout), Base(stays, adapters.scale, adapters.dropout))


def copy_weights(tree: Params, offload: bool) -> Params:
    """Copies weights into device memory, or, one array on the devices at a time, to the host."""
    if not offload and not any(map(placing.waits, jax.tree.leaves(tree))):
        places = jax.tree.map(lambda x: x.sharding, tree)
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=places)(tree)

    def apart(x: jax.Array) -> jax.Array:
        copy: jax.Array = placing.to_device(x).copy()
        return placing.to_host(copy) if offload else copy

    return jax.tree.map(apart, tree)


@dataclasses.dataclass(frozen=True)
class Making:
    """How the arrays of a learner are made."""

    load: Callable[..., Trained]
    begin_optimizer: Callable[..., tuple[Any, Any]]  # (tx, layout, learned) -> its state, the shardings
    copy: Callable[[Params, bool], Params]  # (weights, to the host) -> others of the same values
    put: Callable[[Any, Any], Any]  # (values, sharding)


LOADED = Making(load_trained, state.init_optimizer, copy_weights, placing.put)
SHAPES = Making(sketch_trained, state.abstract_optimizer, placing.copy_shapes, placing.shapes)


def wait(trained: Trained, offloaded: bool, *, shared: bool = False) -> Trained:
    """Offloads the model to the host if asked; a `shared` base stays where its owner put it."""
    if not offloaded:
        return trained
    base = trained.base if shared else placing.to_host(trained.base)
    return dataclasses.replace(trained, learned=placing.to_host(trained.learned), base=base)


def make_models(c: Settings, inputs: ModelConfigs, mesh: Any) -> tuple[ppo.Models, dict[str, Any]]:
    """Makes the modules of the models, and the arguments of `score.make_logprob` for the policy."""

    def model(cfg: ModelConfig) -> ppo.Model:
        cfg = pad_vocab(cfg, mesh.shape["tensor"])
        return make_decoder(c, cfg, mesh), cfg

    policy = model(inputs.policy)
    critic = None if inputs.critic is None else model(inputs.critic)
    reference = None if inputs.reference is None else model(inputs.reference)
    heads = dict(temperature=c.rollout.temperature, chunk_tokens=chunk_tokens(c.model, policy[1], mesh), mesh=mesh)
    return ppo.Models(policy, critic, reference), heads


def make_recipe_and_passes(c: Settings, inputs: ModelConfigs, mesh: Any) -> tuple[ppo.Recipe, ppo.Passes]:
    """Makes the passes of the config; loads and compiles nothing."""
    models, heads = make_models(c, inputs, mesh)
    recipe = make_recipe(c)
    options = sharding.compiler_options(mesh, c.model.compiler_options)
    return recipe, ppo.make_passes(models, recipe, **heads, options=options)


def shares_trunk(c: Settings, inputs: ModelConfigs) -> bool:
    """Whether critic and policy share one frozen base in memory."""
    return inputs.adapters is not None and inputs.critic_adapters is not None and path_of_critic(c) == c.model.path


def make_learner(c: Settings, inputs: ModelConfigs, mesh: Any, how: Making = LOADED) -> tuple[Learner, TrainState]:
    """Loads the models into their shards and makes the passes."""
    a, path = c.actor, c.model.path

    def keys(number: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(c.trainer.seed), number)

    def fit(cfg: ModelConfig) -> ModelConfig:
        return pad_vocab(cfg, mesh.shape["tensor"])

    cfg = fit(inputs.policy)
    recipe, passes = make_recipe_and_passes(c, inputs, mesh)
    policy = how.load(c, mesh, cfg, path, head="lm", key=keys(0), adapters=inputs.adapters)
    policy = wait(policy, a.param_offload)
    steps = inputs.total_steps - c.trainer.critic_warmup
    actor, policy_opt = make_trainable(a, "actor", passes.actor, policy, steps, how)
    value = value_opt = critic = None
    if inputs.critic is not None and passes.critic is not None:
        shared = shares_trunk(c, inputs)
        trunk = policy.base.params if shared and policy.base is not None else None
        options = dict[str, Any](init=critic_init(c), key=keys(1), adapters=inputs.critic_adapters, trunk=trunk)
        trained = how.load(c, mesh, fit(inputs.critic), path_of_critic(c), head="value", **options)
        trained = wait(trained, c.critic.param_offload, shared=shared)
        value = trained.learned
        critic, value_opt = make_trainable(c.critic, "critic", passes.critic, trained, inputs.total_steps, how)
    reference = None
    if inputs.reference is not None:
        reference = load_reference(c, mesh, fit(inputs.reference), policy, keys(2), how)
    actor_epochs, critic_epochs = make_epochs(c)
    learner = Learner(
        mesh=mesh,
        cfg=cfg,
        plan=plan_of_run(c, mesh, inputs.policy, inputs.total_steps),
        shape=batch_shape(c, mesh),
        recipe=recipe,
        passes=passes,
        actor=actor,
        critic=critic,
        reference=reference,
        actor_epochs=actor_epochs,
        critic_epochs=critic_epochs,
    )
    begin = state.begin_state(
        policy.learned, policy_opt, value, value_opt, kl_coef=c.algorithm.kl_coef, seed=c.trainer.seed,
        value_norm=recipe.value_norm_decay is not None, put=how.put,
    )  # fmt: skip
    return learner, begin


def begin_again(c: Settings, inputs: ModelConfigs, learner: Learner, seed: int) -> TrainState:
    """Makes the initial state of further trained weights for a learner's programs; frozen bases are shared."""
    mesh, by_field = learner.mesh, dict[str, Any]()
    for number, (field, model) in enumerate({"policy": learner.actor, "value": learner.critic}.items()):
        if model is None:
            continue
        head, cfg, adapters = trained_kind(inputs, learner, field)
        key = jax.random.fold_in(jax.random.key(seed), number)
        if head == "lm" and model.base is not None and adapters is not None:
            layout = state.adapters(cfg, mesh, adapters, head=head)
            learned, _ = state.adapt(layout, model.base.params, adapters, key=key, path=c.model.lora_adapter_path)
        else:
            path = c.model.path if head == "lm" else path_of_critic(c)
            trunk = model.base.params if model.base is not None and path == c.model.path else None
            init = c.model.init if head == "lm" else critic_init(c)
            more = dict[str, Any](head=head, key=key, adapters=adapters, init=init, trunk=trunk)
            learned = load_trained(c, mesh, cfg, path, **more).learned
        section: Any = c.actor if head == "lm" else c.critic
        learned = placing.to_host(learned) if section.param_offload else learned
        by_field |= {field: learned, f"{field}_opt": begin_optimizer(c, inputs, learner, field, learned)}
    fields = [by_field.get(name) for name in ("policy", "policy_opt", "value", "value_opt")]
    return state.begin_state(*fields, kl_coef=c.algorithm.kl_coef, seed=seed)


def begin_optimizer(c: Settings, inputs: ModelConfigs, learner: Learner, field: str, learned: Params) -> Any:
    """Returns the initial optimizer state of `policy` or `value`, for loaded parameters."""
    head, cfg, adapters = trained_kind(inputs, learner, field)
    section, name = (c.actor, "actor") if head == "lm" else (c.critic, "critic")
    if adapters is None:
        layout = state.model_weights(cfg, learner.mesh, head=head, param_dtype=c.model.param_dtype)
    else:
        layout = state.adapters(cfg, learner.mesh, adapters, head=head)
    opt, _ = state.init_optimizer(optimizer_of(section, name, layout), layout, learned)
    return placing.to_host(opt) if section.optimizer_offload else opt


def trained_kind(inputs: ModelConfigs, learner: Learner, field: str) -> tuple[Head, ModelConfig, Lora | None]:
    """Returns head, config and adapters of `policy` or `value`."""
    if field == "policy" or inputs.critic is None:
        return "lm", learner.cfg, inputs.adapters
    return "value", pad_vocab(inputs.critic, learner.mesh.shape["tensor"]), inputs.critic_adapters


def list_run_programs(c: Settings, learner: Learner, now: TrainState) -> list[programs.Program]:
    """Lists the programs of a run's steps; learner and state may be of shapes."""
    shuffles = c.actor.shuffle or c.critic.shuffle
    return programs.list_programs(learner, now, shuffled=most_sequences(c) if shuffles else 0)


def run_programs(
    some: Sequence[programs.Program], part: Callable[[str, int], Callable[[], None]] = lambda *_: ppo.silent
) -> None:
    """Runs the programs on zeros, so that no step compiles; `part` begins the count of so many."""
    done = part("programs compiled", len(some))
    for program in some:
        program.run()
        done()


def load_reference(c: Settings, mesh: Any, cfg: ModelConfig, policy: Trained, key: jax.Array, how: Making) -> Params:
    """Makes the frozen reference of the KL: its own model, or a copy of the initial policy."""
    if c.ref.path != "policy":
        trained = how.load(c, mesh, cfg, c.ref.path, head="lm", init="pretrained", key=key, adapters=None)
        return wait(trained, c.ref.param_offload).learned
    if policy.base is not None:  # LoRA: the loaded base is the reference
        return policy.base.params
    return how.copy(policy.learned, c.ref.param_offload)


def make_trainable(
    section: Optimizer, name: str, loss: CompiledLoss, trained: Trained, total_steps: int, how: Making = LOADED
) -> tuple[Trainable, Any]:
    """Makes what trains a model by a section of the config, and the initial state of its optimizer."""
    tx = optimizer_of(section, name, trained.layout)
    opt, places = how.begin_optimizer(tx, trained.layout, trained.learned)
    apply = make_scheduled_apply(section, tx, trained.layout, places, total_steps)
    given = update.make_apply(tx, lambda hyper: hyper, shardings=(trained.layout.shardings, places))
    zeros = update.make_zeros(trained.layout.shapes, trained.layout.shardings)
    spare = trained.layout.spare, state.spare_of_optimizer(tx, trained.layout)
    opt = placing.to_host(opt) if section.optimizer_offload else opt
    exchange = update.make_exchange(trained.layout.shardings)
    made = Trainable(name, loss, apply, zeros, exchange, base=trained.base, spare=spare, apply_given=given)
    return made, opt


def make_scheduled_apply(section: Optimizer, tx: Any, layout: state.ModelLayout, places: Any, total_steps: int) -> Any:
    """Compiles the optimizer step with its schedule; `places` are the shardings of its state."""
    return update.make_apply(tx, rate_schedule(section, total_steps), shardings=(layout.shardings, places))
