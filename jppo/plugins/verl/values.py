"""Conversions of verl's values to those of jppo's settings.

A conversion takes the value of a verl key, and `get`, which returns other keys' values, verl's defaults included. It
raises Needless for a value without a meaning, and Unsupported for one that jppo lacks.
"""

import json
import pathlib
import shlex
from collections.abc import Callable
from typing import Any

from jppo.errors import UserError, first_line
from jppo.plugins.verl import derived
from jppo.plugins.verl.name import (
    GetKey,
    Needless,
    Unsupported,
    device_tokens,
    has_adapters,
    join_commas,
    lora_rank,
    needed,
    value_or,
)
from jppo.plugins.verl.overrides import read_value
from jppo.registry import REMOTE_LOGGERS
from jppo.settings.table import TABLE
from jppo.settings.texts import LOCAL_LOGGERS

_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
FUSED_PROJECTIONS = {  # Megatron's projections
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}


_ENGINES = {"sglang_async": "sglang", "vllm_async": "vllm", "hf": "inprocess"}


def engine(value: str, get: GetKey) -> str:
    """Returns jppo's engine, `rollout.name`, for verl's; Unsupported where vLLM is to sample in its place."""
    name = _ENGINES.get(value, value)
    if reason := _why_vllm(name, get):
        raise Unsupported(f"vllm is taken{reason}")
    return name


def served_by(get: GetKey) -> str:
    """Returns the engine that samples: vLLM in place of one that jppo lacks, or that cannot do what is asked."""
    name = _ENGINES.get(get("R.name"), str(get("R.name")))
    return "vllm" if _why_vllm(name, get) else name


def _why_vllm(name: str, get: GetKey) -> str:
    """Returns why vLLM has to sample in place of an engine, or ''."""
    if name in ("vllm", "inprocess"):
        return ""
    if name != "sglang":
        return " in place of this engine"
    if (get("R.top_p") or 1.0) < 1 or (get("R.top_k") or -1) > 0:
        return ", for log-probs over the tokens that top_p and top_k keep"
    if derived.unlike_llama(get):
        return ": publishing experts, latent attention or gated delta nets to SGLang is untested"
    return ""


def logger_names(value: Any, _: GetKey) -> str:
    names = ["jsonl" if name == "file" else name for name in join_commas(value).split(",")]
    return ",".join(
        dict.fromkeys([*(name for name in names if name in LOCAL_LOGGERS or name in REMOTE_LOGGERS.own), "jsonl"])
    )


def param_dtype(value: str, _: GetKey) -> str:
    """Returns the parameters' dtype by jppo's name; Unsupported for float16."""
    dtype = _DTYPES.get(value, value)
    if dtype == "float16":
        raise Unsupported("float16 lacks the range for parameters; model.compute_dtype may be float16")
    return dtype


def contents(value: Any, _: GetKey) -> str:
    """Returns the parts of a checkpoint, always with model and extra, without which no run could resume."""
    parts = join_commas(value).split(",")
    return ",".join([*(one for one in ("model", "extra") if one not in parts), *parts])


def micro_tokens(value: int | None, get: GetKey) -> int:
    why = "use_dynamic_bsz=True reads ppo_max_token_len_per_gpu"
    return device_tokens(get, max(1, needed(value, not get("A.use_dynamic_bsz"), why)))


