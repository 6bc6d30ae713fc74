"""The rule `code`: runs the program in a response against the row's tests, in a sandbox (`jppo/sandbox/`).

The program's process has neither expected values nor a verdict. It receives the input of a test, whose output is
compared here, or the calls of asserts, which run in another process (`jppo/sandbox/program.py`). Asserts that this
cannot grade are refused before training (`refused`); with `native` tests they run in the program's own process. Runs
in a worker process; standard library only.
"""

import ast
import builtins
import dataclasses
import functools
import importlib
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from jppo.rewards.rules import Verdict
from jppo.sandbox.choice import Runner, make_runner
from jppo.sandbox.launcher import TOO_LONG, Ran
from jppo.sandbox.program import FAILED, IDLE, PASSED
from jppo.sandbox.reader import Reading

STRICT, NATIVE = "strict", "native"  # reward.code.tests
SUSPICIOUS, RETRIES = "suspicious", "sandbox_retries"  # parts of a verdict, left out if 0
_BLOCK = re.compile(r"```(?:python|py)[0-9.]*[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Libraries whose names tests may use without an import, the first that has a name; and names that are seldom a task.
_LIBRARIES = (
    "math", "collections", "itertools", "functools", "decimal", "fractions", "datetime", "statistics", "random",
    "heapq", "bisect", "copy", "string", "typing", "dataclasses", "enum",
)  # fmt: skip
_ALIASES = {"np": "numpy", "npt": "numpy.testing", "pd": "pandas", "plt": "matplotlib.pyplot", "dt": "datetime",
            "nx": "networkx", "sp": "sympy"} | {name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy",
            "torch")}  # fmt: skip
_OF_NUMPY = {"allclose": "numpy", "array_equal": "numpy", "assert_allclose": "numpy.testing",
             "assert_array_equal": "numpy.testing", "assert_array_almost_equal": "numpy.testing"}  # fmt: skip
_USUAL = {"approx", "deepcopy", "defaultdict", "deque", "inf", "isclose", "isinf", "isnan", "namedtuple", "nan", "pi",
          "raises", "timedelta"}  # fmt: skip
