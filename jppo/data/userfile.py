"""Loads user-defined classes of settings such as 'path.py:Class'."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jppo.config import UserError


def user_class(spec: str, setting: str) -> Callable[..., Any]:
    """Returns the class that `spec` names; a wrong form, file or name is a UserError that names the setting."""
    file, colon, name = spec.rpartition(":")
    path = pathlib.Path(file).expanduser()
    if not colon or path.suffix != ".py" or not name:
        raise UserError(f"{setting}={spec!r} must be the path of a Python file, a colon and a class: data.py:Rows")
    cls = getattr(user_module(path, f"{setting}={spec}"), name, None)
    if not callable(cls):
        raise UserError(f"{setting}={spec}: {path} defines no class {name!r}; use a class of the file")
    return cls


def user_module(path: pathlib.Path, where: str) -> ModuleType:
    """Imports the file as a module; `where` is the beginning of errors."""
    if not path.is_file():
        raise UserError(f"{where}: no file {path}; use the path of a Python file")
    described = importlib.util.spec_from_file_location(f"_custom_{path.stem}", path)
    assert described is not None and described.loader is not None
    module = sys.modules[described.name] = importlib.util.module_from_spec(described)
    try:
        described.loader.exec_module(module)
    except Exception as e:  # a user's file may raise anything
        raise UserError(f"{where}: {path} cannot be run ({said(e)}); fix the file") from e
    return module


def said(error: BaseException) -> str:
    """Returns the error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
