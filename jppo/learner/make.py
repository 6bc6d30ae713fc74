"""From the settings to what every training has: the mesh, a loaded model, its optimizer, the shapes of rows.

PPO's learner is made in `run/make.py`. What of learner/ reads settings is here, in `catalogue.py` and in
`auto_packing.py`; the verbs of its other modules take values.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import optax

from jppo import process  # corrects the sums of XLA, whoever makes a learner
from jppo.errors import UserError
from jppo.learner import cost, loss_scale, optim, packing, score, sharding, state, update
from jppo.learner.trainable import CompiledLoss, Trainable
from jppo.models import attention, freeze, fused, half, hf, lora, modules, placing, sequence_parallel
from jppo.models.config import ModelConfig
from jppo.models.decoder import Decoder, Remat, attention_settings
from jppo.models.freeze import ALL_LEARN, Frozen
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
    Training,
    optimizers,
    parts,
)
from jppo.types import Array, Params

if TYPE_CHECKING:
    from jppo.learner.ppo import ModelConfigs


def make_mesh(c: Common, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Makes the mesh of the config from the given devices, by default this machine's.

    Described devices can be given: programs compile for them but cannot run.
    """
    if devices is None:
        devices = jax.devices()
        require_host_memory(c, devices[0])
    shape = sharding.mesh_shape(len(devices), **{axis: getattr(c.mesh, axis) for axis in sharding.AXES})
    return sharding.mesh_of_shape(shape, devices)


def open_mesh(c: Common, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Makes the config's mesh, of these devices or all, and prepares the process for them."""
    mesh = make_mesh(c, devices)
    process.prepare_process(sharding.platform(mesh), c.trainer.compile_cache, c.model.compute_dtype)
    return mesh


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


def find_frozen(c: Common, name: str, cfg: ModelConfig | None, *, head: Head) -> Frozen:
    """Finds the parameters that `freeze` of an optimizer's section keeps as they are; none without a model."""
    patterns = optimizers(c)[name].freeze
    return ALL_LEARN if cfg is None or not patterns else freeze.find_frozen(cfg, patterns, f"{name}.freeze", head=head)


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


def describe_offload(c: Common, inputs: "ModelConfigs | None", device: jax.Device) -> str | None:
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
        attend=sequence_parallel.exchange_positions(fused.make_attention(kernel, needs, mesh=mesh), mesh),
        dtype=c.model.compute_dtype,
        param_dtype=c.model.param_dtype,
        scan_layers=c.model.scan_layers,
        remat=cast(Remat, c.model.remat),
        constrain=sharding.constrain_to_rows(mesh),
        lookup=modules.make_lookup(mesh),
        mesh=mesh,
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
    frozen: Frozen = ALL_LEARN,
    init: str | None = None,
    trunk: Params | None = None,
) -> Trained:
    """Loads the model at `path` for training, each device its shards, or takes the weights of a loaded `trunk`.

    `key` initialises weights that the files lack, or all if `init` (None: `model.init`) is 'random'. With 'shapes',
    shapes take the place of arrays, and no file is read.
    """
    layout = state.model_weights(cfg, mesh, head=head, param_dtype=c.model.param_dtype, adapters=adapters)
    if trunk is None:
        values = state.load_sharded(layout, path, init=init or c.model.init, key=key)
    else:
        values = trunk if head == "lm" else state.on_trunk(layout, trunk, key=key)
    if c.model.scales_loss and not placing.are_shapes(values):
        half.require_range_of_all(values, "model.compute_dtype")
    if adapters is None and not frozen:
        return Trained(layout, values, None)
    if adapters is None:
        layout = state.model_weights(cfg, mesh, head=head, param_dtype=c.model.param_dtype, frozen=frozen)
        learned, rest = freeze.divide(cfg, values, frozen, head=head)
        return Trained(layout, learned, Base(rest))
    layout = state.adapters(cfg, mesh, adapters, head=head)
    start = c.model.lora_adapter_path if isinstance(c.model, Model) and head == "lm" else ""
    learned, base = state.adapt(layout, values, adapters, key=key, path=start)
    return Trained(layout, learned, base)


def sketch_trained(
    c: Common, mesh: Any, cfg: ModelConfig, *, head: Head, adapters: Lora | None, frozen: Frozen = ALL_LEARN
) -> Trained:
    """Makes a model for training of shapes in place of arrays."""
    options = dict[str, Any](adapters=adapters, frozen=frozen, init="shapes")
    return load_trained(c, mesh, cfg, "", head=head, key=jax.random.key(0), **options)


def copy_weights(tree: Params, offload: bool) -> Params:
    """Copies weights, or their shapes, into device memory, or, one array on the devices at a time, to the host."""
    if placing.are_shapes(tree):
        copies: Params = placing.on_device_shapes(tree)
        return placing.to_host(copies) if offload else copies
    if not offload and not any(map(placing.is_offloaded, jax.tree.leaves(tree))):
        shardings = jax.tree.map(lambda x: x.sharding, tree)
        return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)(tree)

    def copy_array(x: jax.Array) -> jax.Array:
        copy: jax.Array = placing.to_device(x).copy()
        return placing.to_host(copy) if offload else copy

    return jax.tree.map(copy_array, tree)


