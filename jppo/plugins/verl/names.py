"""The table of verl's settings, with the defaults of verl 0.9.1. A `*` in a key matches anything.

If several rows match a key, the first counts. Then the settings that follow from several keys. `page` prints it all.
"""

import fnmatch
import functools
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jppo.plugins.verl import derived
from jppo.plugins.verl.derived import DISTILLED, distilled
from jppo.plugins.verl.keys_learning import ACTOR, ALGORITHM, CRITIC, DATA, TRAINING, TUNING
from jppo.plugins.verl.keys_running import MODEL, REF, REWARD, ROLLOUT, TRAINER
from jppo.plugins.verl.name import (
    MICRO,
    GetKey,
    KeyRow,
    device_tokens,
    key_of,
    longest_sequence,
    reward_model,
    value_or,
)
from jppo.plugins.verl.values import adapter_field, engine_options, penalized_tokens

KEYS: tuple[KeyRow, ...] = (
    *DATA,
    *MODEL,
    *ACTOR,
    *CRITIC,
    *REF,
    *TRAINING,
    *ROLLOUT,
    *ALGORITHM,
    *REWARD,
    *TRAINER,
    *TUNING,
)

# Today's keys, or beginnings of keys, and their names in older versions or their second names. Of each row there is one
# for every ENGINE, veomni and torchtitan, and one for every SECTION, A and critic.
_OTHER_NAMES = {
    "SECTION.optim.clip_grad": "SECTION.optim.grad_clip",
    "SECTION.optim.lr_scheduler_type": "SECTION.optim.warmup_style SECTION.optim.lr_decay_style"
    " SECTION.optim.decay_type",
    "SECTION.optim.weight_decay_incr_style": "SECTION.optim.wd_incr_style",
    "SECTION.optim.lr_warmup_steps": "SECTION.optim.warmup_steps",
    "SECTION.optim.lr_warmup_steps_ratio": "SECTION.optim.warmup_steps_ratio",
    "SECTION.optim.min_lr_ratio": "SECTION.optim.min_lr_factor",
    "SECTION.optim.min_lr": "SECTION.optim.lr_min",
    "SECTION.optim.optimizer": "SECTION.optim.name",
    "A.entropy_coeff": "A.entropy_coef",
    "A.checkpoint.save_contents": "A.checkpoint.contents",
    "critic.checkpoint.save_contents": "critic.checkpoint.contents",
    "trainer.log_val_generations": "trainer.val_generations_to_log_to_wandb",
    "global_profiler.steps": "trainer.profile_steps",
    "reward.reward_manager.": "reward_manager.",
    "A.tau_pos": "A.policy_loss.tau_pos",
    "A.tau_neg": "A.policy_loss.tau_neg",
    "A.ulysses_sequence_parallel_size": "A.fsdp_config.ulysses_sequence_parallel_size A.automodel.cp_size"
    " A.megatron.context_parallel_size A.ENGINE.ulysses_parallel_size A.ENGINE.ulysses_sequence_parallel_size"
    " A.ENGINE.context_parallel_size",
    "SECTION.megatron.": "SECTION.megatron_config.",
    "A.megatron.tensor_model_parallel_size": "A.automodel.tp_size A.ENGINE.tensor_parallel_size",
    "A.megatron.pipeline_model_parallel_size": "A.automodel.pp_size A.ENGINE.pipeline_parallel_size",
    "A.megatron.expert_model_parallel_size": "A.automodel.ep_size A.ENGINE.expert_parallel_size",
    "A.fsdp_config.dtype": "A.fsdp_config.mixed_precision.param_dtype A.megatron.dtype A.ENGINE.dtype",
    "A.fsdp_config.model_dtype": "A.automodel.model_dtype",
    "A.fsdp_config.fsdp_size": "A.ENGINE.fsdp_size",
    "A.fsdp_config.offload_policy": "A.ENGINE.enable_fsdp_offload",
    "A.fsdp_config.param_offload": "A.param_offload A.megatron.param_offload A.ENGINE.param_offload",
    "A.fsdp_config.optimizer_offload": "A.megatron.optimizer_offload A.ENGINE.optimizer_offload"
    " A.optim.override_optimizer_config.optimizer_cpu_offload",
    "A.fsdp_config.grad_offload": "A.megatron.grad_offload",
    "M.enable_gradient_checkpointing": "A.automodel.activation_checkpointing A.fsdp_config.gradient_checkpointing",
    "M.override_config.": "M.override_config.model_config.",
    "M.use_rmpad": "A.use_rmpad",
    "critic.fsdp.": "critic.model.fsdp_config. critic.fsdp_config.",
    "critic.fsdp.param_offload": "critic.param_offload critic.megatron.param_offload critic.ENGINE.param_offload",
    "critic.fsdp.optimizer_offload": "critic.megatron.optimizer_offload critic.ENGINE.optimizer_offload"
    " critic.optim.override_optimizer_config.optimizer_cpu_offload",
    "critic.model.enable_gradient_checkpointing": "critic.fsdp_config.gradient_checkpointing",
    "critic.model.override_config.": "critic.model.override_config.model_config.",
    "REF.megatron.": "REF.megatron_config.",
    "REF.fsdp_config.param_offload": "REF.param_offload REF.megatron.param_offload REF.ENGINE.param_offload",
    "REF.fsdp_config.optimizer_offload": "REF.ENGINE.optimizer_offload",
    "R.n": "rollout.n",
    "R.response_length": "R.max_new_tokens data.max_new_tokens",
    "TURNS.max_assistant_turns": "TURNS.max_turns",
    "OVERLONG.": "reward_model.overlong_buffer.",
    "FUNCTION.": "custom_reward_function.",
    "BOX.": "reward_model.sandbox_fusion. sandbox_fusion.",
    "RM.": "reward_model.",
    "RM.model_path": "reward_model.model.path reward_model.path",
    "RM.input_tokenizer": "reward_model.model.input_tokenizer",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_loop_": "reward_model.reward_loop_",
    "reward.num_workers": "reward_model.num_workers",
    "reward_model.launch_reward_fn_async": "reward_model.launch_reward_fn_async",
    "trainer.total_epochs": "rollout.total_epochs",
    "trainer.test_freq": "rollout.test_freq",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_ctrl.kl_coeff",
}


