"""The configs shipped with jppo: --config=jppo://quickstart is configs/quickstart.py."""

import pathlib
import runpy

import ml_collections

from jppo.errors import UserError

SCHEME = "jppo://"
FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"  # of the package: in a checkout a link to configs/


def names() -> list[str]:
    """Returns the names that may follow the scheme."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def locate(word: str) -> str:
    """Replaces the NAME of --config=jppo://NAME[:ARGUMENT] by its file's path; returns other arguments unchanged."""
    flag, scheme, named = word.partition(SCHEME)
    if flag != "--config=" or not scheme:
        return word
    name, colon, argument = named.partition(":")
    if name not in names():
        raise UserError(f"{word}: jppo has no config {name!r}; it has {', '.join(names())}")
    return f"{flag}{FOLDER / name}.py{colon}{argument}"


def recipe(name: str, argument: str = "") -> ml_collections.ConfigDict:
    """Returns the settings of configs/NAME.py, for a config that differs in a few."""
    get_config = runpy.run_path(str(FOLDER / f"{name}.py"))["get_config"]
    return get_config(argument) if argument else get_config()
