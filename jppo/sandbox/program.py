"""A program that a model wrote, and its tests: what runs in the two processes of the sandbox.

`run_as_main` is the whole of a program that reads its standard input. `answer_tests` runs a program and then the calls
of its tests, which `run_tests` runs in another process: there they are Python as it is, with their expected values,
comparisons, helpers and imports, and only the program's own names reach over (`peer.py`). Standard library only and no
import of jppo, because an HTTP sandbox service gets these files as text.
"""

import ast
import builtins
import os
import sys
import types
from collections.abc import Callable

TYPE_CHECKING = False  # as in typing, whose import would delay every program
if TYPE_CHECKING:
    from jppo.sandbox.peer import Captured, Peer

PASSED, FAILED, IDLE = "passed", "failed", "idle"  # idle: no assert ran, and the program was not called
_RAN = "assert ran"  # a name that no text of tests can have
_FROM_TESTS = (
    "abs", "all", "any", "bool", "callable", "dict", "enumerate", "float", "frozenset", "hasattr", "int",
    "isinstance", "issubclass", "len", "list", "map", "print", "range", "repr", "round", "set", "sorted",
    "str", "tuple", "type", "zip",
)  # fmt: skip


def run_as_main(text: str) -> None:
    """Runs the program's text as a new `__main__`."""
    names = _fresh("__main__")
    exec(compile(text, "program.py", "exec"), names)


def answer_tests(text: str, peer_of: Callable[[Callable[[str], object]], "Peer"], captured: "Captured") -> None:
    """Runs the program's text, and answers what its tests ask until they end."""
    names = _fresh("program")
    sys.modules["__main__"] = sys.modules["program"]  # where dataclasses and pickle look
    sys.stdout = captured

    def look_up(name: str) -> object:
        return names[name] if name in names else getattr(builtins, name)

    peer = peer_of(look_up)
    exec(compile(text, "program.py", "exec"), names)
    peer.serve()


def run_tests(tests: str, peer: "Peer") -> str:
    """Returns the verdict on the program on the other side, by a block of tests."""
    names, ran = _Names(tests, peer), []
    names[_RAN] = lambda: ran.append(True)
    main = _Main("__main__")
    main.__dict__["names"] = names
    sys.modules["__main__"] = main
    sys.argv = ["tests.py"]
    if not peer.wait():  # the program reads its descriptors while it starts, and may end
        return FAILED
    try:
        exec(compile(ast.fix_missing_locations(_Marked().visit(ast.parse(tests))), "tests.py", "exec"), names)
    except SystemExit as e:  # of unittest.main()
        if getattr(e, "from_program", False) or e.code not in (None, 0, False):
            return FAILED
    except BaseException:
        return FAILED
    if ran:
        return PASSED
    return FAILED if peer.asked else IDLE


class _Marked(ast.NodeTransformer):
    """Adds a call of _RAN where a test has held: after asserts, and after what raises or asserts where one has not."""

    def _after(self, node: ast.stmt) -> tuple[ast.AST, ast.Expr]:
        return self.generic_visit(node), ast.Expr(ast.Call(ast.Name(_RAN, ast.Load()), [], []))

    visit_Assert = _after

    def _if_named(self, node: ast.stmt) -> ast.AST | tuple[ast.AST, ast.Expr]:
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
        named = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls}
        tests = any(name.startswith("assert") or name in ("raises", "fail") for name in named)
        return self._after(node) if tests else self.generic_visit(node)

    visit_Expr = visit_With = visit_AsyncWith = _if_named

    def visit_If(self, node: ast.If) -> ast.AST | tuple[ast.AST, ast.Expr]:
        return self._after(node) if any(map(_fails, ast.walk(node))) else self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> ast.AST | tuple[ast.AST, ast.Expr]:
        if not any(isinstance(inner, (ast.Assert, ast.Raise)) for inner in ast.walk(node)):
            return self.generic_visit(node)
        marked = self._after(node)
        for handler in node.handlers:  # it may return
            handler.body.insert(0, marked[1])
        return marked


def _fails(node: ast.AST) -> bool:
    never = isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and not node.test.value
    return never or isinstance(node, ast.Raise)


def needed(tests: str) -> tuple[set[str], set[str]]:
    """Returns the names that tests take from the program, and the modules that they use without an import.

    A builtin belongs to the tests unless no other name of theirs can be the program's; then one that they call or hand
    over is, and of several those that tests seldom use by themselves. A module's name belongs to them where they use it
    for its attributes alone.
    """
    nodes = list(ast.walk(ast.parse(tests)))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    own |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    aliases = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    own |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - own
    held = [node.value for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and all(node is not owner for owner in held)}
    modules = {owner.id for owner in held} & used - bare & sys.stdlib_module_names
    asked = {name for name in used if not hasattr(builtins, name)} - modules
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = {part.id for call in calls for part in (call.func, *call.args) if isinstance(part, ast.Name)} & used
    called -= {name for name in called if isinstance(getattr(builtins, name, None), type) and name[:1].isupper()}
    return asked or called - set(_FROM_TESTS) or called, modules


class _Names(dict[str, object]):
    """The globals of the tests: their own, and what the program has for the names that they do not define."""

    def __init__(self, tests: str, peer: "Peer"):
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._peer = peer
        self._asked, modules = needed(tests)
        for name in modules:
            self[name] = __import__(name)

    def __missing__(self, name: str) -> object:
        if name not in self._asked:
            raise KeyError(name)  # a builtin, or an error
        try:
            definition = self._peer.ask("name", name)
        except (KeyError, AttributeError):
            raise KeyError(name) from None
        if isinstance(definition, type) and name[:1].isupper():  # a function of the tests may be a class of a cheat
            self._peer.values.named.add(definition)
        return definition


class _Main(types.ModuleType):
    """The module of the tests, as unittest looks for it."""

    def __getattr__(self, name: str) -> object:
        try:
            return self.__dict__["names"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __dir__(self) -> list[str]:
        return list(self.__dict__["names"])


def _fresh(name: str) -> dict[str, object]:
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
    left = (line + "\n").encode()
    while left:
        left = left[os.write(fd, left) :]
