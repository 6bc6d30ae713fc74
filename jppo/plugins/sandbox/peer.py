"""The two ends of a graded program's pipe: the process of its tests, and its own.

The tests' process asks and the program's answers, with plain data (`plain.py`) and references to the program's objects,
which to the tests are handles (`handle.py`). What the tests see of an object without a call stays the same until their
next call. The program can ask for one thing alone: to call a function of the tests that it was given.
"""

import builtins
import contextlib
import functools
import importlib
import io
import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from jppo.plugins.sandbox.handle import (
    ACTS,
    LOOKS,
    Handle,
    Meta,
    Undecided,
    exception,
    fact,
    make_class,
    number_of,
    plain_base,
    shared_class,
)
from jppo.plugins.sandbox.plain import COPIES, IMMUTABLE, TYPES, Gone, Plain

_LINE_BYTES = 2**26  # of a message
_OPEN = ("__name__", "__qualname__", "__doc__", "__wrapped__", "__members__", "__enter__", "__exit__")
_SWALLOWING = ("AssertionError", "Exception", "BaseException")  # classes by whose names a program ends failures
PLAIN_METHODS = {name for kind in TYPES.values() for name in dir(kind) if name[:1] != "_"} | {"all", "any"}
# Those that judge their arguments. Tests that call one on a result mean the one of plain data.
_JUDGES = {name for name in PLAIN_METHODS if name.startswith(("is", "compare"))} | {
    "all", "any", "count", "difference", "endswith", "find", "index", "intersection", "rfind", "rindex",
    "same_quantum", "startswith", "symmetric_difference",
}  # fmt: skip


class Stopped(Exception):
    """A call of the program raised StopIteration, which would end a loop of the tests."""


class Unsupported(BaseException):
    """Tests hand the program something else than plain data, its own objects and their own functions."""


class _Side(Plain):
    def __init__(self, receives: int, sends: int):
        super().__init__()
        self._in, self._out = os.fdopen(receives, "rb"), sends
        self.objects: list[Any] = []  # what the other side may name by its place
        self._places: dict[int, int] = {}

    def export(self, value: object) -> int:
        """Numbers an object, so that the other side can name it."""
        if id(value) not in self._places:
            self._places[id(value)] = len(self.objects)
            self.objects.append(value)  # and so its id stays its own
        return self._places[id(value)]

    def request(self, op: str, *operands: object) -> Any:
        """Asks the other side for an operation, and returns or raises its result."""
        self._send({"op": op, "args": [self.encode(operand) for operand in operands]})
        while "op" in (message := self._receive()):
            self.answer(message)
        if printed := message.get("printed"):
            sys.stdout.write(str(printed))
        if "raised" in message:
            raise self.decode_error(message["raised"])
        return self.decode(message.get("value"))

    def answer(self, message: dict[str, Any]) -> None:
        """Does an operation that the other side asks for, and sends its result or error."""
        reply: dict[str, Any] = {}
        try:
            operands = [self.decode(operand) for operand in message["args"]]
            reply["value"] = self.encode(self.do(message["op"], operands))
        except Gone:
            raise
        except BaseException as e:
            reply["raised"] = self.encode_error(TypeError(str(e)) if isinstance(e, Unsupported) else e)
        if isinstance(sys.stdout, Captured):
            reply["printed"] = sys.stdout.take_text()
        self._send(reply)

    def do(self, op: str, operands: list[Any]) -> Any:
        raise NotImplementedError

    def resolve(self, sent: Any) -> Any:
        """Returns what a reference stands for on this side."""
        tag, *rest = sent
        if tag == "error":
            return self.decode_error(sent)
        if tag not in ("yours", "exception"):
            raise ValueError(tag)
        return self.objects[rest[0]] if tag == "yours" else exception(*rest)

    def encode_error(self, error: BaseException, causes: int = 4) -> Any:
        """Describes an error, with its class, arguments and up to so many causes."""
        if (place := error.__dict__.get("_place")) is not None:
            return ["yours", place]
        try:
            is_builtin = type(error).__module__ == "builtins"  # one of a file's has its name outside of `args`, too
            args = [self.encode(v) for v in (error.__reduce__()[1] if is_builtin else error.args)]
            attributes = [[str(k), self.encode(v)] for k, v in vars(error).items() if k[:1] != "_"]
            text = str(error)
        except (Gone, Unsupported):
            raise
        except BaseException:  # whatever an error of a program does when it is looked at
            args, attributes, text = [], [], ""
        cause = error.__cause__
        reason = self.encode_error(cause, causes - 1) if isinstance(cause, BaseException) and causes else None
        return ["error", self.refer(type(error)), args, attributes, text, reason, self.export(error)]

    def decode_error(self, sent: Any) -> Any:
        """Makes the error that the other side has described."""
        if sent[0] == "yours":
            return self.resolve(sent)
        _, kind, args, attributes, text, reason, place = sent
        kind = exception(*kind[1:]) if kind[0] == "exception" else self.decode(kind)
        args = [self.decode(argument) for argument in args]
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise Gone("no exception")
        try:
            error = kind(*args) if kind.__module__ == "builtins" else kind.__new__(kind, *args)
        except Exception:  # a class whose constructor takes other arguments than those it keeps in `args`
            error = kind.__new__(kind)
        if kind.__module__ != "builtins":
            error.args = tuple(args)
        error.__dict__.update({str(k): self.decode(v) for k, v in attributes}, _text=str(text), _place=int(place))
        if reason is not None:
            error.__cause__ = self.decode_error(reason)
        return error

    def _send(self, message: dict[str, Any]) -> None:
        message["changed"], message["gone"] = self.changes()
        left = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        while left:
            left = left[os.write(self._out, left) :]

    def _receive(self) -> dict[str, Any]:
        """Reads the other side's next message, a line of JSON, and applies what it says of changed objects."""
        os.set_blocking(self._in.fileno(), True)  # a program may have changed it
        line = self._in.readline(_LINE_BYTES)
        try:
            message = dict(json.loads(line))
            self.apply(message["changed"], message["gone"])
        except (ValueError, LookupError, TypeError, RecursionError) as e:
            raise Gone("no message") from e
        return message


