"""Assert statements, compared outside of the program: which calls to make, and what their values have to be.

`plan` splits a block of asserts into requests to the program's process (calls, with their arguments) and checks that
are done here, on plain values. Expected values stay here. Statements with asserts that cannot be split, such as a
`try` around one, run beside the program; `Plan.beside` counts them, and a program that is out to can pass those.
"""

import ast
import builtins
import dataclasses
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

Check = Callable[[Sequence[Any]], Any]  # of the values of all requests

_MOST_REQUESTS = 10_000
_BUILTINS = {
    name: getattr(builtins, name)
    for name in [
        "abs", "all", "any", "ascii", "bin", "bool", "bytes", "chr", "complex", "dict", "divmod", "enumerate", "float",
        "frozenset", "hex", "int", "isinstance", "len", "list", "max", "min", "oct", "ord", "range", "repr", "reversed",
        "round", "set", "sorted", "str", "sum", "tuple", "type", "zip",
    ]
}  # fmt: skip
_MATH = {name: value for name, value in vars(math).items() if not name.startswith("_")}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
_METHODS = ("startswith", "endswith", "issubset", "issuperset")  # that say whether a test holds
_PLAIN = (str, bytes, list, tuple, set, frozenset, dict)


class _NotByValue(Exception):
    """A statement that has to run beside the program."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to ask of the program's process, and the checks of what it answers."""

    requests: tuple[tuple[str, str], ...]  # (exec or eval, source)
    checks: tuple[Check, ...]
    beside: int  # requests that hold asserts, whose word has to be taken


class Foreign:
    """A value that is none of Python's plain ones; equal to nothing."""

    def __init__(self, items: list[Any] | None):
        self._items = items

    def __iter__(self) -> Any:
        if self._items is None:
            raise TypeError("no plain value")
        return iter(self._items)

    def __len__(self) -> int:
        return len(list(iter(self)))


def plan(tests: str, program: str) -> Plan:
    """The plan for a block of asserts about a program. Raises ValueError where the block asserts nothing."""
    tree = ast.parse(tests)
    defined, imported = _names_of(program)
    kept: frozenset[str] = frozenset()  # names that live in the program's process
    while True:
        planner = _Planner(defined, imported | _names_of(tests)[1], kept)
        foreign = [statement for statement in tree.body if not planner.add(statement)]
        used = kept | {node.id for one in foreign for node in ast.walk(one) if isinstance(node, ast.Name)}
        used &= planner.bound | kept
        if used == kept:
            break
        kept = frozenset(used)
    if not planner.checks and not planner.beside:
        raise ValueError(f"ground_truth={tests[:60]!r} asserts nothing that is run; give it assert statements")
    return Plan(tuple(planner.requests), tuple(planner.checks), planner.beside)


def holds(found: Plan, replies: Sequence[str]) -> bool:
    """Whether all checks hold for the replies of the program's process, which may be anything."""
    if len(replies) != len(found.requests):
        return False
    try:
        seen = [_value(json.loads(line)["value"]) for line in replies]
        return all(bool(check(seen)) for check in found.checks)
    except Exception:  # whatever a program's values lead to, it is no right answer
        return False


