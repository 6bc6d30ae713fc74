"""Registries of parts by name: advantage estimators, policy losses, graders, tools, engines, optimizers.

A registry knows jppo's own parts by name. A user-defined part is named by its place, 'path.py:name' or 'module:name'.
An installed package may also register names, as entry points of the group `jppo.<group>`.
"""

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import traceback
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, Generic, TypeVar

from jppo import user_files
from jppo.errors import UserError, expanded, first_line

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Parts of one kind by name, from jppo and from installed packages."""

    def __init__(self, group: str, own: dict[str, T] | str, *, returns: str = ""):
        """Takes jppo's own parts, or the name 'module:name' of a dict, imported when a part is looked up.

        `returns` is the class, 'module:name', of the parts' results; `make` checks it.
        """
        self.group, self.returns, self._own = group, returns, own

    @functools.cached_property
    def own(self) -> dict[str, T]:
        """Returns jppo's own parts."""
        if isinstance(self._own, dict):
            return self._own
        module, _, name = self._own.partition(":")
        parts: dict[str, T] = getattr(importlib.import_module(module), name)
        return parts

    @functools.cached_property
    def _installed(self) -> dict[str, importlib.metadata.EntryPoint]:
        return {point.name: point for point in importlib.metadata.entry_points(group=f"jppo.{self.group}")}

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._installed

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in self._installed if name not in self.own)

    def __len__(self) -> int:
        return len({*self.own, *self._installed})

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        part: T = resolve(self._installed[name].value, self.group)
        return part

    def find(self, spec: str, setting: str) -> T:
        """Returns the part named `spec`; raises a UserError that begins with the setting."""
        if spec in self:
            return self[spec]
        if ":" not in spec and (known := ", ".join(map(repr, self))):
            raise UserError(
                f"{setting}={spec!r} is not known; it is one of {known}, or PATH.py:NAME, or MODULE:NAME"
                f"{did_you_mean(spec, self)}"
            )
        part: T = resolve(spec, setting)
        return part

    def make(self, spec: str, setting: str, *arguments: object, **options: object) -> object:
        """Calls the part named `spec` with what parts of the kind get: the settings and more, or options."""
        part = self.find(spec, setting)
        assert callable(part)
        try:
            made = part(*arguments, **options)
        except UserError:
            raise
        except Exception as e:  # a user's function may raise anything
            given = "settings" if arguments else "options"
            raise UserError(
                f"{setting}={spec!r}: {spec} raises {said(e)} when called with the {given}; correct it"
            ) from e
        if self.returns and not isinstance(made, resolve(self.returns, setting)):
            wanted = self.returns.replace(":", ".")
            raise UserError(f"{setting}={spec!r}: {spec} returns {type(made).__name__}; it must return a {wanted}")
        return made


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Returns the end of an error about an unknown word: the nearest known one, or nothing."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def resolve(spec: str, setting: str) -> Any:
    """Imports the callable 'path.py:name' or 'module:name'; raises a UserError that begins with `setting`."""
    place, colon, name = spec.rpartition(":")
    said_as = f"{setting}={spec!r}"
    by_path = place.endswith(".py")
    if not (colon and name and (by_path or all(part.isidentifier() for part in place.split(".")))):
        raise UserError(f"{said_as} must be PATH.py:NAME or MODULE:NAME, as in parts.py:Part or mypackage.parts:Part")
    module = user_module(expanded(place), said_as) if by_path else _import(place, said_as)
    attribute = getattr(module, name, None)
    if attribute is None:
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        own = [key for key in there if getattr(getattr(module, key), "__module__", "") == module.__name__]
        raise _undefined(f"{said_as}: {place}", name, own)
    if not callable(attribute):
        raise UserError(f"{said_as}: {name!r} is of type {type(attribute).__name__}; it must be a function or a class")
    return attribute


def user_module(path: pathlib.Path, said_as: str) -> ModuleType:
    """Imports the user's file (`user_files.py`). `said_as` begins the error."""
    if not path.is_file():
        raise UserError(f"{said_as}: no file {path}; give the path of a Python file")
    try:
        return user_files.load(path)
    except (Exception, SystemExit) as e:  # a user's file may raise anything
        raise UserError(f"{said_as}: {path} cannot be run ({said(e)}); correct the file") from e


def read_source(path: pathlib.Path, said_as: str) -> str:
    """Returns the text of the user's file, decoded as Python does; raises a UserError that begins with `said_as`."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, ValueError, SyntaxError) as e:  # the last two: of its encoding
        why = "there is no such file" if isinstance(e, FileNotFoundError) else f"the file cannot be read: {e}"
        raise UserError(f"{said_as}: {why} ({path}); give the path of a Python file") from e


def require_name(text: str, path: pathlib.Path, name: str, said_as: str) -> None:
    """Raises a UserError if the user's file, with this text, cannot define the name; does not run it."""
    try:
        there = user_files.names_in(text, str(path))
    except (SyntaxError, ValueError) as e:  # ValueError: a NUL byte
        raise UserError(f"{said_as}: {path} cannot be run ({said(e)}); correct the file") from e
    if there is not None and name not in there:
        raise _undefined(f"{said_as}: {path}", name, there)


def _undefined(said_as: str, name: str, there: list[str]) -> UserError:
    has = ", ".join(known for known in there if not known.startswith("_")) or "none"
    return UserError(f"{said_as} defines no {name!r}; it has {has}{did_you_mean(name, there)}")


def _import(name: str, said_as: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:  # a user's module may raise anything
        raise UserError(f"{said_as}: the module {name} cannot be imported ({said(e)}); install or correct it") from e


def said(error: BaseException) -> str:
    """Returns the error's type and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def at_line(error: BaseException) -> str:
    """Returns the line of a user's file at which the error was raised, as the end of an error; '' outside of one."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    users = [f"{file}:{line}" for file, line in lines if user_files.has_run(file)]
    return f" ({users[-1]})" if users else ""
