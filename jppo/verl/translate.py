"""Translates verl's overrides to jppo's settings, with an account of each."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jppo.settings import UserError
from jppo.verl.name import Moot, Name, Unfit, key_of
from jppo.verl.names import FOLLOWING, KEYS, OF_CONFIG, UNCHANGED, find, today
from jppo.verl.script import UNREAD
from jppo.verl.values import CONVERSIONS

DICTS = (  # keys whose value is a dict
    "data.apply_chat_template_kwargs",
    key_of("R.engine_kwargs.vllm"),
    key_of("R.engine_kwargs.sglang"),
)
_NAMES = ("trainer.project_name", "trainer.experiment_name")
OWN_FILES = ("config", "ppo_trainer", "ppo_megatron_trainer")  # of Hydra's --config-path and --config-name
PATHS = ("model.path", "data.train_files", "data.val_files")  # from the base config, if verl's line omits them


@dataclasses.dataclass(frozen=True)
class Line:
    """The result of one override."""

    said: str  # KEY=VALUE, as given
    kind: str  # same, needless, missing or unknown
    why: str  # for same: jppo's SETTING=VALUE


@dataclasses.dataclass(frozen=True)
class Translation:
    """jppo's settings, and the account of verl's overrides."""

    settings: dict[str, Any]
    given: frozenset[str]  # set by overrides; the others are verl's defaults
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def translate(words: Iterable[str], config: Mapping[str, Any] | None = None) -> Translation:
    """Translates overrides. The last one of a key wins, as in Hydra.

    Keys that no override gives have verl's defaults; with a jppo `config`, its values, and the result has no settings
    but those that the overrides change.
    """
    values, said, lines, notes = _read(words)

    def look(short: str) -> Any:
        key = key_of(short)
        if key in values:
            return values[key]
        name = find(key)
        if config is not None and key in OF_CONFIG:
            return OF_CONFIG[key](config, values)
        if config is not None and name and name.key == key and name.setting and name.convert in UNCHANGED:
            return config[name.setting]
        default = name.default if name and name.key == key else None
        return look(default[1:]) if isinstance(default, str) and default.startswith("=") else default

    settings: dict[str, Any] = {}
    for name in KEYS if config is None else ():
        if name.default is not None and name.key not in values and not _of_no_critic(name.key, look):
            with contextlib.suppress(Moot, Unfit):
                settings[name.setting] = CONVERSIONS[name.convert](look(name.key), look)
    for setting, (follow, keys, _) in FOLLOWING.items():
        decides = config is None or any(key_of(key) in values for key in keys.split())
        if decides and (value := follow(look)) is not None:
            settings[setting] = value
    given = set()
    for key, value in values.items():
        line, setting, converted = _account(key, value, said[key], look)
        lines.append(line)
        if setting:
            settings[setting] = converted
            given.add(setting)
    if config is None:
        notes += _notes(values, look)
    return Translation(settings, frozenset(given), tuple(lines), tuple(notes))


def _read(words: Iterable[str]) -> tuple[dict[str, Any], dict[str, str], list[Line], list[str]]:
    """Returns values and spellings by current verl key, lines on words that are no override, and notes."""
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    lines = []
    for word in words:
        key, equals, text = word.partition("=")
        if word.startswith("-"):
            lines.append(Line(_shown(word), *_option(key, text)))
        elif word.startswith("~") or not equals or not key.strip("+"):
            lines.append(Line(_shown(word), "unknown", "it is no KEY=VALUE"))
        else:
            for name, value in flat(key.lstrip("+"), read_value(text)).items():
                now = today(name)
                values.pop(now, None)  # order of the last overrides
                values[now], said[now] = value, f"{key}={text}" if name == key.lstrip("+") else f"{name}={value}"
    for key in DICTS:
        _gather(values, said, key)
    _interpolate(values)
    notes = _without_unread(values)
    for key, value in values.items():
        usual = row.default if (row := find(key)) else None
        numeric = isinstance(usual, int | float) and not isinstance(usual, bool)
        if numeric and UNREAD not in str(value) and not isinstance(value, int | float | None):
            raise UserError(f"{said[key]}: it must be a number, as verl's own {usual} is")
        if UNREAD in str(value):
            raise UserError(
                f"{_shown(said[key])}: nothing of the script is run, and this is not said in it; set the variable in"
                f" the environment, or give {key}=VALUE behind the file"
            )
    return values, said, lines, notes


def _without_unread(values: dict[str, Any]) -> list[str]:
    """Leaves the parts of a run's names that only the script could expand out of them; returns notes."""
    notes = []
    for key in _NAMES:
        if UNREAD in (text := str(values.get(key, ""))):
            left = re.sub(rf"{UNREAD}[^{UNREAD}]*{UNREAD}", "", text).strip("-_ ")
            notes.append(f"{key}={_shown(text)}: nothing of the script is run; it is {left or 'left out'}")
            if left:
                values[key] = left
            else:
                del values[key]
    return notes


