"""Config files: users' Python programs, whose faults become errors that name file and line, and jppo's own.

--config=jppo://quickstart is configs/quickstart.py.
"""

import pathlib
import re
import runpy
import traceback
from collections.abc import Callable
from typing import Any

import ml_collections

from jppo.errors import UserError
from jppo.settings.other_names import no_setting
from jppo.settings.setting import settings_by_name
from jppo.settings.table import TABLE, kind_of, values

SCHEME = "jppo://"
SHIPPED = pathlib.Path(__file__).resolve().parents[1] / "configs"  # of the package: in a checkout a link to configs/


def read_configfile(named: str) -> ml_collections.ConfigDict:
    """Returns the settings from get_config() of FILE or FILE:ARGUMENT, locked."""
    file, _, argument = named.partition(":")
    if not is_file(file):
        raise UserError(f"--config={named}: no such file; jppo's own are {SCHEME}NAME, as jppo://gsm8k is")
    get_config = functions(file).get("get_config")
    if not callable(get_config):
        raise UserError(f"--config={named}: the file has no get_config(); write one that returns the settings")
    code = getattr(get_config, "__code__", None)
    if argument and code is not None and code.co_argcount == 0:
        raise UserError(
            f"--config={named}: this config takes no argument; settings are given as --config.SECTION.NAME=VALUE"
        )
    config = explained(file, get_config, *([argument] if argument else []))
    _check_names(config, file)
    return config.lock()


def is_file(path: str) -> bool:
    """Whether a file of this name exists; the name may be invalid."""
    try:
        return pathlib.Path(path).is_file()
    except (OSError, ValueError):
        return False


def functions(file: str) -> dict[str, Any]:
    """Returns the functions that a Python file defines."""
    defined: dict[str, Any] = explained(file, runpy.run_path, file)
    return defined


def explained(file: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls into a user's file; its errors become one line with the place."""
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
        what = (
            no_setting(missing[1], re.findall(r"\w+", text[missing.end() :]), TABLE)
            if missing
            else f"{type(e).__name__}: {text:.300}"
        )
        raise UserError(f"{place}: {what}; fix the file") from e


def _check_names(config: Any, file: str) -> None:
    """Raises a UserError unless names and types of the settings match the file's defaults."""
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(
            f"{file}: get_config() returns {config!r:.40}; it must return settings, as jppo.settings.default() does"
        )
    table = dict(settings_by_name(kind_of(config)))
    found = values(config)
    for name in sorted(table.keys() ^ found.keys()):
        what = "is missing" if name in table else "is no setting"
        raise UserError(f"{file}: {name} {what}; start from jppo.settings.default() and change values only")
    for name, value in found.items():
        asked = table[name].type
        integer = asked is float and type(value) is int
        if not (isinstance(value, asked) or integer or (value is None and table[name].optional)):
            raise UserError(f"{file}: {name}={value!r:.40} must be of type {asked.__name__}, as the default is")


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
