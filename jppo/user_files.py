"""Users' Python files as modules: one module per file, whatever its name and however many settings name it.

Files of one name in two folders are two modules, and none takes the place of a library. A file imports those of its
folder by their plain names, unless Python has another module of the name.
"""

import importlib.util
import inspect
import pathlib
import re
import symtable
import sys
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

_DEFINING = ("exec", "globals", "locals", "vars", "setattr", "eval")
_STAR = re.compile(r"import\s*\(?\s*\*")
_loaded: dict[str, int | str] = {}  # by module: the file's time of change, or the text that was run


def load(path: pathlib.Path, source: str | None = None) -> ModuleType:
    """Runs a user's file once, and again after a change, and returns its module; with `source`, this text runs."""
    path = path.resolve()
    name = f"user_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{zlib.crc32(str(path).encode()):08x}"
    version = path.stat().st_mtime_ns if source is None else source
    if name in sys.modules and _loaded[name] == version:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _loaded[name] = version  # before it runs: a file that loads itself gets the module as it is, as by an import
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(path.read_bytes() if source is None else source, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def has_run(path: str) -> bool:
    return any(getattr(sys.modules.get(name), "__file__", None) == path for name in _loaded)


def names_in(text: str, path: str) -> list[str] | None:
    """Returns the names that a file defines, without running it; None if it may define more. Raises SyntaxError."""
    top = symtable.symtable(text, path, "exec")
    names, tables = {}, [top]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and symbol.get_name() in _DEFINING:
                return None
            if (table is top or symbol.is_declared_global()) and (symbol.is_assigned() or symbol.is_imported()):
                names[symbol.get_name()] = True
    return None if "__getattr__" in names or _STAR.search(text) else list(names)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: of a function, a method, or an object's `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
