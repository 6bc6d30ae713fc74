"""Optional rooms, each written on the core as a user's package would be.

A module of the core imports no plugin: it loads one by name where a setting asks for it. Only commands import them.
"""

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Imports a module of a plugin by its name, such as 'judge.make'."""
    return importlib.import_module(f"{__name__}.{name}")
