"""The check of a config: every value by the table, then the rules between settings; needs no data, model or device."""

from typing import Any, TypeVar, overload

import ml_collections

from jppo.errors import UserError
from jppo.registry import did_you_mean
from jppo.settings import rules_rollout, rules_training
from jppo.settings.presets import PRESETS, THRESHOLDS
from jppo.settings.table import TABLE, Common, Settings, changed, kind_of, sections, values

C = TypeVar("C", bound=Common)


@overload
def typed(config: ml_collections.ConfigDict | Settings) -> Settings: ...


@overload
def typed(config: ml_collections.ConfigDict | C, kind: type[C], *, training: bool = True) -> C: ...


def typed(
    config: ml_collections.ConfigDict | Common, kind: type[Common] = Settings, *, training: bool = True
) -> Common:
    """Checks a config and returns it as frozen sections; sections are returned as they are.

    Raises a UserError at the first value, or combination of values, that is not allowed. Without `training`, rules
    between settings that only training reads are skipped.
    """
    if not isinstance(config, ml_collections.ConfigDict):
        return config
    _check_values(values(config), training=training)
    made = sections(config, kind)
    made = with_preset(made) if isinstance(made, Settings) else made
    _check_rules(made, training=training)
    return made


def check(config: ml_collections.ConfigDict | Common, *, training: bool = True) -> None:
    """Raises a UserError at the first value, or combination of values, that is not allowed."""
    if isinstance(config, ml_collections.ConfigDict):
        typed(config, kind_of(config), training=training)
    else:
        _check_values(values(config), training=training)
        _check_rules(with_preset(config) if isinstance(config, Settings) else config, training=training)


def with_preset(config: Settings) -> Settings:
    """Returns the settings with the values of `algorithm.rollout_correction` in place of its name.

    A threshold of the config's own replaces the preset's; another setting that differs raises a UserError.
    """
    name = config.algorithm.rollout_correction
    if not name:
        return config
    found, changes = values(config), dict[str, object]({"algorithm.rollout_correction": ""})
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


def _check_values(found: dict[str, Any], *, training: bool) -> None:
    for name, value in found.items():
        if name not in TABLE:
            raise UserError(f"there is no setting {name!r}; remove it from the config{did_you_mean(name, TABLE)}")
        TABLE[name].check(value)
    for name in found:
        if training or not TABLE[name].only.startswith("rollout.name"):
            _check_read(name, found)


def _check_rules(made: Common, *, training: bool) -> None:
    if isinstance(made, Settings):
        rules_rollout.check_rollout(made, training=training)
    if training:
        if not made.data.train_files:
            raise UserError("data.train_files is empty; give a path, as in --config.data.train_files=PATH")
        rules_training.check_training(made)


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
