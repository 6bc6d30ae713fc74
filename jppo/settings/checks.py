"""The check of a config: every value by the table, then the rules between settings; needs no data, model or device."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import ml_collections

from jppo.errors import UserError, faults_of, raise_faults
from jppo.registry import did_you_mean
from jppo.settings import rules_rollout, rules_training
from jppo.settings.table import TABLE, Common, Settings, by_name, changed, kind_of, sections
from jppo.settings.texts import PRESETS, THRESHOLDS

C = TypeVar("C", bound=Common)


@overload
def typed(config: ml_collections.ConfigDict | Settings) -> Settings: ...


@overload
def typed(config: ml_collections.ConfigDict | C, kind: type[C], *, training: bool = True) -> C: ...


def typed(
    config: ml_collections.ConfigDict | Common, kind: type[Common] = Settings, *, training: bool = True
) -> Common:
    """Checks a config and returns it as frozen sections; sections are returned as they are.

    Raises a UserError with every value, and every combination of values, that is not allowed. Without `training`, rules
    between settings that only training reads are skipped.
    """
    if not isinstance(config, ml_collections.ConfigDict):
        return config
    made = sections(config, kind)
    raise_faults(_faults(by_name(config), made, training=training))
    made = with_preset(made) if isinstance(made, Settings) else made
    return made


def check(config: ml_collections.ConfigDict | Common, *, training: bool = True) -> None:
    """Raises a UserError with every value, and every combination of values, that is not allowed."""
    if isinstance(config, ml_collections.ConfigDict):
        typed(config, kind_of(config), training=training)
    else:
        raise_faults(_faults(by_name(config), config, training=training))


def with_preset(config: Settings) -> Settings:
    """Returns the settings with the values of `algorithm.rollout_correction` in place of its name.

    A threshold of the config's own replaces the preset's; another setting that differs raises a UserError.
    """
    name = config.algorithm.rollout_correction
    if not name:
        return config
    found, changes = by_name(config), dict[str, object]({"algorithm.rollout_correction": ""})
    for leaf, new in vars(PRESETS[name]).items():
        setting = "actor.loss_mode" if leaf == "loss_mode" else f"algorithm.{leaf}"
        given, usual = found[setting], TABLE[setting].default
        if not new and leaf == "loss_mode":
            continue
        if given in (usual, new):
            changes[setting] = new
        elif leaf not in THRESHOLDS or new == "":
            raise UserError(
                f"{setting}={given!r}: algorithm.rollout_correction={name!r} sets it to {new!r}; leave it at {usual!r},"
                " or set the correction without a preset"
            )
    return changed(config, changes)


def _faults(found: dict[str, Any], made: Common, *, training: bool) -> list[str]:
    """Returns the faults of single values, then those between valid values."""
    wrong: dict[str, list[str]] = {}
    for name, value in found.items():
        if faults := faults_of([functools.partial(_check_value, name, value)]):
            wrong[name] = faults
    known = [name for name in found if name in TABLE]
    read = [name for name in known if training or not TABLE[name].only.startswith("rollout.name")]
    checks: list[Callable[[], object]] = [
        functools.partial(_check_read, name, found) for name in read if name not in wrong
    ]
    mended = changed(made, {name: TABLE[name].default for name in known if name in wrong})
    expanded = mended
    if isinstance(mended, Settings):
        with contextlib.suppress(UserError):
            expanded = with_preset(mended)
        checks.append(functools.partial(with_preset, mended))
    between = faults_of([*checks, *_rules(expanded, training=training)])
    of_wrong = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)" for name in wrong) or "(?!)")
    return [*itertools.chain(*wrong.values()), *(fault for fault in between if not of_wrong.search(fault))]


def _check_value(name: str, value: Any) -> None:
    if name not in TABLE:
        raise UserError(f"there is no setting {name!r}; remove it from the config{did_you_mean(name, TABLE)}")
    TABLE[name].check(value)


def _rules(made: Common, *, training: bool) -> Iterator[Callable[[], None]]:
    if isinstance(made, Settings):
        yield from rules_rollout.rollout_rules(made, training=training)
    if training:
        yield functools.partial(_check_train_files, made)
        yield from rules_training.training_rules(made)


def _check_train_files(made: Common) -> None:
    if not made.data.train_files:
        raise UserError("data.train_files is empty; give a path, as in --config.data.train_files=PATH")


def _check_read(name: str, found: dict[str, Any]) -> None:
    """Raises a UserError for a value that no part of the run would read."""
    setting, value = TABLE[name], found[name]
    if not setting.only or value == setting.default:
        return
    switch, is_not, wanted = setting.only.partition("!=")
    if not is_not:
        switch, equals, wanted = setting.only.partition("=")
    actual = found[switch]
    read = str(actual) != wanted if is_not else str(actual) == wanted if equals else bool(actual)
    if not read:
        when = f"a {switch} other than {wanted!r}" if is_not else f"{switch}={wanted!r}" if equals else f"{switch} set"
        raise UserError(
            f"{name}={value!r} is read only with {when}, and {switch}={actual!r}; change that, or leave {name} at"
            f" {setting.default!r}"
        )
