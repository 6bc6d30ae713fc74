"""From settings to running parts: reads the config once and closes everything else over plain numbers.

The commands call it; below it nothing sees a config.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jppo.algorithms import advantage, losses
from jppo.config import UserError, importance_band, rejection_rules
from jppo.data.prompts import PromptSet, read_prompts
from jppo.data.stream import steps_per_epoch
from jppo.data.tokenizer import end_token_ids, load_tokenizer
from jppo.learner import correct, estimate, optim, packing, ppo, sharding, state, update
from jppo.learner.estimate import Estimator
from jppo.models import hf
from jppo.models.decoder import Decoder
from jppo.models.families import ModelConfig
from jppo.models.params import Head
from jppo.rewards.graders import Grader, graders_for
from jppo.rollout.server import ServerSettings
from jppo.rollout.vllm import VllmEngine, start_vllm
from jppo.structs import Array, Params, Sampling, TrainState


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads before it starts anything."""

    tokenizer: Any
    end_tokens: tuple[int, ...]
    train: PromptSet
    val: PromptSet
    graders: dict[str, Grader]
    policy: ModelConfig
    critic: ModelConfig | None  # None where the estimator needs none
    reference: ModelConfig | None  # None where no KL is asked for
    total_steps: int


@dataclasses.dataclass(frozen=True)
class Learner:
    """The compiled side of a run: the passes, and what they close over."""

    mesh: Any
    plan: packing.Plan
    recipe: ppo.Recipe
    passes: ppo.Passes
    actor: ppo.Descent
    critic: ppo.Descent | None
    reference: Params | None


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
    policy, critic, reference = read_models(c)
    tokenizer = read_tokenizer(c, *(model for model in (policy, critic, reference) if model is not None))
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
        reference=reference,
        total_steps=by_epochs if c.trainer.total_training_steps == -1 else c.trainer.total_training_steps,
    )


def read_models(c: ConfigDict) -> tuple[ModelConfig, ModelConfig | None, ModelConfig | None]:
    """Policy, critic and reference as their directories describe them, their weights seen to be there."""

    def read(path: str, head: Head) -> ModelConfig:
        _, cfg = hf.read_config(path)
        if c.model.init == "pretrained":
            hf.check_weights(path, cfg, head=head)
        return cfg

    policy = read(c.model.path, "lm")
    critic = read(critic_path(c), "value") if wants_critic(c) else None
    if not wants_reference(c):
        return policy, critic, None
    reference = policy if c.ref.path == "policy" else read(c.ref.path, "lm")
    if reference.vocab_size != policy.vocab_size:
        raise UserError(
            f"ref.path={c.ref.path}: a reference has the policy's vocabulary, {policy.vocab_size} tokens, and this one"
            f" has {reference.vocab_size}; use one of the same family"
        )
    return policy, critic, reference


def critic_path(c: ConfigDict) -> str:
    """Where the critic's first weights are: the policy's, unless it has its own."""
    return c.critic.path if c.critic.path else c.model.path


def wants_critic(c: ConfigDict) -> bool:
    """Whether the estimator reads values."""
    return make_estimator(c).critic


def wants_reference(c: ConfigDict) -> bool:
    """Whether a KL is asked for."""
    return c.algorithm.use_kl_in_reward or c.actor.use_kl_loss


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


