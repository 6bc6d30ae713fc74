"""What each setting means: the comment behind its default in `defaults.py`, for --help and docs/configuration.md."""

import ast
import functools
import inspect
import io
import tokenize
from collections.abc import Iterator

from jppo.config import defaults


@functools.cache
def meanings() -> dict[str, str]:
    """The meaning of every setting by its dotted name, of PPO's and of fine-tuning's; '' where none is written."""
    source = inspect.getsource(defaults)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "default").body
    shared: dict[str, ast.Call] = {}  # by the variable that holds them
    found: dict[str, str] = {}
    for node in body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        (target,) = node.targets
        if isinstance(target, ast.Name):
            shared[target.id] = node.value
        elif isinstance(target, ast.Attribute):
            found |= {name: comments.get(line, "") for name, line in _settings(node.value, f"{target.attr}.", shared)}
    actor = {name.removeprefix("actor."): meaning for name, meaning in found.items() if name.startswith("actor.")}
    optim = ("lr", *defaults.OPTIM, "max_tokens_per_device")
    found |= {f"optim.{leaf}": actor[leaf] for leaf in optim}
    return found | {name: comments.get(line, "") for name, line in _further(ast.parse(source))}


def _further(source: ast.Module) -> Iterator[tuple[str, int]]:
    """The settings that fine-tuning and reward models have beside those of PPO, each with its line."""
    others = [n for n in source.body if isinstance(n, ast.FunctionDef) and n.name != "default"]
    for node in (n for function in others for n in ast.walk(function) if isinstance(n, ast.Assign)):
        section, _, name = ast.unparse(node.targets[0]).partition(".")
        if section != "config" or not name:
            continue
        if isinstance(node.value, ast.Constant):
            yield name, node.lineno
        elif isinstance(node.value, ast.Call) and node.value.args and isinstance(node.value.args[0], ast.Call):
            yield from _settings(node.value, f"{name}.", {})


def _settings(call: ast.Call, prefix: str, shared: dict[str, ast.Call]) -> Iterator[tuple[str, int]]:
    """Every setting of `c(dict(...))` with the line on which its default ends."""
    inner = call.args[0] if call.args else call
    assert isinstance(inner, ast.Call)
    for keyword in inner.keywords:
        value = keyword.value
        if keyword.arg is None:  # **optim
            assert isinstance(value, ast.Name)
            yield from _settings(shared[value.id], prefix, shared)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "c":
            yield from _settings(value, f"{prefix}{keyword.arg}.", shared)
        else:
            yield f"{prefix}{keyword.arg}", value.end_lineno or value.lineno
