"""The rule `code`: runs the program in a response against the row's tests, in a sandbox.

The program's process has neither expected values nor a verdict. It receives the input of a test, whose output is
compared here, or the calls of asserts, which run in another process (`program.py`). Asserts that this
cannot grade are refused before training (`refusal_reason`); with `native` tests they run in the program's own process.
Runs in a worker process; standard library only.
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

from jppo.plugins.sandbox.choice import Runner, make_runner
from jppo.plugins.sandbox.launcher import TOO_LONG, Ran
from jppo.plugins.sandbox.program import FAILED, IDLE, PASSED
from jppo.plugins.sandbox.reader import Reading
from jppo.rewards.rules import Verdict

STRICT, NATIVE = "strict", "native"  # reward.code.tests
SUSPICIOUS, RETRIES = "suspicious", "sandbox_retries"  # parts of a verdict, left out if 0
_BLOCK = re.compile(r"```(?:python|py)[0-9.]*[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Libraries whose names tests may use without an import; the first that has a name counts.
_LIBRARIES = (
    "math", "collections", "itertools", "functools", "decimal", "fractions", "datetime", "statistics", "random",
    "heapq", "bisect", "copy", "string", "typing", "dataclasses", "enum",
)  # fmt: skip
_ALIASES = {"np": "numpy", "npt": "numpy.testing", "pd": "pandas", "plt": "matplotlib.pyplot", "dt": "datetime",
            "nx": "networkx", "sp": "sympy"} | {name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy",
            "torch")}  # fmt: skip
_NUMPY_NAMES = {"allclose": "numpy", "array_equal": "numpy", "assert_allclose": "numpy.testing",
                "assert_array_equal": "numpy.testing", "assert_array_almost_equal": "numpy.testing"}  # fmt: skip
# Names that a program seldom defines: imported also where the tests do not call them, as pi.
_COMMON_NAMES = {"approx", "deepcopy", "defaultdict", "deque", "inf", "isclose", "isinf", "isnan", "namedtuple", "nan",
                 "pi", "raises", "timedelta"}  # fmt: skip
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
    reaching, runs = suspicious(blocks[-1]), list[Ran]()
    runner = runner or make_runner()

    def run(program: str, **options: Any) -> Ran:
        runs.append(runner(program, memory_bytes=memory_bytes, **options))
        return runs[-1]

    if tests.asserts and tests_in == NATIVE:
        passed = run(f"{blocks[-1]}\n{tests.asserts}", time_s=time_s / 2).status == 0
    elif tests.asserts:
        passed = _passes_asserts(blocks[-1], ground_truth, run, time_s)
    else:
        passed = _passes_io(blocks[-1], tests.io, run, time_s)
    counts = {SUSPICIOUS: float(bool(reaching)), RETRIES: float(sum(ran.retries for ran in runs))}
    return Verdict(float(passed), {"exact": float(passed), "answered": 1.0} | {k: v for k, v in counts.items() if v})


def read_tests(ground_truth: str) -> Tests:
    """Parses the tests of a ground truth; raises ValueError if it has none."""
    text = ground_truth.strip()
    excerpt = _shorten(text)
    if not text.startswith(("[", "{")):
        if "assert" not in text:
            raise ValueError(f"ground_truth={excerpt!r} has no tests: neither JSON nor assert statements")
        return Tests(asserts=_require_asserts(text, excerpt))
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"ground_truth={excerpt!r} is not valid JSON: {e}") from e
    if isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows):
        return Tests(asserts=_require_asserts("\n".join(rows), excerpt))
    as_two_lists = isinstance(rows, dict) and set(rows) == {"inputs", "outputs"}  # as verl's code data sets have them
    if as_two_lists and all(isinstance(part, list) for part in rows.values()):
        rows = [{"input": i, "output": o} for i, o in zip(rows["inputs"], rows["outputs"], strict=True)]
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(entry, dict) and isinstance(entry.get("input"), str) for entry in rows)
        or not all(isinstance(entry.get("output"), str) for entry in rows)
    ):
        raise ValueError(
            f"ground_truth={excerpt!r} must be a list, not empty, of {{input, output}} texts or of assert statements"
        )
    return Tests(io=tuple((row["input"], row["output"]) for row in rows))


def refusal_reason(ground_truth: str) -> str:
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
    """Adds imports of library names that asserts use without one; the second result is why they are refused, or ''.

    Such a name is the program's if an assert tests it alone. A rarer one beside others could be either's.
    """
    unbound = Reading(tests).asked
    imports = {name: import_line for name in unbound if (import_line := _import_statement(name, tests)) is not None}
    statements = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Assert | ast.Expr | ast.Assign)]
    names_used = [
        {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and not hasattr(builtins, inner.id)}
        for node in statements
    ]
    for name, statement in list(imports.items()):
        rare = name.islower() and name not in _COMMON_NAMES | _NUMPY_NAMES.keys()
        if statement.startswith("import "):
            continue
        if {name} in names_used or (rare and not any(name in used and len(used) > 1 for used in names_used)):
            del imports[name]  # the program's, tested by itself
        elif rare:
            return tests, f"uses {name} without an import: the tests' or the program's? add `{statement}`"
    if len(imports) == len(unbound):
        imports = {}
    text = "".join(f"{line}; " for line in sorted(imports.values())) + ("\n" if imports else "") + tests
    return text, Reading(text).refused()


def _import_statement(name: str, tests: str) -> str | None:
    """Returns the import statement of a library name that tests use; None for other names and for builtins."""
    used_without_dot = rf"(?<![\w.]){name}(?!\w)(?!\s*\.)"  # a module if it is only ever NAME.something
    if (name in sys.stdlib_module_names or name in _ALIASES) and not re.search(used_without_dot, tests):
        return f"import {_ALIASES[name]} as {name}" if name in _ALIASES else f"import {name}"
    if hasattr(builtins, name) or name[:1] == "_":
        return None
    if name in ("approx", "raises"):
        return f"from pytest import {name}"
    if name in _NUMPY_NAMES:
        return f"from {_NUMPY_NAMES[name]} import {name}"
    may_be_imported = name in _COMMON_NAMES or re.search(rf"(?<![\w.]){name}\(", tests)
    for library in map(importlib.import_module, _LIBRARIES):
        is_exported = may_be_imported and name in getattr(library, "__all__", dir(library))
        if is_exported and (name in _COMMON_NAMES or callable(getattr(library, name))):
            return f"from {library.__name__} import {name}"
    return None


def _passes_asserts(program: str, ground_truth: str, run: Runner, time_s: float) -> bool:
    """Runs the program and its asserts in two processes; ValueError if the asserts cannot be graded that way."""
    tests, reason = read_tests(ground_truth).asserts, refusal_reason(ground_truth)
    tests = tests if reason else _with_imports(tests)[0]
    reply = "" if reason else next(iter(run(program, tests=tests, time_s=time_s / 2).replies), FAILED)
    if reply == IDLE:
        raise ValueError(f"ground_truth={_shorten(ground_truth)!r} has no assert that runs; give it assert statements")
    if reply not in (PASSED, FAILED):
        raise ValueError(
            f"ground_truth={_shorten(ground_truth)!r} cannot be graded across two processes: {reason or reply}; leave"
            " the row out, or set reward.code.tests=native, where a program can cheat"
        )
    return reply == PASSED


def _shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 60 else text[:60] + "..."


def _require_asserts(tests: str, excerpt: str) -> str:
    """Returns the tests unchanged; ValueError unless they are Python with an assert that runs."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ValueError(f"ground_truth={excerpt!r} is neither JSON nor Python: {e or 'it is nested too deep'}") from e
    if not _has_asserts(tree):
        raise ValueError(f"ground_truth={excerpt!r} has no assert that runs; give it assert statements")
    return tests


