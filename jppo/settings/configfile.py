"""Config files, the overrides of a command line, and the check that makes typed sections of them; --help.

Config files are users' Python programs, whose faults become errors that name file and line, and jppo's own:
--config=jppo://quickstart is configs/quickstart.py. Every value is checked by the table, then the rules between
settings; that needs no data, model or device.
"""

import argparse
import contextlib
import errno
import functools
import itertools
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, overload

import ml_collections
from absl import flags
from ml_collections import config_flags

from jppo.errors import INTERRUPTED, UserError, faults_of, one_line, raise_faults
from jppo.registry import did_you_mean
from jppo.settings import parts, rules_rollout, rules_training
from jppo.settings.options import EXTENSION, PREFIX
from jppo.settings.setting import explain_unknown_setting, settings_by_name, settings_meant
from jppo.settings.table import (
    TABLE,
    Common,
    Loop,
    Settings,
    Table,
    Training,
    by_name,
    changed,
    kind_of,
    sections,
    training_command,
)
from jppo.settings.texts import PRESETS, THRESHOLDS

C = TypeVar("C", bound=Common)

SCHEME = "jppo://"
SHIPPED = pathlib.Path(__file__).resolve().parents[1] / "configs"  # of the package: in a checkout a link to configs/


def _read_configfile(spec: str) -> ml_collections.ConfigDict:
    """Returns the settings from get_config() of FILE or FILE:ARGUMENT, locked."""
    file, _, argument = spec.partition(":")
    if not is_file(file):
        raise UserError(f"--config={spec}: no such file; jppo's own are {SCHEME}NAME, as jppo://gsm8k is")
    get_config = functions(file).get("get_config")
    if not callable(get_config):
        raise UserError(f"--config={spec}: the file has no get_config(); write one that returns the settings")
    code = getattr(get_config, "__code__", None)
    if argument and code is not None and code.co_argcount == 0:
        raise UserError(
            f"--config={spec}: this config takes no argument; settings are given as --config.SECTION.NAME=VALUE"
        )
    config = call_user_code(file, get_config, *([argument] if argument else []))
    _check_names(config, file)
    return config.lock()


def is_file(path: str) -> bool:
    """Whether a file of this name exists; the name may be invalid."""
    try:
        return pathlib.Path(path).is_file()
    except (OSError, ValueError):
        return False


def functions(file: str) -> dict[str, Any]:
    """Runs a user's Python file; returns the functions and other names that it defines."""
    defined: dict[str, Any] = call_user_code(file, runpy.run_path, file)
    return defined


def call_user_code(file: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function of a user's file; an exception becomes a UserError of one line with its place in the file."""
    try:
        return call(*args, **kwargs)
    except UserError:
        raise
    except Exception as e:
        numbers = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == file]
        if isinstance(e, SyntaxError) and e.filename == file:
            numbers = [e.lineno]
        place = f"{file}, line {numbers[-1]}" if numbers else file
        text = " ".join(str(e.args[0] if e.args else e).split())
        missing = re.search(r"""Key "(\w+)" does not exist""", text)  # ml_collections
        reason = (
            explain_unknown_setting(missing[1], re.findall(r"\w+", text[missing.end() :]), TABLE)
            if missing
            else f"{type(e).__name__}: {text:.300}"
        )
        raise UserError(f"{place}: {reason}; fix the file") from e


def _check_names(config: Any, file: str) -> None:
    """Raises a UserError unless names and types of the settings match the file's defaults."""
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(
            f"{file}: get_config() returns {config!r:.40}; it must return settings, as jppo.settings.default() does"
        )
    table = dict(settings_by_name(kind_of(config)))
    values = {name: value for name, value in by_name(config).items() if not name.startswith(PREFIX)}
    for name in sorted(table.keys() ^ values.keys()):
        problem = "is missing" if name in table else "is no setting"
        raise UserError(f"{file}: {name} {problem}; start from jppo.settings.default() and change values only")
    for name, value in values.items():
        expected = table[name].type
        integer = expected is float and type(value) is int
        if not (isinstance(value, expected) or integer or (value is None and table[name].optional)):
            raise UserError(f"{file}: {name}={value!r:.40} must be of type {expected.__name__}, as the default is")


def shipped_names() -> list[str]:
    """Returns the names that may follow the scheme."""
    return sorted(path.stem for path in SHIPPED.glob("*.py"))


