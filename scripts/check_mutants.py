"""Mutation check: are faults in the mathematics caught by its tests? scripts/check_mutants.py --mutants=100 --seed=0

Draws one-token faults (signs, bounds, masks, axes, off-by-one, swapped branches) from `jppo/algorithms/` and
`jppo/learner/`, writes each into a copy of the checkout, and runs tests/algorithms and tests/learner there until one
fails. Each run is a fork of a process that has imported the dependencies, and all share a cache of compiled programs.
Prints a line a mutant, then the share that was caught and those that live. Exit code 1 below --at-least.
"""

import argparse
import ast
import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("algorithms", "learner")
BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.FloorDiv: "*"}
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
CALLED = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "any": "all", "all": "any"}
CALLED |= {"sum": "mean", "mean": "sum", "zeros_like": "ones_like", "ones_like": "zeros_like", "exp": "expm1"}
SLOW = {"test_compilations", "test_invariance", "test_offload", "test_optim", "test_prefix", "test_properties"}
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


def stages(checkout: pathlib.Path, mutant: Mutant) -> list[list[str]]:
    """Returns test files by session: the module's own, quick ones of its package, the rest of both packages."""
    package, name = mutant.path.parts[1], mutant.path.stem
    found: list[list[str]] = [[], [], []]
    for room in (package, *(other for other in PACKAGES if other != package)):
        for file in sorted((checkout / "tests" / room).glob("test_*.py")):
            place = 0 if file.stem == f"test_{name}" else 2 if file.stem in SLOW or room != package else 1
            found[place].append(str(file.relative_to(checkout)))
    return [files for files in found if files]


def run_tests(checkout: pathlib.Path, sessions: list[list[str]], log: pathlib.Path) -> None:
    """Runs the tests of a copy until one fails and exits as pytest does; for a forked process."""
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    options = ["-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    code = 0
    for files in sessions:
        code = code or int(pytest.main([*options, *files]))
    sys.stdout.flush()
    os._exit(code)


def catches(checkout: pathlib.Path, sessions: list[list[str]], timeout_s: float) -> tuple[bool, str]:
    """Whether a test fails, and which; tests that run into the timeout count as failed."""
    log = checkout.parent / "log"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(checkout, sessions, log))
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
    by = [line.split(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return process.exitcode != 0, by[0] if by else ""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=100, help="how many are drawn (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--at-least", type=float, default=0.95, help="share that must be caught (default 0.95)")
    parser.add_argument("--only", default="", help="only modules whose path contains this")
    parser.add_argument("--timeout_s", type=float, default=900, help="seconds of tests for one mutant (default 900)")
    args = parser.parse_args()
    files = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / "jppo" / package).glob("*.py"))]
    every = [one for path in files if args.only in str(path) for one in mutants(path)]
    drawn = random.Random(args.seed).sample(every, min(args.mutants, len(every)))
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder) / "checkout"
        for name in ("jppo", "tests", "configs", "scripts", "examples", "benchmarks", "docs"):
            if (ROOT / name).exists():
                shutil.copytree(ROOT / name, checkout / name, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", checkout)
        if (ROOT.parent / "shared").exists():
            (pathlib.Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(folder) / "programs")  # one for all mutants
        for name in IMPORTED:
            importlib.import_module(name)
        for i, mutant in enumerate(drawn):
            began, target = time.monotonic(), checkout / mutant.path
            source = target.read_bytes()
            target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
            caught, by = catches(checkout, stages(checkout, mutant), args.timeout_s)
            target.write_bytes(source)
            alive += [] if caught else [mutant]
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{i + 1}/{len(drawn)} {'caught' if caught else 'LIVES'} {took} {mutant} {by}".rstrip(), flush=True)
    share = 1 - len(alive) / max(len(drawn), 1)
    counted = f"{len(drawn) - len(alive)} of {len(drawn)} mutants caught ({share:.0%})"
    print(f"{counted}, drawn from {len(every)} by seed {args.seed}")
    print("\n".join(f"lives: {mutant}" for mutant in alive))
    sys.exit(share < args.at_least)


if __name__ == "__main__":
    main()