def _option(key: str, text: str) -> tuple[str, str]:
    """Returns what becomes of an option of Hydra."""
    if text.strip("./'\"").removesuffix(".yaml") in OWN_FILES:
        return "needless", "verl's own settings are read"
    return "missing", "verl's YAML files are not read; give their settings as overrides"


def _gather(values: dict[str, Any], said: dict[str, str], key: str) -> None:
    """Merges overrides of a dict's entries into one value of `key`."""
    entries = [name for name in values if name.startswith(f"{key}.")]
    if entries:
        said[key] = " ".join(said[name] for name in entries)
        values[key] = {name.removeprefix(f"{key}."): values.pop(name) for name in entries}


def _interpolate(values: dict[str, Any]) -> None:
    """Expands ${KEY}, the whole of a value or a part of a text."""
    for key, value in values.items():
        for mark, named in (
            re.findall(rf"({UNREAD}?\$\{{([\w.]+)\}}{UNREAD}?)", value) if isinstance(value, str) else ()
        ):
            other = today(named)
            found = values.get(other, row.default if (row := find(other)) and row.key == other else None)
            if other != key and found is not None and isinstance(values[key], str):
                values[key] = found if values[key] == mark else values[key].replace(mark, str(found))


def _account(key: str, value: Any, said: str, look: Any) -> tuple[Line, str, Any]:
    """Returns an override's line, and its setting and value if there is one."""
    name = find(key)
    if name is None:
        return Line(said, "unknown", "no name of verl's that jppo knows of; it is left out"), "", None
    kind, why = name.kind, name.why
    if _of_no_critic(key, look):
        kind, why = "needless", f"algorithm.adv_estimator={look('algorithm.adv_estimator')} has no critic"
    elif name.only and key != name.only and not look(name.only):
        kind, why = "needless", f"read only with {name.only}"
    elif kind == "missing" and value in name.off:
        kind, why = "needless", "it asks for nothing"
    return _convert(name, value, said, look) if kind == "same" else (Line(said, kind, why), "", None)


def _convert(name: Name, value: Any, said: str, look: Any) -> tuple[Line, str, Any]:
    try:
        converted = CONVERSIONS[name.convert](value, look)
    except Moot as e:
        return Line(said, "needless", str(e)), "", None
    except Unfit as e:
        return Line(said, "missing", str(e)), "", None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        raise UserError(f"{said}: a value of this kind has no meaning in verl; it stands for {name.setting}") from e
    why = f"{name.setting}={converted}"
    if name.convert == "loggers":
        given = [one.strip("' ") for one in str(value).strip("[]").split(",")]
        if left := [one for one in given if one not in (*converted.split(","), "file")]:
            why += f" (not supported: {', '.join(left)})"
    return Line(said, "same", why), name.setting, converted


def _of_no_critic(key: str, look: Any) -> bool:
    return key.startswith("critic.") and look("algorithm.adv_estimator") != "gae"


def _notes(values: dict[str, Any], look: Any) -> Iterable[str]:
    given = {name.setting for key in values if (name := find(key))}
    if absent := [setting for setting in PATHS if setting not in given]:
        yield f"{', '.join(absent)}: not given; those of configs/gsm8k.py are taken"
    if look("algorithm.adv_estimator") == "gae" and "critic.model.path" not in values:
        yield "critic.model.path is not given; the critic begins as the policy, not as verl's own default"
    if "algorithm.kl_ctrl.kl_coef" in values and not look("algorithm.use_kl_in_reward"):
        yield (
            "algorithm.kl_ctrl.kl_coef is read only with algorithm.use_kl_in_reward=True, which verl 0.9.1 leaves at"
            " False; verl before 0.3 always had the KL in the reward"
        )
    a = key_of("A.clip_ratio")
    if a in values and (look(f"{a}_low"), look(f"{a}_high")) != (values[a], values[a]):
        low, high = look(f"{a}_low"), look(f"{a}_high")
        yield f"{a}={values[a]} clips nothing in verl: clip_ratio_low={low} and clip_ratio_high={high} do"


def _shown(text: str) -> str:
    return text.replace(UNREAD, "")


_WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def read_value(text: str) -> Any:
    """Parses a value by Hydra's grammar: null, numbers, booleans, quoted or bare text, lists and dicts."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if text.startswith("[") and text.endswith("]"):
        return [read_value(part) for part in _parts(text[1:-1])]
    if text.startswith("{") and text.endswith("}"):
        pairs = (part.partition(":") for part in _parts(text[1:-1]))
        return {str(read_value(key)): read_value(value) for key, _, value in pairs}
    return text


def flat(key: str, value: Any) -> dict[str, Any]:
    """Flattens a dict to dotted keys."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {k: v for name, inner in value.items() for k, v in flat(f"{key}.{name}", inner).items()}


def _parts(text: str) -> list[str]:
    """Splits at commas outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += 0 if quote else (character in "[{") - (character in "]}")
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]
