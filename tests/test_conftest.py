"""What conftest.py promises every test."""

import ast
import contextlib
import functools
import importlib
import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import masked
from tests.make import ROOT


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank"):
        jnp.zeros((2, 3)) + jnp.zeros(3)


def test_a_key_that_is_used_twice_raises():
    key = jax.random.key(0)
    jax.random.normal(key)
    with pytest.raises(jax.errors.KeyReuseError):
        jax.random.normal(key)


def made(code, name="jppo.made", **names):
    """The function `f` of a module's source."""
    names |= {"__name__": name, "jax": jax, "np": np, "functools": functools}
    exec(code, names)
    return names["f"]


MAKER = """
def scale(x): return x * 2
def f(factor, add=0, kept=(), **options):
    def program(x, more=add):
        return scale(x) * factor + more + len(kept)
    return jax.jit(functools.partial(program), **options)
"""


def test_equal_functions_of_jppo_share_a_program_and_others_do_not():
    make = made(MAKER)
    one = make(np.ones(3), 1)
    assert make(np.ones(3), 1) is one and made(MAKER)(np.ones(3), 1) is one
    again = made(MAKER.replace("x * 2", "x * 3"))(np.ones(3), 1)
    others = [
        make(np.zeros(3), 1), make(np.ones(3, np.float32), 1), make(np.ones(3), True), make(np.ones(3), 2), again,
        make(np.ones(3), 1, kept=[]), make(np.ones(3), 1, kept=object()), make(np.ones(3), 1, donate_argnums=0),
        make(np.ones(3), 1, kept=object()), made(MAKER, "others")(np.ones(3), 1),
    ]  # fmt: skip
    assert len({id(other) for other in [one, *others]}) == 11
    assert float(one(1.0)[0]) == 3.0 and float(again(1.0)[0]) == 4.0


def test_a_test_that_replaces_what_is_traced_or_counts_compilations_shares_no_program(monkeypatch, request):
    make = made(MAKER)
    one = make(1.0)
    monkeypatch.setattr(masked, "whiten", None)
    assert make(1.0) is not one
    monkeypatch.undo()
    assert make(1.0) is one
    request.getfixturevalue("own_programs")
    assert make(1.0) is not one


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
    for path in (ROOT / folder).glob("**/*.py"):
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
                if not hasattr(importlib.import_module(module), name):
                    importlib.import_module(f"{module}.{name}")
    assert gone == []
