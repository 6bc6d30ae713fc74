"""Other Python interpreters: their executables, and the PYTHONPATH with which they find jppo."""

import os
import pathlib
import shutil
import sys

import jppo
from jppo.errors import UserError


def executable(python: str, setting: str = "rollout.python") -> str:
    """Resolves an interpreter, '' for this one; UserError if `setting` names none."""
    found = shutil.which(os.path.expanduser(python)) if python else sys.executable
    if found is None:
        raise UserError(f"{setting}={python!r} is not a program; set it to the path of a Python")
    return found


def python_path() -> str:
    """Returns a PYTHONPATH with which another interpreter finds jppo."""
    package = str(pathlib.Path(jppo.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
