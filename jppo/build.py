"""From settings to running parts: reads the config once and closes everything else over plain numbers.

The commands call it; below it nothing sees a config.
"""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jppo.config import UserError
from jppo.data.prompts import PromptSet, read_prompts
from jppo.data.stream import steps_per_epoch
from jppo.data.tokenizer import end_token_ids, load_tokenizer
from jppo.learner import optim, packing, ppo, score, sharding, state, update
from jppo.models import hf
from jppo.models.decoder import Decoder
from jppo.models.families import ModelConfig
from jppo.rewards.graders import Grader, graders_for
from jppo.rollout.server import ServerSettings
from jppo.rollout.vllm import VllmEngine, start_vllm
from jppo.structs import Params, Sampling, TrainState

# What `algorithm.adv_estimator` chooses from.
ESTIMATORS = {"gae": score.make_gae}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads before it starts anything."""

    tokenizer: Any
    end_tokens: tuple[int, ...]
    train: PromptSet
    val: PromptSet
    graders: dict[str, Grader]
    policy: ModelConfig
    critic: ModelConfig
    total_steps: int


@dataclasses.dataclass(frozen=True)
class Learner:
    """The compiled side of a run: the passes, and what they close over."""

    mesh: Any
    plan: packing.Plan
    passes: ppo.Passes
    actor: ppo.Descent
    critic: ppo.Descent
    reference: Params | None  # None where no KL is asked for


def sampling(c: ConfigDict, version: int) -> Sampling:
    """How this step's responses are drawn; each step has seeds of its own."""
    seed = int(np.random.SeedSequence([c.trainer.seed, version]).generate_state(1)[0])
    return Sampling(
        temperature=c.rollout.temperature,
        top_p=1.0,
        top_k=-1,
        n=c.rollout.n,
        max_tokens=c.data.max_response_length,
        seed=seed,
    )


def read_inputs(c: ConfigDict) -> Inputs:
    """Everything that can be wrong with files is found here, before a device or a server is touched."""
    _, policy = hf.read_config(c.model.path)
    _, critic = hf.read_config(c.critic.path or c.model.path)
    tokenizer = read_tokenizer(c, policy, critic)
    if c.model.init == "pretrained":
        hf.check_weights(c.model.path, policy, head="lm")
        hf.check_weights(c.critic.path or c.model.path, critic, head="value")
    read = dict(
        tokenizer=tokenizer,
        max_prompt_length=c.data.max_prompt_length,
        filter_overlong=c.data.filter_overlong_prompts,
    )
    train = read_prompts(c.data.train_files, **read)
    val = read_prompts(c.data.val_files, max_samples=c.data.val_max_samples, setting="data.val_files", **read)
    sources = {p.data_source for p in (*train.prompts, *val.prompts)}
    per_epoch = steps_per_epoch(len(train.prompts), c.data.train_batch_size)
    by_epochs = per_epoch * c.trainer.total_epochs
    return Inputs(
        tokenizer=tokenizer,
        end_tokens=end_token_ids(c.model.path, tokenizer),
        train=train,
        val=val,
        graders=graders_for(sources, override=c.reward.grader),
        policy=policy,
        critic=critic,
        total_steps=by_epochs if c.trainer.total_training_steps == -1 else c.trainer.total_training_steps,
    )


def read_tokenizer(c: ConfigDict, *models: ModelConfig) -> Any:
    """The policy's tokenizer, once it and the lengths are seen to fit every model that reads its tokens."""
    tokenizer = load_tokenizer(c.model.path)
    longest = c.data.max_prompt_length + c.data.max_response_length
    for model in models:
        if len(tokenizer) > model.vocab_size:
            raise UserError(
                f"{c.model.path}: the tokenizer has {len(tokenizer)} tokens, the embedding of a model that reads them"
                f" vocab_size={model.vocab_size}; use the tokenizer that the model was made with"
            )
        if longest > model.max_position_embeddings:
            raise UserError(
                f"data.max_prompt_length+data.max_response_length={longest} must be within the model's"
                f" max_position_embeddings={model.max_position_embeddings}; lower one of them"
            )
    return tokenizer


def share_gpu(c: ConfigDict) -> None:
    """Leaves the servers' part of a GPU to them: JAX would take three quarters of it when it starts."""
    if not c.rollout.urls:
        os.environ.setdefault(
            "XLA_PYTHON_CLIENT_MEM_FRACTION", f"{max(0.1, 0.92 - c.rollout.gpu_memory_utilization):.2f}"
        )


def start_engine(c: ConfigDict, run: pathlib.Path) -> VllmEngine:
    """vLLM on its way to being ready, or attached to."""
    r = c.rollout
    run.mkdir(parents=True, exist_ok=True)
    server = ServerSettings(
        python=r.python,
        servers=r.servers,
        port=r.port,
        dtype=r.dtype,
        max_model_len=c.data.max_prompt_length + c.data.max_response_length,
        max_num_seqs=r.max_num_seqs,
        enforce_eager=r.enforce_eager,
        gpu_memory_utilization=r.gpu_memory_utilization,
        kv_cache_memory_bytes=r.kv_cache_memory_bytes,
        omp_threads=r.omp_threads,
        start_timeout_s=r.start_timeout_s,
    )
    return start_vllm(
        str(hf.resolve(c.model.path, weights=False)),
        str(run),
        settings=server,
        urls=[url.strip() for url in r.urls.split(",") if url.strip()],
        request_timeout_s=r.request_timeout_s,
        publish_dir=r.publish_dir,
    )


