"""Conversions of verl's values. `look` returns other keys' values, verl's defaults included."""

import json
import pathlib
import re
import shlex
from collections.abc import Callable
from typing import Any

import yaml

from jppo.settings.table import TABLE
from jppo.settings.texts import LOGGERS
from jppo.verl import layout
from jppo.verl.name import Look, Moot, Unfit, commas, lora_rank, need, off_or, on_each
from jppo.verl.overrides import read_value

_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
FUSED = {  # Megatron's projections
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}


def engine(value: str, _: Look) -> str:
    name = {"sglang_async": "sglang", "vllm_async": "vllm", "hf": "inprocess"}.get(value, value)
    if name not in ("vllm", "sglang", "inprocess"):
        raise Unfit("vllm is taken in place of this engine")
    return name


def loggers(value: Any, _: Look) -> str:
    names = ["jsonl" if name == "file" else name for name in commas(value).split(",")]
    return ",".join(dict.fromkeys([*(name for name in names if name in LOGGERS), "jsonl"]))


def train_dtype(value: str, _: Look) -> str:
    dtype = _DTYPES.get(value, value)
    if dtype == "float16":
        raise Unfit("bfloat16 has the range of float32, and needs no loss scaling; rollout.dtype may be float16")
    return dtype


def contents(value: Any, _: Look) -> str:
    """Returns the parts of a checkpoint; without model and extra no run could resume from it."""
    given = commas(value).split(",")
    return ",".join([*(one for one in ("model", "extra") if one not in given), *given])


def micro_tokens(value: int | None, look: Look) -> int:
    why = "use_dynamic_bsz=True reads ppo_max_token_len_per_gpu"
    return on_each(look, max(1, need(value, not look("A.use_dynamic_bsz"), why)))


