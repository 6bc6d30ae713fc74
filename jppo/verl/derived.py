"""Values that several of verl's keys decide: devices and publishes, the correction of the rollout, distillation."""

import math
import re
from collections.abc import Callable
from typing import Any

from jppo.verl.name import Look, Unfit, commas, off_or, required

_HOST = 8  # devices of a host, at least
_MEGATRON = ("megatron", "mindspeed")


def training_engine(look: Look) -> str:
    """Returns the training engine: fsdp, megatron, veomni or torchtitan."""
    for name in (look("model_engine"), look("A.strategy")):
        if name in (*_MEGATRON, "veomni", "torchtitan"):
            return "megatron" if name in _MEGATRON else str(name)
    return "fsdp"


def _world(look: Look) -> int:
    """Returns the trainer's devices."""
    return int((look("trainer.nnodes") or 1) * (look("trainer.n_gpus_per_node") or 1))


def _sequence(look: Look) -> int:
    return int(look("A.ulysses_sequence_parallel_size") or 1)


def _tensor(look: Look) -> int:
    return int(look("A.megatron.tensor_model_parallel_size") or 1)


def _rest(look: Look) -> int:
    return max(1, _world(look) // (_sequence(look) * _tensor(look)))


def expert(look: Look) -> int:
    """Returns the size of `mesh.expert`; verl's experts share the devices of data, sequence and tensor."""
    return math.gcd(int(look("A.megatron.expert_model_parallel_size") or 1), _rest(look))


def _sharing_devices(look: Look) -> int:
    """Returns the devices that share verl's parameters, beside those that share rows."""
    size = look("A.torchtitan.data_parallel_shard_size") if training_engine(look) == "torchtitan" else None
    size = look("A.fsdp_config.fsdp_size") if size is None else size * _sequence(look)
    if training_engine(look) == "megatron" or size < 0 or size >= _world(look):
        return _rest(look) // expert(look)
    return int(max(1, size // (_sequence(look) * expert(look))))


def fsdp(look: Look) -> int:
    """Returns the size of `mesh.fsdp`: a power of two, for the width of a model must be a multiple; -1 is all."""
    size = _sharing_devices(look) & -_sharing_devices(look)
    return -1 if size * expert(look) == _rest(look) else size


def require_sharing(value: int, look: Look) -> int:
    """Returns the number of hosts or of their devices; raises Unfit if not all can share the parameters."""
    size = _sharing_devices(look)
    if value & (value - 1) and size & (size - 1):
        raise Unfit(f"{size & -size} of {size} devices share the parameters: {size} must divide a model's width")
    return value


def mesh_data(look: Look) -> int:
    return 1 if fsdp(look) == -1 else -1


def _apart(look: Look) -> bool:
    """Whether the samplers have devices of their own."""
    return bool(look("rollout.nnodes") or look("R.nnodes"))


def _sampling(look: Look) -> int:
    """Returns the devices of one of verl's hosts that sample."""
    place = "rollout" if look("rollout.nnodes") else "R"
    own = look(f"{place}.n_gpus_per_node") if _apart(look) else None
    return int(own or look("trainer.n_gpus_per_node") or 1)


def server_devices(look: Look) -> int:
    """Returns the devices of a server, which are on one host."""
    return min(int(look("R.tensor_model_parallel_size") or 1), _sampling(look))


def hosts(look: Look) -> tuple[int, int, int]:
    """Returns the hosts of the run, and of each the devices that train and those that sample, which may be the same."""
    nodes, trains = int(look("trainer.nnodes") or 1), int(look("trainer.n_gpus_per_node") or 1)
    if not _apart(look):
        return nodes, trains, trains
    samples = int((look("rollout.nnodes") or look("R.nnodes")) * _sampling(look))
    all_train, most = nodes * trains, max(_HOST, trains)
    for count in range(-(-(all_train + samples) // most), all_train + 1):
        if all_train % count == 0 and samples % count == 0 and (samples // count) % server_devices(look) == 0:
            return count, all_train // count, samples // count
    raise Unfit(f"{samples} devices that sample beside {all_train} that train do not fit hosts of {most}")


def servers(look: Look) -> int:
    return max(1, hosts(look)[2] // server_devices(look))


def sampling_devices(look: Look) -> str | None:
    """Returns the devices of a host that sample, where they do not train."""
    _, train, sample = hosts(look)
    return ",".join(map(str, range(train, train + sample))) if _apart(look) else None


def fully(look: Look) -> bool:
    """Whether the trainer is verl's fully asynchronous one."""
    return look("async_training.trigger_parameter_sync_step") is not None


def asynchronous(look: Look) -> bool:
    return bool(fully(look) or look("rollout.nnodes") or look("trainer.v1.trainer_mode") != "sync")


def meetings(look: Look) -> int:
    """Returns the updates of verl's between two publishes; jppo publishes after each step."""
    if fully(look):
        return int(look("async_training.trigger_parameter_sync_step") or 1)
    return (
        int(look("trainer.v1.separate_async.parameter_sync_step"))
        if look("trainer.v1.trainer_mode") == "separate_async"
        else 1
    )


def batch(look: Look) -> int:
    """Returns the prompts between two publishes."""
    if fully(look):
        required = look("A.ppo_mini_batch_size") * (look("async_training.require_batches") or 1)
        return int(required * meetings(look))
    return int(look("data.train_batch_size") * meetings(look))


def training_steps(look: Look) -> int | None:
    """Returns the steps of a run, if they are given."""
    total = look("trainer.total_training_steps")
    if fully(look) and not total:
        prompts = look("rollout.total_rollout_steps")
        return None if not prompts else max(1, int(prompts) // batch(look))
    return -1 if not total or total < 0 else max(1, int(total) // (1 if fully(look) else meetings(look)))


def max_staleness(look: Look) -> int | None:
    """Returns the publishes that a sample may be old."""
    if not asynchronous(look):
        return None
    return math.ceil(look("async_training.staleness_threshold") or 0) if fully(look) else 1


def on_update(look: Look) -> str | None:
    """Returns what becomes of unfinished responses at a publish."""
    spans = look("trainer.v1.trainer_mode") == "separate_async"
    spans = spans or bool(fully(look) and look("async_training.partial_rollout") and max_staleness(look))
    return "abort" if spans else "wait" if asynchronous(look) else None


def reference_offload(look: Look) -> bool | None:
    """Returns the reference's offload where it follows from the actor's."""
    follows = training_engine(look) in ("megatron", "veomni") and look("REF.fsdp_config.param_offload") is None
    return bool(look("A.fsdp_config.param_offload")) if follows else None


_UNLIKE_LLAMA = re.compile(
    r"(?i)(?<![a-z])(\d+x\d+b|a\d+(\.\d+)?b|moe|\w*moe|mixtral|moonlight|kimi|gpt[-_]?oss|qwen3[-_]?next|qwen3[._]?5"
    r"|deepseek[-_](v[23]|coder-v2|r1(?!-distill))|dsv[23])(?![a-z])"
)


def unlike_llama(look: Look) -> bool:
    """Whether a model has experts, latent attention or gated delta nets, by its settings or its published name."""
    experts = ("A.megatron.expert_model_parallel_size", "R.expert_parallel_size")
    named = _UNLIKE_LLAMA.search(str(look("M.path")).rstrip("/").rpartition("/")[2])
    return bool(named or look("R.enable_rollout_routing_replay") or any((look(key) or 1) > 1 for key in experts))


def _bypasses(look: Look) -> bool:
    """Whether the old log-probs are the rollout engine's."""
    return bool(look("CORRECTION.bypass_mode") and not look("async_training.compute_prox_log_prob"))


def old_logprob(value: bool | None, look: Look) -> str:
    asked = any(look(f"CORRECTION.{name}") not in (None, "none", "") for name in ("rollout_is", "rollout_rs"))
    return "bypass" if _bypasses(look) else "correction" if asked else "decoupled"


def _reinforces(look: Look) -> bool:
    """Whether bypass mode has verl's policy-gradient loss."""
    return _bypasses(look) and look("CORRECTION.loss_type") == "reinforce"


def loss_mode(value: str, look: Look) -> str:
    """Returns the policy loss; `bypass_mode` is verl's name for the two of bypass."""
    forced = value == "bypass_mode" or (_bypasses(look) and look("trainer.use_v1") is False)
    return "gpg" if _reinforces(look) else "vanilla" if forced else value


def rollout_is(value: Any, look: Look) -> str:
    off, ratio = value in (None, "none", "", False), _bypasses(look) and not _reinforces(look)
    return "none" if off else str(required(value, not ratio, "in bypass mode verl's clipped loss has no weights"))


def with_weights(value: Any, look: Look) -> Any:
    used = look("CORRECTION.rollout_is") not in (None, "none", "", False) and (_reinforces(look) or not _bypasses(look))
    value = required(value, used, "read only with rollout_is, without the clipped loss of bypass mode")
    return value if isinstance(value, bool) else str(value)


def batch_normalize(value: bool, look: Look) -> bool:
    if with_weights(value, look) and _bypasses(look):
        raise Unfit("in bypass mode the weights change with every mini-batch, and their mean would follow its cut")
    return value


_OLD_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def rejection(value: Any, _: Look) -> str:
    """Returns the rules; each of verl's older ones is a k1 of today."""
    return "" if value in (None, "none", "", False) else _OLD_RULES.get(value, commas(value))


def rejected(value: Any, look: Look) -> str:
    """Returns the thresholds of the rules; an older rule's band is LOW_HIGH, with 1 / HIGH for a missing LOW."""
    rule = look("CORRECTION.rollout_rs")
    if value in (None, "none", "", False):
        return ""
    if required(rule, rule, "read only with rollout_rs") in _OLD_RULES:
        return f"{off_or(look('CORRECTION.rollout_rs_threshold_lower'), 1 / value):g}_{value:g}"
    return commas(value)


def adv_estimator(value: str, look: Look) -> str:
    """Returns the estimator; those that compare samples have the score itself for one sample a prompt."""
    if look("distillation.enabled") and not _rewarded(look):
        return "distill"
    alone = look("R.n") == 1 and value in ("grpo", "rloo", "opo")
    return "reinforce_no_baseline" if alone else value


_DISTILLED = "distillation.distillation_loss"
_KINDS = {"kl": "kl", "k1": "kl", "abs": "abs", "mse": "mse", "k2": "mse", "low_var_kl": "low_var_kl",
  "k3": "low_var_kl", "forward_kl_topk": "forward_kl_topk"}  # fmt: skip


def _rewarded(look: Look) -> bool:
    """Whether the score is learned beside the teacher, as by default."""
    return bool(off_or(look(f"{_DISTILLED}.use_task_rewards"), True))


def distilled(setting: str) -> Callable[[Look], Any]:
    """Makes the value of a setting that distillation implies, None without it."""

    def value(look: Look) -> Any:
        if not look("distillation.enabled"):
            return None
        kind = _KINDS.get(look(f"{_DISTILLED}.loss_mode") or "k3")
        if look(f"{_DISTILLED}.use_policy_gradient"):
            reward = {"algorithm.use_kl_in_reward": True, "algorithm.kl_coef": 1.0, "algorithm.gamma": 0.0}
            return (reward | {"algorithm.kl_penalty": kind}).get(setting)
        coef = off_or(look(f"{_DISTILLED}.distillation_loss_coef"), 1.0) if _rewarded(look) else 1.0
        loss = {"actor.use_kl_loss": True, "actor.kl_loss_coef": coef, "actor.kl_loss_type": kind}
        return loss.get(setting)

    return value


DISTILLED = ("algorithm.use_kl_in_reward", "algorithm.kl_coef", "algorithm.kl_penalty", "algorithm.gamma",
  "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type")  # fmt: skip


def teacher_clamp(value: float | None, look: Look) -> float | None:
    if value is not None and look(f"{_DISTILLED}.use_policy_gradient"):
        raise Unfit("the KL in the reward is not clamped")
    return required(value, look("distillation.enabled"), "distillation.enabled is False")


def untaught(key: str, value: Any, look: Look) -> str:
    """Why a key of distillation has no counterpart, or ''."""
    if not key.startswith("distillation.") or not look("distillation.enabled"):
        return ""
    gradient = look(f"{_DISTILLED}.use_policy_gradient")
    if key == f"{_DISTILLED}.loss_mode" and (value not in _KINDS or (gradient and value == "forward_kl_topk")):
        return f"a distillation loss of jppo named {value!r}{' in the reward' if gradient else ''}"
    if key == f"{_DISTILLED}.use_policy_gradient" and gradient and _rewarded(look):
        return (
            "the teacher in the reward together with a score; set use_task_rewards=False, or use_policy_gradient=False"
        )
    models = key.removeprefix("distillation.teacher_models.")
    several = models != key and not models.startswith("teacher_model.")
    return (
        "several teachers; leave out distillation.teacher_models, serve each by vLLM, and set"
        " ref.url=SOURCE=ADDRESS,SOURCE=ADDRESS with the data_source of its rows"
        if several
        else ""
    )
