"""A program that a model wrote, and its tests: what runs in the two processes of the sandbox.

`run_as_main` is the whole of a program that reads its standard input. `answer_tests` runs a program and then the calls
of its tests, which `run_tests` runs in another process (`peer.py`): there they are Python as it is, with their expected
values, comparisons, helpers and imports. Standard library only and no import of jppo, because an HTTP sandbox service
gets these files as text.
"""

import ast
import builtins
import os
import sys
import types

TYPE_CHECKING = False  # as in typing, whose import would delay every program
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from jppo.plugins.sandbox.peer import Captured, ProgramSide, TestsSide
    from jppo.plugins.sandbox.reader import Reading

PASSED, FAILED, IDLE = "passed", "failed", "idle"  # idle: no assert ran, and the program was not called
_RAN, _ASK, _GET, _HAS, _SAME = ".ran", ".ask", ".get", ".has", ".same"  # names that no text of tests can have


def run_as_main(text: str) -> None:
    """Runs the program's text as a new `__main__`."""
    names = _new_module_names("__main__")
    exec(compile(text, "program.py", "exec"), names)


def answer_tests(text: str, side_of: "Callable[[Callable[[str], object]], ProgramSide]", captured: "Captured") -> None:
    """Runs the program's text, and answers what its tests ask until they end."""
    names = _new_module_names("program")
    sys.modules["__main__"] = sys.modules["program"]  # where dataclasses and pickle look
    sys.stdout = captured

    def look_up(name: str) -> object:
        return names[name] if name in names else getattr(builtins, name)

    side = side_of(look_up)
    exec(compile(text, "program.py", "exec"), names)
    side.serve()


def run_tests(tests: str, side: "TestsSide") -> str:
    """Returns the verdict on the program on the other side, by a block of tests."""
    from jppo.plugins.sandbox.peer import Unsupported
    from jppo.plugins.sandbox.reader import Reading

    reading = Reading(tests)
    names, marks = _new_module_names("__main__"), list[bool]()
    names |= {_RAN: lambda: marks.append(True), _ASK: side.name, _GET: side.get_open, _HAS: side.has, _SAME: side.same}
    side.names = names
    sys.argv = ["tests.py"]
    _close_libraries(tests)
    if not side.wait():  # the program reads its descriptors while it starts, and may end
        return FAILED
    try:
        tree = ast.fix_missing_locations(_MarkTests(reading).visit(reading.tree))
        exec(compile(tree, "tests.py", "exec"), names)
    except Unsupported as e:
        return f"not plain data: {e}"
    except SystemExit as e:  # of unittest.main()
        if vars(e).keys() & {"_place", "_crossed"} or e.code not in (None, 0, False):
            return FAILED
    except BaseException:
        return FAILED
    if marks and not side.failed:
        return PASSED
    return FAILED if side.asked else IDLE


def _close_libraries(tests: str) -> None:
    """Closes what a program could pass tests by: an empty array is close to no other one, a skipped test has failed."""
    if "numpy" in tests:
        import numpy

        close = numpy.allclose

        def allclose(a: "Any", b: "Any", *args: "Any", **named: "Any") -> bool:
            empty = [numpy.asarray(value).size == 0 for value in (a, b)]
            return empty[0] == empty[1] and close(a, b, *args, **named)

        numpy.allclose = allclose
    if "unittest" in tests and "skip" not in tests:
        import unittest

        def fail(result: unittest.TestResult, test: object, reason: str) -> None:
            result.failures.append((test, reason))  # type: ignore[arg-type]

        unittest.TestResult.addSkip = fail  # type: ignore[assignment]


class _MarkTests(ast.NodeTransformer):
    """Adds a call of _RAN where a test has held: after asserts, and after what raises or asserts where one has not.

    The program has the names that the tests do not define (_ASK). What tests do with an object that they have made by
    the program's class goes to that object (_GET, _HAS). Whether two values are one object, copies do not say (_SAME).
    """

    def __init__(self, reading: "Reading"):
        self._asked, self._made = reading.asked, reading.made

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return _call_node(_ASK, ast.Constant(node.id)) if node.id in self._asked else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        made = isinstance(node.ctx, ast.Load) and node.value in self._made
        changed = self.generic_visit(node)
        return _call_node(_GET, node.value, ast.Constant(node.attr)) if made else changed

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        op, right = node.ops[0], node.comparators[0]
        has_constant = isinstance(node.left, ast.Constant) or isinstance(right, ast.Constant)
        is_membership = isinstance(op, ast.In | ast.NotIn) and right in self._made
        is_identity = isinstance(op, ast.Is | ast.IsNot) and not has_constant
        changed = self.generic_visit(node)
        if len(node.ops) > 1 or not (is_membership or is_identity):
            return changed
        replacement = _call_node(_HAS if is_membership else _SAME, node.left, node.comparators[0])
        return ast.UnaryOp(ast.Not(), replacement) if isinstance(op, ast.NotIn | ast.IsNot) else replacement

    def _mark_after(self, node: ast.stmt) -> ast.AST | tuple[ast.AST, ast.Expr]:
        """Adds a mark after a statement in which a test has held."""
        mark = ast.Expr(_call_node(_RAN)) if _has_tested(node) else None
        changed = self.generic_visit(node)
        if mark and isinstance(node, ast.Try):
            for handler in node.handlers:  # it may return
                handler.body.insert(0, mark)
        return (changed, mark) if mark else changed

    visit_Assert = visit_Expr = visit_With = visit_If = visit_Try = _mark_after


def _has_tested(node: ast.stmt) -> bool:
    """Whether a test has held where a statement has ended: its asserts, or what raises where one has not."""
    nodes = list(ast.walk(node))
    match node:
        case ast.Assert():
            return True
        case ast.Try():
            return any(isinstance(inner, ast.Assert | ast.Raise) for inner in nodes)
        case ast.If():
            never_true = [
                n for n in nodes if isinstance(n, ast.Assert) and isinstance(n.test, ast.Constant) and not n.test.value
            ]
            return bool(never_true) or any(isinstance(inner, ast.Raise) for inner in nodes)
    calls = [call.func for call in nodes if isinstance(call, ast.Call)]
    names = [getattr(function, "attr", getattr(function, "id", "")) for function in calls]
    return any(name.startswith("assert") or name in ("raises", "fail") for name in names)


def _call_node(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _new_module_names(name: str) -> dict[str, object]:
    """Makes a module and returns its names."""
    for word in ("exit", "quit"):  # as the module site has them
        if not hasattr(builtins, word):
            setattr(builtins, word, sys.exit)
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__["__builtins__"] = builtins
    return module.__dict__


def write_all(fd: int, line: str) -> None:
    """Writes a line to a file descriptor."""
    remaining = (line + "\n").encode()
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]