class ProgramSide(_Side):
    """The program's end: it does what the tests ask."""

    def __init__(self, receives: int, sends: int, look_up: Callable[[str], Any]):
        super().__init__(receives, sends)
        self._look_up = look_up
        self._functions: dict[int, Any] = {}  # and iterators of the tests
        self._places_of_tests: dict[int, int] = {}

    def serve(self) -> None:
        """Answers requests until the other side ends, which waits for this to begin."""
        with contextlib.suppress(Gone):
            os.set_blocking(self._out, True)
            os.write(self._out, b"\n")
            while True:
                self.answer(self._receive())

    def do(self, op: str, operands: list[Any]) -> Any:
        """Looks up a name of the program, or does an operation on its objects."""
        return self._look_up(*operands) if op == "name" else _OPERATIONS[op](*operands)

    def refer(self, value: Any) -> Any:
        """Refers to an object of the program, with its plain data if it is of such a class."""
        if id(value) in self._places_of_tests:
            return ["yours", self._places_of_tests[id(value)]]
        if isinstance(value, BaseException):
            return self.encode_error(value)
        kind = type(value)
        if isinstance(value, type):
            return self._class(value)
        base = plain_base(kind)
        if base is None:
            return ["object", self.export(value), self.refer(kind), None]
        plain = frozenset(value) if base is frozenset else base(*base.__getnewargs__(value))
        return ["object", self.export(value), self.refer(kind), self.encode(plain)]

    def _class(self, kind: type) -> Any:
        """Refers to a class: its bases, the special methods of its objects, and its module."""
        name = str(fact(kind, "__name__"))
        if issubclass(kind, BaseException) and getattr(builtins, name, None) is kind:
            return ["exception", name]
        plain = plain_base(kind)
        bases = [base for base in fact(kind, "__bases__") if plain or not (base in _NO_BASES or plain_base(base))]
        names = {n for base in fact(kind, "__mro__")[:-1] if base not in IMMUTABLE for n in fact(base, "__dict__")}
        special = [n for n in names if n == "keys" or n[:2] == n[-2:] == "__"]
        module = str(kind.__module__)
        module = module if shared_class(module, name) is kind else ""
        return ["class", self.export(kind), name, [self.encode(base) for base in bases], special, module]

    def resolve(self, sent: Any) -> Any:
        """Returns what a reference stands for: also a name of a module, a function or an iterator of the tests."""
        tag, *rest = sent
        if tag == "name":
            return functools.reduce(getattr, rest[1].split("."), importlib.import_module(rest[0]))
        if tag not in ("function", "iterator"):
            return super().resolve(sent)
        place = rest[0]
        if place not in self._functions:
            ask = functools.partial(self.request, "call", place)
            self._functions[place] = _make_function(ask, *rest[1:]) if tag == "function" else _make_iterator(ask)
            self._places_of_tests[id(self._functions[place])] = place
        return self._functions[place]