def offload_if(trained: Trained, offloaded: bool, *, shared: bool = False) -> Trained:
    """Moves the model to host memory if `offloaded`; a base that is `shared` with another model is not moved."""
    if not offloaded:
        return trained
    base = trained.base if shared else placing.to_host(trained.base)
    return dataclasses.replace(trained, learned=placing.to_host(trained.learned), base=base)


def optimizer_of(section: Optimizer, name: str, layout: state.ModelLayout, *, scaled: bool) -> Any:
    """Makes the optimizer of a section of the config; `name` and `scaled` as in `make_trainable`."""
    chain = make_chain(section, name if name in ("actor", "critic") else "optim", layout.matrices)
    narrow = any(x.dtype != jnp.float32 for x in jax.tree.leaves(layout.shapes))
    tx = optim.make_optimizer(
        chain,
        grad_clip=section.grad_clip,
        moments_dtype=section.moments_dtype,
        master=section.master_dtype == "float32" and narrow,
        still=layout.still,
    )
    return loss_scale.scale_loss(tx) if scaled else tx


def make_chain(section: Optimizer, name: str, matrices: Any = None) -> optim.Chain:
    """Returns the optax chain of `optimizer` in section `name`, as a function of the learning rate.

    Given `Hyperparameters`, AdamW takes all of them, another optimizer the learning rate alone. `matrices` tells Muon
    which parameters are matrices.
    """

    def chain(learning_rate: Any) -> optax.GradientTransformation:
        if isinstance(learning_rate, optim.Hyperparameters):
            h, learning_rate = learning_rate, learning_rate.lr
            if section.optimizer == "adamw":
                return optax.adamw(h.lr, h.beta1, h.beta2, h.eps, weight_decay=h.weight_decay)
        arguments = (section, learning_rate, matrices)
        transformation = parts.OPTIMIZERS.make(section.optimizer, f"{name}.optimizer", *arguments)
        return cast(optax.GradientTransformation, transformation)  # `make` has checked the class

    chain(0.0)  # raises where the optimizer cannot be made
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
    """Returns `data.packing`; 'auto' shares rows only where a fused kernel keeps their mask from being quadratic.

    `auto_packing.py` has replaced an 'auto' by prefix where that costs less.
    """
    if c.data.packing != "auto":
        return c.data.packing
    return "segments" if sharding.platform(mesh) == "tpu" and c.model.attention in ("auto", "splash") else "buckets"


def shared_prompts(c: Common, mesh: Any) -> tuple[int, int] | None:
    """Returns the longest prompt and response where n responses share one prompt."""
    return (c.data.max_prompt_length, c.data.max_response_length) if packing_kind(c, mesh) == "prefix" else None


def token_price(c: Common, mesh: Any, policy: ModelConfig) -> Callable[[int], float]:
    """Returns the cost of a token, with the attention of its row, as a function of the row's length."""
    kernel, shared = attention_kernel(c, policy, mesh)[0], shared_prompts(c, mesh)
    slower = cost.SLOWER[sharding.platform(mesh), kernel]

    def price(length: int) -> float:
        pairs = attention.count_score_pairs(length, shared) if kernel == "xla" else length * (length + 1) // 2
        return cost.price(policy, pairs / length, slower)

    return price


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
        prompt_options = dict(price=token_price(c, mesh, policy), shared=shared)
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
        most=fused.PACKED if sharding.platform(mesh) == "gpu" and c.model.attention != "xla" else None,
        **prompt_options,
    )


def kept_tokens(c: Loop, policy: ModelConfig) -> int:
    """Returns how many tokens of each truncated distribution the engine returns to be replayed; 0: none."""
    return min(c.rollout.mask_replay_tokens, policy.vocab_size) if c.rollout.mask_replay else 0


def make_trainable(
    section: Optimizer, name: str, loss: CompiledLoss, trained: Trained, total_steps: int, *, scaled: bool
) -> tuple[Trainable, Any]:
    """Makes the Trainable of a loaded model by a section of the config, and the initial state of its optimizer.

    `scaled`: the optimizer's state has a loss scale.
    """
    tx = optimizer_of(section, name, trained.layout, scaled=scaled)
    opt, opt_shardings = state.init_optimizer(tx, trained.layout, trained.learned)
    shardings = trained.layout.shardings, opt_shardings
    apply = update.make_apply(tx, rate_schedule(section, total_steps), shardings=shardings)
    apply_hyper = update.make_apply(tx, lambda hyper: hyper, shardings=shardings)
    zeros = update.make_zeros(trained.layout.shapes, trained.layout.shardings)
    spare = trained.layout.spare, state.spare_of_optimizer(tx, trained.layout)
    opt = placing.to_host(opt) if section.optimizer_offload else opt
    exchange = update.make_exchange(trained.layout.shardings)
    trainable = Trainable(name, loss, apply, zeros, exchange, base=trained.base, spare=spare, apply_hyper=apply_hyper)
    return trainable, opt
