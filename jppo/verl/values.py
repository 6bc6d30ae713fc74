"""Conversions of verl's values. `look` returns other keys' values, verl's defaults included."""

import json
import pathlib
import shlex
from collections.abc import Callable
from typing import Any

from jppo.errors import UserError, first_line
from jppo.settings.table import TABLE
from jppo.settings.texts import LOGGERS
from jppo.verl import derived
from jppo.verl.name import Look, Moot, Unfit, adapts, commas, lora_rank, off_or, on_each, required
from jppo.verl.overrides import read_value

_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
FUSED = {  # Megatron's projections
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}


_ENGINES = {"sglang_async": "sglang", "vllm_async": "vllm", "hf": "inprocess"}


def engine(value: str, look: Look) -> str:
    name = _ENGINES.get(value, value)
    if why := _unserved(name, look):
        raise Unfit(f"vllm is taken{why}")
    return name


def served_by(look: Look) -> str:
    """Returns the engine that samples: vllm in place of one that jppo lacks, or that could not do what is asked."""
    name = _ENGINES.get(look("R.name"), str(look("R.name")))
    return "vllm" if _unserved(name, look) else name


def _unserved(name: str, look: Look) -> str:
    """Why vllm samples in place of an engine, or ''."""
    if name in ("vllm", "inprocess"):
        return ""
    if name != "sglang":
        return " in place of this engine"
    if (look("R.top_p") or 1.0) < 1 or (look("R.top_k") or -1) > 0:
        return ", for log-probs over the tokens that top_p and top_k keep"
    if derived.unlike_llama(look):
        return ": publishing experts, latent attention or gated delta nets to SGLang is untested"
    return ""


def logger_names(value: Any, _: Look) -> str:
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
    return on_each(look, max(1, required(value, not look("A.use_dynamic_bsz"), why)))