def make_estimator(c: ConfigDict) -> Estimator:
    """What `algorithm.adv_estimator` chooses from."""
    gamma, std = c.algorithm.gamma, c.algorithm.norm_adv_by_std_in_grpo
    gae = functools.partial(advantage.gae, gamma=gamma, lam=c.algorithm.lam)

    def twice(x: Array) -> tuple[Array, Array]:
        return x, x  # no critic reads the returns

    estimators = {
        "gae": lambda: Estimator(
            lambda reward, value, _, rows: gae(reward, value, rows.mask, rows.segment), whiten=True, critic=True
        ),
        "reinforce_plus_plus": lambda: Estimator(
            lambda reward, _, __, rows: twice(
                advantage.reinforce_plus_plus(reward, rows.mask, rows.segment, gamma=gamma)
            ),
            whiten=True,
        ),
        "remax": lambda: Estimator(
            lambda reward, _, greedy, rows: twice(
                advantage.remax(reward, greedy, rows.mask, rows.segment, rows.sequence)
            ),
            greedy=True,
        ),
        "grpo": lambda: Estimator(
            estimate.spread, lambda score, _, group: advantage.grpo(score, group, norm_adv_by_std=std)
        ),
        "grpo_passk": lambda: Estimator(
            estimate.spread, lambda score, _, group: advantage.grpo_passk(score, group, norm_adv_by_std=std)
        ),
        "rloo": lambda: Estimator(estimate.spread, lambda score, _, group: advantage.rloo(score, group)),
        "rloo_vectorized": lambda: Estimator(
            estimate.spread, lambda score, _, group: advantage.rloo_vectorized(score, group)
        ),
        "reinforce_plus_plus_baseline": lambda: Estimator(
            estimate.spread,
            lambda score, _, group: advantage.reinforce_plus_plus_baseline(score, group),
            whiten=True,
        ),
        "opo": lambda: Estimator(estimate.spread, advantage.opo),
    }
    return estimators[c.algorithm.adv_estimator]()


def make_policy_loss(c: ConfigDict) -> Callable[..., losses.PolicyLoss]:
    """What `actor.loss_mode` chooses from."""
    a = c.actor
    low = a.clip_ratio if a.clip_ratio_low is None else a.clip_ratio_low
    high = a.clip_ratio if a.clip_ratio_high is None else a.clip_ratio_high
    clip = dict(clip_low=low, clip_high=high)
    losses_by_name: dict[str, Callable[..., losses.PolicyLoss]] = {
        "vanilla": functools.partial(losses.clipped, **clip, clip_c=a.clip_ratio_c),
        "gspo": functools.partial(losses.gspo, **clip),
        "geo_mean": functools.partial(losses.geo_mean, **clip),
        "cispo": functools.partial(losses.cispo, **clip),
        "sapo": functools.partial(losses.sapo, tau_pos=a.tau_pos, tau_neg=a.tau_neg),
        "gpg": losses.gpg,
    }
    return losses_by_name[a.loss_mode]


def make_correction(c: ConfigDict) -> correct.Correction | None:
    """What is done about the gap between sampler and trainer."""
    a = c.algorithm
    if a.old_logprob != "correction":
        return None
    lower, upper = importance_band(a.rollout_is_threshold)
    return correct.Correction(
        level=None if a.rollout_is == "none" else a.rollout_is,
        lower=lower,
        upper=upper,
        normalize=a.rollout_is_batch_normalize,
        rules=rejection_rules(a.rollout_rs, a.rollout_rs_threshold),
    )


def make_recipe(c: ConfigDict) -> ppo.Recipe:
    """The mathematics that the config asks for."""
    a, v = c.actor, c.critic
    mode = "seq-mean-token-mean" if a.loss_mode in ("sapo", "geo_mean") else a.loss_agg_mode
    value_mode = a.loss_agg_mode if v.loss_agg_mode is None else v.loss_agg_mode
    scale = float(c.data.max_response_length) if a.loss_scale_factor is None else a.loss_scale_factor
    value_scale = scale if v.loss_scale_factor is None else v.loss_scale_factor
    return ppo.Recipe(
        estimator=make_estimator(c),
        policy_loss=make_policy_loss(c),
        by_sequence=a.loss_mode == "geo_mean",
        weigh=functools.partial(losses.token_weights, mode=mode, scale=scale),
        weigh_value=functools.partial(losses.token_weights, mode=value_mode, scale=value_scale),
        cliprange_value=v.cliprange_value,
        entropy_coeff=a.entropy_coeff,
        kl_penalty=c.algorithm.kl_penalty if c.algorithm.use_kl_in_reward else None,
        kl_loss_type=a.kl_loss_type if a.use_kl_loss else None,
        kl_loss_coef=a.kl_loss_coef,
        bypass=c.algorithm.old_logprob == "bypass",
        correction=make_correction(c),
    )