def all_micro_tokens(value: int | None, get: GetKey) -> int:
    gpus = get("trainer.nnodes") * get("trainer.n_gpus_per_node")
    return micro_tokens(None if value is None else max(1, value // gpus), get)


def dynamic_tokens(value: int, get: GetKey) -> int:
    """Returns the tokens of a micro-batch, which holds at least one row."""
    return max(needed(value, get("A.use_dynamic_bsz"), "read only with use_dynamic_bsz=True"), device_tokens(get, 1))


def reward_parts(value: Any, get: GetKey) -> str:
    """Returns the names of reward parts for keys of the dict that verl's reward function returns."""
    part = "function_score" if get("FUNCTION.path") else "rule_score"
    return ",".join(part if key == "score" else f"{part}/{key}" for key in join_commas(value).split(","))


def balance(value: float, get: GetKey) -> float:
    kind = get("A.megatron.override_transformer_config.moe_router_load_balancing_type")
    return needed(value, kind not in ("none", '"none"'), "the load is not balanced by a loss")


def conversing(value: bool, get: GetKey) -> bool:
    """Returns `rollout.multi_turn.enable`; Needless without tools."""
    if value and not has_tools(get):
        raise Needless("no tools answer the policy; a conversation has one turn")
    return value


def has_tools(get: GetKey) -> bool:
    return bool(get("TURNS.tool_config_path"))


def group(value: int, get: GetKey) -> int:
    """Returns the devices of a server; Unsupported for more than a host samples with."""
    if value > derived.server_devices(get):
        raise Unsupported(f"a server is on one host: rollout.tensor_model_parallel_size={derived.server_devices(get)}")
    return value


def quantized(value: str | None, get: GetKey) -> str:
    """Returns `rollout.quantization` for verl's fp8: weights in blocks of 128 by 128, activations as they come."""
    if needed(value) != "fp8" or served_by(get) != "vllm" or derived.old_logprob(None, get) != "correction":
        raise Unsupported("only vLLM's fp8 is there, with rollout_correction.rollout_is")
    return "fp8_per_block"


def served_experts(value: int, get: GetKey) -> str:
    """Returns the server's options for expert parallelism; Unsupported together with data parallelism."""
    needed(value if value != 1 else None)
    if (get("R.data_parallel_size") or 1) > 1:
        raise Unsupported("a server's experts are on its own GPUs, rollout.tensor_model_parallel_size of them")
    return str(engine_options(get))


def engine_options(get: GetKey) -> str | None:
    """Returns `rollout.engine_args`: the options of the server's command line; None without any."""
    name = served_by(get)
    words = [server_args(options, get, name)] if (options := get(f"R.engine_kwargs.{name}")) else []
    if (get("R.expert_parallel_size") or 1) > 1 and (get("R.data_parallel_size") or 1) == 1 and name == "vllm":
        words.append("--enable-expert-parallel")
    return " ".join(words) or None


def interval(value: int | str | None, _: GetKey) -> int:
    """Returns an interval in steps, which are publishes in verl, too; -1 is none."""
    if value == "after_each_epoch":
        raise Unsupported("give the steps of an epoch")
    return -1 if value is None or isinstance(value, str) or value <= 0 else min(value, 2**31 - 1)


def critic_model(value: str | None, get: GetKey) -> str:
    return "" if value in (None, get("M.path")) else value


def critic_lora(value: int, get: GetKey) -> int:
    return needed(value, has_adapters(get) or value, "the policy has no adapters either")


def adapter_field(get: GetKey, field: str) -> Any:
    """Returns a field of the starting adapters' config; None where a rank is given."""
    if not (path := get("M.lora_adapter_path")) or lora_rank(get):
        return None
    try:
        return json.loads(pathlib.Path(path, "adapter_config.json").expanduser().read_text("utf-8"))[field]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"{path}: no {field} can be read from its adapter_config.json ({first_line(e)}); give"
            " actor_rollout_ref.model.lora_rank and lora_alpha"
        ) from e


def adapter(value: str | None, get: GetKey) -> str:
    return needed(value, adapter_field(get, "r") or lora_rank(get), "read only with the rank")


def modules(value: Any, _: GetKey) -> str:
    """Returns names of projections; Megatron's fused ones are several."""
    return ",".join(FUSED_PROJECTIONS.get(name, name) for name in join_commas(value).split(","))


def optimizer(value: str, _: GetKey) -> str:
    """Returns `actor.optimizer` or `critic.optimizer`; Unsupported for one that jppo lacks."""
    adams = ("adam", "_adamw", "fusedadam")  # FusedAdam is Transformer Engine's, with decoupled weight decay
    name = "adamw" if value.lower() in adams else value.lower()
    if value == "Adam" or name not in ("adamw", "sgd", "muon", "adafactor", "lion"):
        raise Unsupported(
            "adamw, muon, adafactor, lion and sgd are there, with decoupled weight decay; or PATH.py:NAME"
        )
    return name


def schedule(value: str | None, _: GetKey) -> str:
    """Returns `actor.lr_scheduler_type` or the critic's; Unsupported for one that jppo lacks."""
    if needed(value) not in ("constant", "cosine", "linear"):
        raise Unsupported("constant, cosine and linear are there")
    return str(value)


def server_args(value: dict[str, Any] | None, get: GetKey, engine: str) -> str:
    """Returns the options of `engine`'s command line from a dict; Needless where another engine samples."""
    if served_by(get) != engine:
        raise Needless(f"read only with rollout.name={engine}")
    words = []
    for key, option in needed(value or None).items():
        name = key.replace("_", "-")
        if option is None:
            continue
        text = shlex.quote(json.dumps(option) if isinstance(option, dict | list) else str(option))
        words.append(f"--{name}" if option is True else f"--no-{name}" if option is False else f"--{name} {text}")
    return " ".join(words)


def agent_loop(value: str, get: GetKey) -> bool:
    """Returns `rollout.multi_turn.enable` by verl's name of an agent loop."""
    if value in (None, "single_turn_agent"):
        raise Needless("it is what multi_turn.enable=False is")
    if value != "tool_agent":
        raise Unsupported("rollout.multi_turn.enable makes conversations; there is no other loop")
    return conversing(True, get)


def master(value: str | None, get: GetKey) -> str:
    return f"{needed(value)}:{get('trainer.master_port') or 29500}"


def resume_mode(value: str, get: GetKey) -> str:
    return needed(get("trainer.resume_from_path")) if value == "resume_path" else value


def trainer_mode(value: str, get: GetKey) -> str:
    """Returns `rollout.mode` by verl's trainer mode."""
    if value not in ("sync", "colocate_async", "separate_async"):
        raise Unsupported("sync, colocate_async and separate_async are there")
    return "async" if derived.asynchronous(get) else "sync"


def function(value: str | None, get: GetKey) -> str:
    return f"{needed(value)}:{get('FUNCTION.name') or 'compute_score'}"


def with_model(value: Any, get: GetKey) -> Any:
    """Returns an option of the reward model; Unsupported beside a reward function, which may ask it over HTTP."""
    if get("FUNCTION.path"):
        raise Unsupported("verl's function may ask it over HTTP; reward.model.path adds its score to the function's")
    return needed(value)


def model_engine(value: str, get: GetKey) -> str:
    """Returns `reward.model.engine`; Unsupported for another than vLLM."""
    if with_model(value, get) != "vllm":
        raise Unsupported("reward.model.engine is jax, transformers or vllm")
    return value


def in_turns(value: Any, get: GetKey) -> Any:
    enabled = get("TURNS.enable") or get("R.agent.default_agent_loop") == "tool_agent"
    return needed(value, enabled and has_tools(get), "read only with multi_turn.enable=True and tools")


def of_tools(value: Any, get: GetKey) -> Any:
    in_turns(value, get)
    return needed(value, get("TURNS.tool_config_path"), "read only with multi_turn.tool_config_path")


def call_format(value: str | None, get: GetKey) -> str:
    """Returns `rollout.multi_turn.format`, the syntax of tool calls; Unsupported for one that jppo lacks."""
    formats = TABLE["rollout.multi_turn.format"].choices
    if in_turns(value, get) not in formats:
        raise Unsupported(f"{', '.join(map(str, formats))} are there")
    return str(value)


def filter_groups(value: bool, get: GetKey) -> bool:
    return needed(value, not derived.fully_async(get), "verl's fully asynchronous trainer does not filter")


def filtering(value: Any, get: GetKey) -> Any:
    enabled = filter_groups(get("algorithm.filter_groups.enable"), get)
    return needed(value, enabled, "read only with algorithm.filter_groups.enable=True")


def gen_batch(value: int | None, get: GetKey) -> int:
    """Returns `data.gen_batch_size`; Needless without the filter, where `older.modernize` has made it the batch."""
    filters = filter_groups(get("algorithm.filter_groups.enable"), get)
    return needed(value, filters, "without algorithm.filter_groups.enable a step samples its prompts at once")


def penalized_tokens(get: GetKey) -> int:
    """Returns the last tokens of a response that verl's over-long penalty is on; 0 without one."""
    longest, buffer = get("data.max_response_length"), get("OVERLONG.len")
    if not get("OVERLONG.enable") or not buffer or get("reward.reward_manager.name") != "dapo":
        return 0
    return max(0, int(longest - value_or(get("reward.reward_kwargs.max_resp_len"), longest) + buffer))


def penalized(value: int | None, get: GetKey) -> int:
    """Returns `reward.overlong_buffer_tokens`."""
    tokens = penalized_tokens(get)
    needed(value, tokens, "read only with overlong_buffer_cfg.enable=True and reward_manager.name=dapo")
    return tokens


def cut_prompts(value: str, get: GetKey) -> str:
    no_filter = value == "error" or not get("data.filter_overlong_prompts")
    return needed(value, no_filter, "data.filter_overlong_prompts=True leaves out what it would cut")


def filter_metric(value: str | None, get: GetKey) -> str:
    """Returns `algorithm.filter_groups_metric`: the part of the reward that verl's key stands for."""
    part = "function_score" if get("FUNCTION.path") else "rule_score"
    if filtering(value, get) in ("reward", "seq_reward"):
        return "score"
    if value == "score" or (value == "acc" and part == "rule_score"):
        return part
    if value == "seq_final_reward":
        raise Unsupported("algorithm.filter_groups_metric=score has no KL in it")
    return f"{part}/{value}"


def unless_greedy(value: Any, get: GetKey) -> Any:
    greedy = get("R.val_kwargs.temperature") == 0
    return needed(value, not greedy, "a greedy test takes the likeliest token, whatever else is left")


def top_k(value: int | None, _: GetKey) -> int:
    return value if value and value > 0 else -1


def ref_offload(value: bool, get: GetKey) -> bool:
    """Returns the reference's offload; Needless where the reference is the base of the policy's adapters."""
    shares_base = has_adapters(get) and not get("A.fsdp_config.param_offload")
    return needed(
        value, not shares_base, "beside adapters the reference is the policy's own base; actor.param_offload moves it"
    )


def warmup_steps(value: int | None, get: GetKey) -> int:
    """Returns the steps of the warm-up, which verl counts in updates, of which several may be between two publishes."""
    if value and value > 0 and derived.training_engine(get) == "veomni":
        raise Needless("VeOmni reads lr_warmup_steps_ratio alone")
    return max(1, round(value / derived.publish_interval(get))) if value is not None and value > 0 else -1


def warmup_ratio(value: float | None, get: GetKey, section: str) -> float:
    steps = get(f"{section}.optim.lr_warmup_steps")
    is_by_steps = steps is not None and steps > 0 and derived.training_engine(get) != "veomni"
    return 0.0 if is_by_steps else value_or(value, 0.0)


def without_server_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the settings of servers where the trainer samples by itself."""
    if settings.get("rollout.name") != "inprocess":
        return settings
    return {name: value for name, value in settings.items() if TABLE[name].only != "rollout.name!=inprocess"}


CONVERSIONS: dict[str, Callable[[Any, GetKey], Any]] = {
    "as_is": lambda value, _: needed(value),
    "filled": lambda value, _: needed(value or None),
    "commas": lambda value, _: join_commas(value),
    "prompt_column": lambda value, get: ".".join([join_commas(value), *(get("tuning.prompt_dict_keys") or ())]),
    "response_column": lambda value, get: ".".join([join_commas(value), *(get("tuning.response_dict_keys") or ())]),
    "off": lambda value, _: -1 if value is False else value_or(value, -1),
    "lora_alpha": lambda value, get: needed(value, has_adapters(get), "read only with lora_rank above 0"),
    "arguments": lambda value, _: ",".join(f"{name}={one}" for name, one in (value or {}).items()),
    "clip": lambda value, _: min(needed(value), 1e30),  # inf is none
    "or_zero": lambda value, _: value_or(value, 0.0),
    "at_least_0": lambda value, _: max(0, value or 0),
    "batch": lambda _, get: derived.batch(get),
    "expert": lambda _, get: derived.expert(get),
    "fsdp": lambda _, get: derived.fsdp(get),
    "hosts": lambda value, get: derived.require_sharing(value, get) and derived.hosts(get)[0],
    "servers": lambda value, get: derived.require_sharing(value, get) and derived.servers(get),
    "steps": lambda _, get: derived.training_steps(get) or -1,
    "titan": lambda value, get: derived.fsdp(
        needed(
            get,
            value is not None and derived.training_engine(get) == "torchtitan",
            "read only with model_engine=torchtitan",
        )
    ),
    "pair": lambda value, _: tuple(float(b) for b in (read_value(value) if isinstance(value, str) else value)),
    "dtype": lambda value, _: _DTYPES.get(needed(value), value),
    "shared_prompts": lambda value, _: "prefix" if value else "auto",
    "remat": lambda value, _: "full" if value else "none",
    "sleep": lambda value, _: 2 if value else 0,
    "minis": lambda value, get: min(int(needed(value) * get("R.n")), derived.batch(get) * get("R.n")),
    "token_level": lambda value, _: "token-mean" if value else "seq-mean-token-mean",
    "group_size": lambda value, get: get("R.n"),
    "critic_warmup": lambda value, _: max(0, value - 1),
    "of_actor_lr": lambda value, get: value_or(value, 0.0) / get("A.optim.lr"),
    "of_critic_lr": lambda value, get: value_or(value, 0.0) / get("critic.optim.lr"),
    "vllm_args": lambda value, get: server_args(value, get, "vllm"),
    "sglang_args": lambda value, get: server_args(value, get, "sglang"),
    "actor_warmup_ratio": lambda value, get: warmup_ratio(value, get, "A"),
    "critic_warmup_ratio": lambda value, get: warmup_ratio(value, get, "critic"),
    "controller": lambda value, get: needed(
        value, value == "fixed" or get("algorithm.use_kl_in_reward"), "read only with algorithm.use_kl_in_reward=True"
    ),
    "drawn": lambda value, get: 0.0 if get("R.do_sample") is False else value,
    "turns": lambda value, get: -1 if value is None else in_turns(value, get),
    "model_dtype": lambda value, get: _DTYPES.get(with_model(value, get), value),
    "top_k_unless_greedy": lambda value, get: top_k(unless_greedy(value, get), get),
}
_NAMED = (
    derived.adv_estimator, derived.batch_normalize, derived.frozen, derived.loss_mode, derived.old_logprob,
    derived.rejected, derived.rejection, derived.rollout_is, derived.teacher_clamp, derived.with_weights,
    adapter, agent_loop, all_micro_tokens, balance, call_format, contents, conversing, critic_lora, critic_model,
    cut_prompts, dynamic_tokens, engine, filter_groups, filter_metric, filtering, function, gen_batch, group, in_turns,
    interval, logger_names, master, micro_tokens, model_engine, modules, of_tools, optimizer, param_dtype, penalized,
    quantized, ref_offload, resume_mode, reward_parts, schedule, served_experts, top_k, trainer_mode, unless_greedy,
    warmup_steps, with_model,
)  # fmt: skip
CONVERSIONS |= {function.__name__: function for function in _NAMED}
