"""Values of several of verl's keys together, and what keeps a value from a translation."""

from collections.abc import Callable
from typing import Any

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TURNS, RM = f"{R}.multi_turn", "reward.reward_model"
OVERLONG, CORRECTION = "reward.reward_kwargs.overlong_buffer_cfg", "algorithm.rollout_correction"
FUNCTION, FILTER = "reward.custom_reward_function", "algorithm.filter_groups"
MICRO = ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size")

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


def lora_rank(look: Look) -> int:
    return look(f"{M}.lora_rank") or look(f"{M}.lora.rank") or 0