def critic_mini_batch_size(c: ConfigDict) -> int:
    """Sequences in an optimizer step of the critic."""
    own = c.critic.ppo_mini_batch_size
    return c.actor.ppo_mini_batch_size if own is None else own


def make_learner(c: ConfigDict, inputs: Inputs, mesh: Any) -> tuple[Learner, TrainState]:
    """Loads the models into their shards and closes the passes over the config's numbers."""
    a = c.actor
    key = jax.random.key(c.trainer.seed)
    recipe = make_recipe(c)

    def model(cfg: ModelConfig | None) -> ppo.Model | None:
        return None if cfg is None else (make_decoder(c, cfg, mesh), cfg)

    def load(cfg: ModelConfig, path: str, head: Head, number: int) -> tuple[state.Weights, Params]:
        what = state.weights(cfg, mesh, head=head, param_dtype=c.model.param_dtype)
        return what, state.load(what, path, init=c.model.init, key=jax.random.fold_in(key, number))

    passes = ppo.make_passes(
        ppo.Models(
            (make_decoder(c, inputs.policy, mesh), inputs.policy), model(inputs.critic), model(inputs.reference)
        ),
        recipe,
        temperature=c.rollout.temperature,
        chunk_tokens=chunk_tokens(c, inputs.policy),
        sequences=sequences_of_step(c),
    )
    what, policy = load(inputs.policy, c.model.path, "lm", 0)
    actor, policy_opt = make_descent(
        a, "actor", passes.actor, what, policy, inputs.total_steps - c.trainer.critic_warmup
    )
    value = value_opt = critic = reference = None
    if inputs.critic is not None:
        what, value = load(inputs.critic, critic_path(c), "value", 1)
        critic, value_opt = make_descent(c.critic, "critic", passes.critic, what, value, inputs.total_steps)
    if inputs.reference is not None:
        alike = c.ref.path == "policy"
        reference = (
            jax.tree.map(lambda x: x.copy(), policy) if alike else load(inputs.reference, c.ref.path, "lm", 2)[1]
        )
    learner = Learner(
        mesh=mesh,
        plan=make_plan(
            c,
            mesh,
            tokens_per_device=a.max_tokens_per_device,
            sequences=max(a.ppo_mini_batch_size, critic_mini_batch_size(c)),
        ),
        recipe=recipe,
        passes=passes,
        actor=actor,
        critic=critic,
        reference=reference,
    )
    begin = state.begin(policy, policy_opt, value, value_opt, kl_coef=c.algorithm.kl_coef, seed=c.trainer.seed)
    return learner, begin


def sequences_of_step(c: ConfigDict) -> int:
    """How many trajectories a step has."""
    return c.data.train_batch_size * c.rollout.n


def make_descent(
    section: ConfigDict, name: str, accumulate: Any, what: state.Weights, params: Params, total_steps: int
) -> tuple[ppo.Descent, Any]:
    """The optimizer of one model, by its section of the config, and the optimizer's first state."""
    tx = optim.make_optimizer(
        grad_clip=section.grad_clip, betas=tuple(section.betas), weight_decay=section.weight_decay
    )
    by_ratio = section.lr_warmup_steps == -1
    schedule = optim.make_schedule(
        section.lr_scheduler_type,
        lr=section.lr,
        warmup_steps=int(section.lr_warmup_steps_ratio * total_steps) if by_ratio else section.lr_warmup_steps,
        total_steps=total_steps,
        min_lr_ratio=section.min_lr_ratio,
    )
    opt, places = state.init_optimizer(tx, what, params)
    apply = update.make_apply(tx, schedule, shardings=(what.shardings, places))
    zeros = update.make_zeros(what.shapes, what.shardings)
    return ppo.Descent(accumulate=accumulate, apply=apply, zeros=zeros, name=name), opt
