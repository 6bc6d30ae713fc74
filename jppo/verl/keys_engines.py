"""verl's settings of the training engines (FSDP, Megatron and others), the optimizers and the profilers."""

from collections.abc import Iterator

from jppo.verl.name import Name, missing, needless, same, within

_OTHERS = "it is of another engine of verl; jppo has one"
_MOMENTS = "actor.moments_dtype and critic.moments_dtype set the optimizer's precision"
_PROFILER = "trainer.profile_steps writes traces of JAX's profiler"
_ONE_MESH = "one mesh shards everything"
_NO_REPLAY = "the policy alone replays experts, and those of the rollout engine"


def _optimizer(optim: str, section: str, lr: float) -> Iterator[Name]:
    """Yields the rows of the actor's or critic's optimizer."""
    yield same(f"{optim}.lr", f"{section}.lr", lr)
    yield same(f"{optim}.clip_grad", f"{section}.grad_clip", 1.0)
    yield same(f"{optim}.betas", f"{section}.betas", (0.9, 0.999), "pair")
    yield same(f"{optim}.weight_decay", f"{section}.weight_decay", 0.01)
    yield same(f"{optim}.lr_warmup_steps", f"{section}.lr_warmup_steps", -1, "warmup_steps")
    yield same(f"{optim}.lr_warmup_steps_ratio", f"{section}.lr_warmup_steps_ratio", 0.0, f"{section}_warmup_ratio")
    yield same(f"{optim}.lr_scheduler_type", f"{section}.lr_scheduler_type", "constant", "schedule")
    yield same(f"{optim}.min_lr_ratio", f"{section}.min_lr_ratio", 0.0, "or_zero")
    yield same(f"{optim}.min_lr", f"{section}.min_lr_ratio", convert=f"{section}_min_lr", why="over the learning rate")
    why = "AdamW, SGD and Muon, in lower case"
    yield same(f"{optim}.optimizer", f"{section}.optimizer", convert="optimizer", why=why)
    chains = "optax has the optimizers; actor.moments_dtype=bfloat16 makes their state smaller"
    yield from missing(chains, f"{optim}.optimizer_impl", off=("torch.optim",))
    yield from missing("cosine has half a period", f"{optim}.num_cycles", off=(0.5,))
    yield from missing("a warm-up starts at 0 in step 1", f"{optim}.zero_indexed_step", off=(True,))
    yield from missing("a warm-up starts at 0", within(optim, "lr_warmup_init lr_start"), off=(0,))
    yield from missing("the schedule ends with the run", within(optim, "lr_decay_steps lr_decay_ratio"), off=(1.0,))
    yield from needless("it is trainer.total_training_steps, in verl too", f"{optim}.total_training_steps")
    yield from missing("the weight decay is constant", f"{optim}.weight_decay_incr_style", off=("constant",))
    yield from needless("it is of a schedule that jppo does not have", within(optim, "lr_wsd_decay_* decay_type"))
    yield from needless("a resume restores the schedule", f"{optim}.use_checkpoint_opt_param_scheduler")
    yield from missing(_MOMENTS, f"{optim}.use_precision_aware_optimizer")
    yield from missing(_MOMENTS, within(optim, "main_grads_dtype exp_avg_dtype exp_avg_sq_dtype"), off=("fp32",))
    yield from needless(_ONE_MESH, f"{optim}.use_layer_wise_distributed_optimizer")
    yield from needless(f"{section}.optimizer=muon has optax's defaults", f"{optim}.muon_*")
    yield from missing("eps is optax's default", f"{optim}.eps", off=(1e-8,))
    own = f"set {section}.optimizer=PATH.py:NAME, a custom optax chain"
    yield from missing(own, f"{optim}.override_optimizer_config*", off=({},))


