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

    def __init__(self, group: str, own: Mapping[str, T | str] | str, *, returns: str = ""):
        """Takes jppo's own parts; one may be a text 'module:name', and so may the dict: imported on first use.

        `returns` is the class, 'module:name', of the parts' results; `make` checks it.
        """
        self.group, self.returns, self._own = group, returns, own

    @functools.cached_property
    def own(self) -> Mapping[str, T | str]:
        """Returns jppo's own parts by name, or where they are."""
        if not isinstance(self._own, str):
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
        return iter({**self.own, **self._installed})

    def __len__(self) -> int:
        return len({**self.own, **self._installed})

    def __getitem__(self, name: str) -> T:
        part = self.own[name] if name in self.own else self._installed[name].value
        return resolve(part, self.group) if isinstance(part, str) else part

    def find(self, spec: str, setting: str) -> T:
        """Returns the part that `spec` names, also a user's; raises a UserError that begins with the setting."""
        if spec in self:
            return self[spec]
        if ":" not in spec and (known_names := ", ".join(map(repr, self))):
            raise UserError(
                f"{setting}={spec!r} is not known; it is one of {known_names}, or PATH.py:NAME, or MODULE:NAME"
                f"{did_you_mean(spec, self)}"
            )
        part: T = resolve(spec, setting)
        return part

    def make(self, spec: str, setting: str, *arguments: object, **options: object) -> object:
        """Calls the part that `spec` names and checks the type of its result; UserError if the part raises."""
        part = self.find(spec, setting)
        assert callable(part)
        try:
            result = part(*arguments, **options)
        except UserError:
            raise
        except Exception as e:  # a user's function may raise anything
            argument_kind = "settings" if arguments else "options"
            raise UserError(
                f"{setting}={spec!r}: {spec} raises {explain(e)} when called with the {argument_kind}; correct it"
            ) from e
        if self.returns and not isinstance(result, resolve(self.returns, setting)):
            required = self.returns.replace(":", ".")
            raise UserError(f"{setting}={spec!r}: {spec} returns {type(result).__name__}; it must return a {required}")
        return result


# Classes of loggers outside the run folder, each a `Sink` with a static method `require`.
REMOTE_LOGGERS = Registry[Any](
    "loggers",
    {
        "wandb": "jppo.plugins.loggers.remote:Wandb",
        "mlflow": "jppo.plugins.loggers.remote:MLflow",
        "swanlab": "jppo.plugins.loggers.remote:Swanlab",
        "clearml": "jppo.plugins.loggers.remote:ClearML",
        "trackio": "jppo.plugins.loggers.remote:Trackio",
    },
)


def did_you_mean(word: str, names: Collection[str]) -> str:
    """Returns the end of an error about an unknown word: the nearest known one, or nothing."""
    matches = difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def resolve(spec: str, setting: str) -> Any:
    """Imports a user's callable 'path.py:name' or 'module:name'; raises a UserError that begins with `setting`."""
    module_name, colon, name = spec.rpartition(":")
    label = f"{setting}={spec!r}"
    by_path = module_name.endswith(".py")
    if not (colon and name and (by_path or all(part.isidentifier() for part in module_name.split(".")))):
        raise UserError(f"{label} must be PATH.py:NAME or MODULE:NAME, as in parts.py:Part or mypackage.parts:Part")
    module = user_module(expanded(module_name), label) if by_path else _import_module(module_name, label)
    attribute = getattr(module, name, None)
    if attribute is None:
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        own_callables = [key for key in callables if getattr(getattr(module, key), "__module__", "") == module.__name__]
        raise _undefined_error(f"{label}: {module_name}", name, own_callables)
    if not callable(attribute):
        raise UserError(f"{label}: {name!r} is of type {type(attribute).__name__}; it must be a function or a class")
    return attribute


def user_module(path: pathlib.Path, label: str) -> ModuleType:
    """Imports the user's file (`user_files.py`); `label` begins the error."""
    if not path.is_file():
        raise UserError(f"{label}: no file {path}; give the path of a Python file")
    try:
        return user_files.load(path)
    except (Exception, SystemExit) as e:  # a user's file may raise anything
        package = "install the package, or " if isinstance(e, ModuleNotFoundError) else ""
        raise UserError(f"{label}: {path} cannot be run ({explain(e)}); {package}correct the file") from e


def read_source(path: pathlib.Path, label: str) -> str:
    """Returns the text of the user's file, decoded as Python does; raises a UserError that begins with `label`."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, ValueError, SyntaxError) as e:  # the last two: of its encoding
        reason = "there is no such file" if isinstance(e, FileNotFoundError) else f"the file cannot be read: {e}"
        raise UserError(f"{label}: {reason} ({path}); give the path of a Python file") from e


def require_name(text: str, path: pathlib.Path, name: str, label: str) -> None:
    """Raises a UserError if the user's file, with this text, cannot define the name; does not run it."""
    try:
        names = user_files.names_in(text, str(path))
    except (SyntaxError, ValueError) as e:  # ValueError: a NUL byte
        raise UserError(f"{label}: {path} cannot be run ({explain(e)}); correct the file") from e
    if names is not None and name not in names:
        raise _undefined_error(f"{label}: {path}", name, names)


def _undefined_error(label: str, name: str, names: list[str]) -> UserError:
    has = ", ".join(known for known in names if not known.startswith("_")) or "none"
    return UserError(f"{label} defines no {name!r}; it has {has}{did_you_mean(name, names)}")


def _import_module(name: str, label: str) -> ModuleType:
    """Imports a module by name; UserError if it raises."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:  # a user's module may raise anything
        raise UserError(f"{label}: the module {name} cannot be imported ({explain(e)}); install or correct it") from e


def explain(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message, for errors about users' code."""
    return f"{type(error).__name__}: {first_line(error)}"


def at_line(error: BaseException) -> str:
    """Returns the line of a user's file at which the error was raised, as the end of an error; '' outside of one."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    user_lines = [f"{file}:{line}" for file, line in lines if user_files.has_run(file)]
    return f" ({user_lines[-1]})" if user_lines else ""