class TestsSide(_Side):
    """The tests' end. `names`: their globals, whose functions the program may call."""

    parity = 1

    def __init__(self, receives: int, sends: int):
        super().__init__(receives, sends)
        self.names: dict[str, Any] = {}
        self.asked = 0  # requests other than to look up a name
        self.failed = False  # an assert of the tests has failed where the program may end the error
        self._classes: dict[int, Any] = {}
        self._handles: dict[int, Any] = {}
        self._looks: dict[tuple[object, ...], Any] = {}  # what was seen since the last call

    def wait(self) -> bool:
        """Returns whether the program has begun to serve; False if it has ended before."""
        return self._in.readline(_LINE_BYTES) == b"\n"

    def name(self, name: str) -> Any:
        """Returns what the program has by a name that the tests do not define."""
        try:
            return self.ask("name", name)
        except (KeyError, AttributeError):
            raise NameError(f"name {name!r} is not defined", name=name) from None

    def ask(self, op: str, *operands: object) -> Any:
        """Has the program do an operation; what tests see of an object must not change between their calls."""
        self.asked += op != "name"
        try:
            if op not in LOOKS:
                if op not in ("iter", "name", "copy", "deepcopy"):
                    self._looks.clear()
                return self.request(op, *operands)
            if self.has_changed():
                self._looks.clear()
            handle, *operands_left = operands
            look_key = op, number_of(handle), json.dumps([self.encode(value) for value in operands_left])
            return self._require_steady(look_key, self.request(op, *operands))
        except StopIteration as e:
            if op == "next":
                raise
            raise Stopped("the program raised StopIteration") from e

    def _require_steady(self, key: tuple[object, ...], seen: Any) -> Any:
        """Returns what tests see of an object, which is another value only after a call of theirs."""
        if self._looks.setdefault(key, shape := _shape(seen)) != shape:
            raise Undecided("an object of the program changes without a call")
        return seen

    def get(self, handle: Any, name: str, made: bool = False) -> Any:
        """Returns an attribute of a program's object; one that tests have not `made` has no method that judges."""
        if name.startswith("__") and name not in _OPEN:
            raise AttributeError(name)
        value = self.ask("get", handle, name)
        if name not in _JUDGES or made or not callable(value):
            return value
        if name.startswith("is") or name in ("all", "any"):
            raise AttributeError(name)
        return lambda: value()

    def get_open(self, value: Any, name: str) -> Any:
        """Returns an attribute of an object that the tests have made, also a method that judges their values."""
        is_judge = isinstance(value, (Handle, Meta)) and name in _JUDGES and not isinstance(value, IMMUTABLE)
        return self.get(value, name, made=True) if is_judge else getattr(value, name)

    def has(self, item: Any, container: Any) -> Any:
        """Whether an object that the tests have made contains an item."""
        is_handle = isinstance(container, Handle) and not isinstance(container, IMMUTABLE)
        return self.ask("contains", container, item) if is_handle else item in container

    def same(self, one: Any, other: Any) -> bool:
        """Whether two values are one object; copies of plain data do not say."""
        if one is not other and type(one) is type(other) and type(one) in COPIES:
            raise Undecided("the identity of plain data that cannot change")
        return one is other

    def items(self, handle: Any) -> Any:
        """Iterates over a program's object."""
        itself, iterator = self.ask("iter", handle)
        return handle if itself is True else self._iterate(handle, iterator)

    def _iterate(self, handle: Any, iterator: Any) -> Iterator[Any]:
        for i in itertools.count():
            try:
                item = self.request("next", iterator)
            except StopIteration:
                self._require_steady(("end", number_of(handle)), i)
                if "__len__" in getattr(type(handle), "special", ()) and self.ask("len", handle) != i:
                    raise Undecided("the length of an object is not the number of its items") from None
                return
            yield self._require_steady(("item", number_of(handle), i), item)

    def item(self, handle: Any, key: Any) -> Any:
        """Returns an item of a program's object, which for a sequence is the one of its iteration."""
        sequence = {"__len__", "__iter__"} <= type(handle).special and "keys" not in type(handle).special
        if sequence and type(key) in (int, slice):
            return list(self.items(handle))[key]
        return self.ask("getitem", handle, key)

    def do(self, op: str, operands: list[Any]) -> Any:
        """Calls a function of the tests for the program: all that it may ask for."""
        if op != "call" or len(operands) != 3 or operands[0] not in range(len(self.objects)):
            raise Gone(f"no such request: {op}")
        place, args, named = operands
        try:
            return self.objects[place](*args, **named)
        except BaseException as e:
            from_framework = type(e).__module__.startswith(("_pytest", "unittest"))
            self.failed |= (isinstance(e, AssertionError) or from_framework) and "_place" not in vars(e)
            e.__dict__["_crossed"] = True
            raise

    def refer(self, value: Any) -> Any:
        """Refers to an object of the program or a function of the tests; Unsupported for anything else."""
        if isinstance(value, Handle) or (isinstance(value, Meta) and "number" in vars(value)):
            return ["yours", number_of(value)]
        if isinstance(value, BaseException):
            return self.encode_error(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            builtin = next(above.__name__ for above in value.__mro__ if above.__module__ == "builtins")
            return ["exception", builtin, value.__name__]
        if hasattr(value, "__next__"):
            return ["iterator", self.export(value.__next__)]
        if (name := _shared_name(value)) is not None:
            return ["name", *name]
        function = getattr(value, "__func__", value)
        is_own_function = isinstance(function, types.FunctionType) and function.__globals__ is self.names
        if is_own_function or (isinstance(value, types.BuiltinMethodType) and type(value.__self__) in TYPES.values()):
            return ["function", self.export(value), value.__name__, value.__doc__, _parameters(value)]
        raise Unsupported(f"they hand the program a {type(value).__name__}")

    def resolve(self, sent: Any) -> Any:
        """Returns what a reference stands for: also a class of the program, or a handle of one of its objects."""
        tag, *rest = sent
        if tag == "exception" and rest[0] in _SWALLOWING:
            raise Gone("no value")
        if tag == "class":
            number, name, bases, special, outer = rest
            if number not in self._classes:
                above = tuple(exception(base[1]) if base[0] == "exception" else self.decode(base) for base in bases)
                self._classes[number] = make_class(self, int(number), str(name), above, special, outer)
            return self._classes[number]
        if tag != "object":
            return super().resolve(sent)
        number, kind, contents = rest
        if number not in self._handles:
            kind = self.decode(kind)
            handle = kind.__new__(kind) if contents is None else kind.__new__(kind, self.decode(contents))
            object.__setattr__(handle, "_number", int(number))
            self._handles[number] = handle
        return self._handles[number]


def _make_function(ask: Callable[..., Any], name: str, doc: Any, parameters: str) -> Any:
    """Makes the program's stand-in for a function of the tests; `parameters` are `_parameters` of that function."""
    function = eval(f"lambda {parameters}: _ask({parameters})", {"_ask": lambda *args, **named: ask(args, named)})
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _make_iterator(ask: Callable[..., Any]) -> Iterator[Any]:
    """Makes the program's stand-in for an iterator of the tests; `ask` gets its next value."""
    with contextlib.suppress(StopIteration):
        while True:
            yield ask((), {})


_OPERATIONS = LOOKS | ACTS
_NO_BASES = (object, *TYPES.values())


def _shape(value: Any, depth: int = 4) -> Any:
    """Returns the part of a value that must be equal whenever the value is read."""
    if isinstance(value, Handle) or depth == 0:
        return type(value).__name__
    if isinstance(value, dict):
        return [(_shape(k, depth - 1), _shape(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [_shape(item, depth - 1) for item in value]
    return repr(value)


def _shared_name(value: Any) -> tuple[str, str] | None:
    """Returns (module, name) of a function or class of the standard library or numpy: the program has its own."""
    owner = getattr(value, "__objclass__", value)  # of a method such as str.upper
    module, name = getattr(owner, "__module__", None) or "builtins", getattr(value, "__qualname__", None)
    if module.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"} or not isinstance(name, str):
        return None
    with contextlib.suppress(AttributeError):
        if functools.reduce(getattr, name.split("."), sys.modules.get(module)) is value:
            return module, name
    return None


def _parameters(function: Any) -> str:
    """Returns the parameters of a function as the program sees them: with their names if all must be given."""
    code = getattr(function, "__code__", None)
    if code is None or function.__defaults__ or code.co_kwonlyargcount or code.co_posonlyargcount or code.co_flags & 12:
        return "*args, **named"
    return ", ".join(code.co_varnames[hasattr(function, "__self__") : code.co_argcount])


class Captured(io.StringIO):
    """A standard output that keeps its text for the next answer."""

    def take_text(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text