def _engine(model: str, section: str) -> Iterator[Name]:
    """Yields the rows of the engines of the actor, the critic or the reference."""
    fsdp = "critic.fsdp" if section == "critic" else f"{model}.fsdp_config"
    megatron = f"{model}.megatron"
    if section == "actor":
        yield same(f"{fsdp}.fsdp_size", "mesh.fsdp", -1, why="-1 is all devices; else mesh.data has the remaining ones")
        yield same(f"{fsdp}.model_dtype", "model.param_dtype", "float32", "train_dtype")
        yield same(f"{fsdp}.dtype", "model.compute_dtype", "bfloat16", "train_dtype")
        yield same(f"{megatron}.tensor_model_parallel_size", "mesh.tensor", 1)
        yield same(f"{megatron}.expert_model_parallel_size", "mesh.expert", 1)
        axes = "pipeline_model virtual_pipeline_model expert_tensor"
        yield from missing(
            "there is no pipeline, and experts' widths follow mesh.tensor; mesh.fsdp and mesh.expert shard the model",
            within(megatron, " ".join(f"{axis}_parallel_size" for axis in axes.split())),
            off=(1,),
        )
    else:
        mesh = f"{fsdp}.fsdp_size {megatron}.*_parallel_size"
        yield from needless("all models share the actor's mesh", mesh)
        yield from needless("all models have the dtypes of model.*", within(fsdp, "model_dtype dtype"))
    convert = "ref_offload" if section == "ref" else "as_is"
    yield same(f"{fsdp}.param_offload", f"{section}.param_offload", False, convert)
    if section == "ref":
        yield from needless("the reference has no optimizer", f"{fsdp}.optimizer_offload {model}.optim.*")
    else:
        yield same(f"{fsdp}.optimizer_offload", f"{section}.optimizer_offload", False)
    yield from needless("gradients are not kept between steps", f"{fsdp}.grad_offload")
    yield from missing("set param_offload and optimizer_offload", f"{fsdp}.offload_policy")
    yield from needless(_ONE_MESH, within(fsdp, "strategy ulysses_sequence_parallel_size"))
    yield from needless("trainer.seed is the seed of everything", f"{fsdp}.seed")
    yield from missing("on a GPU, set XLA_FLAGS=--xla_gpu_deterministic_ops=true", f"{fsdp}.full_determinism")
    compiled = "wrap_policy.* reshard_after_forward forward_prefetch use_orig_params use_torch_compile"
    compiled += " use_no_sync_for_gradient_accumulation forward_only"
    yield from needless("XLA compiles every program, and schedules its communication", within(fsdp, compiled))
    yield from needless("model.param_dtype and model.compute_dtype are the dtypes", f"{fsdp}.mixed_precision*")
    yield from needless("model.logprob_chunk_bytes is the size of a chunk", f"{fsdp}.entropy_*")
    yield from needless("packing does it: no row is padded to the longest", f"{fsdp}.pad_to_length*")
    for quantized in (f"{fsdp}.qat", f"{model}.qat"):
        yield from missing("training is not quantized", f"{quantized}.*", only=f"{quantized}.enable")
    yield from needless(_OTHERS, f"{fsdp}.turbo_config.* {model}.veomni* {model}.torchtitan*")
    yield from needless("model.remat sets what is recomputed", f"{megatron}.override_transformer_config.recompute_*")
    yield from needless("model.attention chooses", f"{megatron}.override_transformer_config.attention_backend")
    yield from missing("the model is as its config.json describes it", f"{megatron}.override_*", off=({},))
    yield from missing("training is not quantized", f"{megatron}.qat.*", only=f"{megatron}.qat.enable")
    replay = ("disabled", "R3") if section == "actor" else ("disabled",)  # R3 needs R.enable_rollout_routing_replay
    yield from missing(_NO_REPLAY, f"{megatron}.router_replay.*", off=replay)
    yield from missing(_NO_REPLAY, f"{model}.router_replay.*", off=replay)
    yield from needless(_OTHERS, f"{megatron}.*")
    yield from needless(_PROFILER, f"{model}.profiler.*")


ENGINES = (
    *_optimizer("A.optim", "actor", 1e-6),
    *_optimizer("critic.optim", "critic", 1e-5),
    *_engine("A", "actor"),
    *_engine("critic", "critic"),
    *_engine("REF", "ref"),
    *needless(_PROFILER, "R.profiler.*"),
    same("global_profiler.steps", "trainer.profile_steps", convert="profiled"),
    *needless(_PROFILER, "global_profiler.*"),
)
