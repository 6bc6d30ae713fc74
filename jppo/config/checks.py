"""What settings may be, alone and together: found before a file or a device is touched."""

import math
from collections.abc import Iterator
from typing import Any

import ml_collections

from jppo.config.defaults import default
from jppo.config.draws import check_sampling
from jppo.config.engines import check_engine, check_publish, check_secrets
from jppo.config.errors import UserError
from jppo.config.memory import check_memory
from jppo.config.multi_turn import check_multi_turn
from jppo.config.steps import parse_steps
from jppo.config.texts import importance_band, loggers, rejection_rules, save_contents, template_arguments

_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
_KL_NAMES = (*_KL, *(f"{name}+" for name in _KL))
_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NEEDS_GROUPS = ("grpo", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo")
CHOICES = {
    "model.init": ("pretrained", "random"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.attention": ("auto", "xla", "cudnn", "pallas", "splash"),
    "model.remat": ("none", "dots", "attention", "full", "auto"),
    "model.compiler_options": ("auto", "none"),
    "data.truncation": ("error", "left", "right", "middle"),
    "data.learn_turns": ("last", "all"),
    "data.packing": ("auto", "segments", "buckets", "prefix", "none"),
    "algorithm.adv_estimator": ("gae", "reinforce_plus_plus", "remax", *NEEDS_GROUPS),
    "algorithm.kl_penalty": _KL_NAMES,
    "algorithm.kl_ctrl_type": ("fixed", "adaptive"),
    "algorithm.old_logprob": ("decoupled", "bypass", "correction"),
    "algorithm.rollout_is": ("none", "token", "sequence"),
    "actor.loss_mode": ("vanilla", "gspo", "geo_mean", "cispo", "sapo", "gpg"),
    "actor.loss_agg_mode": _AGGREGATIONS,
    "critic.loss_agg_mode": (None, *_AGGREGATIONS),
    "actor.kl_loss_type": _KL_NAMES,
    "actor.lr_scheduler_type": ("constant", "cosine"),
    "optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.lr_scheduler_type": ("constant", "cosine"),
    "actor.master_dtype": ("float32", "bfloat16"),
    "optim.master_dtype": ("float32", "bfloat16"),
    "critic.master_dtype": ("float32", "bfloat16"),
    "actor.moments_dtype": ("float32", "bfloat16"),
    "optim.moments_dtype": ("float32", "bfloat16"),
    "critic.moments_dtype": ("float32", "bfloat16"),
    "rollout.name": ("vllm", "sglang", "inprocess"),
    "rollout.mode": ("sync", "async"),
    "rollout.on_update": ("wait", "abort", "keep"),
    "rollout.sleep_level": (0, 1, 2),
    "rollout.multi_turn.format": ("hermes", "qwen3", "qwen3_coder", "plain"),
    "rollout.multi_turn.tool_response_truncate_side": ("left", "middle", "right"),
    "reward.sandbox": ("strict", "basic", "container"),
    "reward.judge.api_type": ("", "openai", "dashscope", "gemini", "claude"),
    "reward.judge.preset": ("", "math", "code", "dialogue", "safety"),
    "reward.model.engine": ("auto", "jax", "transformers", "vllm"),
    "reward.model.dtype": ("float32", "bfloat16"),
    "rollout.lora_sync": ("merge", "adapter"),
    "trainer.stop_exit_code": (143, 75),
    "rollout.publish_via": ("file", "tcp"),
    "rollout.dtype": ("float32", "bfloat16", "float16"),
}
# Lower bounds; a setting that is not here may be any number of its type.
AT_LEAST = {
    "model.logprob_chunk_bytes": 1,
    "model.lora_rank": 0,
    "critic.lora_rank": 0,
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.row_lengths": 1,
    "algorithm.gamma": 0.0,
    "algorithm.lam": 0.0,
    "algorithm.kl_coef": 0.0,
    "algorithm.horizon": 1,
    "actor.lr": 0.0,
    "actor.ppo_mini_batch_size": 1,
    "actor.ppo_epochs": 1,
    "actor.clip_ratio": 0.0,
    "actor.clip_ratio_low": 0.0,
    "actor.clip_ratio_high": 0.0,
    "actor.kl_loss_coef": 0.0,
    "actor.lr_warmup_steps": -1,
    "actor.weight_decay": 0.0,
    "optim.lr": 0.0,
    "critic.lr": 0.0,
    "critic.ppo_epochs": 1,
    "critic.ppo_mini_batch_size": 1,
    "critic.cliprange_value": 0.0,
    "optim.lr_warmup_steps": -1,
    "critic.lr_warmup_steps": -1,
    "actor.lr_warmup_steps_ratio": 0.0,
    "optim.lr_warmup_steps_ratio": 0.0,
    "critic.lr_warmup_steps_ratio": 0.0,
    "optim.weight_decay": 0.0,
    "critic.weight_decay": 0.0,
    "rollout.n": 1,
    "rollout.max_staleness": 0,
    "rollout.servers": 1,
    "rollout.port": 0,
    "rollout.max_num_seqs": 1,
    "rollout.omp_threads": 1,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.max_restarts": 0,
    "rollout.logp_tolerance": 0.0,
    "rollout.max_kl_jump": 0.0,
    "rollout.min_p": 0.0,
    "rollout.val_kwargs.min_p": 0.0,
    "rollout.multi_turn.max_parallel_calls": 1,
    "rollout.multi_turn.max_tool_response_length": 1,
    "rollout.val_kwargs.temperature": 0.0,
    "rollout.val_kwargs.n": 1,
    "reward.workers": 1,
    "reward.memory_bytes": 2**28,
    "reward.overlong_buffer_tokens": 0,
    "reward.judge.max_tokens": 1,
    "reward.judge.concurrency": 1,
    "reward.judge.retries": 0,
    "reward.judge.temperature": 0.0,
    "reward.model.batch_size": 1,
    "reward.model.max_length": 2,
    "reward.model.threads": 1,
    "trainer.total_epochs": 1,
    "trainer.max_ckpt_to_keep": 1,
    "trainer.critic_warmup": 0,
    "trainer.max_bad_steps": 1,
    "trainer.seed": 0,
    "trainer.log_val_generations": 0,
    "trainer.node_rank": -1,
    "actor.min_lr_ratio": 0.0,
    "critic.min_lr_ratio": 0.0,
    "optim.min_lr_ratio": 0.0,
    "loss.margin": 0.0,
    "loss.center_rewards_coefficient": 0.0,
}
ABOVE_ZERO = (
    "reward.timeout_s",
    "reward.judge.max_score",
    "reward.judge.timeout_s",
    "reward.model.clip",
    "reward.model.gpu_memory_utilization",
    "model.lora_alpha",
    "critic.lora_alpha",
    "algorithm.target_kl",
    "actor.tau_pos",
    "actor.tau_neg",
    "actor.loss_scale_factor",
    "critic.loss_scale_factor",
    "actor.grad_clip",
    "critic.grad_clip",
    "optim.grad_clip",
    "trainer.stage_timeout_s",
    "trainer.stop_timeout_s",
    "trainer.join_timeout_s",
    "trainer.host_timeout_s",
    "rollout.top_p",
    "rollout.val_kwargs.top_p",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "rollout.multi_turn.tool_timeout_s",
    "rollout.health_timeout_s",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_memory_bytes",
)
OFF_OR_POSITIVE = (  # -1 is off
    "rollout.multi_turn.max_assistant_turns",
    "rollout.multi_turn.max_user_turns",
    "data.train_max_samples",
    "data.val_max_samples",
    "data.val_batch_size",
    "rollout.top_k",
    "rollout.val_kwargs.top_k",
    "trainer.total_training_steps",
    "trainer.nnodes",
    "trainer.save_freq",
    "trainer.test_freq",
)
AT_MOST_ONE = (
    "algorithm.gamma",
    "algorithm.lam",
    "rollout.top_p",
    "rollout.val_kwargs.top_p",
    "rollout.gpu_memory_utilization",
    "actor.min_lr_ratio",
    "critic.min_lr_ratio",
    "optim.min_lr_ratio",
    "actor.lr_warmup_steps_ratio",
    "critic.lr_warmup_steps_ratio",
    "optim.lr_warmup_steps_ratio",
)


def check(config: ml_collections.ConfigDict, *, training: bool = True) -> None:
    """UserError at the first setting, or pair of settings, that cannot be; touches no file and no device.

    Where nothing is trained, what only training reads is seen one by one, not together.
    """
    for name, value in _numbers(config):
        if not math.isfinite(value):
            raise UserError(f"{name}={value} must be a finite number")
    for name, allowed in CHOICES.items():
        if _has(config, name) and (value := _get(config, name)) not in allowed:
            raise UserError(f"{name}={value!r} is not known; it is one of {', '.join(map(repr, allowed))}")
    for name, least in AT_LEAST.items():
        if (value := _find(config, name)) is not None and not value >= least:
            raise UserError(f"{name}={value} must be at least {least}")
    for name in ABOVE_ZERO:
        if (value := _find(config, name)) is not None and not value > 0:
            raise UserError(f"{name}={value} must be above 0")
    for name in OFF_OR_POSITIVE:
        if _has(config, name) and (value := _get(config, name)) != -1 and value < 1:
            raise UserError(f"{name}={value} must be 1 or more, or -1")
    for name in ("actor.betas", "critic.betas", "optim.betas"):
        if _has(config, name):
            value = _get(config, name)
            if len(value) != 2 or not all(isinstance(b, float) and 0 <= b < 1 for b in value):
                raise UserError(f"{name}={value} must be two numbers in [0, 1), such as (0.9, 0.999)")
    for name in AT_MOST_ONE:
        if _has(config, name) and (value := _get(config, name)) > 1:
            raise UserError(f"{name}={value} must be at most 1")
    for name in ("model.path", *(("data.train_files",) if training else ()), "data.val_files", "trainer.run_dir"):
        if _has(config, name) and not _get(config, name):
            raise UserError(f"{name} is empty; give a path, as in --config.{name}=PATH")
    loggers(config.trainer.logger)
    template_arguments(_find(config, "data.apply_chat_template_kwargs") or "")
    if "rollout" in config:
        if (last := config.rollout.port + config.rollout.servers - 1) > 65535:
            raise UserError(f"rollout.port={config.rollout.port}: the last server has port {last}, ports end at 65535")
        check_sampling(config, training=training)
        _check_unread(config)
        check_multi_turn(config.rollout.multi_turn)
        check_publish(config.rollout)
        check_secrets(config.rollout)
    if training:
        _check_training(config)


def _numbers(config: ml_collections.ConfigDict, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number among the settings, also those within a setting: none may be NaN or an infinity."""
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from _numbers(value, f"{prefix}{name}.")
            continue
        several = value if isinstance(value, tuple | list) else [value]
        yield from ((f"{prefix}{name}", one) for one in several if isinstance(one, float))


def _check_training(config: ml_collections.ConfigDict) -> None:
    if "rollout" in config:
        _check_mini_batch(config, "actor")
        _check_mini_batch(config, "critic")
        _check_estimator(config)
        _check_losses(config)
        _check_kl(config)
        _check_correction(config)
        check_engine(config)
        save_contents(config.trainer.save_contents)
        parse_steps(config.trainer.profile_steps, "trainer.profile_steps")
    for section in ("actor", "critic", "optim"):
        if section in config and config[section].lr_warmup_steps >= 0 and config[section].lr_warmup_steps_ratio > 0:
            raise UserError(
                f"{section}.lr_warmup_steps={config[section].lr_warmup_steps} and {section}.lr_warmup_steps_ratio="
                f"{config[section].lr_warmup_steps_ratio} both say how long the warm-up is; leave one at its default"
            )
    if "loss" in config and config.loss.margin and config.loss.margin_column:
        raise UserError(
            f"loss.margin={config.loss.margin} and loss.margin_column={config.loss.margin_column!r} both say by how"
            " much a chosen response is to be better; leave one at its default"
        )
    _check_packing(config)
    _check_lengths(config)
    check_memory(config)


def _check_mini_batch(config: ml_collections.ConfigDict, section: str) -> None:
    batch, mini = config.data.train_batch_size * config.rollout.n, config[section].ppo_mini_batch_size
    if mini is not None and batch % mini:
        fitting = max(d for d in range(1, min(mini, batch) + 1) if batch % d == 0)
        raise UserError(
            f"{section}.ppo_mini_batch_size={mini} must divide data.train_batch_size*rollout.n={batch}; try {fitting}"
        )


def _check_estimator(config: ml_collections.ConfigDict) -> None:
    name = config.algorithm.adv_estimator
    if name in NEEDS_GROUPS and config.rollout.n < 2:
        raise UserError(
            f"algorithm.adv_estimator={name!r} compares the samples of a prompt with each other, rollout.n="
            f"{config.rollout.n} draws one; raise rollout.n, or take gae, remax or reinforce_plus_plus"
        )
    if name != "gae" and config.trainer.critic_warmup > 0:
        raise UserError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} trains a critic, and algorithm.adv_estimator="
            f"{name!r} has none; set it to 0, or take gae"
        )


def _check_losses(config: ml_collections.ConfigDict) -> None:
    a = config.actor
    if not a.clip_ratio_c > 1:
        raise UserError(
            f"actor.clip_ratio_c={a.clip_ratio_c} must be above 1: it bounds ratios, and 1 is no change; try 3.0"
        )
    if a.loss_mode in ("sapo", "geo_mean") and a.loss_agg_mode not in ("token-mean", "seq-mean-token-mean"):
        raise UserError(
            f"actor.loss_agg_mode={a.loss_agg_mode!r}: actor.loss_mode={a.loss_mode!r} is always averaged by"
            " seq-mean-token-mean; set that"
        )


def _check_kl(config: ml_collections.ConfigDict) -> None:
    asked = [
        f"{switch}=True with {kind}={_get(config, kind)!r}"
        for switch, kind in (
            ("algorithm.use_kl_in_reward", "algorithm.kl_penalty"),
            ("actor.use_kl_loss", "actor.kl_loss_type"),
        )
        if _get(config, switch)
    ]
    if asked and not config.ref.path:
        raise UserError(
            f"{' and '.join(asked)}: a KL is measured against a reference, and ref.path is empty; give a model's path,"
            " or ref.path=policy for the policy that the run begins with"
        )
    if config.algorithm.kl_ctrl_type == "adaptive" and not config.algorithm.use_kl_in_reward:
        raise UserError(
            "algorithm.kl_ctrl_type='adaptive' steers the KL in the reward, and algorithm.use_kl_in_reward is False;"
            " set it to True"
        )


def _check_correction(config: ml_collections.ConfigDict) -> None:
    a = config.algorithm
    importance_band(a.rollout_is_threshold)
    rules = rejection_rules(a.rollout_rs, a.rollout_rs_threshold)
    asked = a.rollout_is != "none" or bool(rules)
    if asked and a.old_logprob != "correction":
        raise UserError(
            f"algorithm.rollout_is={a.rollout_is!r} and algorithm.rollout_rs={a.rollout_rs!r} belong to"
            f" algorithm.old_logprob='correction', which is {a.old_logprob!r}; set it, or leave them out"
        )
    if a.old_logprob == "correction" and not asked:
        raise UserError(
            "algorithm.old_logprob='correction' corrects nothing yet; set algorithm.rollout_is to token or sequence,"
            " or algorithm.rollout_rs to a rule such as token_k1"
        )


def _check_unread(config: ml_collections.ConfigDict) -> None:
    """What nobody reads was meant for something that is not asked for."""
    r, usual = config.reward, default().reward
    unread = [
        (f"reward.{part}.{leaf}", r[part][leaf], usual[part][leaf], f"reward.{part}.{switch} is empty")
        for part, switch in (("judge", "api_type"), ("model", "path"))
        if not r[part][switch]
        for leaf in r[part]
    ]
    if r.sandbox != "container":
        why = f"reward.sandbox={r.sandbox!r} runs programs here"
        unread.append(("reward.sandbox_url", r.sandbox_url, usual.sandbox_url, why))
    elif not r.sandbox_url:
        raise UserError(
            "reward.sandbox='container' needs the service's address; set reward.sandbox_url=http://HOST:PORT"
        )
    if r.function:
        unread.append(("reward.grader", r.grader, usual.grader, f"reward.function={r.function!r} grades in its place"))
    for name, value, was, why in unread:
        if value != was:
            raise UserError(f"{name}={value!r} is read by nobody: {why}; mend that, or leave it at {was!r}")


def _check_packing(config: ml_collections.ConfigDict) -> None:
    if config.data.packing == "prefix" and (_find(config, "rollout.n") or 1) < 2:
        raise UserError(
            "data.packing='prefix' has a prompt once for its samples, and here each has one; raise rollout.n in PPO, or"
            " take buckets"
        )


def _check_lengths(config: ml_collections.ConfigDict) -> None:
    section = "actor" if "actor" in config else "optim"
    longest = config.data.max_prompt_length + config.data.max_response_length
    micro, row = f"{section}.max_tokens_per_device", "data.max_tokens_per_row"
    # So many devices have a row together; where they are those that are left, none is looked at yet.
    share = {-1: longest}.get(config.mesh.sequence, max(1, config.mesh.sequence))
    if section == "optim" and config.model.remat == "auto":
        raise UserError(
            "model.remat='auto' is decided by jppo.train alone; name one of none, dots, attention, full, as the dry run"
            " says what fits"
        )
    by_memory = section == "actor" and _get(config, micro) == -1
    for name, parts in ((row, 1), *(() if by_memory else ((micro, share),))):
        if (value := _get(config, name)) * parts < longest and not (name == row and value == -1):
            shared = f", on mesh.sequence={parts} devices each" if 1 < parts < longest else ""
            raise UserError(
                f"{name}={value} must hold a prompt and a response, data.max_prompt_length"
                f"+data.max_response_length={longest}{shared}; try {-(-longest // parts)}"
            )
    if not by_memory and _get(config, micro) * share < _get(config, row):
        raise UserError(f"{micro}={_get(config, micro)} must hold a row, {row}={_get(config, row)}; raise the one")


def _find(config: ml_collections.ConfigDict, name: str) -> Any:
    """The setting's value; None where it is unset, or where this kind of config has no such setting."""
    return _get(config, name) if _has(config, name) else None


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(config, ml_collections.ConfigDict) or part not in config:
            return False
        config = config[part]
    return True


def _get(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config