def _value(told: Any) -> Any:
    """A value as `program.plain` wrote it."""
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
    """The names that a program defines, and those that it imports."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset(), frozenset()
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    defined |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    aliases = [a for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names]
    return frozenset(defined), frozenset((a.asname or a.name).split(".")[0] for a in aliases)


class _Planner:
    """Goes through the statements of a block in their order."""

    def __init__(self, defined: frozenset[str], imported: frozenset[str], kept: frozenset[str]):
        self.requests: list[tuple[str, str]] = []
        self.checks: list[Check] = []
        self.beside = 0
        self.bound: set[str] = set()  # names that the block binds to known values or helpers
        self._defined, self._imported, self._kept = defined, imported - defined, kept
        self._known: dict[str, Any] = {"math": math} if "math" not in defined else {}
        self._alias: dict[str, ast.expr] = {}
        self._helpers: dict[str, ast.FunctionDef] = {}

    def add(self, statement: ast.stmt) -> bool:
        """Plans a statement; False where the program's process has to run it as it stands."""
        before = len(self.requests), len(self.checks), dict(self._known)
        try:
            self._statement(statement)
            return True
        except (_NotByValue, RecursionError):
            del self.requests[before[0] :], self.checks[before[1] :]
            self._known = before[2]
        asserts = any(isinstance(node, ast.Assert) for node in ast.walk(statement))
        calls = {n.func.id for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        # A helper with asserts that lives there is run by a call; an imported test runner by whatever it is called.
        self.beside += asserts or bool(calls & self._helpers.keys())
        self.requests.append(("exec", ast.unparse(statement)))
        return False

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assert(test=test):
                self.checks.append(self._truth(test))
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case ast.Assign(targets=[target], value=value):
                self._bind(target, self._fold(value))
            case ast.For(target=target, iter=iterated, body=body, orelse=[]):
                for item in self._fold(iterated):
                    self._bind(target, item)
                    self._block(body)
            case ast.If(test=test, body=body, orelse=orelse):
                self._block(body if self._fold(test) else orelse)
            case ast.FunctionDef(name=name):
                self._helpers[name] = statement
                self._remember(name)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])) if name in self._helpers:
                self._inline(self._helpers[name], args)
            case _:
                raise _NotByValue

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                raise _NotByValue
            self._statement(statement)

    def _inline(self, helper: ast.FunctionDef, args: list[ast.expr]) -> None:
        parameters = [a.arg for a in helper.args.args]
        if helper.decorator_list or len(parameters) != len(args) or len(ast.unparse(helper.args)) != len(
            ", ".join(parameters)
        ):  # fmt: skip
            raise _NotByValue
        known, alias = dict(self._known), dict(self._alias)
        for parameter, given in zip(parameters, args, strict=True):
            if isinstance(given, ast.Name) and given.id not in known:
                self._alias[parameter] = alias.get(given.id, given)
                self._known.pop(parameter, None)
            else:
                self._known[parameter] = self._fold(given)
        try:
            self._block(helper.body)
        finally:
            self._known, self._alias = known, alias

    def _bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            items = list(value)
            if len(items) != len(target.elts):
                raise _NotByValue
            for one, item in zip(target.elts, items, strict=True):
                self._bind(one, item)
        elif isinstance(target, ast.Name):
            self._remember(target.id)
            self._known[target.id] = value
        else:
            raise _NotByValue

    def _remember(self, name: str) -> None:
        self.bound.add(name)
        if name in self._kept:
            raise _NotByValue

    def _fold(self, node: ast.expr) -> Any:
        """The value of an expression that asks nothing of the program."""
        before = len(self.requests)
        check = self._build(node)
        if len(self.requests) > before:
            raise _NotByValue
        try:
            return check(())
        except Exception as e:
            raise _NotByValue from e

    def _truth(self, node: ast.expr) -> Check:
        """An expression that a test wants to be true."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._truth(node.operand)
            return lambda seen: not inner(seen)
        if isinstance(node, ast.BoolOp):
            return self._bool(node, self._truth)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            return self._method(node, node.func)
        before = len(self.requests)
        check = self._build(node)
        if len(self.requests) == before + 1 and self.requests[-1] == ("eval", self._source(node)):
            root = node
            while isinstance(root, ast.Call | ast.Attribute | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id in self._imported:
                raise _NotByValue  # such as numpy.allclose(f(1), 2): a library's word, and the expected value with it
            self.requests[-1] = ("eval", f"not not ({self._source(node)})")
        return check

    def _build(self, node: ast.expr) -> Check:
        match node:
            case ast.Constant(value=value):
                return lambda seen: value
            case ast.Name(id=name) if name in self._known:
                known = self._known[name]
                return lambda seen: known
            case ast.Name(id=name) if name in _BUILTINS and name not in self._defined and name not in self._alias:
                return lambda seen: _BUILTINS[name]
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if "math" in self._known and name in _MATH:
                return lambda seen: _MATH[name]
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp():
                return self._bool(node, self._build)
            case ast.UnaryOp(op=op, operand=operand):
                of, apply = self._build(operand), _UNARY[type(op)]
                return lambda seen: apply(of(seen))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._arithmetic(left, _ARITHMETIC[type(op)], right)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                made = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
                built = [self._build(item) for item in items]
                return lambda seen: made(item(seen) for item in built)
            case ast.Dict(keys=keys, values=values):
                pairs = [(self._build(_there(k)), self._build(v)) for k, v in zip(keys, values, strict=True)]
                return lambda seen: {k(seen): v(seen) for k, v in pairs}
            case ast.Subscript(value=of, slice=at) if not self._asks(of) and not isinstance(at, ast.Slice):
                inner, index = self._build(of), self._build(at)
                return lambda seen: inner(seen)[index(seen)]
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node)
            case ast.Call():
                return self._call(node)
            case ast.Lambda() | ast.Starred() | ast.Yield() | ast.Await() | ast.NamedExpr():
                raise _NotByValue
            case _:
                return self._observed(node)

    def _compare(self, node: ast.Compare) -> Check:
        sides = [node.left, *node.comparators]
        if all(self._asks(side) for side in sides):
            raise _NotByValue  # nothing here knows the value
        built = [self._build(side) for side in sides]
        operators = [_COMPARE[type(op)] for op in node.ops]

        def check(seen: Sequence[Any]) -> bool:
            values = [side(seen) for side in built]
            return all(bool(op(a, b)) for op, a, b in zip(operators, values, values[1:], strict=False))

        return check

    def _bool(self, node: ast.BoolOp, build: Callable[[ast.expr], Check]) -> Check:
        built, every = [build(value) for value in node.values], isinstance(node.op, ast.And)
        return lambda seen: (all if every else any)(bool(one(seen)) for one in built)

    def _arithmetic(self, left: ast.expr, apply: Callable[[Any, Any], Any], right: ast.expr) -> Check:
        asks = self._asks(left) or self._asks(right)
        a, b = self._build(left), self._build(right)

        def check(seen: Sequence[Any]) -> Any:
            x, y = a(seen), b(seen)
            if asks and not (_small(x) and _small(y) and apply is not operator.pow):  # no terabytes by 'x' * 10**12
                raise ValueError("no arithmetic with such a value")
            return apply(x, y)

        return check

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Check:
        if len(node.generators) != 1 or node.generators[0].is_async:
            raise _NotByValue
        over, known, built = node.generators[0], dict(self._known), []
        if self._asks(over.iter):
            return self._observed(node)
        try:
            for item in self._fold(over.iter):
                self._bind(over.target, item)
                if all(self._fold(condition) for condition in over.ifs):
                    built.append(self._build(node.elt))
        finally:
            self._known = known
        made = set if isinstance(node, ast.SetComp) else list
        return lambda seen: made(one(seen) for one in built)

    def _call(self, node: ast.Call) -> Check:
        function: Callable[..., Any] | None = None
        match node.func:
            case ast.Name(id=name) if name in _BUILTINS and name not in self._alias:
                # A program that defines `abs` may be asked for it; `abs(f(1) - 2) < 0.1` is no question to it.
                if name not in self._defined or any(self._asks(a) for a in node.args):
                    function = _BUILTINS[name]
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if "math" in self._known:
                function = _MATH.get(name)
            case ast.Attribute(value=of) if not self._asks(of):
                return self._method(node, node.func)
        if function is None or any(isinstance(a, ast.Lambda) for a in [*node.args, *(k.value for k in node.keywords)]):
            return self._observed(node)
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise _NotByValue
        called = function
        args = [self._build(a) for a in node.args]
        named = {str(k.arg): self._build(k.value) for k in node.keywords}
        return lambda seen: called(*(a(seen) for a in args), **{k: v(seen) for k, v in named.items()})

    def _method(self, node: ast.Call, function: ast.Attribute) -> Check:
        if node.keywords or function.attr.startswith("_"):
            raise _NotByValue
        of, args = self._build(function.value), [self._build(a) for a in node.args]

        def check(seen: Sequence[Any]) -> Any:
            value = of(seen)
            if type(value) not in _PLAIN:
                raise ValueError("no method of a plain value")
            return getattr(value, function.attr)(*(a(seen) for a in args))

        return check

    def _asks(self, node: ast.AST) -> bool:
        """Whether an expression asks something of the program: it has a name that is not known here."""
        free = _free_names(node) - self._known.keys()
        return any(name in self._alias or name in self._defined or name not in _BUILTINS for name in free)

    def _observed(self, node: ast.expr) -> Check:
        """The value that the program's process gives for an expression."""
        if len(self.requests) >= _MOST_REQUESTS:
            raise _NotByValue
        index = len(self.requests)
        self.requests.append(("eval", self._source(node)))
        return lambda seen: seen[index]

    def _source(self, node: ast.expr) -> str:
        """An expression as source, known names replaced by their values."""
        text = ast.unparse(node)
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & (self._known.keys() | self._alias.keys())
        names.discard("math")
        if not names:
            return text
        if names & _bound_names(node):
            raise _NotByValue
        replaced = _Replace({name: self._alias.get(name) or _literal(self._known[name]) for name in names})
        return ast.unparse(replaced.visit(ast.parse(text, mode="eval")))


def _bound_names(node: ast.AST) -> set[str]:
    """Names that an expression binds for itself, as comprehensions and lambdas do."""
    parameters = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return parameters | {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _free_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - _bound_names(node)


class _Replace(ast.NodeTransformer):
    def __init__(self, by: dict[str, ast.expr]):
        self._by = by

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._by.get(node.id, node)


def _literal(value: Any) -> ast.expr:
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    raise _NotByValue


def _there(key: ast.expr | None) -> ast.expr:
    if key is None:  # {**other}
        raise _NotByValue
    return key


def _small(value: Any) -> bool:
    return type(value) in (bool, float) or (type(value) is int and value.bit_length() < 2**16)
