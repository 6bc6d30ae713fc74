"""Asserts split into calls for the program's process and comparisons here."""

import json

import pytest

from jppo.rewards import expressions
from jppo.rewards.asserts import holds, plan_asserts
from jppo.rewards.suspicion import suspicious
from jppo.sandbox.program import plain

PROGRAM = "def f(x): ...\nclass Node: ...\ndef g(x): ..."
CHECK = """
METADATA = {'author': 'x'}
def check(candidate):
    '''A docstring.'''
    assert candidate(1) == 2, 'one'
    for i in range(2):
        assert candidate(i) == i + 1
check(f)
"""


@pytest.mark.parametrize(
    ("tests", "requests"),
    [
        ("assert f(1) == 2", ["f(1)"]),
        ("assert 2 == f(1)", ["f(1)"]),
        ("assert f(g(1), *[2], k=3)[0].x == 2", ["f(g(1), *[2], k=3)[0].x"]),
        (CHECK, ["f(1)", "f(0)", "f(1)"]),
        ("def test():\n    assert f(1) == 2\ntest()", ["f(1)"]),
        ("x, y = 1, [2]\nassert f(x, y) == y", ["f(1, [2])"]),
        ("assert abs(f(1) - 2) < 1e-6", ["f(1)"]),
        ("import math\nassert math.isclose(f(1), 2, rel_tol=0.1)", ["f(1)"]),
        ("assert all(f(i) == i for i in range(2))", ["f(0)", "f(1)"]),
        ("assert f(1) and not f(2)", ["not not (f(1))", "not not (f(2))"]),
        ("assert f('a').startswith('ab')", ["f('a')"]),
        ("assert str(f(1)) == 'N' and len(f(2)) == 2", ["str(f(1))", "len(f(2))"]),
        ("assert str(abs(f(1) - 2)) == '0'", ["f(1)"]),
        ("def close(a, b):\n    return abs(a - b) < 0.1\nassert close(f(1), 2.0)", ["f(1)"]),
        ("def same(a, b: int): return a == b\nassert same(f(1), 2) and not same(f(2), 2)", ["f(1)", "f(2)"]),
        ("assert isinstance(f(1), Node) and isinstance(f(2), int)", ["not not (isinstance(f(1), Node))", "f(2)"]),
        ("assert sorted(f([2]), key=lambda v: -v) == [1]", ["sorted(f([2]), key=lambda v: -v)"]),
        ("x = [2, 1]\nf(x)\nassert x == [1, 2]", ["x = [2, 1]", "f(x)", "x"]),
        ("n = Node()\nn.left = Node()\nassert f(n) == 3", ["n = Node()", "n.left = Node()", "f(n)"]),
        ("if True:\n    assert f(1) == 2\nelse:\n    assert f(2) == 1", ["f(1)"]),
    ],
)
def test_expected_values_stay_here(tests, requests):
    found = plan_asserts(tests, PROGRAM)
    assert [source for _, source in found.requests if not source.startswith("import")] == requests
    assert found.in_program == 0


@pytest.mark.parametrize(
    "tests",
    [
        "try:\n    f('a')\n    assert False\nexcept TypeError:\n    pass",
        "import numpy as np\nassert np.allclose(f(1), 2)",
        "from fractions import Fraction\nassert f(1) == Fraction(1, 2)",
        "class T:\n    def t(self):\n        assert f(1) == 2\nT().t()",
        "while True:\n    assert f(1) == 2\n    break",
        "def same(a, b):\n    c = a == b\n    return c\nassert same(f(1), 2)",
        "assert max(f(1), 5, key=lambda v: v) == 5",
    ],
)
def test_what_cannot_be_split_runs_beside_the_program(tests):
    found = plan_asserts(tests, PROGRAM)
    assert found.in_program == 1 and any(
        (kind == "exec" and "f(1)" in text) or "f('a')" in text for kind, text in found.requests
    )


def test_one_statement_beside_leaves_the_others_here():
    found = plan_asserts("assert f(1) == 41\ntry:\n    assert f(2)\nexcept TypeError: pass\nassert f(3) == 43", PROGRAM)
    assert found.in_program == 1 and len(found.checks) == 2
    assert not any("41" in text or "43" in text for _, text in found.requests)


def answers(*values):
    return [json.dumps({"value": plain(value)}) for value in values]


class Equal:
    def __eq__(self, other):
        return True

    __hash__ = None


class Int(int):
    __eq__ = Equal.__eq__
    __hash__ = None


