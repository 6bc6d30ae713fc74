"""What settings name as 'path.py:Class': a user's Python file, run once, and something in it."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jppo.config import UserError


def user_class(spec: str, setting: str, *, kind: str = "class", example: str = "data.py:Rows") -> Callable[..., Any]:
    """The class or function that `spec` names; a wrong form, file or name is a UserError that names the setting."""
    file, colon, name = spec.rpartition(":")
    path = pathlib.Path(file).expanduser()
    if not colon or path.suffix != ".py" or not name:
        raise UserError(f"{setting}={spec!r} must be the path of a Python file, a colon and a {kind}: {example}")
    cls = getattr(user_module(path, f"{setting}={spec}"), name, None)
    if not callable(cls):
        raise UserError(f"{setting}={spec}: {path} defines no {kind} {name!r}; name one of the file's own")
    return cls


def user_module(path: pathlib.Path, where: str) -> ModuleType:
    """The file as a module; `where` begins the error."""
    if not path.is_file():
        raise UserError(f"{where}: no file {path}; give the path of a Python file")
    described = importlib.util.spec_from_file_location(f"_custom_{path.stem}", path)
    assert described is not None and described.loader is not None
    module = sys.modules[described.name] = importlib.util.module_from_spec(described)
    try:
        described.loader.exec_module(module)
    except Exception as e:  # a user's file may raise anything
        raise UserError(f"{where}: {path} cannot be run ({said(e)}); mend the file") from e
    return module


def said(error: BaseException) -> str:
    """The error's type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
