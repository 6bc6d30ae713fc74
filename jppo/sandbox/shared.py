"""Modules, functions and classes that the tests' process and the program's have both, and that so go by their names."""

import builtins
import importlib
import sys
import types

# Builtins that run where they are from.
_OWN = (
    "__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec", "exit", "getattr", "globals", "help",
    "input", "locals", "open", "quit", "setattr", "super", "vars",
)  # fmt: skip
# Modules whose functions are equal on both sides.
SHARED = (
    "bisect", "cmath", "collections", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "fractions",
    "functools", "heapq", "itertools", "json", "json.decoder", "math", "numbers", "numpy", "operator", "random",
    "re", "statistics", "string", "types", "typing",
)  # fmt: skip


def shared_name(value):
    """Returns (module, name) of a builtin or of a function that both sides have."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(name, str) or not isinstance(value, (type, types.BuiltinFunctionType, types.FunctionType)):
        return None
    module = {
        "_operator": "operator",
        "_functools": "functools",
        "_heapq": "heapq",
        "_bisect": "bisect",
        "_decimal": "decimal",
        "_collections": "collections",
        None: "builtins",
    }.get(module, module)
    if (module == "builtins" and name in _OWN) or "." in name or name.startswith("_"):
        return None
    found = sys.modules.get(module) if module == "builtins" or module in SHARED else None
    return (module, name) if found is not None and found.__dict__.get(name) is value else None


def shared(module, name):
    """Returns what goes by a name; ValueError for what does not."""
    if name.startswith("_") or (module == "builtins" and name in _OWN):
        raise ValueError(name)
    return getattr(builtins if module == "builtins" else imported(module), name)


def is_plain_class(found):
    """Whether it is a class that a value may have, and whose instances do nothing."""
    if not isinstance(found, type) or found.__module__ in ("types", "typing", "random"):
        return False
    if found.__module__.partition(".")[0] != "numpy":
        return True
    numpy = sys.modules["numpy"]
    return issubclass(found, numpy.generic) or found is numpy.ndarray


def imported(name):
    """Returns a module of SHARED."""
    if name not in SHARED:
        raise ValueError(name)
    return importlib.import_module(name)
