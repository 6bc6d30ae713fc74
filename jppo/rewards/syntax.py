"""Names, parameters and literals in the syntax trees of asserts, for `expressions.py` and `asserts.py`."""

import ast
from typing import Any


class NotByValue(Exception):
    """A statement that has to run in the program's process."""


def parameters_of(helper: ast.FunctionDef) -> list[str]:
    """Returns the parameters of a function with plain parameters only."""
    a = helper.args
    if a.posonlyargs or a.vararg or a.kwonlyargs or a.kwarg or a.defaults:
        raise NotByValue
    return [one.arg for one in a.args]


def bound_names(node: ast.AST) -> set[str]:
    """Returns names that an expression binds itself, as in comprehensions and lambdas."""
    parameters = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return parameters | {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def free_names(node: ast.AST) -> set[str]:
    """Returns names that an expression reads and does not bind itself."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - bound_names(node)


class Replace(ast.NodeTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, by: dict[str, ast.expr]):
        self._by = by

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._by.get(node.id, node)


def literal(value: Any) -> ast.expr:
    """Returns a plain value as the expression that makes it."""
    text = repr(value)
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError, RecursionError, MemoryError) as e:
        raise NotByValue from e
    if not same:
        raise NotByValue
    return ast.parse(text, mode="eval").body


def there(key: ast.expr | None) -> ast.expr:
    """Returns the key of a dict's entry."""
    if key is None:  # {**other}
        raise NotByValue
    return key