def all_micro_tokens(value: int | None, look: Look) -> int:
    gpus = look("trainer.nnodes") * look("trainer.n_gpus_per_node")
    return micro_tokens(None if value is None else max(1, value // gpus), look)


def dynamic_tokens(value: int, look: Look) -> int:
    """Returns the tokens of a micro-batch, which holds at least one row."""
    return max(required(value, look("A.use_dynamic_bsz"), "read only with use_dynamic_bsz=True"), on_each(look, 1))


def reward_parts(value: Any, look: Look) -> str:
    """Returns the parts of the reward that keys of a reward function's dict are."""
    part = "function_score" if look("FUNCTION.path") else "rule_score"
    return ",".join(part if key == "score" else f"{part}/{key}" for key in commas(value).split(","))


def balance(value: float, look: Look) -> float:
    kind = look("A.megatron.override_transformer_config.moe_router_load_balancing_type")
    return required(value, kind not in ("none", '"none"'), "the load is not balanced by a loss")


def conversing(value: bool, look: Look) -> bool:
    if value and not answered(look):
        raise Moot("no tools answer the policy; a conversation has one turn")
    return value


def answered(look: Look) -> bool:
    return bool(look("TURNS.tool_config_path"))


def group(value: int, look: Look) -> int:
    if value > derived.server_devices(look):
        raise Unfit(f"a server is on one host: rollout.tensor_model_parallel_size={derived.server_devices(look)}")
    return value


def quantized(value: str | None, look: Look) -> str:
    """Returns vLLM's name of verl's fp8: weights in blocks of 128 by 128, activations as they come."""
    if required(value) != "fp8" or served_by(look) != "vllm" or derived.old_logprob(None, look) != "correction":
        raise Unfit("only vLLM's fp8 is there, with rollout_correction.rollout_is")
    return "fp8_per_block"


def served_experts(value: int, look: Look) -> str:
    required(value if value != 1 else None)
    if (look("R.data_parallel_size") or 1) > 1:
        raise Unfit("a server's experts are on its own GPUs, rollout.tensor_model_parallel_size of them")
    return str(engine_options(look))


def engine_options(look: Look) -> str | None:
    """Returns all options of the server's command line."""
    name = served_by(look)
    words = [server_args(given, look, name)] if (given := look(f"R.engine_kwargs.{name}")) else []
    if (look("R.expert_parallel_size") or 1) > 1 and (look("R.data_parallel_size") or 1) == 1 and name == "vllm":
        words.append("--enable-expert-parallel")
    return " ".join(words) or None


def interval(value: int | None, look: Look) -> int:
    """Returns an interval in steps of jppo's; -1 is none."""
    if value is None or isinstance(value, str) or value <= 0:
        return -1
    return max(1, value // (1 if derived.fully(look) else derived.meetings(look)))


def critic_model(value: str | None, look: Look) -> str:
    return "" if value in (None, look("M.path")) else value


def critic_lora(value: int, look: Look) -> int:
    return required(value, adapts(look) or value, "the policy has no adapters either")


def of_adapter(field: str) -> Callable[[Look], Any]:
    """Makes a field of the configuration of the adapters that the policy starts from, where no rank is given."""

    def value(look: Look) -> Any:
        if not (path := look("M.lora_adapter_path")) or lora_rank(look):
            return None
        try:
            return json.loads(pathlib.Path(path, "adapter_config.json").expanduser().read_text("utf-8"))[field]
        except (OSError, ValueError, KeyError) as e:
            raise UserError(
                f"{path}: no {field} can be read from its adapter_config.json ({first_line(e)}); give"
                " actor_rollout_ref.model.lora_rank and lora_alpha"
            ) from e

    return value


def adapter(value: str | None, look: Look) -> str:
    return required(value, of_adapter("r")(look) or lora_rank(look), "read only with the rank")


def modules(value: Any, _: Look) -> str:
    """Returns names of projections; Megatron's fused ones are several."""
    return ",".join(FUSED.get(name, name) for name in commas(value).split(","))


def optimizer(value: str, _: Look) -> str:
    others = ("adam", "_adamw", "fusedadam")  # FusedAdam is Transformer Engine's, with decoupled weight decay
    name = "adamw" if value.lower() in others else value.lower()
    if value == "Adam" or name not in ("adamw", "sgd", "muon", "adafactor", "lion"):
        raise Unfit("adamw, muon, adafactor, lion and sgd are there, with decoupled weight decay; or PATH.py:NAME")
    return name


def schedule(value: str | None, _: Look) -> str:
    if required(value) not in ("constant", "cosine", "linear"):
        raise Unfit("constant, cosine and linear are there")
    return str(value)


def share_of_lr(value: float | None, look: Look, optim: str) -> float:
    rate: float = off_or(value, 0.0) / look(f"{optim}.lr")
    return rate


def server_args(value: dict[str, Any] | None, look: Look, engine: str) -> str:
    """Returns options of a server's command line."""
    if served_by(look) != engine:
        raise Moot(f"read only with rollout.name={engine}")
    words = []
    for key, one in required(value or None).items():
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


def master(value: str | None, look: Look) -> str:
    return f"{required(value)}:{look('trainer.master_port') or 29500}"


def resume_mode(value: str, look: Look) -> str:
    return required(look("trainer.resume_from_path")) if value == "resume_path" else value


def trainer_mode(value: str, look: Look) -> str:
    if value not in ("sync", "colocate_async", "separate_async"):
        raise Unfit("sync, colocate_async and separate_async are there")
    return "async" if derived.asynchronous(look) else "sync"


def function(value: str | None, look: Look) -> str:
    return f"{required(value)}:{look('FUNCTION.name') or 'compute_score'}"


def with_model(value: Any, look: Look) -> Any:
    if look("FUNCTION.path"):
        raise Unfit("verl's function may ask it over HTTP; reward.model.path adds its score to the function's")
    return required(value)


def model_engine(value: str, look: Look) -> str:
    if with_model(value, look) != "vllm":
        raise Unfit("reward.model.engine is jax, transformers or vllm")
    return value


def in_turns(value: Any, look: Look) -> Any:
    enabled = look("TURNS.enable") or look("R.agent.default_agent_loop") == "tool_agent"
    return required(value, enabled and answered(look), "read only with multi_turn.enable=True and tools")


def of_tools(value: Any, look: Look) -> Any:
    in_turns(value, look)
    return required(value, look("TURNS.tool_config_path"), "read only with multi_turn.tool_config_path")


def call_format(value: str | None, look: Look) -> str:
    formats = TABLE["rollout.multi_turn.format"].choices
    if in_turns(value, look) not in formats:
        raise Unfit(f"{', '.join(map(str, formats))} are there")
    return str(value)


def filter_groups(value: bool, look: Look) -> bool:
    return required(value, not derived.fully(look), "verl's fully asynchronous trainer does not filter")


def filtering(value: Any, look: Look) -> Any:
    enabled = filter_groups(look("algorithm.filter_groups.enable"), look)
    return required(value, enabled, "read only with algorithm.filter_groups.enable=True")


def cut_prompts(value: str, look: Look) -> str:
    alone = value == "error" or not look("data.filter_overlong_prompts")
    return required(value, alone, "data.filter_overlong_prompts=True leaves out what it would cut")


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
    return required(value, not greedy, "a greedy test takes the likeliest token, whatever else is left")


def top_k(value: int | None, _: Look) -> int:
    return value if value and value > 0 else -1


def ref_offload(value: bool, look: Look) -> bool:
    adapters = adapts(look) and not look("A.fsdp_config.param_offload")
    return required(
        value, not adapters, "beside adapters the reference is the policy's own base; actor.param_offload moves it"
    )


def warmup_steps(value: int | None, look: Look) -> int:
    """Returns the steps of the warm-up, which verl counts in updates, of which several may be between two publishes."""
    return max(1, round(value / derived.meetings(look))) if value is not None and value > 0 else -1


def warmup_ratio(value: float | None, look: Look, section: str) -> float:
    steps = look(f"{section}.optim.lr_warmup_steps")
    return 0.0 if steps is not None and steps > 0 else off_or(value, 0.0)


def without_server_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings without those of servers where there are none."""
    if settings.get("rollout.name") != "inprocess":
        return settings
    return {name: value for name, value in settings.items() if TABLE[name].only != "rollout.name!=inprocess"}


CONVERSIONS: dict[str, Callable[[Any, Look], Any]] = {
    "as_is": lambda value, _: required(value),
    "filled": lambda value, _: required(value or None),
    "commas": lambda value, _: commas(value),
    "prompt_column": lambda value, look: ".".join([commas(value), *(look("tuning.prompt_dict_keys") or ())]),
    "response_column": lambda value, look: ".".join([commas(value), *(look("tuning.response_dict_keys") or ())]),
    "off": lambda value, _: -1 if value is False else off_or(value, -1),
    "lora_alpha": lambda value, look: required(value, adapts(look), "read only with lora_rank above 0"),
    "arguments": lambda value, _: ",".join(f"{name}={one}" for name, one in (value or {}).items()),
    "or_zero": lambda value, _: off_or(value, 0.0),
    "at_least_0": lambda value, _: max(0, value or 0),
    "batch": lambda _, look: derived.batch(look),
    "expert": lambda _, look: derived.expert(look),
    "fsdp": lambda _, look: derived.fsdp(look),
    "hosts": lambda value, look: derived.require_sharing(value, look) and derived.hosts(look)[0],
    "servers": lambda value, look: derived.require_sharing(value, look) and derived.servers(look),
    "steps": lambda _, look: derived.training_steps(look) or -1,
    "titan": lambda value, look: derived.fsdp(
        required(
            look,
            value is not None and derived.training_engine(look) == "torchtitan",
            "read only with model_engine=torchtitan",
        )
    ),
    "pair": lambda value, _: tuple(float(b) for b in (read_value(value) if isinstance(value, str) else value)),
    "dtype": lambda value, _: _DTYPES.get(required(value), value),
    "shared_prompts": lambda value, _: "prefix" if value else "auto",
    "remat": lambda value, _: "full" if value else "none",
    "sleep": lambda value, _: 2 if value else 0,
    "times_n": lambda value, look: required(value) * look("R.n"),
    "critic_warmup": lambda value, _: max(0, value - 1),
    "of_actor_lr": lambda value, look: share_of_lr(value, look, "A.optim"),
    "of_critic_lr": lambda value, look: share_of_lr(value, look, "critic.optim"),
    "vllm_args": lambda value, look: server_args(value, look, "vllm"),
    "sglang_args": lambda value, look: server_args(value, look, "sglang"),
    "actor_warmup_ratio": lambda value, look: warmup_ratio(value, look, "A"),
    "critic_warmup_ratio": lambda value, look: warmup_ratio(value, look, "critic"),
    "controller": lambda value, look: required(
        value, value == "fixed" or look("algorithm.use_kl_in_reward"), "read only with algorithm.use_kl_in_reward=True"
    ),
    "drawn": lambda value, look: 0.0 if look("R.do_sample") is False else value,
    "turns": lambda value, look: -1 if value is None else in_turns(value, look),
    "model_dtype": lambda value, look: _DTYPES.get(with_model(value, look), value),
    "top_k_unless_greedy": lambda value, look: top_k(unless_greedy(value, look), look),
}
_NAMED = (
    derived.adv_estimator, derived.batch_normalize, derived.loss_mode, derived.old_logprob, derived.rejected,
    derived.rejection, derived.rollout_is, derived.teacher_clamp, derived.with_weights,
    adapter, agent_loop, all_micro_tokens, balance, call_format, contents, conversing, critic_lora, critic_model,
    cut_prompts, dynamic_tokens, engine, filter_groups, filter_metric, filtering, function, group, in_turns, interval,
    logger_names, master, micro_tokens, model_engine, modules, of_tools, optimizer, quantized, ref_offload,
    resume_mode, reward_parts, schedule, served_experts, top_k, train_dtype, trainer_mode, unless_greedy,
    warmup_steps, with_model,
)  # fmt: skip
CONVERSIONS |= {function.__name__: function for function in _NAMED}