# What `rollout.name` chooses from.
ENGINES = {"vllm": start_engine}


def make_mesh(c: ConfigDict) -> Any:
    """The devices, as the config lays them out."""
    shape = sharding.mesh_shape(len(jax.devices()), data=c.mesh.data, fsdp=c.mesh.fsdp, tensor=c.mesh.tensor)
    if c.model.compute_dtype == "float32" and jax.default_backend() != "cpu":
        # By default a float32 product is TF32 on GPUs and bfloat16 on TPUs: not what the sampler computes.
        jax.config.update("jax_default_matmul_precision", "highest")
    return sharding.make_mesh(shape)


def make_decoder(c: ConfigDict, cfg: ModelConfig, mesh: Any) -> Decoder:
    """The transformer of `cfg`, its activations spread over the mesh as the rows are."""
    return Decoder(
        cfg,
        dtype=c.model.compute_dtype,
        param_dtype=c.model.param_dtype,
        scan_layers=c.model.scan_layers,
        remat=c.model.remat,
        constrain=sharding.constrain_to_rows(mesh),
    )


def chunk_tokens(c: ConfigDict, cfg: ModelConfig) -> int:
    """How many tokens have their f32 logits in memory at a time."""
    return max(1, c.model.logprob_chunk_bytes // (4 * cfg.vocab_size))


def make_plan(c: ConfigDict, mesh: Any, *, tokens_per_device: int, sequences: int) -> packing.Plan:
    """The shapes of rows that the run will see."""
    # Attention has no fused kernel for shared rows yet: their mask costs the square of a row on every backend.
    kind = "buckets" if c.data.packing == "auto" else c.data.packing
    multiple = sharding.row_multiple(mesh)
    longest = c.data.max_prompt_length + c.data.max_response_length
    return packing.make_plan(
        kind,
        max_length=longest,
        row_lengths=c.data.row_lengths,
        max_tokens_per_row=longest if c.data.max_tokens_per_row == -1 else c.data.max_tokens_per_row,
        tokens_per_micro=tokens_per_device * multiple,
        sequences=sequences,
        row_multiple=multiple,
    )


def make_learner(c: ConfigDict, inputs: Inputs, mesh: Any) -> tuple[Learner, TrainState]:
    """Loads the models into their shards and closes the passes over the config's numbers."""
    a = c.actor
    key = jax.random.key(c.trainer.seed)
    what = state.weights(inputs.policy, mesh, head="lm", param_dtype=c.model.param_dtype)
    what_value = state.weights(inputs.critic, mesh, head="value", param_dtype=c.model.param_dtype)
    statics = ppo.Statics(
        temperature=c.rollout.temperature,
        chunk_tokens=chunk_tokens(c, inputs.policy),
        gamma=c.algorithm.gamma,
        lam=c.algorithm.lam,
        kl_penalty=c.algorithm.kl_penalty if c.algorithm.use_kl_in_reward else None,
        clip_ratio=a.clip_ratio,
        entropy_coeff=a.entropy_coeff,
        kl_loss_coef=a.kl_loss_coef,
        kl_loss_type=a.kl_loss_type if a.use_kl_loss else None,
        cliprange_value=c.critic.cliprange_value,
    )
    passes = ppo.make_passes(
        make_decoder(c, inputs.policy, mesh),
        make_decoder(c, inputs.critic, mesh),
        inputs.policy,
        statics,
        estimator=ESTIMATORS[c.algorithm.adv_estimator],
    )
    policy = state.load(what, c.model.path, init=c.model.init, key=jax.random.fold_in(key, 0))
    value = state.load(what_value, c.critic.path or c.model.path, init=c.model.init, key=jax.random.fold_in(key, 1))
    actor, policy_opt = make_descent(a, "actor", a.ppo_epochs, passes.actor, what, policy, inputs.total_steps)
    critic, value_opt = make_descent(
        c.critic, "critic", c.critic.ppo_epochs, passes.critic, what_value, value, inputs.total_steps
    )
    wants_reference = statics.kl_penalty is not None or statics.kl_loss_type is not None
    learner = Learner(
        mesh=mesh,
        plan=make_plan(c, mesh, tokens_per_device=a.max_tokens_per_device, sequences=a.ppo_mini_batch_size),
        passes=passes,
        actor=actor,
        critic=critic,
        reference=jax.tree.map(lambda x: x.copy(), policy) if wants_reference else None,
    )
    begin = state.begin(policy, policy_opt, value, value_opt, kl_coef=c.algorithm.kl_coef, seed=c.trainer.seed)
    return learner, begin


def make_descent(
    section: ConfigDict,
    name: str,
    epochs: int,
    accumulate: Any,
    what: state.Weights,
    params: Params,
    total_steps: int,
) -> tuple[ppo.Descent, Any]:
    """The optimizer of one model, by its section of the config, and the optimizer's first state."""
    tx = optim.make_optimizer(
        grad_clip=section.grad_clip, betas=tuple(section.betas), weight_decay=section.weight_decay
    )
    schedule = optim.make_schedule(
        section.lr_scheduler_type,
        lr=section.lr,
        warmup_steps=section.lr_warmup_steps,
        total_steps=total_steps,
        min_lr_ratio=section.min_lr_ratio,
    )
    opt, places = state.init_optimizer(tx, what, params)
    apply = update.make_apply(tx, schedule, shardings=(what.shardings, places))
    zeros = update.make_zeros(what.shapes, what.shardings)
    return ppo.Descent(accumulate=accumulate, apply=apply, zeros=zeros, epochs=epochs, name=name), opt
