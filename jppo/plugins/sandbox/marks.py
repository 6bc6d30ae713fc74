"""Marks the asserts of a row, so that it is known which of them have held, and what they ask of the program.

Standard library only, as `program.py`, which imports it for tests alone: the module ast delays a start.
"""

import ast

from jppo.plugins.sandbox.reader import Reading

RAN, ASK, GET, HAS, SAME = ".ran", ".ask", ".get", ".has", ".same"  # names that no text of tests can have


def mark_tests(reading: Reading) -> ast.Module:
    """Returns the tests with the calls of `_MarkTests`."""
    marked: ast.Module = _MarkTests(reading).visit(reading.tree)
    return ast.fix_missing_locations(marked)


class _MarkTests(ast.NodeTransformer):
    """Adds a call of RAN where a test has held: after asserts, and after what raises or asserts where one has not.

    The program has the names that the tests do not define (ASK). What tests do with an object that they have made by
    the program's class goes to that object (GET, HAS). Whether two values are one object, copies do not say (SAME).
    """

    def __init__(self, reading: Reading):
        self._asked, self._made = reading.asked, reading.made

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return _call_node(ASK, ast.Constant(node.id)) if node.id in self._asked else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        made = isinstance(node.ctx, ast.Load) and node.value in self._made
        changed = self.generic_visit(node)
        return _call_node(GET, node.value, ast.Constant(node.attr)) if made else changed

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        op, right = node.ops[0], node.comparators[0]
        has_constant = isinstance(node.left, ast.Constant) or isinstance(right, ast.Constant)
        is_membership = isinstance(op, ast.In | ast.NotIn) and right in self._made
        is_identity = isinstance(op, ast.Is | ast.IsNot) and not has_constant
        changed = self.generic_visit(node)
        if len(node.ops) > 1 or not (is_membership or is_identity):
            return changed
        replacement = _call_node(HAS if is_membership else SAME, node.left, node.comparators[0])
        return ast.UnaryOp(ast.Not(), replacement) if isinstance(op, ast.NotIn | ast.IsNot) else replacement

    def _mark_after(self, node: ast.stmt) -> ast.AST | tuple[ast.AST, ast.Expr]:
        """Adds a mark after a statement in which a test has held."""
        mark = ast.Expr(_call_node(RAN)) if _has_tested(node) else None
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
