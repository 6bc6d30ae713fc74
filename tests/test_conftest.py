"""What conftest.py promises every test."""

import ast
import contextlib
import importlib
import re
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from tests.make import ROOT


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank"):
        jnp.zeros((2, 3)) + jnp.zeros(3)


def test_a_key_that_is_used_twice_raises():
    key = jax.random.key(0)
    jax.random.normal(key)
    with pytest.raises(jax.errors.KeyReuseError):
        jax.random.normal(key)


def test_a_warning_of_ours_is_an_error_and_of_others_is_not():
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "x.py", 1, module="jppo.learner.ppo")
    with pytest.warns(UserWarning, match="theirs"):
        warnings.warn_explicit("theirs", UserWarning, "x.py", 1, module="numpy")


@pytest.mark.parametrize("folder", ["tests", "scripts", "benchmarks"])
def test_names_that_a_slow_test_or_a_string_uses_are_there(folder):
    """A slow test that names what was renamed fails at once, by the attributes of imported modules that files use.

    So does code in strings, which processes run, by its imports.
    """
    gone = []
    for path in (path for path in (ROOT / folder).glob("**/*.py") if ".envs" not in path.parts):
        source = path.read_text(encoding="utf-8")
        tree, names = ast.parse(source), {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jppo":
                with contextlib.suppress(ImportError):  # of a package that is not here
                    exec(compile(ast.Module([node], []), path, "exec"), names)
        nodes = list(ast.walk(tree))
        for node in nodes:  # a variable of the same name is no module
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            names.pop(node.arg if isinstance(node, ast.arg) else node.id if stored else None, None)
        for node in nodes:
            owner, name = None, ""
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner, name = node.value.id, node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr") and len(node.args) == 3:
                owner, name = ast.unparse(node.args[0]), getattr(node.args[1], "value", "")
            found = names.get(owner)
            written = isinstance(name, str) and name and "raising" not in ast.unparse(node)
            if isinstance(found, types.ModuleType) and written and not hasattr(found, name):
                gone.append(f"{path.name}:{node.lineno}: {owner}.{name}")
        for module, imported in re.findall(r"from (jppo[\w.]*) import ([\w, ]+)", source):
            for name in re.split(r",\s*", imported.partition(" as ")[0].strip(" ,")):
                try:
                    if not hasattr(importlib.import_module(module), name):
                        importlib.import_module(f"{module}.{name}")
                except ModuleNotFoundError as e:  # of a package that is not here
                    assert not str(e.name).startswith("jppo"), e
    assert gone == []
