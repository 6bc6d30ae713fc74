"""Optional rooms, each written on the core as a user's package would be; the core works without any of them.

A module of the core imports no plugin. It loads one by name where a setting asks for it, and a command where it is run.
"""

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Imports a module of a plugin by its name, such as 'judge.make'."""
    return importlib.import_module(f"{__name__}.{name}")
