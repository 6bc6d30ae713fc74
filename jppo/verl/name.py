"""One verl setting: its counterpart in jppo, or why it has none; and values that conversions read of several."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_ROLLOUT = "actor_rollout_ref.rollout"
PLACES = {  # the first words of keys in this package, in short
    "A": "actor_rollout_ref.actor",
    "M": "actor_rollout_ref.model",
    "R": _ROLLOUT,
    "REF": "actor_rollout_ref.ref",
    "TURNS": f"{_ROLLOUT}.multi_turn",
    "VAL": f"{_ROLLOUT}.val_kwargs",
    "CORRECTION": "algorithm.rollout_correction",
    "RM": "reward.reward_model",
    "FUNCTION": "reward.custom_reward_function",
    "OVERLONG": "reward.reward_kwargs.overlong_buffer_cfg",
    "BOX": "reward.sandbox_fusion",
}


@dataclasses.dataclass(frozen=True)
class Name:
    """A verl key, or a pattern of keys."""

    key: str
    kind: str  # same: a jppo setting; needless: no meaning in jppo; missing: not supported
    setting: str = ""  # jppo's
    convert: str = "as_is"  # a name in `values.CONVERSIONS`
    default: Any = None  # verl's, if a script that omits the key must get it; '=KEY': that key's; None: jppo's own
    why: str = ""
    off: tuple[object, ...] = (False, None)  # missing: values that disable the feature
    only: str = ""  # the key that must be on for verl to read this one, or KEY=VALUE, or KEY!=VALUE


def key_of(short: str) -> str:
    """Returns a key with its first word spelt out, as A.shuffle is actor_rollout_ref.actor.shuffle."""
    place, dot, rest = short.partition(".")
    return f"{PLACES.get(place, place)}{dot}{rest}"


def same(key: str, setting: str, default: Any = None, convert: str = "as_is", why: str = "", only: str = "") -> Name:
    if isinstance(default, str) and default.startswith("="):
        default = f"={key_of(default[1:])}"
    return Name(key_of(key), "same", setting, convert, default, why, only=key_of(only))


def needless(why: str, keys: str) -> tuple[Name, ...]:
    return tuple(Name(key, "needless", why=why) for key in _keys(keys))


def missing(why: str, keys: str, off: tuple[object, ...] = (), only: str = "") -> tuple[Name, ...]:
    return tuple(Name(key, "missing", why=why, off=(False, None, *off), only=key_of(only)) for key in _keys(keys))


def _keys(words: str) -> list[str]:
    """Splits short keys at blanks; BOTH is the policy's model and the critic's."""
    keys = []
    for word in words.split():
        place, _, rest = word.partition(".")
        keys += [f"{PLACES['M']}.{rest}", f"critic.model.{rest}"] if place == "BOTH" else [key_of(word)]
    return keys


def within(place: str, names: str) -> str:
    """Returns the keys of a place by their names."""
    return " ".join(f"{place}.{name}" for name in names.split())


MICRO = ("A.ppo_micro_batch_size_per_gpu", "A.ppo_micro_batch_size")

Look = Callable[[str], Any]  # by a key, also in short


class Moot(Exception):
    """A value without meaning given the others; the message says why."""


class Unfit(Exception):
    """A feature that jppo lacks; the message names the nearest one."""


def longest(look: Look) -> int:
    """Returns the maximum tokens of prompt plus response."""
    total: int = look("data.max_prompt_length") + look("data.max_response_length")
    return total


def on_each(look: Look, sequences: int) -> int:
    """Returns each device's tokens of `sequences` of the longest, divided by sequence parallelism."""
    return -(-sequences * longest(look) // (look("A.ulysses_sequence_parallel_size") or 1))


def read_with(condition: str, look: Look) -> bool:
    """Whether the condition of `Name.only` holds."""
    key, unequal, value = condition.partition("!=")
    if unequal:
        return str(look(key)) != value
    key, equal, value = condition.partition("=")
    return str(look(key)) == value if equal else bool(look(key))


def reward_model(look: Look) -> bool:
    """Whether a reward model alone gives the score."""
    return bool(look("RM.enable") and not look("FUNCTION.path"))


def off_or(value: Any, usual: Any) -> Any:
    return usual if value is None else value


def required(value: T | None, truth: object = True, why: str = "") -> T:
    """Returns the value if the condition holds and it is set; else raises Moot."""
    if not truth:
        raise Moot(why)
    if value is None:
        raise Moot("null asks for nothing")
    return value


def commas(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(required(value))


def adapts(look: Look) -> bool:
    """Whether the policy has adapters."""
    return bool(lora_rank(look) or look("M.lora_adapter_path"))


def lora_rank(look: Look) -> int:
    return look("M.lora_rank") or look("M.lora.rank") or 0
