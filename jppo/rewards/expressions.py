"""Expressions of asserts as functions of values that the program's process returned.

Parts of an expression that need the program become requests. The worker evaluates the rest with a fixed set of
operators, builtins and `math`. `asserts.py` does the same for statements.
"""

import ast
import builtins
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jppo.rewards.syntax import NotByValue, Replace, bound_names, free_names, literal, parameters_of, there

Check = Callable[[Sequence[Any]], Any]  # takes the values of all requests

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
_CONVERSIONS = (
    "bytes", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "repr", "round", "set", "sorted", "str",
    "sum", "tuple",
)  # fmt: skip
_METHODS = ("startswith", "endswith", "issubset", "issuperset")  # methods whose result is a test's outcome
_PLAIN = (str, bytes, list, tuple, set, frozenset, dict)


class Expressions:
    """Turns expressions into requests and checks; tracks the names with a known value outside the program."""

    def __init__(self, defined: frozenset[str], imported: frozenset[str]):
        self.requests: list[tuple[str, str]] = []
        self.helpers: dict[str, ast.FunctionDef] = {}  # functions of the block
        self.known: dict[str, Any] = {"math": math} if "math" not in defined else {}  # names with a value here
        self.alias: dict[str, ast.expr] = {}  # names for the program's objects, such as HumanEval's `candidate`
        self._defined, self._imported = defined, imported - defined

    def bind(self, target: ast.expr, value: Any) -> None:
        """Binds the names of an assignment's left side to a value."""
        if isinstance(target, ast.Tuple | ast.List):
            items = list(value)
            if len(items) != len(target.elts):
                raise NotByValue
            for one, item in zip(target.elts, items, strict=True):
                self.bind(one, item)
        elif isinstance(target, ast.Name):
            self.known[target.id] = value
        else:
            raise NotByValue

    def fold(self, node: ast.expr) -> Any:
        """Evaluates an expression that needs no request."""
        before = len(self.requests)
        check = self._build(node)
        if len(self.requests) > before:
            raise NotByValue
        try:
            return check(())
        except Exception as e:
            raise NotByValue from e

    def truth(self, node: ast.expr) -> Check:
        """Builds the check of an expression that must be true."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand)
            return lambda seen: not inner(seen)
        if isinstance(node, ast.BoolOp):
            return self._bool(node, self.truth)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            return self._method(node, node.func)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.helpers:
            return self.truth(self._returned(self.helpers[node.func.id], node))
        before = len(self.requests)
        check = self._build(node)
        if len(self.requests) == before + 1 and self.requests[-1] == ("eval", self._source(node)):
            root = node
            while isinstance(root, ast.Call | ast.Attribute | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id in self._imported:
                raise NotByValue  # such as numpy.allclose(f(1), 2): a library's predicate with the expected value
            self.requests[-1] = ("eval", f"not not ({self._source(node)})")
        return check

    def _build(self, node: ast.expr) -> Check:
        match node:
            case ast.Constant(value=value):
                return lambda seen: value
            case ast.Name(id=name) if name in self.known:
                known = self.known[name]
                return lambda seen: known
            case ast.Name(id=name) if name in _BUILTINS and name not in self._defined and name not in self.alias:
                return lambda seen: _BUILTINS[name]
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if "math" in self.known and name in _MATH:
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
                pairs = [(self._build(there(k)), self._build(v)) for k, v in zip(keys, values, strict=True)]
                return lambda seen: {k(seen): v(seen) for k, v in pairs}
            case ast.Subscript(value=of, slice=at) if not self._asks(of) and not isinstance(at, ast.Slice):
                inner, index = self._build(of), self._build(at)
                return lambda seen: inner(seen)[index(seen)]
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node)
            case ast.Call():
                return self._call(node)
            case ast.Lambda() | ast.Starred() | ast.Yield() | ast.Await() | ast.NamedExpr():
                raise NotByValue
            case _:
                return self._observed(node)

    def _compare(self, node: ast.Compare) -> Check:
        sides = [node.left, *node.comparators]
        if all(self._asks(side) for side in sides):
            raise NotByValue  # no known value to compare with
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
            if asks and not (_small(x) and _small(y) and apply is not operator.pow):  # against 'x' * 10**12
                raise ValueError("no arithmetic with such a value")
            return apply(x, y)

        return check

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Check:
        if len(node.generators) != 1 or node.generators[0].is_async:
            raise NotByValue
        over, known, built = node.generators[0], dict(self.known), []
        if self._asks(over.iter):
            return self._observed(node)
        try:
            for item in self.fold(over.iter):
                self.bind(over.target, item)
                if all(self.fold(condition) for condition in over.ifs):
                    built.append(self._build(node.elt))
        finally:
            self.known = known
        made = set if isinstance(node, ast.SetComp) else list
        return lambda seen: made(one(seen) for one in built)

    def _call(self, node: ast.Call) -> Check:
        function: Callable[..., Any] | None = None
        match node.func:
            case ast.Name(id=name) if name in self.helpers and name not in self.alias:
                return self._build(self._returned(self.helpers[name], node))
            case ast.Name(id=name) if name in _BUILTINS and name not in self.alias:
                # A program that defines `abs` may be called; `abs(f(1) - 2) < 0.1` must be evaluated here.
                if name not in self._defined or any(self._asks(a) for a in node.args):
                    function = _BUILTINS[name]
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if "math" in self.known:
                function = _MATH.get(name)
            case ast.Attribute(value=of) if not self._asks(of):
                return self._method(node, node.func)
        if function is None or self._converts(node):
            return self._observed(node)
        if any(isinstance(a, ast.Lambda) for a in [*node.args, *(k.value for k in node.keywords)]):
            if len(node.args) > 1:
                raise NotByValue
            return self._observed(node)
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise NotByValue
        called = function
        args = [self._build(a) for a in node.args]
        named = {str(k.arg): self._build(k.value) for k in node.keywords}
        return lambda seen: called(*(a(seen) for a in args), **{k: v(seen) for k, v in named.items()})

    def _converts(self, node: ast.Call) -> bool:
        """Whether a builtin only converts the program's value; then the program's process does the conversion."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "isinstance" and len(node.args) == 2:
            return self._asks(node.args[1])
        # With a second value, as in min(f(1), 5), an object of the program could choose the result.
        single = len(node.args) == (2 if name == "round" else 1) and not node.keywords
        if name not in _CONVERSIONS or name in self._defined or not single or any(map(self._asks, node.args[1:])):
            return False
        first = node.args[0]
        bare = isinstance(first, ast.Call | ast.Name | ast.Attribute | ast.Subscript) and self._asks(first)
        return bare and not any(isinstance(n, ast.BinOp | ast.Compare | ast.BoolOp) for n in ast.walk(first))

    def _returned(self, helper: ast.FunctionDef, node: ast.Call) -> ast.expr:
        """Returns the expression that a helper of the block returns, with its arguments substituted."""
        match helper:
            case ast.FunctionDef(body=[ast.Return(value=ast.expr() as returned)], decorator_list=[]):
                parameters = parameters_of(helper)
                if len(parameters) == len(node.args) and not node.keywords and not bound_names(returned):
                    by = dict(zip(parameters, node.args, strict=True))
                    return Replace(by).visit(ast.parse(ast.unparse(returned), mode="eval").body)
        raise NotByValue

    def _method(self, node: ast.Call, function: ast.Attribute) -> Check:
        if node.keywords or function.attr.startswith("_"):
            raise NotByValue
        of, args = self._build(function.value), [self._build(a) for a in node.args]

        def check(seen: Sequence[Any]) -> Any:
            value = of(seen)
            if type(value) not in _PLAIN:
                raise ValueError("no method of a plain value")
            return getattr(value, function.attr)(*(a(seen) for a in args))

        return check

    def _asks(self, node: ast.AST) -> bool:
        """Whether an expression needs the program: it has a name that is not known here."""
        free = free_names(node) - self.known.keys()
        return any(name in self.alias or name in self._defined or name not in _BUILTINS for name in free)

    def _observed(self, node: ast.expr) -> Check:
        """Builds the check that reads the value returned by the program's process."""
        if len(self.requests) >= _MOST_REQUESTS:
            raise NotByValue
        index = len(self.requests)
        self.requests.append(("eval", self._source(node)))
        return lambda seen: seen[index]

    def _source(self, node: ast.expr) -> str:
        """Returns an expression as source, with known names replaced by their values."""
        text = ast.unparse(node)
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & (self.known.keys() | self.alias.keys())
        names.discard("math")
        if not names:
            return text
        if names & bound_names(node):
            raise NotByValue
        replaced = Replace({name: self.alias.get(name) or literal(self.known[name]) for name in names})
        return ast.unparse(replaced.visit(ast.parse(text, mode="eval")))


def _small(value: Any) -> bool:
    return type(value) in (bool, float) or (type(value) is int and value.bit_length() < 2**16)
