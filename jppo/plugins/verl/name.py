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
class KeyRow:
    """A row of the table of verl's settings: a key, or a pattern of keys."""

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
    word, dot, ending = short.partition(".")
    return f"{PLACES.get(word, word)}{dot}{ending}"


def same(key: str, setting: str, default: Any = None, convert: str = "as_is", why: str = "", only: str = "") -> KeyRow:
    """Makes the row of a verl key whose counterpart in jppo is `setting`; `default` may be '=KEY', with a short key."""
    if isinstance(default, str) and default.startswith("="):
        default = f"={key_of(default[1:])}"
    return KeyRow(key_of(key), "same", setting, convert, default, why, only=key_of(only))


def alike(place: str, section: str, **defaults: Any) -> tuple[KeyRow, ...]:
    """Makes rows of keys of a place that have the same names in a section of jppo, with verl's defaults."""
    return tuple(same(f"{place}.{name}", f"{section}.{name}", default) for name, default in defaults.items())


def needless(why: str, keys: str) -> tuple[KeyRow, ...]:
    """Makes rows of keys without a meaning in jppo."""
    return tuple(KeyRow(key, "needless", why=why) for key in _keys(keys))


def missing(why: str, keys: str, off: tuple[object, ...] = (), only: str = "") -> tuple[KeyRow, ...]:
    """Makes rows of keys whose feature jppo lacks; a value in `off` does not ask for it."""
    return tuple(KeyRow(key, "missing", why=why, off=(False, None, *off), only=key_of(only)) for key in _keys(keys))


def _keys(words: str) -> list[str]:
    """Spells out the short keys of a text, which blanks separate; BOTH.x is the policy's model and the critic's."""
    keys = []
    for word in words.split():
        section, _, ending = word.partition(".")
        keys += [f"{PLACES['M']}.{ending}", f"critic.model.{ending}"] if section == "BOTH" else [key_of(word)]
    return keys


def within(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.{name}" for name in names.split())


MICRO = ("A.ppo_micro_batch_size_per_gpu", "A.ppo_micro_batch_size")

GetKey = Callable[[str], Any]  # by a key, also in short


class Needless(Exception):
    """Raised for a value without a meaning, given the others; the message says why."""


class Unsupported(Exception):
    """Raised for a feature that jppo lacks; the message names the nearest one."""


def longest_sequence(get: GetKey) -> int:
    """Returns the maximum tokens of prompt plus response."""
    total: int = get("data.max_prompt_length") + get("data.max_response_length")
    return total


def device_tokens(get: GetKey, sequences: int) -> int:
    """Returns the tokens of `sequences` of maximum length on each device, after sequence parallelism."""
    return -(-sequences * longest_sequence(get) // (get("A.ulysses_sequence_parallel_size") or 1))


def read_with(condition: str, get: GetKey) -> bool:
    """Whether a condition on a key of verl holds: KEY (is on), KEY=VALUE or KEY!=VALUE."""
    key, unequal, value = condition.partition("!=")
    if unequal:
        return str(get(key)) != value
    key, equal, value = condition.partition("=")
    return str(get(key)) == value if equal else bool(get(key))


def reward_model(get: GetKey) -> bool:
    """Whether a reward model alone gives the score."""
    return bool(get("RM.enable") and not get("FUNCTION.path"))


def value_or(value: Any, default: Any) -> Any:
    return default if value is None else value


def needed(value: T | None, is_read: object = True, why: str = "") -> T:
    """Returns a value that has an effect. Raises Needless for null, and with `why` if verl does not read it."""
    if not is_read:
        raise Needless(why)
    if value is None:
        raise Needless("null asks for nothing")
    return value


def join_commas(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(needed(value))


def has_adapters(get: GetKey) -> bool:
    return bool(lora_rank(get) or get("M.lora_adapter_path"))


def lora_rank(get: GetKey) -> int:
    return get("M.lora_rank") or get("M.lora.rank") or 0
