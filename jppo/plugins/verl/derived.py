"""Values that several of verl's keys decide: devices and publishes, the correction of the rollout, distillation."""

import math
import re
from typing import Any

from jppo.plugins.verl.name import GetKey, Unsupported, join_commas, needed, value_or

_HOST = 8  # devices of a host, at least
_MEGATRON = ("megatron", "mindspeed")


def training_engine(get: GetKey) -> str:
    """Returns the training engine: fsdp, megatron, veomni or torchtitan."""
    for name in (get("model_engine"), get("A.strategy")):
        if name in (*_MEGATRON, "veomni", "torchtitan"):
            return "megatron" if name in _MEGATRON else str(name)
    return "fsdp"


def _training_devices(get: GetKey) -> int:
    return int((get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1))


def _sequence_size(get: GetKey) -> int:
    return int(get("A.ulysses_sequence_parallel_size") or 1)


def _data_devices(get: GetKey) -> int:
    tensor_size = int(get("A.megatron.tensor_model_parallel_size") or 1)
    return max(1, _training_devices(get) // (_sequence_size(get) * tensor_size))


def expert(get: GetKey) -> int:
    """Returns the size of `mesh.expert`; verl's experts share the devices of data, sequence and tensor."""
    return math.gcd(int(get("A.megatron.expert_model_parallel_size") or 1), _data_devices(get))


def _sharing_devices(get: GetKey) -> int:
    """Returns over how many devices verl shards the parameters, beside those that share rows."""
    size = get("A.torchtitan.data_parallel_shard_size") if training_engine(get) == "torchtitan" else None
    size = get("A.fsdp_config.fsdp_size") if size is None else size * _sequence_size(get)
    if training_engine(get) == "megatron" or size < 0 or size >= _training_devices(get):
        return _data_devices(get) // expert(get)
    return int(max(1, size // (_sequence_size(get) * expert(get))))


def fsdp(get: GetKey) -> int:
    """Returns the size of `mesh.fsdp`: a power of two, for the width of a model must be a multiple; -1 is all."""
    size = _sharing_devices(get) & -_sharing_devices(get)
    return -1 if size * expert(get) == _data_devices(get) else size


def require_sharing(value: int, get: GetKey) -> int:
    """Returns the number of hosts or of their devices; raises Unsupported if not all can share the parameters."""
    size = _sharing_devices(get)
    if value & (value - 1) and size & (size - 1):
        raise Unsupported(f"{size & -size} of {size} devices share the parameters: {size} must divide a model's width")
    return value


def mesh_data(get: GetKey) -> int:
    return 1 if fsdp(get) == -1 else -1


def _samples_apart(get: GetKey) -> bool:
    return bool(get("rollout.nnodes") or get("R.nnodes"))


def _sampling_devices(get: GetKey) -> int:
    """Returns how many devices of one of verl's hosts sample."""
    section = "rollout" if get("rollout.nnodes") else "R"
    own_devices = get(f"{section}.n_gpus_per_node") if _samples_apart(get) else None
    return int(own_devices or get("trainer.n_gpus_per_node") or 1)


def server_devices(get: GetKey) -> int:
    """Returns the devices of a server, which are on one host."""
    return min(int(get("R.tensor_model_parallel_size") or 1), _sampling_devices(get))


def hosts(get: GetKey) -> tuple[int, int, int]:
    """Returns the run's hosts, and the devices of each that train and that sample, which may be the same."""
    nodes, training = int(get("trainer.nnodes") or 1), int(get("trainer.n_gpus_per_node") or 1)
    if not _samples_apart(get):
        return nodes, training, training
    sampling = int((get("rollout.nnodes") or get("R.nnodes")) * _sampling_devices(get))
    trained, limit = nodes * training, max(_HOST, training)
    for count in range(-(-(trained + sampling) // limit), trained + 1):
        if trained % count == 0 and sampling % count == 0 and (sampling // count) % server_devices(get) == 0:
            return count, trained // count, sampling // count
    raise Unsupported(f"{sampling} devices that sample beside {trained} that train do not fit hosts of {limit}")


def servers(get: GetKey) -> int:
    return max(1, hosts(get)[2] // server_devices(get))


def sampling_devices(get: GetKey) -> str | None:
    """Returns `rollout.devices`, the numbers of a host's sampling devices; None if the same ones train."""
    _, train, sample = hosts(get)
    return ",".join(map(str, range(train, train + sample))) if _samples_apart(get) else None


def fully_async(get: GetKey) -> bool:
    """Whether the trainer is verl's fully asynchronous one."""
    return get("async_training.trigger_parameter_sync_step") is not None


def asynchronous(get: GetKey) -> bool:
    return bool(fully_async(get) or get("rollout.nnodes") or get("trainer.v1.trainer_mode") != "sync")


def publish_interval(get: GetKey) -> int:
    """Returns after how many steps of its schedule verl publishes; jppo publishes after each step."""
    if fully_async(get):
        return int(get("async_training.trigger_parameter_sync_step") or 1)
    if get("trainer.v1.trainer_mode") == "separate_async":
        return int(get("trainer.v1.separate_async.parameter_sync_step") or 4)
    return 1


def batch(get: GetKey) -> int:
    """Returns the prompts between two publishes of verl's, which are one step of jppo's."""
    if fully_async(get):
        required = get("A.ppo_mini_batch_size") * (get("async_training.require_batches") or 1)
        return int(required * publish_interval(get))
    return int(get("data.train_batch_size"))


def training_steps(get: GetKey) -> int | None:
    """Returns the steps of a run, -1 for whole epochs; None if they follow from data that is not known."""
    total = get("trainer.total_training_steps")
    if fully_async(get) and not total:
        prompts = get("rollout.total_rollout_steps")
        return None if not prompts else max(1, int(prompts) // batch(get))
    return -1 if not total or total < 0 else int(total)


def max_staleness(get: GetKey) -> int | None:
    """Returns `rollout.max_staleness`: how many publishes old a sample may be; None in synchronous training."""
    if not asynchronous(get):
        return None
    return math.ceil(get("async_training.staleness_threshold") or 0) if fully_async(get) else 1


def on_update(get: GetKey) -> str | None:
    """Returns `rollout.on_update`: what becomes of unfinished responses at a publish."""
    is_partial = get("trainer.v1.trainer_mode") == "separate_async"
    is_partial = is_partial or bool(fully_async(get) and get("async_training.partial_rollout") and max_staleness(get))
    return "abort" if is_partial else "wait" if asynchronous(get) else None


def reference_offload(get: GetKey) -> bool | None:
    """Returns the reference's offload if verl takes the actor's for it; else None."""
    follows_actor = training_engine(get) in ("megatron", "veomni") and get("REF.fsdp_config.param_offload") is None
    return bool(get("A.fsdp_config.param_offload")) if follows_actor else None


_UNLIKE_LLAMA = re.compile(
    r"(?i)(?<![a-z])(\d+x\d+b|a\d+(\.\d+)?b|moe|\w*moe|mixtral|moonlight|kimi|gpt[-_]?oss|qwen3[-_]?next|qwen3[._]?5"
    r"|deepseek[-_](v[23]|coder-v2|r1(?!-distill))|dsv[23])(?![a-z])"
)


def unlike_llama(get: GetKey) -> bool:
    """Whether a model has experts, latent attention or gated delta nets, by its settings or its published name."""
    experts = ("A.megatron.expert_model_parallel_size", "R.expert_parallel_size")
    by_name = _UNLIKE_LLAMA.search(str(get("M.path")).rstrip("/").rpartition("/")[2])
    return bool(by_name or get("R.enable_rollout_routing_replay") or any((get(key) or 1) > 1 for key in experts))


def _bypasses(get: GetKey) -> bool:
    """Whether the old log-probs are the rollout engine's."""
    return bool(get("CORRECTION.bypass_mode") and not get("async_training.compute_prox_log_prob"))


def old_logprob(value: bool | None, get: GetKey) -> str:
    corrects = any(get(f"CORRECTION.{name}") not in (None, "none", "") for name in ("rollout_is", "rollout_rs"))
    return "bypass" if _bypasses(get) else "correction" if corrects else "decoupled"


def _reinforces(get: GetKey) -> bool:
    """Whether bypass mode has verl's policy-gradient loss."""
    return _bypasses(get) and get("CORRECTION.loss_type") == "reinforce"


def loss_mode(value: str, get: GetKey) -> str:
    """Returns `actor.loss_mode`: in verl's bypass mode the policy gradient or the clipped loss."""
    is_clipped = value == "bypass_mode" or (_bypasses(get) and get("trainer.use_v1") is False)
    return "gpg" if _reinforces(get) else "vanilla" if is_clipped else value


def rollout_is(value: Any, get: GetKey) -> str:
    off, clipped = value in (None, "none", "", False), _bypasses(get) and not _reinforces(get)
    return "none" if off else str(needed(value, not clipped, "in bypass mode verl's clipped loss has no weights"))


def with_weights(value: Any, get: GetKey) -> Any:
    """Returns an option of the importance weights; Needless without these."""
    is_used = get("CORRECTION.rollout_is") not in (None, "none", "", False) and (_reinforces(get) or not _bypasses(get))
    value = needed(value, is_used, "read only with rollout_is, without the clipped loss of bypass mode")
    return value if isinstance(value, bool) else str(value)


def batch_normalize(value: bool, get: GetKey) -> bool:
    """Returns whether the weights are divided by their mean; Unsupported in bypass mode."""
    if with_weights(value, get) and _bypasses(get):
        raise Unsupported(
            "in bypass mode the weights change with every mini-batch, and their mean would follow its cut"
        )
    return value


_OLD_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def rejection(value: Any, _: GetKey) -> str:
    """Returns the rejection rules; each of verl's older ones is a k1 rule of today."""
    return "" if value in (None, "none", "", False) else _OLD_RULES.get(value, join_commas(value))


def rejected(value: Any, get: GetKey) -> str:
    """Returns the thresholds of the rejection rules; an older rule's is LOW_HIGH, with 1 / HIGH for a missing LOW."""
    rule = get("CORRECTION.rollout_rs")
    if value in (None, "none", "", False):
        return ""
    if needed(rule, rule, "read only with rollout_rs") in _OLD_RULES:
        return f"{value_or(get('CORRECTION.rollout_rs_threshold_lower'), 1 / value):g}_{value:g}"
    return join_commas(value)


def adv_estimator(value: str, get: GetKey) -> str:
    """Returns the estimator; with one sample a prompt, those that compare samples become the score itself."""
    if get("distillation.enabled") and not _learns_score(get):
        return "distill"
    single_sample = get("R.n") == 1 and value in ("grpo", "rloo", "opo")
    return "reinforce_no_baseline" if single_sample else value


_DISTILLED = "distillation.distillation_loss"
_KINDS = {"kl": "kl", "k1": "kl", "abs": "abs", "mse": "mse", "k2": "mse", "low_var_kl": "low_var_kl",
  "k3": "low_var_kl", "forward_kl_topk": "forward_kl_topk"}  # fmt: skip


def _learns_score(get: GetKey) -> bool:
    """Whether the score is learned beside the teacher, as by default."""
    return bool(value_or(get(f"{_DISTILLED}.use_task_rewards"), True))


def distilled(get: GetKey) -> dict[str, Any]:
    """Returns the settings of distillation from a teacher; none without it."""
    if not get("distillation.enabled"):
        return {}
    kind = _KINDS.get(get(f"{_DISTILLED}.loss_mode") or "k3")
    if get(f"{_DISTILLED}.use_policy_gradient"):
        reward = {"algorithm.use_kl_in_reward": True, "algorithm.kl_coef": 1.0, "algorithm.gamma": 0.0}
        return reward | {"algorithm.kl_penalty": kind}
    coef = value_or(get(f"{_DISTILLED}.distillation_loss_coef"), 1.0) if _learns_score(get) else 1.0
    return {"actor.use_kl_loss": True, "actor.kl_loss_coef": coef, "actor.kl_loss_type": kind}


DISTILLED = ("algorithm.use_kl_in_reward", "algorithm.kl_coef", "algorithm.kl_penalty", "algorithm.gamma",
  "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type")  # fmt: skip


def teacher_clamp(value: float | None, get: GetKey) -> float | None:
    """Returns the clamp of the distillation loss; Unsupported where the teacher is in the reward."""
    if value is not None and get(f"{_DISTILLED}.use_policy_gradient"):
        raise Unsupported("the KL in the reward is not clamped")
    return needed(value, get("distillation.enabled"), "distillation.enabled is False")


def teacher_fault(key: str, value: Any, get: GetKey) -> str:
    """Returns why a key of distillation has no counterpart, or ''."""
    if not key.startswith("distillation.") or not get("distillation.enabled"):
        return ""
    gradient = get(f"{_DISTILLED}.use_policy_gradient")
    if key == f"{_DISTILLED}.loss_mode" and (value not in _KINDS or (gradient and value == "forward_kl_topk")):
        return f"a distillation loss of jppo named {value!r}{' in the reward' if gradient else ''}"
    if key == f"{_DISTILLED}.use_policy_gradient" and gradient and _learns_score(get):
        return (
            "the teacher in the reward together with a score; set use_task_rewards=False, or use_policy_gradient=False"
        )
    models = key.removeprefix("distillation.teacher_models.")
    if models != key and not models.startswith("teacher_model."):
        return (
            "several teachers; leave out distillation.teacher_models, serve each by vLLM, and set"
            " ref.url=SOURCE=ADDRESS,SOURCE=ADDRESS with the data_source of its rows"
        )
    return ""


def frozen(value: Any, get: GetKey) -> str:
    """Returns critic.freeze for regular expressions that are searched in names of parameters."""
    patterns = []
    for text in needed(value or None) if isinstance(value, list | tuple) else [needed(value or None)]:
        pattern = str(text).strip("^$").replace(r"\.", ".").replace(".*", "*")
        if re.search(r"[][()|+?{}\\,]", pattern):
            raise Unsupported("a pattern of critic.freeze has no signs but *, as in *.self_attn.*")
        patterns.append(re.sub(r"\*+", "*", f"*{pattern}*"))
    return ",".join(patterns)
