"""Splits assert statements into calls for the program's process and comparisons in the worker.

`plan_asserts` turns a block of asserts into requests (calls with their arguments) and checks on the returned plain
values. Expected values stay in the worker. Asserts that cannot be split, such as those inside a `try`, run in the
program's process. `AssertPlan.in_program` counts them; a hostile program can pass those.
"""

import ast
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jppo.rewards.expressions import Check, Expressions
from jppo.rewards.syntax import NotByValue, parameters_of


@dataclasses.dataclass(frozen=True)
class AssertPlan:
    """Requests to the program's process, and the checks of its replies."""

    requests: tuple[tuple[str, str], ...]  # (exec or eval, source)
    checks: tuple[Check, ...]
    in_program: int  # requests with asserts, whose result a program can fake


class Foreign:
    """A value that is not a plain Python value; equal to nothing."""

    def __init__(self, items: list[Any] | None):
        self._items = items

    def __iter__(self) -> Any:
        if self._items is None:
            raise TypeError("no plain value")
        return iter(self._items)

    def __len__(self) -> int:
        return len(list(iter(self)))


def plan_asserts(tests: str, program: str) -> AssertPlan:
    """Plans a block of asserts about a program. Raises ValueError if the block has no asserts."""
    tree = ast.parse(tests)
    defined, imported = _names_of(program)
    kept: frozenset[str] = frozenset()  # names that exist in the program's process
    while True:
        planner = _Planner(defined, imported | _names_of(tests)[1], kept)
        foreign = [statement for statement in tree.body if not planner.add(statement)]
        used = kept | {node.id for one in foreign for node in ast.walk(one) if isinstance(node, ast.Name)}
        used &= planner.bound | kept
        if used == kept:
            break
        kept = frozenset(used)
    if not planner.checks and not planner.in_program:
        raise ValueError(f"ground_truth={tests[:60]!r} has no assert that runs; give it assert statements")
    return AssertPlan(tuple(planner.requests), tuple(planner.checks), planner.in_program)


def holds(found: AssertPlan, replies: Sequence[str]) -> bool:
    """Whether all checks hold for the replies of the program's process, which may be anything."""
    if len(replies) != len(found.requests):
        return False
    try:
        seen = [_value(json.loads(line)["value"]) for line in replies]
        return all(bool(check(seen)) for check in found.checks)
    except Exception:  # any exception from a program's values is a wrong answer
        return False


def _value(told: Any) -> Any:
    """Decodes a value that `program.plain` encoded."""
    if isinstance(told, list):
        return [_value(item) for item in told]
    if not isinstance(told, dict):
        return told
    ((kind, inner),) = told.items()
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_value(item) for item in inner)
    if kind == "dict":
        return {_value(key): _value(value) for key, value in inner}
    if kind == "int":
        return int(inner, 16)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "complex":
        return complex(*inner)
    return Foreign([_value(item) for item in inner] if kind == "items" else None)


def _names_of(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names that a program defines, and those that it imports."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset(), frozenset()
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    defined |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    aliases = [a for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names]
    return frozenset(defined), frozenset((a.asname or a.name).split(".")[0] for a in aliases)


class _Planner(Expressions):
    """Plans the statements of a block in order."""

    def __init__(self, defined: frozenset[str], imported: frozenset[str], kept: frozenset[str]):
        super().__init__(defined, imported)
        self.checks: list[Check] = []
        self.in_program = 0
        self.bound: set[str] = set()  # names that the block binds to known values or helpers
        self._kept = kept  # the subset that exists in the program's process

    def bind(self, target: ast.expr, value: Any) -> None:
        """Like Expressions.bind, except for names that the program's process needs."""
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._remember(node.id)
        super().bind(target, value)

    def add(self, statement: ast.stmt) -> bool:
        """Plans a statement; False if the program's process has to run it unchanged."""
        before = len(self.requests), len(self.checks), dict(self.known)
        try:
            self._statement(statement)
            return True
        except (NotByValue, RecursionError):
            del self.requests[before[0] :], self.checks[before[1] :]
            self.known = before[2]
        asserts = any(isinstance(node, ast.Assert) for node in ast.walk(statement))
        calls = {n.func.id for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        # A helper with asserts there is run by a call; an imported test runner by any call.
        self.in_program += asserts or bool(calls & self.helpers.keys())
        self.requests.append(("exec", ast.unparse(statement)))
        return False

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assert(test=test):
                self.checks.append(self.truth(test))
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[target], value=value):
                self.bind(target, self.fold(value))
            case ast.For(target=target, iter=iterated, body=body, orelse=[]):
                for item in self.fold(iterated):
                    self.bind(target, item)
                    self._block(body)
            case ast.If(test=test, body=body, orelse=orelse):
                self._block(body if self.fold(test) else orelse)
            case ast.FunctionDef(name=name):
                self.helpers[name] = statement
                self._remember(name)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])) if name in self.helpers:
                self._inline(self.helpers[name], args)
            case _:
                raise NotByValue

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                raise NotByValue
            self._statement(statement)

    def _inline(self, helper: ast.FunctionDef, args: list[ast.expr]) -> None:
        parameters = parameters_of(helper)
        if helper.decorator_list or len(parameters) != len(args):
            raise NotByValue
        known, alias = dict(self.known), dict(self.alias)
        for parameter, given in zip(parameters, args, strict=True):
            if isinstance(given, ast.Name) and given.id not in known:
                self.alias[parameter] = alias.get(given.id, given)
                self.known.pop(parameter, None)
            else:
                self.known[parameter] = self.fold(given)
        try:
            self._block(helper.body)
        finally:
            self.known, self.alias = known, alias

    def _remember(self, name: str) -> None:
        self.bound.add(name)
        if name in self._kept:
            raise NotByValue
