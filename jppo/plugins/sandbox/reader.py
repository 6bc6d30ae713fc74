"""Reads the asserts of a row before any program runs: what they ask of the program, and what they may not do.

The program and its tests run in two processes, between which plain data and references cross (`peer.py`). `Reading`
follows, by names and without an order, which expressions are the program's, and refuses tests whose verdict would not
be Python's, or would be the program's. Standard library only, as `program.py`.
"""

import ast
import builtins
import importlib
import re
from collections.abc import Iterator

from jppo.plugins.sandbox.peer import PLAIN_METHODS

# The kinds of values, by whose they are. Objects of the tests' classes cannot be handed over; a MADE one is of a class
# of the program that the tests name; an ANSWER is what a method of a result said of the tests' values.
_OWN, _OBJECT, _CLASS, _PROGRAM, _MADE, _RESULT, _ANSWER = "", "object", "class", "program", "made", "result", "answer"
_THEIRS = (_PROGRAM, _MADE, _RESULT, _ANSWER)
_FROM_TESTS = (
    "abs", "all", "any", "bool", "callable", "dict", "enumerate", "float", "frozenset", "hasattr", "int",
    "isinstance", "issubclass", "len", "list", "map", "print", "range", "repr", "round", "set", "sorted",
    "str", "tuple", "type", "zip",
)  # fmt: skip
_TO_PLAIN = {"abs", "bool", "callable", "float", "hasattr", "hash", "int", "isinstance", "issubclass", "len", "print",
             "repr", "round", "str", "sum", "type"}  # fmt: skip
_REFUSED = {"__builtins__", "__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec", "globals", "help",
            "id", "input", "locals", "memoryview", "open", "setattr", "vars"}  # fmt: skip
_MODULES = {
    "__future__", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers", "numpy",
    "operator", "pytest", "random", "re", "statistics", "string", "sys", "textwrap", "time", "types", "typing",
    "unittest",
}  # fmt: skip
_UNCOPIED = {"io": None, "re": {"compile", "match", "search", "fullmatch", "finditer"}, "functools": {"partial"},
             "types": None, "operator": {"attrgetter", "itemgetter", "methodcaller"}, "random": {"Random"},
             "contextlib": None}  # fmt: skip
_PASSING = {"copy", "functools", "heapq", "itertools", "operator", "random"}  # modules that return what they are given
_OPEN = {"__call__", "__cause__", "__class__", "__contains__", "__doc__", "__getitem__", "__iter__",
         "__len__", "__members__", "__name__", "__next__", "__qualname__", "__repr__", "__str__",
         "__wrapped__"}  # fmt: skip
_STATE = {"assertLogs", "assertNoLogs", "flags", "get_state", "getcontext", "getstate", "is_", "is_not", "localcontext",
          "redirect_stderr", "setcontext", "shares_memory", "strides", "warns"}  # fmt: skip
_JUDGES = re.compile(r"^assert|(?:close|equal)$")
_SYS = {"float_info", "int_info", "maxsize", "maxunicode", "version_info"}
_EQUATING = {"assertEqual", "assertNotEqual", "assertIn", "assertNotIn", "assertListEqual", "assertCountEqual",
             "assertGreater", "assertLess", "assertGreaterEqual", "assertLessEqual", "assertSequenceEqual",
             "assertDictEqual", "assertSetEqual", "assertTupleEqual", "assertAlmostEqual"}  # fmt: skip