def _has_asserts(tree: ast.Module) -> bool:
    """Whether a block has an assert outside of functions that it never calls, or uses a test framework."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }
    unused = [
        node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in names
    ]
    idle_nodes = {id(inner) for node in unused for inner in ast.walk(node)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    framework = names & {"unittest", "pytest", "testing"} or any(name.startswith("assert_") for name in names)
    return bool(framework) or any(isinstance(n, ast.Assert) and id(n) not in idle_nodes for n in nodes)


def _passes_io(program: str, tests: Sequence[tuple[str, str]], run: Runner, time_s: float) -> bool:
    """Whether the program prints the expected output for each test's input; TimeoutError when `time_s` is over."""
    deadline = time.monotonic() + time_s
    for input_text, expected in tests:
        left_s = deadline - time.monotonic()
        result = run(program, stdin=input_text, time_s=min(left_s, time_s / 2)) if left_s > 0 else None
        if result is None or (result.status is None and deadline - time.monotonic() <= 0 and left_s < time_s / 2):
            raise TimeoutError(f"{len(tests)} tests did not end within {time_s:g} s; raise reward.timeout_s")
        if result.status != 0 or _stripped_lines(result.printed) != _stripped_lines(expected):
            return False
    return True


def program_output(program: str, *, time_s: float, memory_bytes: int, runner: Runner | None = None) -> str:
    """Runs a program and returns its output and, if it fails, the last line of its error."""
    result = (runner or make_runner())(program, time_s=time_s, memory_bytes=memory_bytes)
    error = result.errors[-2000:].strip().rpartition("\n")[2]
    if result.status is None:
        reason = f"took longer than {time_s:g} s" if result.why == TOO_LONG else result.why
        return f"{result.printed}error: the program {reason}"
    return result.printed if result.status == 0 else f"{result.printed}error: {error or f'exit code {result.status}'}"


def _stripped_lines(text: str) -> list[str]:
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