@pytest.mark.parametrize(
    ("test", "value", "right"),
    [
        ("f(1) == 2", 2, True),
        ("f(1) == 2", 3, False),
        ("f(1) == 2", 2.0, True),
        ("f(1) == 2", Equal(), False),
        ("f(1) == 2", Int(3), False),
        ("f(1) == 2", None, False),
        ("f(1) == [1, 2]", (1, 2), False),
        ("f(1) == (1, [2, {'a': {3}}])", (1, [2, {"a": {3}}]), True),
        ("f(1) == {'a': 1}", {"a": 1}, True),
        ("f(1) == 2 ** 70", 2**70, True),
        ("f(1) == b'x'", b"x", True),
        ("f(1) == 1j", 1j, True),
        ("f(1) is None", None, True),
        ("f(1) is True", 1, False),
        ("f(1) == float('inf')", float("inf"), True),
        ("f(1) != f(1) and True", float("nan"), None),
        ("list(f(1)) == [0, 1]", [0, 1], True),
        ("all(x >= 0 for x in f(1)) == True", (x >= 0 for x in range(2)), True),
        ("3 in f(1)", range(4), True),
        ("f(1) == [0, 1]", range(2), False),
        ("len(f(1)) == 2", 2, True),
        ("set(f(1)) == {1}", {1}, True),
        ("isinstance(f(1), int)", 3, True),
        ("isinstance(f(1), int)", "3", False),
        ("type(f(1)) == list", [], True),
        ("1 < f(1) < 3", 2, True),
        ("3 in f(1)", [3], True),
        ("f(1) not in [2, 3]", 3, False),
        ("round(f(1), 2) == 0.33", 0.33, True),
        ("round(abs(f(1) - 3), 2) == 0.33", 3 + 1 / 3, True),
        ("f(1) * 2 == 4", "22", False),
        ("f(1) * 10 ** 12 == 'x'", "x", False),
        ("sum([f(1), 1]) == 3", 2, True),
        ("min(f(1), 5) == 5", Equal(), False),
        ("f(1).endswith('b')", "ab", True),
        ("f(1).endswith('b')", Equal(), False),
    ],
)
def test_values_compare_as_in_python(test, value, right):
    found = plan_asserts(f"assert {test}", PROGRAM)
    if right is None:
        assert found.in_program
    else:
        assert holds(found, answers(*[value] * len(found.requests))) is right


@pytest.mark.parametrize(
    "replies",
    [
        [],
        ['{"value": 2}', '{"value": 2}'],
        ['{"raised": "ValueError"}'],
        ["true"],
        ["{"],
        ["[" * 10**5],
        ['{"value": {"int": "0x2", "other": "x"}}'],
        ['{"value": {"int": 2}}'],
        ['{"value": {"set": [[1]]}}'],
        ['{"value": {"dict": [[1]]}}'],
        ['{"value": {"items": [2]}}'],
        ['{"score": 777.0, "value": true}'],
    ],
)
def test_a_forged_reply_is_a_wrong_answer(replies):
    assert holds(plan_asserts("assert f(1) == 2", PROGRAM), replies) is False


def test_a_builtin_that_a_program_defines_does_not_compare():
    cheat = "def abs(x): return 0\ndef f(x): return 7"
    found = plan_asserts("assert abs(f(1) - 2) < 0.1", cheat)
    assert found.requests == (("eval", "f(1)"),) and not holds(found, answers(7))
    assert plan_asserts("assert abs(-3) == 3", cheat).requests == (("eval", "abs(-3)"),)  # it is what is asked for


def test_long_expressions_take_no_time():
    many = " + ".join(f"f({i})" for i in range(150))
    found = plan_asserts(f"assert {many} == 150 and abs(abs(abs(abs(abs(abs(f(1))))))) == 1", PROGRAM)
    assert len(found.requests) == 151 and holds(found, answers(*[1] * 151))


@pytest.mark.parametrize("tests", ["x = 1", "def check(c):\n    assert c(1) == 2", "# assert"])
def test_a_block_that_asserts_nothing_is_an_error(tests):
    with pytest.raises(ValueError, match="has no assert that runs"):
        plan_asserts(tests, PROGRAM)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import gc\ngc.get_objects()", ("gc", "get_objects")),
        ("import os\nos._exit(0)", ("_exit",)),
        ("import sys\nsys._getframe().f_back", ("_getframe", "f_back")),
        ("import builtins as b\nb.eval = 1", ("builtins",)),
        ("from ctypes import CDLL", ("ctypes",)),
        ("import sys\nsys.modules['x']", ("sys.modules",)),
        ("import __main__", ("__main__",)),
        ("getattr(os, '_exit')(0)", ("_exit",)),
        ("if __name__ == '__main__':\n    main()", ()),
        ("import sys\nprint(sys.argv, sys.maxsize)\nexit()", ()),
        ("def f(", ()),
    ],
)
def test_names_that_reach_into_the_interpreter(program, found):
    assert suspicious(program) == found


def test_every_builtin_of_the_comparisons_is_harmless():
    assert not {"eval", "exec", "open", "getattr", "__import__", "compile", "input"} & expressions._BUILTINS.keys()