# Names with which a program reaches into its interpreter.
_REACHING_MODULES = {
    "__main__", "_ctypes", "_posixsubprocess", "builtins", "ctypes", "faulthandler", "gc", "inspect", "mmap",
}  # fmt: skip
_REACHING = {
    "__builtins__", "__closure__", "__code__", "__globals__", "__subclasses__", "__traceback__", "_exit", "_getframe",
    "addaudithook", "ag_frame", "cr_frame", "currentframe", "exc_info", "f_back", "f_builtins", "f_globals", "f_locals",
    "get_objects", "get_referrers", "gi_frame", "setprofile", "settrace", "tb_frame", "tb_next",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests of a ground truth: input and output texts, or asserts that run after the program."""

    io: tuple[tuple[str, str], ...] = ()
    asserts: str = ""


def code(
    response: str,
    ground_truth: str,
    *,
    time_s: float,
    memory_bytes: int,
    tests_in: str = STRICT,
    runner: Runner | None = None,
) -> Verdict:
    """1 if the last ```python block of the response passes all tests; stops at the first failure.

    The truth is assert statements, or JSON: a list of {input, output}, the same as {inputs, outputs}, or a list of
    assert statements. Inputs are given on stdin; outputs are compared with stdout except white space at the ends of
    lines. A test that takes over half of `time_s` fails. If all tests together take over `time_s`, the sample is an
    error. Asserts run in a process of their own, or for `native` in the program's.
    """
    tests = read_tests(ground_truth)
    blocks = _BLOCK.findall(response)
    if not blocks:
        return Verdict(0.0, {"exact": 0.0, "answered": 0.0})
    reaching = suspicious(blocks[-1])
    run = _Counted(runner or make_runner(), memory_bytes)
    if tests.asserts and tests_in == NATIVE:
        passed = run(f"{blocks[-1]}\n{tests.asserts}", time_s=time_s / 2).status == 0
    elif tests.asserts:
        passed = _passes_asserts(blocks[-1], ground_truth, run, time_s)
    else:
        passed = _passes_io(blocks[-1], tests.io, run, time_s)
    counts = {SUSPICIOUS: float(bool(reaching)), RETRIES: float(run.retries)}
    return Verdict(float(passed), {"exact": float(passed), "answered": 1.0} | {k: v for k, v in counts.items() if v})


def read_tests(ground_truth: str) -> Tests:
    """Parses the tests of a ground truth; raises ValueError if it has none."""
    text = ground_truth.strip()
    shown = _shown(text)
    if not text.startswith(("[", "{")):
        if "assert" not in text:
            raise ValueError(f"ground_truth={shown!r} has no tests: neither JSON nor assert statements")
        return Tests(asserts=_parsed(text, shown))
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"ground_truth={shown!r} is not valid JSON: {e}") from e
    if isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows):
        return Tests(asserts=_parsed("\n".join(rows), shown))
    both = isinstance(rows, dict) and set(rows) == {"inputs", "outputs"}  # as verl's code data sets have them
    if both and all(isinstance(part, list) for part in rows.values()):
        rows = [{"input": i, "output": o} for i, o in zip(rows["inputs"], rows["outputs"], strict=True)]
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(r, dict) and isinstance(r.get("input"), str) for r in rows)
        or not all(isinstance(r.get("output"), str) for r in rows)
    ):
        raise ValueError(
            f"ground_truth={shown!r} must be a list, not empty, of {{input, output}} texts or of assert statements"
        )
    return Tests(io=tuple((row["input"], row["output"]) for row in rows))


def refused(ground_truth: str) -> str:
    """Returns why the asserts of a ground truth need `native` tests, or ''; '' also for what `read_tests` refuses."""
    try:
        tests = read_tests(ground_truth)
    except ValueError:
        return ""
    try:
        return _with_imports(tests.asserts)[1] if tests.asserts else ""
    except RecursionError:
        return "is nested too deep"


@functools.lru_cache(maxsize=256)  # a group's samples have the same tests
def _with_imports(tests: str) -> tuple[str, str]:
    """Returns asserts with imports of the library's names that they use without one, and why they are refused, or ''.

    Such a name is the program's if an assert tests it alone. A rarer one beside others could be either's.
    """
    asked = Reading(tests).asked
    origins = {name: origin for name in asked if (origin := _origin(name, tests)) is not None}
    statements = _names_of_statements(tests)
    for name, line in list(origins.items()):
        rare = name.islower() and name not in _USUAL | _OF_NUMPY.keys()
        if line.startswith("import "):
            continue
        if {name} in statements or (rare and not any(name in names and len(names) > 1 for names in statements)):
            del origins[name]  # the program's, tested by itself
        elif rare:
            return tests, f"uses {name} without an import: the tests' or the program's? add `{line}`"
    if len(origins) == len(asked):
        origins = {}
    text = "".join(f"{line}; " for line in sorted(origins.values())) + ("\n" if origins else "") + tests
    return text, Reading(text).refused()


def _names_of_statements(tests: str) -> list[set[str]]:
    """Returns the names of each statement, without builtins."""
    statements = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Assert | ast.Expr | ast.Assign)]
    names = [{inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} for node in statements]
    return [{name for name in used if not hasattr(builtins, name)} for used in names]


def _origin(name: str, tests: str) -> str | None:
    """Returns the import statement of a name of the libraries that tests use; None for others and for builtins."""
    owners = rf"(?<![\w.]){name}(?!\w)(?!\s*\.)"
    if (name in sys.stdlib_module_names or name in _ALIASES) and not re.search(owners, tests):
        return f"import {_ALIASES[name]} as {name}" if name in _ALIASES else f"import {name}"
    if hasattr(builtins, name) or name[:1] == "_":
        return None
    if name in ("approx", "raises"):
        return f"from pytest import {name}"
    if name in _OF_NUMPY:
        return f"from {_OF_NUMPY[name]} import {name}"
    called = name in _USUAL or re.search(rf"(?<![\w.]){name}\(", tests)
    for library in map(importlib.import_module, _LIBRARIES):
        there = called and name in getattr(library, "__all__", dir(library))
        if there and (name in _USUAL or callable(getattr(library, name))):
            return f"from {library.__name__} import {name}"
    return None


def _passes_asserts(program: str, ground_truth: str, run: "_Counted", time_s: float) -> bool:
    tests, why = read_tests(ground_truth).asserts, refused(ground_truth)
    tests = tests if why else _with_imports(tests)[0]
    reply = "" if why else next(iter(run(program, tests=tests, time_s=time_s / 2).replies), FAILED)
    if reply == IDLE:
        raise ValueError(f"ground_truth={_shown(ground_truth)!r} has no assert that runs; give it assert statements")
    if reply not in (PASSED, FAILED):
        raise ValueError(
            f"ground_truth={_shown(ground_truth)!r} cannot be graded across two processes: {why or reply}; leave the"
            " row out, or set reward.code.tests=native, where a program can cheat"
        )
    return reply == PASSED


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 60 else text[:60] + "..."


def _parsed(tests: str, shown: str) -> str:
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ValueError(f"ground_truth={shown!r} is neither JSON nor Python: {e or 'it is nested too deep'}") from e
    if not _asserts(tree):
        raise ValueError(f"ground_truth={shown!r} has no assert that runs; give it assert statements")
    return tests


def _asserts(tree: ast.Module) -> bool:
    """Whether a block has an assert outside of functions that it never names, or a test framework."""
    nodes = list(ast.walk(tree))
    named = {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }
    unused = [
        node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in named
    ]
    idle = {id(inner) for node in unused for inner in ast.walk(node)}
    named |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    framework = named & {"unittest", "pytest", "testing"} or any(name.startswith("assert_") for name in named)
    return bool(framework) or any(isinstance(n, ast.Assert) and id(n) not in idle for n in nodes)


class _Counted:
    """A runner that counts its retries."""

    def __init__(self, runner: Runner, memory_bytes: int):
        self._run, self.retries = functools.partial(runner, memory_bytes=memory_bytes), 0

    def __call__(self, program: str, **more: Any) -> Ran:
        ran = self._run(program, **more)
        self.retries += ran.retries
        return ran


def _passes_io(program: str, tests: Sequence[tuple[str, str]], run: _Counted, time_s: float) -> bool:
    deadline = time.monotonic() + time_s
    for given, wanted in tests:
        left = deadline - time.monotonic()
        ran = run(program, stdin=given, time_s=min(left, time_s / 2)) if left > 0 else None
        if ran is None or (ran.status is None and deadline - time.monotonic() <= 0 and left < time_s / 2):
            raise TimeoutError(f"{len(tests)} tests did not end within {time_s:g} s; raise reward.timeout_s")
        if ran.status != 0 or _lines(ran.printed) != _lines(wanted):
            return False
    return True


def program_output(program: str, *, time_s: float, memory_bytes: int, runner: Runner | None = None) -> str:
    """Returns a program's output and, if it fails, the last line of its error."""
    ran = (runner or make_runner())(program, time_s=time_s, memory_bytes=memory_bytes)
    error = ran.errors[-2000:].strip().rpartition("\n")[2]
    if ran.status is None:
        why = f"took longer than {time_s:g} s" if ran.why == TOO_LONG else ran.why
        return f"{ran.printed}error: the program {why}"
    return ran.printed if ran.status == 0 else f"{ran.printed}error: {error or f'exit code {ran.status}'}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def suspicious(program: str) -> tuple[str, ...]:
    """Returns the names by which a program reaches into its interpreter, sorted.

    They are counted, with a warning. A program can hide them, so no verdict relies on their absence.
    """
    try:
        nodes = list(ast.walk(ast.parse(program)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    reaching: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import(names=names):
                reaching |= {alias.name for alias in names if alias.name.split(".")[0] in _REACHING_MODULES}
            case ast.ImportFrom(module=module, names=names):
                reaching |= {module or ""} if (module or "").split(".")[0] in _REACHING_MODULES else set()
                reaching |= {alias.name for alias in names if alias.name in _REACHING}
            case ast.Attribute(attr=name) if name in _REACHING:
                reaching.add(name)
            case ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
                reaching.add("sys.modules")
            case ast.Name(id=name) if name in _REACHING | {"__import__"}:
                reaching.add(name)
            case ast.Constant(value=str(name)) if name in _REACHING_MODULES - {"__main__"} | _REACHING:
                reaching.add(name)
    return tuple(sorted(reaching))
