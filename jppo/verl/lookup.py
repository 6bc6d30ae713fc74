"""Values of several of verl's keys together, and what keeps a value from a translation."""

from collections.abc import Callable
from typing import Any

MICRO = ("A.ppo_micro_batch_size_per_gpu", "A.ppo_micro_batch_size")

Look = Callable[[str], Any]  # by a key, also in short


class Moot(Exception):
    """A value without meaning given the others; the message says why."""


class Unfit(Exception):
    """A feature that jppo lacks; the message names the nearest one."""


def longest(look: Look) -> int:
    """Returns the maximum tokens of prompt plus response."""
    return look("data.max_prompt_length") + look("data.max_response_length")


def on_each(look: Look, sequences: int) -> int:
    """Returns each device's tokens of `sequences` of the longest, divided by sequence parallelism."""
    return -(-sequences * longest(look) // (look("A.ulysses_sequence_parallel_size") or 1))


def reward_model(look: Look) -> bool:
    """Whether a reward model alone gives the score."""
    return bool(look("RM.enable") and not look("FUNCTION.path"))


def off_or(value: Any, usual: Any) -> Any:
    return usual if value is None else value


def need(value: Any, truth: Any = True, why: str = "") -> Any:
    """Returns the value if the condition holds and it is set; else raises Moot."""
    if not truth:
        raise Moot(why)
    if value is None:
        raise Moot("null asks for nothing")
    return value


def commas(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(need(value))


def lora_rank(look: Look) -> int:
    return look("M.lora_rank") or look("M.lora.rank") or 0
