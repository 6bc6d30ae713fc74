"""Tests of programs: the verdict of honest programs is native Python's, and cheats earn nothing."""

import random
import subprocess
import sys

import pytest

from jppo.plugins.sandbox.code import NATIVE, code, read_tests, refusal_reason, suspicious
from jppo.plugins.sandbox.reader import Reading
from tests.rewards import graded

QUICK = 24  # of each corpus, in a quick run


def verdict(program, tests, time_s=40.0, tests_in="strict"):
    return code(f"```python\n{program}\n```", tests, time_s=time_s, memory_bytes=2**31, tests_in=tests_in).score


def native(program, tests, folder):
    (folder / "both.py").write_text(f"{program}\n{tests}", encoding="utf-8", errors="surrogatepass")
    done = subprocess.run(
        [sys.executable, "-I", "both.py"], cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=60
    )
    return float(done.returncode == 0)


def differing(pairs, folder):
    return [pair for pair in pairs if not refusal_reason(pair[1]) and verdict(*pair) != native(*pair, folder)]


def earning(pairs, time_s=8.0):
    return [pair for pair in pairs if not refusal_reason(pair[1]) and verdict(*pair, time_s=time_s) != 0.0]


def test_honest_programs(tmp_path):
    pairs = list(graded.honest())
    random.Random(1).shuffle(pairs)
    assert differing(pairs[:QUICK], tmp_path) == []


@pytest.mark.slow
def test_every_honest_program(tmp_path):
    assert differing(graded.honest(), tmp_path) == []


def test_random_pairs(tmp_path):
    assert differing(graded.random_pairs(7, QUICK), tmp_path) == []


def test_most_rows_of_honest_programs_are_graded():
    blocks = [tests for _, tests in graded.honest()]
    assert sum(bool(refusal_reason(tests)) for tests in blocks) <= len(blocks) // 10
    assert not any(refusal_reason(tests) for _, tests in graded.random_pairs(8, 2000))


def test_native_tests_have_pythons_verdict_on_everything(tmp_path):
    pairs = [pair for pair in graded.honest() if refusal_reason(pair[1])]
    assert len(pairs) > 5
    assert [pair for pair in pairs if verdict(*pair, tests_in=NATIVE) != native(*pair, tmp_path)] == []
    assert verdict("import os\nos._exit(0)", "assert f(1) == 2", tests_in=NATIVE) == 1.0, "a program can cheat there"
    assert verdict("def f(x): return 3", "assert f(1) == 2", tests_in=NATIVE) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_random_pairs(tmp_path):
    pairs = list(graded.random_pairs(8, 2000))
    assert differing(pairs, tmp_path) == []
    right = sum(native(*pair, tmp_path) for pair in pairs[:200])
    assert 40 < right < 160, "right and wrong ones are both there"


@pytest.mark.parametrize("kind", graded.CHEATS)
def test_a_cheat_earns_nothing(kind):
    cheats = [(program, tests) for of, program, tests in graded.cheats() if of == kind]
    random.Random(2).shuffle(cheats)
    assert earning(cheats[:6], time_s=4.0 if kind == "endless" else 8.0) == []  # which takes all of it


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_cheat_earns_nothing():
    cheats = list(graded.cheats())
    assert len(cheats) >= 100 and len(graded.CHEATS) >= 10
    assert earning(cheat[1:] for cheat in cheats) == []


@pytest.mark.parametrize(
    ("tests", "asked"),
    [
        ("assert f(1) == 2", {"f"}),
        ("def check(candidate):\n    assert candidate(1) == len([2])\ncheck(f)", {"f"}),
        ("list = [1]\nassert f(list) == sorted(list)", {"f"}),
        ("from math import isclose\nassert isclose(f(1), 2)", {"f"}),
        ("from math import *\nassert isclose(f(1), sqrt(2))", {"f"}),
        ("assert sum([1, 2]) == 3", {"sum"}),
        ("assert abs(sum([1.5, 2]) - 3.5) < 1e-6", {"sum"}),
        ("assert abs(-1) == 1", {"abs"}),
        ("assert sum([1]) == 1, ValueError()", {"sum"}),
        ("def check(candidate):\n    assert candidate([1, 2]) == 3\ncheck(sum)", {"sum"}),
        ("try:\n    f(1)\nexcept Wrong as e:\n    assert e.args", {"f", "Wrong"}),
    ],
)
def test_names_that_tests_take_from_the_program(tests, asked):
    assert Reading(tests).asked == asked


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def Sum(n): return n // 6", "assert Sum(60) == 10"),
        ("def Check(n): return 'Yes'", "assert Check(1) == 'Yes' and 'No' != Check(2)"),
        ("def Split(l): return tuple(l)", "assert Split([1, 2]) == (1, 2)\nassert sorted(Split([2, 1])) == [1, 2]"),
        (
            "def Area(r): return r * 0.5",
            "assert abs(Area(2) - 1.0) < 1e-6\nassert max(Area(2), 3) == 3 and Area(1) in [0.5]",
        ),
        ("def Find_Max(l): return max(l)", "assert Find_Max([['A'], ['A', 'B']]) == ['A', 'B']"),
    ],
)
def test_a_function_may_have_a_capital_letter(program, tests):
    assert refusal_reason(tests) == "" and verdict(program, tests) == 1.0


LIES = "isclose = sqrt = Counter = approx = lambda *a, **k: 0\nclass math: isclose = staticmethod(lambda *a: True)\n"