def _current_by_older() -> dict[str, str]:
    """Returns the current key by each older or second name, the longest name first."""
    keys = {}
    for new, names in _OTHER_NAMES.items():
        for name, engine, section in itertools.product(names.split(), ("veomni", "torchtitan"), ("A", "critic")):
            old, current = (text.replace("ENGINE", engine).replace("SECTION", section) for text in (name, new))
            keys[key_of(old)] = key_of(current)
    return dict(sorted(keys.items(), key=lambda pair: -len(pair[0])))


OLDER = _current_by_older()


def current_key(key: str) -> str:
    """Returns the key in the spelling of verl 0.9.1."""
    for old, new in OLDER.items():
        if key == old or (old.endswith((".", "_")) and key.startswith(old)):
            renamed = new + key[len(old) :]
            return renamed if renamed == key else current_key(renamed)
    return key


@functools.cache
def find_row(key: str) -> KeyRow | None:
    """Returns the row of a verl 0.9.1 key."""
    return next((name for name in KEYS if fnmatch.fnmatchcase(key, name.key)), None)


def _default_micro_tokens(get: GetKey) -> int | None:
    is_set = get("A.use_dynamic_bsz") or any(get(key) for key in MICRO)
    return None if is_set else max(16384, device_tokens(get, 1))


def _reward_weights(get: GetKey) -> str | None:
    """Returns `reward.weights`: verl's reward model scores alone, and the overlong penalty has its slope."""
    weights = {"rm_score": 1.0} if reward_model(get) else {}
    if get("FUNCTION.path"):
        weights = {"function_score": 1.0}
    if tokens := penalized_tokens(get):
        factor = value_or(get("OVERLONG.penalty_factor"), 1.0) * tokens / get("OVERLONG.len")
        weights = {**(weights or {"rule_score": 1.0}), "length_score": factor}
    return ",".join(f"{part}={weight:g}" for part, weight in weights.items()) or None


