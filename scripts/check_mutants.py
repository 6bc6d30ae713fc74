"""Mutation check: do the tests of a room catch faults in it? scripts/check_mutants.py --mutants=200 --seed=7

Draws one-token faults (signs, bounds, masks, axes, off-by-one, swapped branches) from all of `jppo/`, writes each into
a copy of the checkout, and runs there the quick tests of the room that execute the changed line, quickest first, then
those of test_MODULE.py, until one fails. Which tests execute which lines is measured first, with `coverage`, over the
whole quick suite (half an hour on two cores), and kept in --covered for the next time. A line that no test executes
itself, since it runs at the import or in another process (a server's, a sandbox's), is given the room's files that name
its module and the tests that execute other lines of it; a module of no room, all tests. Each run is a fork of a process
that has imported the dependencies, and all share a cache of compiled programs. Prints a line a mutant, then the share
that was caught by room, and those that live. --again FILE tries those of an earlier output that lived. --json FILE
keeps which test catches each mutant first, and the seconds of tests that execute no line of their own and were never
first though they were run: these cost time and catch nothing alone. Exit code 1 below --at-least.
"""

import argparse
import ast
import collections
import dataclasses
import importlib
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import coverage
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.FloorDiv: "*"}
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
CALLED = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "any": "all", "all": "any"}
CALLED |= {"sum": "mean", "mean": "sum", "zeros_like": "ones_like", "ones_like": "zeros_like", "exp": "expm1"}
# Python 3.11 loops in a traced thread to which another sent an exception.
UNTRACEABLE = "tests/rollout/test_fleet.py::"
UNTRACEABLE += "test_attached_servers_are_resumed_after_a_stop_in_a_publish_once_they_have_loaded"
NOT_DRAWN = ("configs", "__main__.py")  # recipes; a list of commands
# Imported once, before the forks; neither jppo nor anything that starts XLA.
IMPORTED = (
    "numpy",
    "jax",
    "jax.numpy",
    "flax.linen",
    "optax",
    "chex",
    "orbax.checkpoint",
    "transformers",
    "hypothesis",
)
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.Import, ast.ImportFrom)
UNSEEN = ("strict", "flush")  # arguments that change nothing in a right program


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed expression."""

    path: pathlib.Path  # relative to the checkout
    line: int
    start: int  # bytes of the source
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def nodes(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions that compute: without annotations, decorators, errors and docstrings."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg in UNSEEN:
                continue
            if isinstance(child, ast.AST) and not isinstance(child, LEFT_OUT):
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    continue
                if isinstance(child, ast.expr):
                    yield child
                yield from nodes(child)


def changed(node: ast.expr) -> Iterator[str]:
    """Yields the faults of one expression, as source."""
    text = ast.unparse
    match node:
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            yield f"(({text(left)}) {BINARY[type(op)]} ({text(right)}))"
        case ast.Compare(left, [op], [right]) if type(op) in COMPARED:
            yield f"(({text(left)}) {COMPARED[type(op)]} ({text(right)}))"
        case ast.UnaryOp(ast.USub() | ast.Invert() | ast.Not(), operand):
            yield f"({text(operand)})"
        case ast.BoolOp(op, values):
            yield f"({(' or ' if isinstance(op, ast.And) else ' and ').join(f'({text(v)})' for v in values)})"
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value)):
            yield f"({value} + 1)"
        case ast.Constant(float(value)):
            yield f"({value} * 2 + 0.5)"
        case ast.Call(ast.Attribute(owner, name) as function, arguments, keywords):
            if name in CALLED:
                mutated = ast.Call(ast.Attribute(owner, CALLED[name], function.ctx), arguments, keywords)
                yield text(ast.fix_missing_locations(mutated))
            if name == "where" and len(arguments) == 3:
                condition, yes, no = arguments
                yield text(ast.fix_missing_locations(ast.Call(function, [condition, no, yes], keywords)))
            for keyword in keywords:
                if keyword.arg == "axis" and isinstance(keyword.value, ast.Constant | ast.UnaryOp):
                    other = "0" if text(keyword.value) in ("1", "-1") else "-1"
                    yield text(node).replace(f"axis={text(keyword.value)}", f"axis={other}")


def mutants(path: pathlib.Path) -> Iterator[Mutant]:
    """Yields all faults of a module."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in nodes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for after in changed(node):
            yield Mutant(path, node.lineno, start, end, source[start:end].decode(), after)


def room(path: pathlib.Path) -> str:
    """Returns the room of a module: its folder in jppo/, or its own name for a command."""
    return path.parts[1] if len(path.parts) > 2 else path.stem


