"""The configs that come with jppo, wherever it is installed: --config=jppo://quickstart is configs/quickstart.py."""

import pathlib
import runpy

import ml_collections

from jppo.errors import UserError

SCHEME = "jppo://"
FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"  # of the package: in a checkout a link to configs/


def names() -> list[str]:
    """What may stand behind the scheme."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def locate(word: str) -> str:
    """An argument with the file's path where it is --config=jppo://NAME[:ARGUMENT]; any other as it stands."""
    flag, scheme, named = word.partition(SCHEME)
    if flag != "--config=" or not scheme:
        return word
    name, colon, argument = named.partition(":")
    if name not in names():
        raise UserError(f"{word}: jppo has no config {name!r}; it has {', '.join(names())}")
    return f"{flag}{FOLDER / name}.py{colon}{argument}"


def recipe(name: str, argument: str = "") -> ml_collections.ConfigDict:
    """The settings of configs/NAME.py, for a config that is the same but for a few."""
    get_config = runpy.run_path(str(FOLDER / f"{name}.py"))["get_config"]
    return get_config(argument) if argument else get_config()