def _scored_length(get: GetKey) -> int | None:
    return longest_sequence(get) if reward_model(get) and not get("RM.max_length") else None


def _by_policy(section: str, name: str) -> Callable[[GetKey], Any]:
    return lambda get: True if get(f"{section}.offload_policy") and get(f"{section}.{name}") is not True else None


def _distilled(setting: str) -> Callable[[GetKey], Any]:
    return lambda get: distilled(get).get(setting)


_MESH = (
    "A.fsdp_config.fsdp_size A.ulysses_sequence_parallel_size A.megatron.tensor_model_parallel_size"
    " A.megatron.expert_model_parallel_size trainer.nnodes trainer.n_gpus_per_node"
)
_HOSTS = "trainer.nnodes trainer.n_gpus_per_node rollout.nnodes R.nnodes R.tensor_model_parallel_size"
_ASYNC = "rollout.nnodes async_training.trigger_parameter_sync_step trainer.v1.trainer_mode"

# Settings that follow from several keys, and why; None: jppo's own default. The keys are those that decide, for an
# override on top of a jppo config.
FOLLOWING: dict[str, tuple[Callable[[GetKey], Any], str, str]] = {
    "actor.max_tokens_per_device": (_default_micro_tokens, "", "nothing is said of micro-batches"),
    "mesh.data": (derived.mesh_data, _MESH, "the devices that are left, where not all share the parameters"),
    "mesh.fsdp": (derived.fsdp, _MESH, "of fsdp_size, the devices beside those of one sequence and of experts; -1 where"
      " fsdp_size is all devices. Megatron's pipeline stages and data parallel devices share the parameters. A power of"
      " two, for a model's width must be a multiple"),
    "mesh.expert": (derived.expert, _MESH, "of expert_model_parallel_size, the devices beside sequence and tensor,"
      " which shard the experts, too"),
    "trainer.nnodes": (lambda get: derived.hosts(get)[0], _HOSTS, "hosts of eight devices or n_gpus_per_node, of"
      " those that train and those that sample"),
    "rollout.tensor_model_parallel_size": (derived.server_devices, _HOSTS, "at most the devices of a host"),
    "rollout.servers": (derived.servers, _HOSTS,
      "a host's devices that sample over rollout.tensor_model_parallel_size"),
    "rollout.devices": (derived.sampling_devices, _HOSTS, "the last devices of a host, where others train"),
    "rollout.mode": (lambda get: "async" if derived.asynchronous(get) else "sync", _ASYNC,
      "the one-step-off and fully asynchronous trainers, and trainer.v1.trainer_mode"),
    "rollout.max_staleness": (derived.max_staleness, _ASYNC, "staleness_threshold, rounded up; else 1"),
    "rollout.on_update": (derived.on_update, _ASYNC, "abort is verl's partial rollout"),
    "rollout.sleep_level": (lambda get: 0 if derived.asynchronous(get) else None, _ASYNC,
      "servers are awake while the trainer learns"),
    "data.train_batch_size": (derived.batch, f"data.train_batch_size {_ASYNC}",
      "the prompts between two publishes"),
    "trainer.total_training_steps": (derived.training_steps, f"trainer.total_training_steps {_ASYNC}",
      "steps of that size"),
    "ref.param_offload": (derived.reference_offload, "A.fsdp_config.param_offload REF.fsdp_config.param_offload",
      "the actor's, where Megatron and VeOmni have none of the reference's own"),
    **{
        f"{section}.{name}": (_by_policy(place, name), f"{place}.offload_policy", "FSDP2's policy is both offloads")
        for section, place in (("actor", "A.fsdp_config"), ("critic", "critic.fsdp"))
        for name in ("param_offload", "optimizer_offload")
    },
    "rollout.engine_args": (engine_options, "R.engine_kwargs.vllm R.engine_kwargs.sglang R.expert_parallel_size",
      "KEY=VALUE is --key VALUE; expert_parallel_size is --enable-expert-parallel"),
    "model.lora_rank": (lambda get: adapter_field(get, "r"), "M.lora_adapter_path",
      "of the adapters that the policy starts from"),
    **{name: (_distilled(name), "distillation.enabled", "distillation from verl's teacher") for name in DISTILLED},
    "reward.weights": (_reward_weights, "RM.enable FUNCTION.path OVERLONG.enable reward.reward_manager.name",
      "verl's reward model scores alone, the overlong penalty is taken off by its factor"),
    "reward.sandbox": (lambda get: "container" if get("BOX.url") else None, "BOX.url",
      "reward.sandbox_fusion.url names a service"),
    "model.lora_alpha": (lambda get: 32 if get("M.lora.rank") else adapter_field(get, "lora_alpha"),
      "M.lora.rank M.lora_adapter_path",
      "of the adapters that the policy starts from; 32 is the default of Megatron's"),
    "reward.model.max_length": (_scored_length, "RM.enable", "verl's reward model reads all of prompt and response"),
    "trainer.run_dir": (
      lambda get: None if get("trainer.default_local_dir") else f"runs/{get('trainer.experiment_name') or 'run'}",
      "trainer.experiment_name", "a folder by the experiment's name"),
}  # fmt: skip