@dataclasses.dataclass(frozen=True)
class Covered:
    """What the quick tests execute: by module and line the tests' numbers; the tests' names and seconds."""

    tests: list[str]
    seconds: list[float]
    lines: dict[str, dict[str, list[int]]]

    def choose(self, mutant: Mutant, budget_s: float) -> list[str]:
        """Returns tests of the mutant's room that execute it, quickest first, up to budget_s together."""
        own = room_files(room(mutant.path)) or {test.split("::")[0] for test in self.tests}
        lines = self.lines.get(str(mutant.path), {})
        last = mutant.line + mutant.before.count("\n")
        numbers = {n for line in range(mutant.line, last + 1) for n in lines.get(str(line), [])}
        named = named_in(own, mutant.path)
        if chosen := self._quickest(numbers, own, budget_s):
            return [*chosen, *(file for file in named if file.endswith(f"/test_{mutant.path.stem}.py"))]
        others = {n for tests in lines.values() for n in tests} or set(range(len(self.tests)))
        return [*named, *self._quickest(others, own - {*named}, budget_s)]

    def with_own_lines(self) -> set[str]:
        """Returns the tests that execute a line which no other test executes."""
        executed = (numbers for lines in self.lines.values() for numbers in lines.values())
        return {self.tests[numbers[0]] for numbers in executed if len(numbers) == 1}

    def _quickest(self, numbers: set[int], own: set[str], budget_s: float) -> list[str]:
        numbers = {n for n in numbers if self.tests[n].split("::")[0] in own}
        chosen, spent = [], 0.0
        for n in sorted(numbers, key=lambda n: self.seconds[n]):
            spent += self.seconds[n]
            if chosen and spent > budget_s:
                break
            chosen.append(self.tests[n])
        return chosen


def room_files(name: str) -> set[str]:
    """Returns the test files of a room: its folder in tests/, and whole-run tests that import from it."""
    imports = re.compile(rf"jppo\.{name}\b|from jppo import .*\b{name}\b|jppo {name}\b")
    files = set((ROOT / "tests" / name).rglob("test_*.py"))
    files |= {path for path in (ROOT / "tests").glob("test_*.py") if imports.search(path.read_text())}
    return {str(path.relative_to(ROOT)) for path in files}


def named_in(files: set[str], module: pathlib.Path) -> list[str]:
    """Returns the files that name a module, test_MODULE.py first."""
    name = module.parent.name if module.stem == "__init__" else module.stem
    matching = [file for file in files if re.search(rf"\b{name}\b", (ROOT / file).read_text())]
    return sorted(matching, key=lambda file: (not file.endswith(f"/test_{name}.py"), file))


def measure(kept: pathlib.Path, jobs: int) -> None:
    """Runs the quick tests once under coverage and keeps which test executes which line."""
    with tempfile.TemporaryDirectory() as folder:
        data, times = pathlib.Path(folder) / "coverage", pathlib.Path(folder) / "times.xml"
        options = [
            "-n",
            str(jobs),
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
        ]
        options += ["--cov=jppo", "--cov-context=test", "--cov-report=", f"--junitxml={times}", "--timeout=1800"]
        options += ["--deselect", UNTRACEABLE]
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=ROOT, env=os.environ | {"COVERAGE_FILE": str(data)}
        )
        if not times.exists() or not data.exists():
            raise SystemExit(f"error: pytest ended with {ended.returncode} and measured nothing")
        took = {
            (case.get("classname"), case.get("name")): float(case.get("time") or 0)
            for case in ElementTree.parse(times).iter("testcase")
        }
        measured = coverage.CoverageData(str(data))
        measured.read()
        numbers: dict[str, int] = {}
        lines: dict[str, dict[str, list[int]]] = {}
        for file in sorted(measured.measured_files()):
            by_line = lines.setdefault(str(pathlib.Path(file).relative_to(ROOT)), {})
            for line, contexts in measured.contexts_by_lineno(file).items():
                names = sorted({context.rpartition("|")[0] for context in contexts if context})
                by_line[str(line)] = [numbers.setdefault(name, len(numbers)) for name in names]
    seconds = []
    for name in numbers:
        file, *classes, test = name.split("::")
        where = ".".join([file.removesuffix(".py").replace("/", "."), *classes])
        seconds.append(took.get((where, test), 60.0))
    kept.write_text(json.dumps({"tests": list(numbers), "seconds": seconds, "lines": lines}))


class InOrder:
    """A plugin that runs tests in the order in which they are named, whatever conftest.py and fixtures prefer."""

    def __init__(self, tests: list[str]) -> None:
        self.places = {test: i for i, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.places.get(item.nodeid, self.places.get(item.nodeid.split("::")[0], -1)))


def run_tests(checkout: pathlib.Path, tests: list[str], log: pathlib.Path) -> None:
    """Runs the tests of a copy until one fails and exits as pytest does; for a forked process."""
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    code = int(
        pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *tests], plugins=[InOrder(tests)])
    )
    sys.stdout.flush()
    os._exit(code)