class Reading:
    """The tests' tree; the names that they take from the program; expressions of its objects that they made."""

    def __init__(self, tests: str):
        self.tree = ast.parse(tests)
        self._nodes = list(ast.walk(self.tree))
        self.bound = set(self._bound_names())
        self.asked = frozenset(self._program_names())
        self._kinds: dict[str, str] = dict.fromkeys(self.asked, _PROGRAM)
        self._functions = {n.name: n for n in self._nodes if isinstance(n, ast.FunctionDef)}
        self._libraries = dict(self._imported_names())
        self._has_arrays = "numpy" in {module for module, _ in self._libraries.values()}
        self._reads_results = any(isinstance(n, ast.Attribute) and n.attr == "wasSuccessful" for n in self._nodes)
        self._imports = {  # calls of __import__ that an import statement could replace
            call.func
            for call in self._nodes
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant)
            if _is_allowed(str(call.args[0].value))
        }
        for node in self._nodes:
            if isinstance(node, ast.ClassDef) and not any("Test" in ast.unparse(base) for base in node.bases):
                self._kinds[node.name] = _CLASS
        before: dict[str, str] = {}
        while before != self._kinds:
            before = dict(self._kinds)
            for node in self._nodes:
                self._note_kinds(node)
        self.made = {
            node for node in self._nodes if isinstance(node, ast.expr) and self._kind(node) in (_MADE, _PROGRAM)
        }

    def refused(self) -> str:
        """Returns why these tests cannot be graded across two processes, or ''."""
        return next(
            (f"line {getattr(node, 'lineno', 1)} {why}" for node in self._nodes for why in self._refusals(node)), ""
        )

    def _bound_names(self) -> Iterator[str]:
        for node in self._nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                    yield name
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name
                case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    yield name
                case ast.ImportFrom(module=str(module), names=[ast.alias(name="*")]):
                    if module.partition(".")[0] in _MODULES:
                        yield from (name for name in dir(importlib.import_module(module)) if name[:1] != "_")
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    yield from ((alias.asname or alias.name).split(".")[0] for alias in aliases)

    def _imported_names(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yields names of modules and of what is imported from them, with (module, name or '')."""
        for node in self._nodes:
            match node:
                case ast.Import(names=aliases):
                    yield from ((a.asname or a.name.split(".")[0], (a.name.split(".")[0], "")) for a in aliases)
                case ast.ImportFrom(module=str(module), names=aliases):
                    yield from ((a.asname or a.name, (module.split(".")[0], a.name)) for a in aliases)

    def _program_names(self) -> set[str]:
        """Returns the names that the tests take from the program.

        A builtin belongs to the tests unless no other name of an assert can be the program's, and none is a variable;
        then one that is called or handed over is, and of several those that tests seldom use by themselves.
        """
        used = {n.id for n in self._nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - self.bound
        found = {name for name in used if not hasattr(builtins, name)}
        blocks = [self.tree] if not found else [node for node in self._nodes if isinstance(node, ast.Assert)]
        elsewhere = set[str]().union(*(names for names in map(_names_in, blocks) if names & (found | self.bound)))
        for block in blocks:
            nodes = list(ast.walk(block))
            names = _names_in(block)
            if found and not all(hasattr(builtins, name) and name not in self.bound for name in names):
                continue
            calls = [n for n in nodes if isinstance(n, ast.Call)]
            calls = [c for c in calls if sum(isinstance(inner, ast.Call) for inner in ast.walk(c)) == 1] or calls
            candidates = {part.id for c in calls for part in (c.func, *c.args) if isinstance(part, ast.Name)} & used
            candidates -= elsewhere if found else set()
            candidates -= {
                name for name in candidates if isinstance(getattr(builtins, name, None), type) and name[:1].isupper()
            }
            found |= candidates - set(_FROM_TESTS) or candidates
        return found

    def _kind(self, node: ast.AST | None) -> str:
        """Returns the kind of an expression's value."""
        match node:
            case ast.Name(id=name):
                return self._kinds.get(name, _OWN)
            case ast.Call():
                return self._kind_of_call(node)
            case ast.Attribute(value=owner):
                if self._kind(owner) in _THEIRS:
                    return _RESULT
                return self._kinds.get(ast.unparse(node), _OWN)
            case ast.Subscript(value=owner):
                return _RESULT if self._kind(owner) in _THEIRS else self._kind(owner)
            case ast.Starred(value=value) | ast.NamedExpr(value=value):
                return self._kind(value)
            case ast.IfExp(body=first, orelse=second):
                return _join_kinds(self._kind(first), self._kind(second))
            case ast.BoolOp(values=parts):
                return _join_kinds(*map(self._kind, parts))
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.Dict(values=parts):
                return _item_kind(_join_kinds(*map(self._kind, parts)))
            case ast.ListComp(elt=part) | ast.SetComp(elt=part) | ast.GeneratorExp(elt=part) | ast.DictComp(value=part):
                return _item_kind(self._kind(part))
        return _OWN

    def _kind_of_call(self, node: ast.Call) -> str:
        """Returns the kind of a call's result."""
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        argument_kind = _item_kind(_join_kinds(*map(self._kind, parts)))
        match node.func:
            case ast.Name(id=name) if self._kind(node.func) == _PROGRAM:
                return _MADE if name[:1].isupper() else _RESULT
            case ast.Name(id=name) if name in self._functions:
                return self._kinds.get(f"{name}()", _OWN)
            case ast.Name(id=name) if self._kind(node.func) == _OWN:
                module, attribute = self._libraries.get(name, ("", ""))
                if _makes_uncopied(module, attribute):
                    return _OBJECT
                if name in ("map", "filter") and any(map(self._is_method_of_result, parts)):
                    return _ANSWER
                return _OWN if name in _TO_PLAIN or (module and module not in _PASSING) else argument_kind
            case ast.Attribute(value=owner, attr=name):
                owner_kind = self._kind(owner)
                if owner_kind in (_RESULT, _ANSWER):
                    return _ANSWER if parts and name not in PLAIN_METHODS else _RESULT
                if owner_kind in (_PROGRAM, _MADE):
                    return _RESULT
                module = self._libraries.get(owner.id, ("", ""))[0] if isinstance(owner, ast.Name) else ""
                return _OBJECT if _makes_uncopied(module, name) else argument_kind if module in _PASSING else _OWN
        owner_kind = self._kind(node.func)
        return _OBJECT if owner_kind == _CLASS else _RESULT if owner_kind in _THEIRS else _OWN

    def _is_method_of_result(self, node: ast.expr) -> bool:
        """Whether an expression is a method of a result that plain data does not have."""
        if not isinstance(node, ast.Attribute):
            return False
        return self._kind(node.value) in (_RESULT, _ANSWER) and node.attr not in PLAIN_METHODS

    def _note_kinds(self, node: ast.AST) -> None:
        """Notes the kinds of the names that a node gives values to."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self._assign(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._set_kind(target, _item_kind(self._kind(value)))
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._set_kind(target, _item_kind(self._kind(value)))
            case ast.FunctionDef(name=name):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return | ast.Yield):
                        self._add_kind(f"{name}()", self._kind(inner.value))
            case ast.Call(func=func, args=args):
                if isinstance(func, ast.Name) and func.id in self._functions:
                    for parameter, value in zip(_parameters(self._functions[func.id]), args, strict=False):
                        self._add_kind(parameter, self._kind(value))
                elif self._kind(func) in _THEIRS:
                    for value in args:  # the program calls them
                        function = self._functions.get(value.id) if isinstance(value, ast.Name) else value
                        if isinstance(function, ast.FunctionDef | ast.Lambda):
                            for parameter in _parameters(function):
                                self._add_kind(parameter, _RESULT)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Notes for each name or attribute that is assigned to what kind of value it has from here on."""
        match target, value:
            case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=parts) | ast.List(elts=parts))):
                if len(targets) == len(parts):
                    for part_target, part in zip(targets, parts, strict=True):
                        self._assign(part_target, part)
                    return
        self._set_kind(target, self._kind(value))

    def _set_kind(self, target: ast.expr, kind: str) -> None:
        """Notes that a name or attribute has values of this kind from here on; of a tuple, its items."""
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._set_kind(part, _item_kind(kind))
        elif isinstance(target, ast.Starred):
            self._set_kind(target.value, _item_kind(kind))
        elif isinstance(target, ast.Name | ast.Attribute):
            self._add_kind(ast.unparse(target), kind)

    def _add_kind(self, name: str, kind: str) -> None:
        """Adds a kind to those that a name may have."""
        if kind:
            self._kinds[name] = _join_kinds(self._kinds.get(name, _OWN), kind)

    def _refusals(self, node: ast.AST) -> Iterator[str]:
        """Yields why tests with this node cannot be graded."""
        match node:
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                yield "awaits"
            case ast.Import(names=aliases):
                yield from (f"imports {a.name}" for a in aliases if not _is_allowed(a.name))
            case ast.ImportFrom(module=module, level=level):
                if level or not _is_allowed(module or ""):
                    yield f"imports {module}"
            case ast.Name(id=name, ctx=ast.Load()) if name in _REFUSED - self.bound and node not in self._imports:
                yield f"uses {name}"
            case ast.Attribute(value=ast.Name(id="sys"), attr=name) if name not in _SYS:
                yield f"uses sys.{name}"
            case ast.Name(id=name) if name in self.asked and len(self.asked) > 1 and _JUDGES.search(name):
                yield f"takes the program's own {name}: import it, or give it another name"
            case ast.keyword(arg="exit") | ast.Attribute(attr="TextTestRunner") if not self._reads_results:
                yield "does not look at the result of its test cases"
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in _STATE:
                yield f"uses {name}"
            case ast.Attribute(attr="seed"):
                yield "seeds a generator of random numbers"
            case ast.Attribute(attr=name) if name[:2] == name[-2:] == "__" and name not in _OPEN:
                yield f"uses {name}"
            case ast.ClassDef(bases=bases, decorator_list=decorators):
                if any(self._kind(base) in _THEIRS for base in bases):
                    yield "defines a subclass of a class of the program"
                if any(self._kind(decorator) in _THEIRS for decorator in decorators):
                    yield "hands the program a class of the tests"
            case ast.FunctionDef(decorator_list=decorators) if any(self._kind(d) in _THEIRS for d in decorators):
                if _has_assert(node):
                    yield "hands the program a function with asserts"
            case ast.MatchClass(cls=named) | ast.MatchValue(value=ast.Attribute(value=named)):
                if self._kind(named) in _THEIRS:
                    yield "matches a pattern by a name of the program"
            case ast.With(items=items, body=body) if any(self._kind(item.context_expr) in _THEIRS for item in items):
                if not any(isinstance(inner, ast.Assert) for part in body for inner in ast.walk(part)):
                    yield "enters a context of the program that may end an error"
            case ast.Compare(left=left, ops=ops, comparators=others):
                yield from self._refusals_of_comparison(left, ops, others)
            case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod()):
                pass
            case ast.BinOp(left=left, right=right):
                members = [isinstance(n, ast.Attribute) and self._kind(n.value) == _PROGRAM for n in (left, right)]
                if self._meet_made(left, right) or all(members):
                    yield "calculates with an object of the program's class"
            case ast.Call(func=ast.Name(id="sorted" | "min" | "max"), args=args) if self._meet_made(*args):
                yield "compares an object of the program's class"
            case ast.Call(func=ast.Name(id="hash"), args=args) if any(map(self._shows_made, args)):
                yield "compares an object of the program's class"
            case ast.AugAssign(target=target, value=value):
                if self._meet_made(target, value):
                    yield "calculates with an object of the program's class"
            case ast.Assign(targets=targets, value=value):
                if any(isinstance(t, ast.Attribute) and self._kind(t.value) in _THEIRS for t in targets):
                    yield from self._refusals_of_arguments([value])
            case ast.Call(func=func, args=args, keywords=keywords):
                if self._kind(func) in _THEIRS or (
                    isinstance(func, ast.Attribute) and self._kind(func.value) in _THEIRS
                ):
                    yield from self._refusals_of_arguments([*args, *(keyword.value for keyword in keywords)])
                if isinstance(func, ast.Attribute) and func.attr in _EQUATING and len(args) > 1:
                    yield from self._refusals_of_comparison(args[0], [ast.Eq()], args[1:2])
        if any(self._kind(truth) == _ANSWER for truth in _truth_tests(node)):
            yield "takes a result's own word: a method of it judges the tests' values"
        yield from self._refusals_of_identity(node)

    def _refusals_of_identity(self, node: ast.AST) -> Iterator[str]:
        """Yields why tests of identity or shared memory cannot be graded: they get copies of plain data and arrays."""
        match node:
            case ast.Subscript(ctx=ast.Store()) | ast.Expr(ast.Call(ast.Attribute(attr="fill" | "put" | "sort"))):
                if self._has_arrays:
                    yield "changes an array that may be a view of another"
            case ast.AugAssign(target=target) if self._has_arrays and self._kind(target) == _RESULT:
                yield "changes an array that may be a view of another"
            case ast.keyword(arg="dtype", value=ast.Name(id="object")):
                yield "makes an array of objects"
            case ast.Call(func=ast.Attribute(attr="assertIs" | "assertIsNot"), args=[one, other, *_]):
                if not any(isinstance(side, ast.Constant) for side in (one, other)):
                    yield "compares identities by a method: write `assert a is b`"
            case ast.Compare(ops=[_, _, *_] as ops) if any(isinstance(op, ast.Is | ast.IsNot) for op in ops):
                yield "compares identities in a chain: write `a is b and b is c`"

    def _refusals_of_comparison(self, left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr]) -> Iterator[str]:
        """Yields why the operands of a comparison cannot be compared."""
        sides = [left, *others]
        for op, one, other in zip(ops, sides, others, strict=False):
            if isinstance(op, ast.Is | ast.IsNot):
                continue
            is_membership = isinstance(op, ast.In | ast.NotIn)
            if self._meet_made(one, other) and not (is_membership and not self._shows_made(one)):
                yield "compares an object of the program's class"
        if any(map(_is_trivial, sides)) and any(self._kind(side) == _ANSWER for side in sides):
            yield "takes a result's own word: a method of it judges the tests' values"

    def _meet_made(self, *sides: ast.expr) -> bool:
        """Whether operands show an object of the program's class; a call next to plain data is one of a function."""
        made = [side for side in sides if self._shows_made(side)]
        alone = sum(self._kind(side) != _OWN for side in sides) == 1
        return bool(made) and not (alone and isinstance(made[0], ast.Call))

    def _shows_made(self, node: ast.expr) -> bool:
        """Whether a value is, or has in it, an object of the program that the tests have made."""
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return any(map(self._shows_made, node.elts))
        if isinstance(node, ast.Dict):
            return any(map(self._shows_made, [*node.values, *(key for key in node.keys if key is not None)]))
        return self._kind(node) == _MADE

    def _refusals_of_arguments(self, values: list[ast.expr]) -> Iterator[str]:
        """Yields why values cannot be handed to the program."""
        for value in values:
            returned_kind = self._kind(value.body) if isinstance(value, ast.Lambda) else _OWN
            if isinstance(value, ast.Name):
                returned_kind = self._kinds.get(f"{value.id}()", _OWN)
                if _has_assert(self._functions.get(value.id)):
                    yield "hands the program a function with asserts"
            if {self._kind(value), returned_kind} & {_OBJECT, _CLASS}:
                yield "hands the program an object of the tests that is no plain data"