@pytest.mark.parametrize(
    ("tests", "right"),
    [
        ("assert math.isclose(f(1), 2)", 1.0),
        ("assert not math.isclose(f(1), 3)", 1.0),
        ("assert isclose(f(1), 2)", 1.0),
        ("assert f(1) == approx(2)", 1.0),
        ("assert Counter([f(1)]) == {2: 1}", 1.0),
        ("assert np.allclose(f(1), [2.0])", 1.0),
        ("assert sqrt(4) == 0", 1.0),  # no other name can be the program's
    ],
)
def test_names_of_libraries_come_from_the_libraries(tests, right):
    assert refusal_reason(tests) == "" and verdict(LIES + "def f(x): return x + 1", tests) == right


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("assert f(2) == sqrt(2)", "uses sqrt without an import: the tests' or the program's? add"),
        ("import os\nassert f(1)", "imports os"),
        ("from unittest.mock import Mock\nassert f(1)", "imports unittest.mock"),
        ("async def t():\n    assert await f(1)\nt()", "awaits"),
        ("assert eval(f(1)) == 2", "uses eval"),
        ("import random\nrandom.seed(1)\nassert f(1) == 3", "seeds"),
        ("assert f(1).equals([2])", "result's own word"),
        ("r = f(1)\nok = r.has(2)\nassert not ok", "result's own word"),
        ("def check(c):\n    assert c(1).has(2)\ncheck(f)", "result's own word"),
        ("assert f(1) == Point(2)", "compares an object"),
        ("assert [Point(2)] == f(1)", "compares an object"),
        ("p = Point(1)\nassert (p + Point(2)).x == 3", "calculates"),
        ("p = Point(1)\nassert p == (1,)", "compares an object"),
        ("match Point(1):\n    case Point(x=1):\n        assert f(1)", "matches a pattern"),
        ("import numpy as np\na = np.zeros(2)\nb = f(a)\na[0] = 1\nassert b[0] == 0", "may be a view"),
        ("import numpy as np\na = np.zeros(2)\nb = f(a)\na.fill(1)\nassert b[0] == 0", "may be a view"),
        ("import numpy as np\nb = f(1)\nb += 1\nassert f(1)[0] == 0", "may be a view"),
        ("import numpy as np\nassert f(np.array([1], dtype=object)) == 1", "array of objects"),
        ("t = (1, 2)\nassert f(t) is not t is not None", "in a chain"),
        ("import unittest\nunittest.TestCase().assertIsNot(f((1, 2)), (1, 2))", "compares identities"),
        ("t = (1, 2)\nassert id(f(t)) == id(t)", "uses id"),
        ("class My:\n    pass\nassert f(My()) == 1", "hands the program"),
        ("class My:\n    pass\ndef build():\n    return My()\nassert f([build()]) == 1", "hands the program"),
        ("import re\nassert f(re.compile('a')) == 1", "hands the program"),
        ("class My(Base):\n    pass\nassert My().x == 1", "subclass"),
        ("@timed\ndef run():\n    assert f(1) == 2\nrun()", "function with asserts"),
        ("import unittest\nassert f(1) == 2\nunittest.main(exit=False)", "does not look at the result"),
        ("assert same_or_close(f(1), 2)", "takes the program's own same_or_close"),
        ("with timer() as t:\n    pass\nassert t.seconds >= 0", "context"),
    ],
)
def test_tests_that_strict_leaves_out(tests, why):
    assert why in refusal_reason(tests)


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("x = 1", "has no tests"),
        ("def check(c):\n    assert c(1) == 2", "has no assert that runs"),
        ("'# assert'", "has no assert that runs"),
        ("f(1)  # assert", "has no assert that runs"),
    ],
)
def test_a_block_that_asserts_nothing_is_an_error(tests, said):
    with pytest.raises(ValueError, match=said):
        read_tests(tests)


CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 2)\n"


@pytest.mark.parametrize("tests", ["if False:\n    assert f(1) == 2", "for i in []:\n    assert f(1) == 2", CASE])
def test_asserts_that_do_not_run_are_an_error(tests):
    with pytest.raises(ValueError, match="has no assert that runs"):
        verdict("def f(x): return 2", tests)


@pytest.mark.parametrize(
    ("tests", "right"),
    [
        ("f(1)  # assert\nimport unittest\nunittest.TestCase", 0.0),
        ("for x in f(0):\n    assert x == 2", 0.0),
        ("for x in f(2):\n    assert x == 2", 1.0),
        (CASE.replace("f(1), 2", "f(1), [2]") + "unittest.main()", 1.0),
        (CASE + "unittest.main()", 0.0),
        ("if f(1) != [2]:\n    assert False", 1.0),
        ("if f(1) == [2]:\n    assert False", 0.0),
        ("try:\n    f('a')\n    assert False\nexcept TypeError:\n    pass", 1.0),
        ("try:\n    f(1)\nexcept TypeError:\n    assert False", 1.0),
        (
            "def raises():\n    try:\n        f('a')\n    except TypeError:\n        return\n    assert 0\nraises()",
            1.0,
        ),
        ("import numpy as np\nnp.testing.assert_allclose(f(2), [2, 2])", 1.0),
        ("import unittest\nwith unittest.TestCase().assertRaises(TypeError):\n    f('a')", 1.0),
    ],
)
def test_at_least_one_assert_must_run(tests, right):
    assert verdict("def f(x): return [2] * x if x != 'a' else x + 1", tests) == right


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import gc\ngc.get_objects()", ("gc", "get_objects")),
        ("import os\nos._exit(0)", ("_exit",)),
        ("import sys\nsys._getframe().f_back", ("_getframe", "f_back")),
        ("import builtins as b\nb.eval = 1", ("builtins",)),
        ("from ctypes import CDLL", ("ctypes",)),
        ("exec_ = __import__", ("__import__",)),
        ("from sys import exc_info\nexc_info()", ("exc_info",)),
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