def catches(checkout: pathlib.Path, tests: list[str], timeout_s: float) -> tuple[bool, str]:
    """Whether a test fails, and which; tests that run into the timeout count as failed."""
    log = checkout.parent / "log"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(checkout, tests, log))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        return True, "timeout"
    text = log.read_text(errors="replace")
    if process.exitcode not in (0, 1, 2, 4):  # 4: a conftest.py that no longer imports
        if process.exitcode < 0:
            return True, f"signal {-process.exitcode}"
        raise SystemExit(f"error: pytest ended with {process.exitcode}: {text[-500:]}")
    by = [line.split(" - ")[0].split(" ", 1)[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return process.exitcode != 0, by[0] if by else ""


def copy(folder: pathlib.Path) -> pathlib.Path:
    """Returns a copy of the checkout."""
    checkout = folder / "checkout"
    for name in ("jppo", "tests", "configs", "scripts", "examples", "benchmarks", "docs", "colab"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, checkout)
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return checkout


def work(drawn: list[Mutant], covered: Covered, args: argparse.Namespace, done: multiprocessing.SimpleQueue) -> None:
    """Tries mutants one after another in a separate copy; puts (mutant, whether caught, its record)."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = copy(pathlib.Path(folder))
        for mutant in drawn:
            began, target = time.monotonic(), checkout / mutant.path
            source, tests = target.read_bytes(), covered.choose(mutant, args.budget_s)
            target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
            caught, by = catches(checkout, tests, args.timeout_s) if tests else (False, "no test of the room")
            target.write_bytes(source)
            record = dict(mutant=str(mutant), caught=caught, by=by, tests=tests, seconds=time.monotonic() - began)
            done.put((mutant, caught, record))


def first_catches(records: list[dict[str, Any]], covered: Covered) -> dict[str, Any]:
    """Returns how often each test was the first to catch a mutant, and the seconds of those that catch nothing alone.

    Those were run against a mutant, were never the first, and execute no line of their own.
    """
    first = collections.Counter(record["by"] for record in records if record["caught"])
    run = {test for record in records for test in run_until(record["tests"], record["by"])}
    seconds = dict(zip(covered.tests, covered.seconds, strict=True))
    alone = sorted((run & seconds.keys()) - first.keys() - covered.with_own_lines(), key=lambda test: -seconds[test])
    return {"first": dict(first.most_common()), "never_first": {test: seconds[test] for test in alone}}


def run_until(tests: list[str], by: str) -> list[str]:
    """Returns the tests that were run, up to the one that failed."""
    return tests[: tests.index(by) + 1] if by in tests else tests


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200, help="how many are drawn (default 200)")
    parser.add_argument("--seed", type=int, default=7, help="of the draw (default 7)")
    parser.add_argument("--at-least", type=float, default=0.9, help="share that must be caught (default 0.9)")
    parser.add_argument("--only", default="", help="only modules whose path contains this")
    parser.add_argument("--covered", type=pathlib.Path, default=ROOT / ".covered.json", help="which test executes what")
    parser.add_argument("--again", type=pathlib.Path, help="an output: only its mutants that lived")
    parser.add_argument("--json", type=pathlib.Path, help="written: which test catches each mutant first")
    parser.add_argument("--budget_s", type=float, default=120, help="seconds of tests for one mutant (default 120)")
    parser.add_argument("--timeout_s", type=float, default=600, help="where a mutant counts as caught (default 600)")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once (default 2)")
    args = parser.parse_args()
    if not args.covered.exists():
        measure(args.covered, args.jobs)
    covered = Covered(**json.loads(args.covered.read_text()))
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "jppo").rglob("*.py"))]
    paths = [path for path in paths if path.parts[1] not in NOT_DRAWN and args.only in str(path)]
    every = [mutant for path in paths for mutant in mutants(path)]
    drawn = random.Random(args.seed).sample(every, min(args.mutants, len(every)))
    if args.again is not None:
        lived = set(re.findall(r"^lives: (.*)$", args.again.read_text(), re.M))
        drawn = [mutant for mutant in drawn if str(mutant) in lived]
    for name in IMPORTED:
        importlib.import_module(name)
    done, alive = multiprocessing.SimpleQueue(), []
    records: list[dict[str, Any]] = []
    rooms: dict[str, collections.Counter[bool]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as programs:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = programs  # one for all mutants
        fork = multiprocessing.get_context("fork")
        shares = [drawn[job :: args.jobs] for job in range(args.jobs)]
        workers = [fork.Process(target=work, args=(share, covered, args, done)) for share in shares]
        for worker in workers:
            worker.start()
        for i in range(len(drawn)):
            mutant, caught, record = done.get()
            records.append(record)
            rooms[room(mutant.path)][caught] += 1
            alive += [] if caught else [mutant]
            how, by = "caught" if caught else "LIVES", record["by"] or len(record["tests"])
            print(f"{i + 1}/{len(drawn)} {how} {record['seconds']:.0f} s {mutant} {by}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"mutants": records, **first_catches(records, covered)}, indent=1))
    share = 1 - len(alive) / max(len(drawn), 1)
    for name, counts in sorted(rooms.items()):
        print(f"{name}: {counts[True]} of {counts.total()}")
    counted = f"{len(drawn) - len(alive)} of {len(drawn)} mutants caught ({share:.0%})"
    print(f"{counted}, drawn from {len(every)} by seed {args.seed}")
    print("\n".join(f"lives: {mutant}" for mutant in alive))
    sys.exit(share < args.at_least)


if __name__ == "__main__":
    main()