def _names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _join_kinds(*kinds: str) -> str:
    """Returns the kind of a value that may have any of these kinds: the strictest."""
    present = {kind for kind in kinds if kind}
    if len(present) < 2:
        return present.pop() if present else _OWN
    return next(kind for kind in (_OBJECT, _CLASS, _ANSWER, _RESULT) if kind in present or kind == _RESULT)


def _item_kind(kind: str) -> str:
    """Returns the kind of an item of a container that was made of values of this kind."""
    return _RESULT if kind in (_MADE, _PROGRAM) else kind


def _has_assert(function: ast.AST | None) -> bool:
    return function is not None and any(isinstance(inner, ast.Assert) for inner in ast.walk(function))


def _makes_uncopied(module: str, name: str) -> bool:
    """Whether a function of a module returns what cannot be handed to the program."""
    names = _UNCOPIED.get(module, set())
    return names is None or name in names


def _is_allowed(module: str) -> bool:
    return module.partition(".")[0] in _MODULES and module not in ("unittest.mock", "numpy.random")


def _parameters(function: ast.FunctionDef | ast.Lambda) -> list[str]:
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]


def _is_trivial(node: ast.expr) -> bool:
    """Whether it is a value that a program guesses: True, None, 0, '' or an empty container."""
    match node:
        case ast.Constant(value=value):
            return value is True or not value
        case (
            ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]) | ast.Call(args=[], keywords=[], func=ast.Name())
        ):
            return True
        case ast.UnaryOp(operand=operand):
            return _is_trivial(operand)
    return False


def _truth_tests(node: ast.AST) -> list[ast.expr]:
    """Returns the expressions whose truth a node takes."""
    match node:
        case ast.Assert(test=test) | ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return [test]
        case ast.BoolOp(values=values) | ast.comprehension(ifs=values):
            return values
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [operand]
        case ast.Call(func=ast.Name(id="bool" | "all" | "any"), args=args):
            return [arg.elt if isinstance(arg, ast.GeneratorExp | ast.ListComp) else arg for arg in args]
        case ast.Call(func=ast.Attribute(attr="assertTrue" | "assertFalse" | "assertIsNone"), args=args):
            return args
    return []