def all_micro_tokens(value: int | None, look: Look) -> int:
    gpus = look("trainer.nnodes") * look("trainer.n_gpus_per_node")
    return micro_tokens(None if value is None else max(1, value // gpus), look)


def tokens(value: int, look: Look) -> int:
    """Returns the tokens of a micro-batch, which holds at least one row."""
    return max(need(value, look("A.use_dynamic_bsz"), "read only with use_dynamic_bsz=True"), on_each(look, 1))


def bypasses(look: Look) -> bool:
    """Whether the old log-probs are the rollout engine's."""
    return bool(look("CORRECTION.bypass_mode") and not look("async_training.compute_prox_log_prob"))


def old_logprob(value: bool | None, look: Look) -> str:
    asked = any(look(f"CORRECTION.{name}") not in (None, "none", "") for name in ("rollout_is", "rollout_rs"))
    return "bypass" if bypasses(look) else "correction" if asked else "decoupled"


def reinforces(look: Look) -> bool:
    """Whether bypass mode has verl's policy-gradient loss."""
    return bypasses(look) and look("CORRECTION.loss_type") == "reinforce"


def loss_mode(value: str, look: Look) -> str:
    """Returns the policy loss; `bypass_mode` is verl's name for the two of bypass."""
    forced = value == "bypass_mode" or (bypasses(look) and look("trainer.use_v1") is False)
    return "gpg" if reinforces(look) else "vanilla" if forced else value


def weights(value: Any, look: Look) -> str:
    off, ratio = value in (None, "none", "", False), bypasses(look) and not reinforces(look)
    return "none" if off else str(need(value, not ratio, "in bypass mode verl's clipped loss has no weights"))


def weighted(value: Any, look: Look) -> Any:
    used = look("CORRECTION.rollout_is") not in (None, "none", "", False) and (reinforces(look) or not bypasses(look))
    value = need(value, used, "read only with rollout_is, without the clipped loss of bypass mode")
    return value if isinstance(value, bool) else str(value)


def reward_parts(value: Any, look: Look) -> str:
    """Returns the parts of the reward that keys of a reward function's dict are."""
    part = "function_score" if look("FUNCTION.path") else "rule_score"
    return ",".join(part if key == "score" else f"{part}/{key}" for key in commas(value).split(","))


def rejection(value: Any, look: Look) -> str:
    if value in (None, "none", "", False):
        return ""
    return commas(need(value, look("CORRECTION.rollout_rs"), "read only with rollout_rs"))


def estimator(value: str, look: Look) -> str:
    return "distill" if look("distillation.enabled") and not rewarded(look) else value


_DISTILLED = "distillation.distillation_loss"
_KINDS = {"kl": "kl", "k1": "kl", "abs": "abs", "mse": "mse", "k2": "mse", "low_var_kl": "low_var_kl",
  "k3": "low_var_kl", "forward_kl_topk": "forward_kl_topk"}  # fmt: skip


def rewarded(look: Look) -> bool:
    """Whether the score is learned beside the teacher, as by default."""
    return bool(off_or(look(f"{_DISTILLED}.use_task_rewards"), True))


def distilled(setting: str) -> Callable[[Look], Any]:
    """Makes the value of a setting that distillation implies, None without it."""

    def value(look: Look) -> Any:
        if not look("distillation.enabled"):
            return None
        kind = _KINDS.get(look(f"{_DISTILLED}.loss_mode") or "k3")
        if look(f"{_DISTILLED}.use_policy_gradient"):
            found = {"algorithm.use_kl_in_reward": True, "algorithm.kl_coef": 1.0, "algorithm.gamma": 0.0}
            return (found | {"algorithm.kl_penalty": kind}).get(setting)
        coef = off_or(look(f"{_DISTILLED}.distillation_loss_coef"), 1.0) if rewarded(look) else 1.0
        loss = {"actor.use_kl_loss": True, "actor.kl_loss_coef": coef, "actor.kl_loss_type": kind}
        return loss.get(setting)

    return value


DISTILLED = ("algorithm.use_kl_in_reward", "algorithm.kl_coef", "algorithm.kl_penalty", "algorithm.gamma",
  "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type")  # fmt: skip


def teacher(value: str | None, look: Look) -> str:
    return str(need(value, look("distillation.enabled"), "read only with distillation.enabled=True"))


def untaught(key: str, value: Any, look: Look) -> str:
    """Why a key of distillation has no counterpart, or ''."""
    if not key.startswith("distillation.") or not look("distillation.enabled"):
        return ""
    gradient = look(f"{_DISTILLED}.use_policy_gradient")
    if key == f"{_DISTILLED}.loss_mode" and (value not in _KINDS or (gradient and value == "forward_kl_topk")):
        return f"a distillation loss of jppo named {value!r}{' in the reward' if gradient else ''}"
    if key == f"{_DISTILLED}.use_policy_gradient" and gradient and rewarded(look):
        return (
            "the teacher in the reward together with a score; set use_task_rewards=False, or use_policy_gradient=False"
        )
    models = key.removeprefix("distillation.teacher_models.")
    return "several teachers" if models != key and not models.startswith("teacher_model.") else ""


def balance(value: float, look: Look) -> float:
    kind = look("A.megatron.override_transformer_config.moe_router_load_balancing_type")
    return need(value, kind not in ("none", '"none"'), "the load is not balanced by a loss")


def conversing(value: bool, look: Look) -> bool:
    if value and not answered(look):
        raise Moot("no tools answer the policy; a conversation has one turn")
    return value


def answered(look: Look) -> bool:
    return bool(look("TURNS.tool_config_path") or look("TURNS.interaction_config_path"))


def served_experts(value: int, look: Look) -> str:
    need(value if value != 1 else None)
    if (look("R.data_parallel_size") or 1) > 1:
        raise Unfit("a server's experts are on its own GPUs, rollout.tensor_model_parallel_size of them")
    return str(engine_args(look))


def engine_args(look: Look) -> str | None:
    """Returns all options of the server's command line."""
    name = "sglang" if str(look("R.name")).startswith("sglang") else "vllm"
    words = [server_args(given, look, name)] if (given := look(f"R.engine_kwargs.{name}")) else []
    if (look("R.expert_parallel_size") or 1) > 1 and (look("R.data_parallel_size") or 1) == 1 and name == "vllm":
        words.append("--enable-expert-parallel")
    if positions := look("M.override_config.max_position_embeddings"):
        option = "--hf-overrides" if name == "vllm" else "--json-model-override-args"
        words.append(f"{option} {shlex.quote(json.dumps({'max_position_embeddings': positions}))}")
    return " ".join(words) or None


def interval(value: int | None, look: Look) -> int:
    """Returns an interval in steps of jppo's; -1 is none."""
    if value is None or isinstance(value, str) or value <= 0:
        return -1
    return max(1, value // (1 if layout.fully(look) else layout.meetings(look)))


def critic_path(value: str | None, look: Look) -> str:
    return "" if value in (None, look("M.path")) else value


def critic_lora(value: int, look: Look) -> int:
    return need(value, lora_rank(look) or value, "the policy has no adapters either")


def megatron_lora(value: Any, look: Look) -> Any:
    return need(value, look("M.lora.rank"), "read only with model.lora.rank above 0")


def modules(value: Any, _: Look) -> str:
    """Returns names of projections; Megatron's fused ones are several."""
    return ",".join(FUSED.get(name, name) for name in commas(value).split(","))


def megatron_modules(value: Any, look: Look) -> str:
    return modules(megatron_lora(value, look), look)


def optimizer(value: str, _: Look) -> str:
    name = {"adam": "adamw", "_adamw": "adamw"}.get(value if value == "adam" else value.lower(), value.lower())
    if value == "Adam" or name not in ("adamw", "sgd", "muon", "adafactor", "lion"):
        raise Unfit("adamw, muon, adafactor, lion and sgd are there, with decoupled weight decay; or PATH.py:NAME")
    return name


def schedule(value: str | None, _: Look) -> str:
    if need(value) not in ("constant", "cosine"):
        raise Unfit("constant and cosine are there")
    return str(value)


def min_lr(value: float | None, look: Look, optim: str) -> float:
    rate: float = off_or(value, 0.0) / look(f"{optim}.lr")
    return rate


def server_args(value: dict[str, Any] | None, look: Look, engine: str) -> str:
    """Returns options of a server's command line."""
    if look("R.name") not in (engine, f"{engine}_async"):
        raise Moot(f"read only with rollout.name={engine}")
    words = []
    for key, one in need(value or None).items():
        name = key.replace("_", "-")
        if one is None:
            continue
        text = shlex.quote(json.dumps(one) if isinstance(one, dict | list) else str(one))
        words.append(f"--{name}" if one is True else f"--no-{name}" if one is False else f"--{name} {text}")
    return " ".join(words)


def agent_loop(value: str, look: Look) -> bool:
    if value in (None, "single_turn_agent"):
        raise Moot("it is what multi_turn.enable=False is")
    if value != "tool_agent":
        raise Unfit("rollout.multi_turn.enable makes conversations; there is no other loop")
    return conversing(True, look)


def profiled(value: Any, look: Look) -> str:
    return commas(need(value, look("global_profiler.tool"), "read only with global_profiler.tool"))


def of_hosts(value: Any, look: Look) -> Any:
    return need(value, look("trainer.nnodes") > 1, "read only with trainer.nnodes above 1")


def master(value: str | None, look: Look) -> str:
    return f"{of_hosts(value, look)}:{look('trainer.master_port') or 29500}"


def resume(value: str, look: Look) -> str:
    return need(look("trainer.resume_from_path")) if value == "resume_path" else value


def trainer_mode(value: str, look: Look) -> str:
    if value not in ("sync", "colocate_async", "separate_async"):
        raise Unfit("sync, colocate_async and separate_async are there")
    return "async" if layout.asynchronous(look) else "sync"


def sync_step(value: int, look: Look) -> int:
    need(value, look("trainer.v1.trainer_mode") == "separate_async", "read only with trainer_mode=separate_async")
    return layout.batch(look)


def function(value: str | None, look: Look) -> str:
    return f"{need(value)}:{look('FUNCTION.name') or 'compute_score'}"


def with_model(value: Any, look: Look) -> Any:
    if look("RM.enable") and look("FUNCTION.path"):
        raise Unfit("verl's function may ask it over HTTP; reward.model.path adds its score to the function's")
    return need(value, look("RM.enable"), "read only with reward_model.enable=True")


def model_engine(value: str, look: Look) -> str:
    if with_model(value, look) != "vllm":
        raise Unfit("reward.model.engine is jax, transformers or vllm")
    return value


def in_turns(value: Any, look: Look) -> Any:
    enabled = look("TURNS.enable") or look("R.agent.default_agent_loop") == "tool_agent"
    return need(value, enabled and answered(look), "read only with multi_turn.enable=True and tools")


def foreign_tools(path: str) -> str:
    """Returns the classes of verl's in a YAML file of tools, if it can be read."""
    try:
        found = yaml.safe_load(pathlib.Path(path).expanduser().read_text(encoding="utf-8"))
        names = [str(tool["class_name"]) for tool in found["tools"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return ""
    return ", ".join(name for name in names if name.startswith(("verl.", "recipe.")))


def of_tools(value: Any, look: Look) -> Any:
    in_turns(value, look)
    return need(value, look("TURNS.tool_config_path"), "read only with multi_turn.tool_config_path")


def call_format(value: str | None, look: Look) -> str:
    formats = TABLE["rollout.multi_turn.format"].choices
    if in_turns(value, look) not in formats:
        raise Unfit(f"{', '.join(map(str, formats))} are there")
    return str(value)


def filtering(value: Any, look: Look) -> Any:
    return need(value, look("algorithm.filter_groups.enable"), "read only with algorithm.filter_groups.enable=True")


def filter_metric(value: str | None, look: Look) -> str:
    """Returns the part of the reward that a key of verl's rewards is here."""
    part = "function_score" if look("FUNCTION.path") else "rule_score"
    if filtering(value, look) in ("reward", "seq_reward"):
        return "score"
    if value == "score" or (value == "acc" and part == "rule_score"):
        return part
    if value == "seq_final_reward":
        raise Unfit("algorithm.filter_groups_metric=score has no KL in it")
    return f"{part}/{value}"


def unless_greedy(value: Any, look: Look) -> Any:
    greedy = look("R.val_kwargs.temperature") == 0
    return need(value, not greedy, "a greedy test takes the likeliest token, whatever else is left")


def top_k(value: int | None, _: Look) -> int:
    return value if value and value > 0 else -1


def ref_offload(value: bool, look: Look) -> bool:
    adapters = lora_rank(look) and not look("A.fsdp_config.param_offload")
    return need(
        value, not adapters, "beside adapters the reference is the policy's own base; actor.param_offload moves it"
    )


def warmup_ratio(value: float | None, look: Look, section: str) -> float:
    steps = look(f"{section}.optim.lr_warmup_steps")
    return 0.0 if steps is not None and steps > 0 else off_or(value, 0.0)


def readable(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings without those of servers where there are none."""
    if settings.get("rollout.name") != "inprocess":
        return settings
    return {name: value for name, value in settings.items() if TABLE[name].only != "rollout.name!=inprocess"}


CONVERSIONS: dict[str, Callable[[Any, Look], Any]] = {
    "as_is": lambda value, _: need(value),
    "commas": lambda value, _: commas(value),
    "teacher_number": lambda value, look: need(value, look("distillation.enabled"), "distillation.enabled is False"),
    "text": lambda value, _: "" if value is None else commas(value),
    "off": lambda value, _: -1 if value is False else off_or(value, -1),
    "lora_alpha": lambda value, look: need(value, lora_rank(look), "read only with lora_rank above 0"),
    "arguments": lambda value, _: ",".join(f"{name}={one}" for name, one in (value or {}).items()),
    "or_zero": lambda value, _: off_or(value, 0.0),
    "or_none": lambda value, _: off_or(value, "none"),
    "at_least_0": lambda value, _: max(0, value or 0),
    "batch": lambda _, look: layout.batch(look),
    "expert": lambda _, look: layout.expert(look),
    "fsdp": lambda _, look: layout.fsdp(look),
    "hosts": lambda _, look: layout.hosts(look)[0],
    "servers": lambda _, look: layout.servers(look),
    "steps": lambda _, look: layout.steps(look) or -1,
    "titan": lambda value, look: layout.fsdp(
        need(look, value is not None and layout.engine(look) == "torchtitan", "read only with model_engine=torchtitan")
    ),
    "pair": lambda value, _: tuple(float(b) for b in (read_value(value) if isinstance(value, str) else value)),
    "dtype": lambda value, _: _DTYPES.get(value, value),
    "shared_prompts": lambda value, look: "prefix" if need(value, look("R.n") > 1, "rollout.n=1") else "auto",
    "remat": lambda value, _: "full" if value else "none",
    "sleep": lambda value, _: 2 if value else 0,
    "times_n": lambda value, look: need(value) * look("R.n"),
    "critic_warmup": lambda value, _: max(0, value - 1),
    "warmup_steps": lambda value, _: value if value is not None and value > 0 else -1,
    "actor_min_lr": lambda value, look: min_lr(value, look, "A.optim"),
    "critic_min_lr": lambda value, look: min_lr(value, look, "critic.optim"),
    "vllm_args": lambda value, look: server_args(value, look, "vllm"),
    "sglang_args": lambda value, look: server_args(value, look, "sglang"),
    "actor_warmup_ratio": lambda value, look: warmup_ratio(value, look, "A"),
    "critic_warmup_ratio": lambda value, look: warmup_ratio(value, look, "critic"),
    "controller": lambda value, look: need(
        value, value == "fixed" or look("algorithm.use_kl_in_reward"), "read only with algorithm.use_kl_in_reward=True"
    ),
    "drawn": lambda value, look: 0.0 if look("R.do_sample") is False else value,
    "turns": lambda value, look: -1 if value is None else in_turns(value, look),
    "top_k_unless_greedy": lambda value, look: top_k(unless_greedy(value, look), look),
    "overlong": lambda value, look: need(value, look("OVERLONG.enable"), "read only with its enable=True"),
    "model_dtype": lambda value, look: _DTYPES.get(with_model(value, look), value),
}
_NAMED = (
    agent_loop, all_micro_tokens, balance, call_format, contents, conversing, critic_lora, critic_path, engine,
    estimator, filter_metric, filtering, function, in_turns, interval, loggers, loss_mode, master, megatron_lora,
    megatron_modules, micro_tokens, model_engine, modules, of_hosts, of_tools, old_logprob, optimizer, profiled,
    ref_offload, rejection, resume, reward_parts, schedule, served_experts, sync_step, teacher, tokens, top_k,
    train_dtype, trainer_mode, unless_greedy, weighted, weights, with_model,
)  # fmt: skip
CONVERSIONS |= {function.__name__: function for function in _NAMED}


_SEES = re.compile(
    r"(?i)(?<![a-z])(vl|vlm|vla|vision|omni|llava\w*|internvl\w*|minicpm-?[vo]\w*|pixtral|audio|video)(?![a-z])"
)


def sees(key: str, value: Any, _: Look) -> str:
    """Why a key asks for a model that sees or hears, or ''."""
    keys = ("data.image_key", "data.video_key", "data.audio_key", "actor_rollout_ref.rollout.limit_images")
    if (key in keys and value is not None) or (key == "actor_rollout_ref.actor.freeze_vision_tower" and value):
        return "jppo's models read text"
    if key == "actor_rollout_ref.model.path" and _SEES.search(str(value).rstrip("/").rpartition("/")[2]):
        return "jppo's models read text, and this one has images, video or sound"
    if key in ("data.train_files", "data.val_files") and re.search("geo3k|geometry3k", str(value)):
        return "jppo's models read text, and Geometry3k has images"
    return ""


def halves(key: str, value: Any, _: Look) -> str:
    """Why a key asks for training in float16, or ''."""
    typed = "dtype" in key and not key.startswith(("actor_rollout_ref.rollout.", "reward."))
    half = typed and str(value).lower() in ("fp16", "float16", "half", "torch.float16")
    if half or (key.endswith(".fp16") and value):
        return "training in float16; bfloat16 has the range of float32 and needs no loss scaling"
    return ""


REFUSED: tuple[Callable[[str, Any, Look], str], ...] = (sees, halves, untaught)
