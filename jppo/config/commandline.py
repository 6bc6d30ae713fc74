"""The command line: --config and its overrides, --help, and errors as one line."""

import functools
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from jppo.config import shipped
from jppo.config.table import TABLE, values
from jppo.errors import UserError

SWITCHES = ("dry_run", "machine", "json", "rollout_tokens_per_s")
settings = values
MEANINGS_AT = 52  # column of the meanings in --help; longer settings push theirs to the right


def dump(config: ml_collections.ConfigDict) -> str:
    """Returns the resolved settings as JSON."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def parse(
    argv: list[str],
    about: str,
    defaults: ml_collections.ConfigDict,
    *,
    needs_file: bool = True,
    describes: bool = False,
) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
    """Returns the config named by --config with its overrides, and the switches; raises a UserError of one line.

    Unless it `needs_file`, a command without --config starts from the defaults. One that `describes` machines has the
    switches of --dry_run for that.
    """
    given = flags.FlagValues()  # type: ignore[no-untyped-call]
    argv = [shipped.locate(word) for word in argv]
    named = [a.split("=", 1)[1] for a in argv if a.startswith("--config=")]
    from_file = needs_file or bool(named)
    if from_file:
        config_flags.DEFINE_config_file(
            "config", None, "a file with get_config()", flag_values=given, sys_argv=["jppo", *argv]
        )
    flags.DEFINE_bool("dry_run", False, "print the resolved settings and stop", flag_values=given)
    if describes:
        flags.DEFINE_string("machine", "", "a machine that --dry_run compiles for", flag_values=given)
        flags.DEFINE_string("json", "", "a file for the account of --dry_run", flag_values=given)
        flags.DEFINE_float("rollout_tokens_per_s", 0.0, "tokens/s of all rollout engines", flag_values=given)
    if "--help" in argv or "-h" in argv:
        print(f"{about}\nSettings and their defaults:\n{describe(defaults)}")
        sys.exit(0)
    if from_file and (len(named) != 1 or not named[0]):
        raise UserError(f"--config is given {len(named)} times; name one file, as in --config=configs/quickstart.py")
    if from_file and not pathlib.Path(named[0].split(":")[0]).is_file():
        raise UserError(f"--config={named[0]}: no such file; jppo's own are {shipped.SCHEME}NAME, as jppo://gsm8k is")
    try:
        if not from_file:  # reads the overrides at once
            config_flags.DEFINE_config_dict("config", defaults, flag_values=given, sys_argv=["jppo", *argv])
        rest = given(["jppo", *argv])[1:]
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(_explain(e)) from e
    if rest:
        raise UserError(f"{rest[0]!r} is not understood; settings are given as --config.SECTION.NAME=VALUE")
    return given["config"].value, {name: given[name].value for name in given if name in SWITCHES}


def _explain(error: Exception) -> str:
    """Rewrites an error of absl or ml_collections as one line of value, rule and remedy."""
    text = " ".join(str(error.args[0] if error.args else error).replace('"', "'").split())
    unknown = re.search(r"(\w+)\W+(?:n)?Did you mean '(\w+)'", text)
    if unknown:
        return f"there is no setting {unknown[1]!r}; did you mean {unknown[2]!r}?"
    if isinstance(error, AttributeError | KeyError):
        name = re.sub(r"\W", "", text)
        return f"there is no setting {name!r}; python -m jppo.train --help lists them all"
    if re.search(r"get_config\(\) takes 0 positional arguments", text):
        return (
            "--config=FILE:ARGUMENT: this config takes no argument; settings are given as --config.SECTION.NAME=VALUE"
        )
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
            print(f"error: {e}", file=sys.stderr)
            sys.exit(2)

    return command


def describe(config: ml_collections.ConfigDict) -> str:
    """Returns all settings with their values and meanings, one per line, for --help."""
    lines = []
    found = settings(config)
    for name, setting in TABLE.items():
        if name in found:
            unit = f"[{setting.unit}] " if setting.unit else ""
            lines.append(f"  {f'--config.{name}={found[name]!r}':<{MEANINGS_AT}}  {unit}{setting.meaning}")
    return "\n".join(lines)
