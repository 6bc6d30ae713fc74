"""Conversions of verl's values. `look` returns other keys' values, verl's defaults included."""

from collections.abc import Callable, Mapping
from typing import Any

from jppo.settings.texts import LOGGERS

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TURNS, RM = f"{R}.multi_turn", "reward.reward_model"
OVERLONG, CORRECTION = "reward.reward_kwargs.overlong_buffer_cfg", "algorithm.rollout_correction"
FUNCTION = "reward.custom_reward_function"
MICRO = ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size")
_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

Look = Callable[[str], Any]


class Moot(Exception):
    """A value without meaning given the others; the message says why."""


class Unfit(Exception):
    """A feature that jppo lacks; the message names the nearest one."""


def longest(look: Look) -> int:
    """Returns the maximum tokens of prompt plus response."""
    return look("data.max_prompt_length") + look("data.max_response_length")


def on_each(look: Look, sequences: int) -> int:
    """Returns each device's tokens of `sequences` of the longest, divided by sequence parallelism."""
    return -(-sequences * longest(look) // (look(f"{A}.ulysses_sequence_parallel_size") or 1))


def reward_model(look: Look) -> bool:
    """Whether a reward model alone gives the score."""
    return bool(look(f"{RM}.enable") and not look(f"{FUNCTION}.path"))


def off_or(value: Any, usual: Any) -> Any:
    return usual if value is None else value


def need(value: Any, truth: Any, why: str) -> Any:
    """Returns the value if the condition holds and it is set; else raises Moot."""
    if not truth:
        raise Moot(why)
    if value is None:
        raise Moot("null asks for nothing")
    return value


def commas(value: Any, look: Look | None = None) -> str:
    if value is None:
        raise Moot("null asks for nothing")
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def engine(value: str, _: Look) -> str:
    name = {"sglang_async": "sglang", "vllm_async": "vllm"}.get(value, value)
    if name not in ("vllm", "sglang"):
        raise Unfit("vllm is taken; rollout.name=inprocess needs no server, as verl's hf")
    return name


def loggers(value: Any, _: Look) -> str:
    names = ["jsonl" if name == "file" else name for name in commas(value).split(",")]
    return ",".join(dict.fromkeys([*(name for name in names if name in LOGGERS), "jsonl"]))


def micro_tokens(value: int | None, look: Look) -> int:
    why = "use_dynamic_bsz=True reads ppo_max_token_len_per_gpu"
    return on_each(look, need(value, not look(f"{A}.use_dynamic_bsz"), why))


def all_micro_tokens(value: int | None, look: Look) -> int:
    gpus = look("trainer.nnodes") * look("trainer.n_gpus_per_node")
    return micro_tokens(None if value is None else max(1, value // gpus), look)


def tokens(value: int, look: Look) -> int:
    if not look(f"{A}.use_dynamic_bsz"):
        raise Moot("read only with use_dynamic_bsz=True")
    return value


def old_logprob(value: bool | None, look: Look) -> str:
    asked = any(look(f"{CORRECTION}.{name}") not in (None, "none", "") for name in ("rollout_is", "rollout_rs"))
    return "bypass" if value else "correction" if asked else "decoupled"


def clip_bound(value: float | None, _: Look) -> float:
    return need(value, True, "")


def critic_path(value: str | None, look: Look) -> str:
    return "" if value in (None, look("actor_rollout_ref.model.path")) else value


def critic_lora(value: int, look: Look) -> int:
    return need(value, look("actor_rollout_ref.model.lora_rank") or value, "the policy has no adapters either")


def resume(value: str, look: Look) -> str:
    if value == "resume_path":
        return need(look("trainer.resume_from_path"), True, "")
    return value


def servers(value: int, look: Look) -> int:
    return max(1, value // (look(f"{R}.tensor_model_parallel_size") or 1))


def trainer_mode(value: str, _: Look) -> str:
    if value == "sync":
        return "sync"
    raise Unfit("rollout.mode=async, with rollout.max_staleness, has samples that are drawn while the trainer learns")


def function(value: str | None, look: Look) -> str:
    return f"{need(value, True, '')}:{look(f'{FUNCTION}.name') or 'compute_score'}"


def with_model(value: Any, look: Look) -> Any:
    if look(f"{RM}.enable") and look(f"{FUNCTION}.path"):
        raise Unfit("verl's function may ask it over HTTP; reward.model.path adds its score to the function's")
    return need(value, look(f"{RM}.enable"), "read only with reward_model.enable=True")


def model_engine(value: str, look: Look) -> str:
    if with_model(value, look) != "vllm":
        raise Unfit("reward.model.engine is jax, transformers or vllm")
    return value


def in_turns(value: Any, look: Look) -> Any:
    return need(value, look(f"{TURNS}.enable"), "read only with multi_turn.enable=True")


def of_tools(value: Any, look: Look) -> Any:
    in_turns(value, look)
    return need(value, look(f"{TURNS}.tool_config_path"), "read only with multi_turn.tool_config_path")


def unless_greedy(value: Any, look: Look) -> Any:
    greedy = look(f"{R}.val_kwargs.temperature") == 0
    return need(value, not greedy, "a greedy test takes the likeliest token, whatever else is left")


def top_k(value: int | None, _: Look) -> int:
    return value if value and value > 0 else -1


def ref_offload(value: bool, look: Look) -> bool:
    adapters = look("actor_rollout_ref.model.lora_rank") and not look(f"{A}.fsdp_config.param_offload")
    return need(
        value, not adapters, "beside adapters the reference is the policy's own base; actor.param_offload moves it"
    )


def warmup_ratio(value: float | None, look: Look, section: str) -> float:
    steps = look(f"{section}.optim.lr_warmup_steps")
    return 0.0 if steps is not None and steps > 0 else off_or(value, 0.0)


CONVERSIONS: dict[str, Callable[[Any, Look], Any]] = {
    "as_is": lambda value, _: need(value, True, ""),
    "given": lambda value, _: need(value, True, ""),
    "files": lambda value, _: commas(value),
    "commas": lambda value, _: commas(value),
    "text": lambda value, _: "" if value is None else commas(value),
    "off": lambda value, _: off_or(value, -1),
    "arguments": lambda value, _: ",".join(f"{name}={one}" for name, one in (value or {}).items()),
    "or_zero": lambda value, _: off_or(value, 0.0),
    "or_none": lambda value, _: off_or(value, "none"),
    "pair": lambda value, _: tuple(float(b) for b in value),
    "dtype": lambda value, _: _DTYPES.get(value, value),
    "shared_prompts": lambda value, look: "prefix" if need(value, look(f"{R}.n") > 1, "rollout.n=1") else "auto",
    "remat": lambda value, _: "full" if value else "none",
    "sleep": lambda value, _: 2 if value else 0,
    "times_n": lambda value, look: need(value, True, "") * look(f"{R}.n"),
    "critic_warmup": lambda value, _: max(0, value - 1),
    "warmup_steps": lambda value, _: value if value is not None and value > 0 else -1,
    "actor_warmup_ratio": lambda value, look: warmup_ratio(value, look, A),
    "critic_warmup_ratio": lambda value, look: warmup_ratio(value, look, "critic"),
    "controller": lambda value, look: need(
        value, value == "fixed" or look("algorithm.use_kl_in_reward"), "read only with algorithm.use_kl_in_reward=True"
    ),
    "drawn": lambda value, look: 0.0 if look(f"{R}.do_sample") is False else value,
    "turns": lambda value, look: off_or(value, -1) if value is None else in_turns(value, look),
    "top_k_unless_greedy": lambda value, look: top_k(unless_greedy(value, look), look),
    "overlong": lambda value, look: need(value, look(f"{OVERLONG}.enable"), "read only with its enable=True"),
    "model_dtype": lambda value, look: _DTYPES.get(with_model(value, look), value),
    **{
        f.__name__: f
        for f in (
            *(
                all_micro_tokens,
                clip_bound,
                critic_lora,
                critic_path,
                engine,
                function,
                in_turns,
                loggers,
                micro_tokens,
            ),
            *(model_engine, of_tools, old_logprob, ref_offload, resume, servers, tokens, top_k, trainer_mode),
            *(unless_greedy, with_model),
        )
    },
}


def _room(look: Look) -> int | None:
    """Returns a default that holds the longest sequence if no micro-batch size is set, where verl refuses to run."""
    said = look(f"{A}.use_dynamic_bsz") or any(look(f"{A}.{name}") for name in MICRO)
    return None if said else max(16384, on_each(look, 1))


def _weights(look: Look) -> str | None:
    factor = off_or(look(f"{OVERLONG}.penalty_factor"), 1.0)
    own = {"rm_score": 1.0} if reward_model(look) else {}
    if look(f"{FUNCTION}.path"):
        own = {"function_score": 1.0}
    if look(f"{OVERLONG}.enable") and look(f"{OVERLONG}.len"):
        own = {**(own or {"rule_score": 1.0}), "length_score": float(factor)}
    return ",".join(f"{part}={weight:g}" for part, weight in own.items()) or None


def _data_axis(look: Look) -> int:
    return 1 if look(f"{A}.fsdp_config.fsdp_size") == -1 else -1


# Settings that follow from several keys, and why; None: jppo's own default. The keys are those that decide, for an
# override on top of a jppo config.
FOLLOWING: dict[str, tuple[Callable[[Look], Any], tuple[str, ...], str]] = {
    "actor.max_tokens_per_device": (_room, (), "nothing is said of micro-batches"),
    "mesh.data": (
        _data_axis,
        (f"{A}.fsdp_config.fsdp_size",),
        "fsdp_size=-1 has the model in as many parts as there are devices",
    ),
    "reward.weights": (
        _weights,
        (f"{RM}.enable", f"{FUNCTION}.path", f"{OVERLONG}.enable"),
        "verl's reward model scores alone, the overlong penalty is taken off by its factor",
    ),
    "reward.model.max_length": (
        lambda look: longest(look) if reward_model(look) and not look(f"{RM}.max_length") else None,
        (f"{RM}.enable",),
        "verl's reward model reads all of prompt and response",
    ),
    "rollout.logp_tolerance": (
        lambda look: 0.5 if look(f"{R}.dtype") != "float32" else None,
        (f"{R}.dtype",),
        "two engines in less than float32 round differently",
    ),
    "trainer.run_dir": (
        lambda look: None if look("trainer.default_local_dir") else f"runs/{look('trainer.experiment_name')}",
        ("trainer.experiment_name",),
        "a folder by the experiment's name",
    ),
}

# For overrides on top of a jppo config: conversions that leave a value as it is, and keys without such a setting.
UNCHANGED = (
    "as_is",
    "dtype",
    "drawn",
    "engine",
    "given",
    "in_turns",
    "off",
    "overlong",
    "top_k",
    "warmup_steps",
    "with_model",
)
OF_CONFIG: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]] = {
    f"{A}.use_dynamic_bsz": lambda _, values: not any(f"{A}.{name}" in values for name in MICRO),
    f"{RM}.enable": lambda config, _: bool(config["reward.model.path"]),
    f"{OVERLONG}.enable": lambda config, _: config["reward.overlong_buffer_tokens"] > 0,
    f"{FUNCTION}.path": lambda config, _: config["reward.function"].partition(":")[0],
}