# For overrides on top of a jppo config: conversions that leave a value as it is, and keys without such a setting.
UNCHANGED = (
    "as_is", "at_least_0", "dtype", "drawn", "engine", "adv_estimator", "filled", "in_turns", "interval", "loss_mode",
    "off", "clip", "schedule", "top_k", "param_dtype", "warmup_steps", "rollout_is", "with_model",
)  # fmt: skip
OF_CONFIG: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]] = {
    key_of("A.use_dynamic_bsz"): lambda _, values: not any(key_of(key) in values for key in MICRO),
    key_of("RM.enable"): lambda config, _: bool(config["reward.model.path"]),
    key_of("OVERLONG.enable"): lambda config, _: config["reward.overlong_buffer_tokens"] > 0,
    "reward.reward_manager.name": lambda _config, _values: "dapo",  # jppo adds the penalty to any reward
    key_of("FUNCTION.path"): lambda config, _: config["reward.function"].partition(":")[0],
}


def page() -> str:
    """Formats the table as Markdown; docs/verl.md has its first part, the settings."""
    parts = [
        "### Settings\n",
        *(_setting_line(name) for name in KEYS if name.kind == "same"),
        "\n### What follows from several\n",
        *(_item(f"`{setting}`: {why}") for setting, (_, _, why) in FOLLOWING.items()),
        "\n### Not supported\n",
        *_lines_by_reason("missing"),
        "\n### No meaning in jppo\n",
        *_lines_by_reason("needless"),
        "\n### Other names\n",
    ]
    for new in sorted(set(OLDER.values())):
        parts.append(_item(f"`{new}`: {', '.join(f'`{old}`' for old, now in OLDER.items() if now == new)}"))
    return "\n".join(parts) + "\n"


def _setting_line(name: KeyRow) -> str:
    """Formats the row of a key with its setting, default and reason."""
    default = f", by default `{str(name.default).removeprefix('=')}`" if name.default is not None else ""
    setting = "" if name.setting == name.key else f" is `{name.setting}`"
    return _item(f"`{name.key}`{setting}{default}{f': {name.why}' if name.why else ''}")


def _lines_by_reason(kind: str) -> Iterator[str]:
    """Yields a line of Markdown for each reason why keys of this kind are not translated, with the keys."""
    rows = [name for name in KEYS if name.kind == kind]
    for why in dict.fromkeys(name.why for name in rows):
        yield _item(f"{why}: {', '.join(f'`{name.key}`' for name in rows if name.why == why)}")


def _item(text: str) -> str:
    """Formats an item of a Markdown list, in lines of at most 120 characters."""
    text = text.replace("``", "`''`")
    return textwrap.fill(
        text, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
