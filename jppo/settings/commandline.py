"""The command line: --config and its overrides, --help, and errors as one line."""

import argparse
import errno
import functools
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import ml_collections
from absl import flags
from ml_collections import config_flags

from jppo.errors import UserError, faults_of, one_line, raise_faults
from jppo.settings import configfile
from jppo.settings.other_names import no_setting, settings_meant
from jppo.settings.table import TABLE, command_of, values

ODD_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EROFS)
SWITCHES = ("dry_run", "machine", "json", "rollout_tokens_per_s")
MEANINGS_AT = 52  # column of the meanings in --help; longer settings push theirs to the right


class Parser(argparse.ArgumentParser):
    """A parser of a command without settings; raises its errors as a UserError of one line."""

    def __init__(self, module: str, about: str | None, **how: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m {module}", description=about, formatter_class=formatter, **how)

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
    given = flags.FlagValues()  # type: ignore[no-untyped-call]
    argv = [configfile.locate(word) for word in argv]
    named = [a.split("=", 1)[1] for a in argv if a.startswith("--config=")]
    flags.DEFINE_bool("dry_run", False, "print the resolved settings and stop", flag_values=given)
    if describes:
        flags.DEFINE_string("machine", "", "a machine that --dry_run compiles for", flag_values=given)
        flags.DEFINE_string("json", "", "a file for the account of --dry_run", flag_values=given)
        flags.DEFINE_float("rollout_tokens_per_s", 0.0, "tokens/s of all rollout engines", flag_values=given)
    if "--help" in argv or "-h" in argv:
        print(f"{about}\nSettings and their defaults:\n{describe(defaults)}")
        sys.exit(0)
    if "--config" in argv:
        raise UserError("--config is given without a file; name it behind a =, as in --config=configs/quickstart.py")
    if (needs_file or named) and (len(named) != 1 or not named[0]):
        raise UserError(f"--config is given {len(named)} times; name one file, as in --config=configs/quickstart.py")
    config = configfile.read_configfile(named[0]) if named else defaults
    if set(config) != set(defaults):
        raise UserError(f"--config={named[0]} is a config of {command_of(config)}; name one of {command_of(defaults)}")
    argv = [word for word in argv if not word.startswith("--config=")]
    named = [word.partition("=")[0].removeprefix("--config.") for word in argv if word.startswith("--config.")]
    raise_faults(faults_of(functools.partial(_check_known, name, config) for name in named))
    try:  # reads the overrides at once
        config_flags.DEFINE_config_dict("config", config, flag_values=given, sys_argv=["jppo", *argv])
        rest = given(["jppo", *argv])[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(_explain(e, values(config))) from e
    if rest:
        raise UserError(_no_option(rest[0], values(config)))
    return given["config"].value, {name: given[name].value for name in given if name in SWITCHES}


def _check_known(name: str, config: ml_collections.ConfigDict) -> None:
    """Raises a UserError for an unknown setting."""
    node: Any = config
    for part in name.split("."):
        if not isinstance(node, ml_collections.ConfigDict) or part not in node:
            siblings = node.keys() if hasattr(node, "keys") else []
            raise UserError(no_setting(part, siblings, values(config)))
        node = node[part]
    if isinstance(node, ml_collections.ConfigDict):
        raise UserError(f"--config.{name} is a section; name a setting of it, as in --config.{name}.{next(iter(node))}")


def _no_option(word: str, known: Collection[str]) -> str:
    """Makes the error about a word that is no option, with the setting that it may mean."""
    name = word.lstrip("-").partition("=")[0]
    meant = [name] if name in known else settings_meant(name, known)
    way = " or ".join(f"--config.{setting}=VALUE" for setting in meant[:3]) or "--config.SECTION.NAME=VALUE"
    return f"{word!r} is not understood; settings are given as {way}"


def _explain(error: Exception, known: Collection[str]) -> str:
    """Rewrites an error of absl or ml_collections as one line of value, rule and remedy."""
    if isinstance(error, flags.UnrecognizedFlagError):
        return _no_option(f"--{error.flagname}", known)
    text = " ".join(str(error.args[0] if error.args else error).replace('"', "'").split())
    typed = re.match(r"flag (--config\.([\w.]+)=.*?): ", text)
    if typed:
        return f"{typed[1]} must be of type {TABLE[typed[2]].type.__name__}, as {TABLE[typed[2]].default!r} is"
    return text


def exit_on_user_error(main: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command: a UserError becomes one line on stderr and exit code 2."""

    @functools.wraps(main)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            main(*args, **kwargs)
        except UserError as e:
            print(one_line(e), file=sys.stderr)
            sys.exit(2)
        except OSError as e:
            if e.errno not in ODD_PATHS or e.filename is None:
                raise
            print(one_line(UserError(f"{e.filename}: {e.strerror}; name another path")), file=sys.stderr)
            sys.exit(2)

    return command


def describe(config: ml_collections.ConfigDict) -> str:
    """Returns all settings with their values and meanings, one per line, for --help."""
    lines = []
    found = values(config)
    for name, setting in TABLE.items():
        if name in found:
            unit = f"[{setting.unit}] " if setting.unit else ""
            lines.append(f"  {f'--config.{name}={found[name]!r}':<{MEANINGS_AT}}  {unit}{setting.meaning}")
    return "\n".join(lines)
