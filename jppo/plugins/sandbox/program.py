"""A program that a model wrote, and its tests: what runs in the two processes of the sandbox.

`run_as_main` is the whole of a program that reads its standard input. `answer_tests` runs a program and then the calls
of its tests, which `run_tests` runs in another process (`peer.py`): there they are Python as it is, with their expected
values, comparisons, helpers and imports. Standard library only and no import of jppo, because an HTTP sandbox service
gets these files as text.
"""

import builtins
import os
import sys
import types

TYPE_CHECKING = False  # as in typing, whose import would delay every program
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from jppo.plugins.sandbox.peer import Captured, ProgramSide, TestsSide

PASSED, FAILED, IDLE = "passed", "failed", "idle"  # idle: no assert ran, and the program was not called


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
    from jppo.plugins.sandbox.marks import ASK, GET, HAS, RAN, SAME, mark_tests
    from jppo.plugins.sandbox.peer import Unsupported
    from jppo.plugins.sandbox.reader import Reading

    reading = Reading(tests)
    names, marks = _new_module_names("__main__"), list[bool]()
    names |= {RAN: lambda: marks.append(True), ASK: side.name, GET: side.get_open, HAS: side.has, SAME: side.same}
    side.names = names
    sys.argv = ["tests.py"]
    _close_libraries(tests)
    if not side.wait():  # the program reads its descriptors while it starts, and may end
        return FAILED
    try:
        exec(compile(mark_tests(reading), "tests.py", "exec"), names)
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
