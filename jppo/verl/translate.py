"""Translates verl's overrides to jppo's settings, with an account of each."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jppo.sandbox.shell import HIDDEN
from jppo.settings import UserError
from jppo.verl import layout, overrides
from jppo.verl.name import Look, Moot, Name, Unfit, key_of, read_with
from jppo.verl.names import FOLLOWING, KEYS, OF_CONFIG, UNCHANGED, find, today
from jppo.verl.refusals import REFUSED, foreign_tools
from jppo.verl.values import CONVERSIONS, readable

DICTS = (  # keys whose value is a dict
    "data.apply_chat_template_kwargs",
    key_of("R.engine_kwargs.vllm"),
    key_of("R.engine_kwargs.sglang"),
)
OF_ENGINE = {"veomni": "cosine", "torchtitan": "linear"}  # schedules of verl's YAML
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


def translate(
    words: Iterable[str],
    config: Mapping[str, Any] | None = None,
    *,
    main: str = "",
    root: str = "",
    folder: str = "",
    rename: Callable[[str], str] = lambda key: key,
) -> Translation:
    """Translates the arguments of a main module of verl's. The last override of a key wins, as in Hydra.

    Keys that no override gives have verl's defaults; with a jppo `config`, its values, and the result has no settings
    but those that the overrides change. YAML is read relative to `root`, of the module, or `folder`, where it starts.
    """
    found, kept = overrides.read(words, main, root, folder)
    lines = [Line(word, "unknown", why) for word, why in kept.items()]
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, one in found.items():
        now = today(rename(key))
        values.pop(now, None)  # order of the last overrides
        values[now], said[now] = one.value, one.said
    for key in DICTS:
        _gather(values, said, key)
    _name_teacher(values, said)

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

    if schedule := OF_ENGINE.get(layout.engine(look)):
        for key in map(key_of, ("A.optim.lr_scheduler_type", "critic.optim.lr_scheduler_type")):
            values.setdefault(key, schedule)
            said.setdefault(key, "")
    overrides.interpolated(values, lambda key: look(today(rename(key))))
    _check(values, said, look)
    settings: dict[str, Any] = {}
    for name in KEYS if config is None else ():
        if name.default is not None and name.key not in values and _read(name, name.key, look):
            with contextlib.suppress(Moot, Unfit, TypeError, ValueError, ZeroDivisionError):  # the key's line says it
                settings[name.setting] = CONVERSIONS[name.convert](look(name.key), look)
    given = set()
    for key, value in values.items():
        line, setting, converted = _account(key, value, said[key] or f"{key}={value}", look)
        if said[key]:
            lines.append(line)
        if setting:
            settings[setting] = converted
            given.add(setting)
    tools = key_of("TURNS.tool_config_path")
    if names := foreign_tools(settings.get("rollout.multi_turn.tool_config_path", "")):
        lines.append(Line(said[tools], "missing", f"it names classes of verl's, {names}; write them as PATH.py:CLASS"))
    decides = {key for key, (_, keys, _) in FOLLOWING.items() if any(key_of(one) in values for one in keys.split())}
    settings = readable(settings | _following(look, FOLLOWING.keys() if config is None else decides))
    notes = list(_notes(values, look)) if config is None else []
    return Translation(settings, frozenset(given), tuple(lines), tuple(notes))


def _following(look: Look, names: Collection[str]) -> dict[str, Any]:
    """Returns the settings of these names that follow from several keys."""
    found: dict[str, Any] = {}
    for setting, (follow, keys, _) in FOLLOWING.items():
        if setting not in names or _of_no_critic(setting, look):
            continue
        with contextlib.suppress(Moot, Unfit):  # a key's own line says it
            try:
                value = follow(look)
            except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
                raise UserError(f"{setting}: one of its keys, {keys}, has a value without a meaning in verl") from e
            if value is not None:
                found[setting] = value
    return found


def _check(values: dict[str, Any], said: dict[str, str], look: Look) -> None:
    """Raises a UserError for what no translation could mean."""
    for key, value in values.items():
        row = find(key)
        usual = row.default if row else None
        if row and row.kind == "same" and HIDDEN in str(value):
            raise UserError(
                f"{said[key]}: the variable of the environment looks like a secret, which a script does not get; give"
                f" {key}=VALUE behind the file"
            )
        numeric = isinstance(usual, int | float) and not isinstance(usual, bool)
        if numeric and not isinstance(value, int | float | None):
            raise UserError(f"{said[key]}: it must be a number, as verl's own {usual} is")
        for refuses in REFUSED:
            if why := refuses(key, value, look):
                raise UserError(f"{said[key]}: not supported: {why}")


_TEACHERS = "distillation.teacher_models."


def _name_teacher(values: dict[str, Any], said: dict[str, str]) -> None:
    """Renames the single teacher, if it has a name, to `teacher_model`, as verl does."""
    names = {key.split(".")[2] for key in values if key.startswith(_TEACHERS)} - {"teacher_model"}
    if len(names) == 1:
        place = f"{_TEACHERS}{names.pop()}."
        for key in [key for key in values if key.startswith(place)]:
            new = f"{_TEACHERS}teacher_model.{key.removeprefix(place)}"
            values[new], said[new] = values.pop(key), said.pop(key)


def _gather(values: dict[str, Any], said: dict[str, str], key: str) -> None:
    """Merges overrides of a dict's entries into one value of `key`."""
    entries = [name for name in values if name.startswith(f"{key}.")]
    if entries:
        said[key] = " ".join(said[name] for name in entries)
        values[key] = {name.removeprefix(f"{key}."): values.pop(name) for name in entries}


def _account(key: str, value: Any, said: str, look: Any) -> tuple[Line, str, Any]:
    """Returns an override's line, and its setting and value if there is one."""
    name = find(key)
    if name is None:
        return Line(said, "unknown", "no name of verl's that jppo knows of; it is left out"), "", None
    kind, why = name.kind, name.why
    if _of_no_critic(key, look):
        kind, why = "needless", f"algorithm.adv_estimator={look('algorithm.adv_estimator')} has no critic"
    elif not _read(name, key, look):
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


def _read(name: Name, key: str, look: Any) -> bool:
    """Whether verl reads a key, given the others."""
    return not _of_no_critic(key, look) and (not name.only or key == name.only or read_with(name.only, look))


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
    if look("CORRECTION.bypass_mode") and key_of("trainer.use_v1") not in values:
        asked = ("CORRECTION.loss_type", "CORRECTION.rollout_is", "CORRECTION.rollout_rs")
        if any(key_of(one) in values for one in asked):
            yield (
                "verl 0.9.1's trainer with use_v1=True reads no other key of rollout_correction in bypass_mode; jppo"
                " does what verl's documentation and its older trainer do"
            )
    a = key_of("A.clip_ratio")
    if a in values and (look(f"{a}_low"), look(f"{a}_high")) != (values[a], values[a]):
        low, high = look(f"{a}_low"), look(f"{a}_high")
        yield f"{a}={values[a]} clips nothing in verl: clip_ratio_low={low} and clip_ratio_high={high} do"