def locate(word: str) -> str:
    """Replaces the NAME of --config=jppo://NAME[:ARGUMENT] by its file's path; returns other arguments unchanged."""
    flag, scheme, named = word.partition(SCHEME)
    if flag != "--config=" or not scheme:
        return word
    name, colon, argument = named.partition(":")
    if name not in shipped_names():
        raise UserError(f"{word}: jppo has no config {name!r}; it has {', '.join(shipped_names())}")
    return f"{flag}{SHIPPED / name}.py{colon}{argument}"


def recipe(name: str, argument: str = "") -> ml_collections.ConfigDict:
    """Returns the settings of configs/NAME.py, for a config that differs in a few."""
    get_config = runpy.run_path(str(SHIPPED / f"{name}.py"))["get_config"]
    return get_config(argument) if argument else get_config()


ODD_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EROFS)
SWITCHES = ("dry_run", "machine", "json", "rollout_tokens_per_s")
MEANINGS_AT = 52  # column of the meanings in --help; longer settings push theirs to the right


def cpu_dtype(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Returns "bfloat16" where this machine's CPU has instructions for its products, otherwise "float32"."""
    text = pathlib.Path(cpuinfo).read_text(errors="replace") if pathlib.Path(cpuinfo).is_file() else ""
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    cpu_features = set(features[1].split()) if features else set()
    return "bfloat16" if cpu_features & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


class Parser(argparse.ArgumentParser):
    """A parser of a command without settings; raises its errors as a UserError of one line."""

    def __init__(self, module: str, about: str | None, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m {module}", description=about, formatter_class=formatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises a UserError; called by argparse."""
        raise UserError(f"{message}; {self.prog} --help has all arguments")


def natural(text: str) -> int:
    """Parses a whole number of 0 or more, for an argument of a Parser."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return value


def parse(
    argv: list[str],
    about: str,
    defaults: ml_collections.ConfigDict,
    *,
    needs_file: bool = True,
    describes: bool = False,
) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
    """Returns the config named by --config with its overrides, and the switches; raises a UserError of one line.

    Unless it `needs_file`, a command without --config starts from the defaults. With `describes` it also has the
    switches of --dry_run for a described machine.
    """
    flag_values = flags.FlagValues()  # type: ignore[no-untyped-call]
    argv = [locate(word) for word in argv]
    specs = [a.split("=", 1)[1] for a in argv if a.startswith("--config=")]
    flags.DEFINE_bool("dry_run", False, "print the resolved settings and stop", flag_values=flag_values)
    if describes:
        flags.DEFINE_string("machine", None, "a machine that --dry_run compiles for", flag_values=flag_values)
        flags.DEFINE_string("json", "", "a file for the account of --dry_run", flag_values=flag_values)
        flags.DEFINE_float("rollout_tokens_per_s", 0.0, "tokens/s of all rollout engines", flag_values=flag_values)
    if "--help" in argv or "-h" in argv:
        print(f"{about}\nSettings and their defaults:\n{help_text(defaults)}")
        sys.exit(0)
    if "--config" in argv:
        raise UserError("--config is given without a file; name it behind a =, as in --config=configs/quickstart.py")
    if (needs_file or specs) and (len(specs) != 1 or not specs[0]):
        file = next((word for word in argv if word.endswith(".py") and "=" not in word), f"{SCHEME}quickstart")
        raise UserError(f"--config is given {len(specs)} times; name one file, as in --config={file}")
    config = _read_configfile(specs[0]) if specs else defaults
    if set(config) != set(defaults):
        raise UserError(
            f"--config={specs[0]} is a config of {training_command(config)}; name one of {training_command(defaults)}"
        )
    options = [word for word in argv if word.startswith(f"--config.{PREFIX}")]
    argv = [word for word in argv if not word.startswith("--config=") and word not in options]
    specs = [word.partition("=")[0].removeprefix("--config.") for word in argv if word.startswith("--config.")]
    raise_faults(faults_of(functools.partial(_check_known, name, config) for name in specs))
    for word in value_lists(argv):
        remedy = "python -m jppo.sweep trains with each of them" if "algorithm" in config else "give one"
        raise UserError(f"{word} lists several values, and a run has one; {remedy}")
    try:  # reads the overrides at once
        config_flags.DEFINE_config_dict("config", config, flag_values=flag_values, sys_argv=["jppo", *argv])
        unknown = flag_values(["jppo", *argv])[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(_explain_parse_error(e, by_name(config))) from e
    if unknown:
        raise UserError(_describe_unknown_word(unknown[0], by_name(config)))
    config = flag_values["config"].value
    _set_options(config, options)
    return config, {name: flag_values[name].value for name in flag_values if name in SWITCHES}


def value_lists(argv: Sequence[str]) -> dict[str, list[str]]:
    """Returns the arguments that list values of a setting which has one, each with the arguments of its values."""
    words = {word: re.fullmatch(r"--config\.([\w.]+)=(.*,.*)", word, re.DOTALL) for word in argv}
    single = {name for name, setting in TABLE.items() if setting.type in (bool, int, float) or setting.choices}
    listed = {word: m for word, m in words.items() if m and m[1] in single}
    return {word: [f"--config.{m[1]}={x}" for x in m[2].split(",")] for word, m in listed.items()}


def _set_options(config: ml_collections.ConfigDict, words: list[str]) -> None:
    """Sets --config.algorithm.options.NAME=VALUE by the types that the extension gives; `typed` checks them."""
    if words and "algorithm" not in config:
        raise UserError(explain_unknown_setting("algorithm", config.keys(), by_name(config)))
    try:
        option_types = parts.options_of(config.algorithm.extension) if words and config.algorithm.extension else {}
    except UserError:  # which `typed` raises
        option_types = {}
    for word in words:
        name, equals, text = word.removeprefix(f"--config.{PREFIX}").partition("=")
        if not equals or not name.isidentifier():
            raise UserError(
                f"{word!r} is not understood; options of {EXTENSION} are given as --config.{PREFIX}NAME=VALUE"
            )
        with config.algorithm.options.unlocked() as options:
            if name in options:  # a ConfigDict would cast the value to the type of the former one
                del options[name]
            options[name] = option_types[name].read(text) if name in option_types else text


def _check_known(name: str, config: ml_collections.ConfigDict) -> None:
    """Raises a UserError for an unknown setting."""
    node: Any = config
    for part in name.split("."):
        if not isinstance(node, ml_collections.ConfigDict) or part not in node:
            siblings = node.keys() if hasattr(node, "keys") else []
            raise UserError(explain_unknown_setting(part, siblings, by_name(config)))
        node = node[part]
    if isinstance(node, ml_collections.ConfigDict):
        first = next(iter(node), "NAME")
        raise UserError(f"--config.{name} is a section; name a setting of it, as in --config.{name}.{first}")


def _describe_unknown_word(word: str, names: Collection[str]) -> str:
    """Returns the text of an error about a word that is no option, with the setting that it may mean."""
    name = word.lstrip("-").partition("=")[0]
    meant = [name] if name in names else settings_meant(name, names)
    remedy = " or ".join(f"--config.{setting}=VALUE" for setting in meant[:3]) or "--config.SECTION.NAME=VALUE"
    return f"{word!r} is not understood; settings are given as {remedy}"


def _explain_parse_error(error: Exception, names: Collection[str]) -> str:
    """Rewrites an error of absl or ml_collections as one line of value, rule and remedy."""
    if isinstance(error, flags.UnrecognizedFlagError):
        return _describe_unknown_word(f"--{error.flagname}", names)
    text = " ".join(str(error.args[0] if error.args else error).replace('"', "'").split())
    mistyped = re.match(r"flag (--config\.([\w.]+)=.*?): ", text)
    if mistyped:
        return f"{mistyped[1]} must be of type {TABLE[mistyped[2]].type.__name__}, as {TABLE[mistyped[2]].default!r} is"
    return text


def exit_on_user_error(main: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command: a UserError becomes one line on stderr and exit code 2, Ctrl-C one line and 130."""

    @functools.wraps(main)
    def run_main(*args: Any, **kwargs: Any) -> None:
        try:
            main(*args, **kwargs)
        except UserError as e:
            print(one_line(e), file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        except OSError as e:
            if e.errno not in ODD_PATHS or e.filename is None:
                raise
            print(one_line(UserError(f"{e.filename}: {e.strerror}; name another path")), file=sys.stderr)
            sys.exit(2)

    return run_main


def help_text(config: ml_collections.ConfigDict) -> str:
    """Returns all settings with their values and meanings, one per line, for --help."""
    lines = []
    values = by_name(config)
    for name, setting in TABLE.items():
        if name in values:
            unit = f"[{setting.unit}] " if setting.unit else ""
            lines.append(f"  {f'--config.{name}={values[name]!r}':<{MEANINGS_AT}}  {unit}{setting.meaning}")
    return "\n".join(lines)


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
    settings = sections(config, kind)
    raise_faults(_list_faults(by_name(config), settings, training=training))
    if not isinstance(settings, Settings):
        return settings
    with_options = {"algorithm.options": parts.options(settings)} if training else {}
    return _with_preset(changed(settings, with_options))


def check(config: ml_collections.ConfigDict | Common, *, training: bool = True) -> None:
    """Raises a UserError with every value, and every combination of values, that is not allowed."""
    if isinstance(config, ml_collections.ConfigDict):
        typed(config, kind_of(config), training=training)
    else:
        raise_faults(_list_faults(by_name(config), config, training=training))


def _with_preset(config: Settings) -> Settings:
    """Returns the settings with the values of `algorithm.rollout_correction` in place of its name.

    A threshold of the config's own replaces the preset's; another setting that differs raises a UserError.
    """
    name = config.algorithm.rollout_correction
    if not name:
        return config
    values, changes = by_name(config), dict[str, object]({"algorithm.rollout_correction": ""})
    for leaf, new in vars(PRESETS[name]).items():
        setting = "actor.loss_mode" if leaf == "loss_mode" else f"algorithm.{leaf}"
        value, usual = values[setting], TABLE[setting].default
        if not new and leaf == "loss_mode":
            continue
        if value in (usual, new):
            changes[setting] = new
        elif leaf not in THRESHOLDS or new == "":
            raise UserError(
                f"{setting}={value!r}: algorithm.rollout_correction={name!r} sets it to {new!r}; leave it at {usual!r},"
                " or set the correction without a preset"
            )
    return changed(config, changes)


def _list_faults(values: dict[str, Any], config: Common, *, training: bool) -> list[str]:
    """Returns all faults of settings as texts: of single values, then of rules between valid values."""
    invalid, table = dict[str, list[str]](), dict(settings_by_name(type(config)))
    for name, value in values.items():
        if faults := faults_of([functools.partial(_check_value, table, name, value)]):
            invalid[name] = faults
    names = [name for name in values if name in table]
    read_names = [name for name in names if training or not table[name].only.startswith("rollout.name")]
    checks: list[Callable[[], object]] = [
        functools.partial(_check_read, name, values) for name in read_names if name not in invalid
    ]
    valid = changed(config, {name: table[name].default for name in names if name in invalid})
    with_preset = valid
    if isinstance(valid, Settings):
        with contextlib.suppress(UserError):
            with_preset = _with_preset(valid)
        checks.append(functools.partial(_with_preset, valid))
    if isinstance(valid, Settings) and training:
        checks.append(functools.partial(parts.options, valid))
    between = faults_of(checks)
    for rules in _list_rules(with_preset, training=training):
        between += faults_of([functools.partial(between.extend, rules)])
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)" for name in invalid) or "(?!)")
    faults = [*itertools.chain(*invalid.values()), *(fault for fault in between if not pattern.search(fault))]
    return list(dict.fromkeys(faults))


def _check_value(table: Table, name: str, value: Any) -> None:
    """Raises UserError for an unknown setting, or a value that it cannot have."""
    if name.startswith(PREFIX):  # by the signature of the extension, in the rules
        return
    if name not in table:
        raise UserError(f"there is no setting {name!r}; remove it from the config{did_you_mean(name, table)}")
    table[name].check(value)


def _list_rules(config: Common, *, training: bool) -> Iterator[Iterator[str]]:
    """Yields the rules between settings; each yields or raises what the settings break of it."""
    if isinstance(config, Loop):
        yield from rules_rollout.rollout_rules(config, training=training)
    if training and isinstance(config, Training) and not config.data.train_files:
        yield iter(["data.train_files is empty; give a path, as in --config.data.train_files=PATH"])
    if training:
        yield from rules_training.training_rules(config)


def without_unread(config: C, keep: Collection[str]) -> C:
    """Returns the settings, with defaults for those that other values leave unread, except for the names in `keep`."""
    values = by_name(config)
    names = (values.keys() & TABLE.keys()) - {*keep}
    unread = [name for name in names if faults_of([functools.partial(_check_read, name, values)])]
    return changed(config, {name: TABLE[name].default for name in unread})


def _check_read(name: str, values: dict[str, Any]) -> None:
    """Raises a UserError for a value that no part of the run would read."""
    setting, value = TABLE[name], values[name]
    if not setting.only or value == setting.default:
        return
    switch, negated, wanted = setting.only.partition("!=")
    if not negated:
        switch, equals, wanted = setting.only.partition("=")
    actual = values[switch]
    is_read = str(actual) != wanted if negated else str(actual) == wanted if equals else bool(actual)
    if not is_read:
        when = f"a {switch} other than {wanted!r}" if negated else f"{switch}={wanted!r}" if equals else f"{switch} set"
        raise UserError(
            f"{name}={value!r} is read only with {when}, and {switch}={actual!r}; change that, or leave {name} at"
            f" {setting.default!r}"
        )
