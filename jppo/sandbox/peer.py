"""The two ends of a graded program's pipe: the process of its tests, and its own.

The tests' process asks and the program's answers, with plain data (`plain.py`) and references to the program's objects.
To the tests an object is a `Handle`: it has the methods and attributes that the program's object has, whose results are
plain data or handles, and it never takes part in a comparison. What the tests see of it without a call stays the same
until their next call. The program can ask for one thing alone: to call a function of the tests that it was given.
"""

import builtins
import contextlib
import copy
import functools
import importlib
import io
import itertools
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from jppo.sandbox.plain import COPIED, IMMUTABLE, MUTABLE, TYPES, Gone, Plain

_LINE_BYTES = 2**26  # of a message
_UNARY = {
    "bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index, "abs": abs,
    "neg": operator.neg, "pos": operator.pos, "invert": operator.invert, "len": len, "str": str, "repr": repr,
    "round": round, "format": format, "getitem": operator.getitem, "missing": operator.getitem, "get": getattr,
}  # fmt: skip
_LOOKS = {**_UNARY, "contains": operator.contains}  # operations with the same result between two calls
_BOTH = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
_CHANGES: dict[str, Any] = {
    "set": setattr, "del": delattr, "setitem": operator.setitem, "delitem": operator.delitem, "iter": iter,
    "next": next, "copy": copy.copy, "deepcopy": copy.deepcopy,
}  # fmt: skip
_OTHERS = ("contains", "call", "iter", "next", "reversed", "setitem", "delitem", "enter", "exit")
_SPECIAL = ("keys", "__eq__", *(f"__{op}__" for op in (*_UNARY, *_OTHERS)))
_OPEN = ("__name__", "__qualname__", "__doc__", "__wrapped__", "__members__", "__enter__", "__exit__")
_CHANGING = {
    "append", "appendleft", "extend", "insert", "remove", "pop", "popleft", "popitem", "add", "update", "discard",
    "clear", "sort", "reverse", "setdefault",
}  # fmt: skip
# Classes of libraries that the program's objects and errors have in the tests, for isinstance and except.
_SHARED = {
    "dataclasses": {"FrozenInstanceError"}, "decimal": {"DecimalException", "DivisionByZero", "InvalidOperation"},
    "json.decoder": {"JSONDecodeError"}, "numpy.linalg": {"LinAlgError"}, "re": {"Match", "Pattern", "error"},
    "statistics": {"StatisticsError"},
}  # fmt: skip
_OF_PYTHON = {kind.__name__: kind for kind in (types.GeneratorType, types.FunctionType, types.BuiltinFunctionType)}
_OF_FILES = (OSError, FileNotFoundError, FileExistsError, PermissionError)  # whose arguments lack the file's name
_SWALLOWING = ("AssertionError", "Exception", "BaseException")  # classes by whose names a program ends failures
PLAIN_METHODS = {name for kind in TYPES.values() for name in dir(kind) if name[:1] != "_"} | {"all", "any"}
# Those that judge their arguments. Tests that call one on a result mean the one of plain data.
_JUDGES = {name for name in PLAIN_METHODS if name.startswith(("is", "compare"))} | {
    "all", "any", "count", "difference", "endswith", "find", "index", "intersection", "rfind", "rindex",
    "same_quantum", "startswith", "symmetric_difference",
}  # fmt: skip


class _Absent:
    """An argument whose default the tests have."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


class Undecided(BaseException):
    """Tests ask of an object of the program what it alone could say, and what decides them; they have failed."""


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
        if id(value) not in self._places:
            self._places[id(value)] = len(self.objects)
            self.objects.append(value)  # and so its id stays its own
        return self._places[id(value)]

    def request(self, op: str, *operands: object) -> Any:
        """Does an operation on the other side, and returns or raises what it does."""
        self._send({"op": op, "args": [self.encode(operand) for operand in operands]})
        while "op" in (message := self._receive()):
            self.answer(message)
        if printed := message.get("printed"):
            sys.stdout.write(str(printed))
        if "raised" in message:
            raise self.decode_error(message["raised"])
        return self.decode(message.get("value"))

    def answer(self, message: dict[str, Any]) -> None:
        reply: dict[str, Any] = {}
        try:
            operands = [self.decode(operand) for operand in message["args"]]
            reply["value"] = self.encode(self.do(message["op"], operands))
        except Gone:
            raise
        except BaseException as e:
            reply["raised"] = self.encode_error(TypeError(str(e)) if isinstance(e, Unsupported) else e)
        if isinstance(sys.stdout, Captured):
            reply["printed"] = sys.stdout.taken()
        self._send(reply)

    def do(self, op: str, operands: list[Any]) -> Any:
        raise NotImplementedError

    def encode_class(self, kind: type) -> Any:
        raise NotImplementedError

    def resolve_other(self, tag: str, rest: list[Any]) -> Any:
        raise NotImplementedError

    def resolve(self, sent: Any) -> Any:
        if sent[0] == "error":
            return self.decode_error(sent)
        return self.objects[sent[1]] if sent[0] == "yours" else self.resolve_other(sent[0], sent[1:])

    def encode_error(self, error: BaseException, causes: int = 4) -> Any:
        if (place := error.__dict__.get("_place")) is not None:
            return ["yours", place]
        try:
            args = [self.encode(v) for v in (error.__reduce__()[1] if type(error) in _OF_FILES else error.args)]
            named = [[str(k), self.encode(v)] for k, v in vars(error).items() if k[:1] != "_"]
            text = str(error)
        except (Gone, Unsupported):
            raise
        except BaseException:  # whatever an error of a program does when it is looked at
            args, named, text = [], [], ""
        cause = error.__cause__
        reason = self.encode_error(cause, causes - 1) if isinstance(cause, BaseException) and causes else None
        return ["error", self.encode_class(type(error)), args, named, text, reason, self.export(error)]

    def decode_error(self, sent: Any) -> Any:
        if sent[0] == "yours":
            return self.resolve(sent)
        _, kind, args, named, text, reason, place = sent
        kind = _exception(*kind[1:]) if kind[0] == "exception" else self.decode(kind)
        args = [self.decode(argument) for argument in args]
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise Gone("no exception")
        try:
            error = kind(*args) if kind.__module__ == "builtins" else kind.__new__(kind, *args)
        except Exception:  # a class whose constructor takes other arguments than those it keeps in `args`
            error = kind.__new__(kind)
        if kind.__module__ != "builtins":
            error.args = tuple(args)
        error.__dict__.update({str(k): self.decode(v) for k, v in named}, _text=str(text), _place=int(place))
        if reason is not None:
            error.__cause__ = self.decode_error(reason)
        return error

    def _send(self, message: dict[str, Any]) -> None:
        message["changed"], message["gone"] = self.changes()
        left = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        while left:
            left = left[os.write(self._out, left) :]

    def _receive(self) -> dict[str, Any]:
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
        if op == "name":
            return self._look_up(*operands)
        if op == "call":
            function, args, named = operands
            return function(*args, **named)
        if op == "iter":
            iterator = iter(operands[0])
            return iterator is operands[0], iterator
        if op == "missing":
            return operands[0].__missing__(operands[1])
        return getattr(operator, op)(*operands) if op in _BOTH else {**_LOOKS, **_CHANGES}[op](*operands)

    def copied_base(self, value: Any) -> str:
        kinds = [] if isinstance(value, type) or type(value) in MUTABLE.values() else type(value).__mro__
        return next((name for kind in kinds for name, base in MUTABLE.items() if kind is base), "")

    def refer(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType | types.GeneratorType) and id(value) in self._places_of_tests:
            return ["yours", self._places_of_tests[id(value)]]
        if isinstance(value, BaseException):
            return self.encode_error(value)
        for tag, (kind, send, _) in reversed(COPIED.items()):
            if isinstance(value, kind) and tag not in IMMUTABLE:  # of a subclass
                return [tag, send(value)]
        return self._reference(value)

    def _reference(self, value: Any) -> Any:
        if isinstance(value, type):
            return self.encode_class(value)
        base = next((kind for kind in IMMUTABLE.values() if isinstance(value, kind)), None)
        contents = None
        if base is not None:  # past the methods of a subclass
            plain: Any = base.__getnewargs__(value) if base is not frozenset else (frozenset.copy(value),)
            contents = self.encode(plain[0] if len(plain) == 1 else base(*plain))
        return ["object", self.export(value), self.encode_class(type(value)), contents]

    def encode_class(self, kind: type) -> Any:
        if TYPES.get(kind.__name__) is kind:
            return ["type", kind.__name__]
        if issubclass(kind, BaseException) and getattr(builtins, kind.__name__, None) is kind:
            return ["exception", kind.__name__]
        place = self.export(kind)
        bases = [self.encode_class(base) for base in kind.__bases__ if base is not object]
        own = {name for above in kind.__mro__[:-1] if above not in TYPES.values() for name in vars(above)}
        special = [name for name in (*_SPECIAL, *_CHANGING) if name in own]
        fields = list(getattr(kind, "_fields", ())) if issubclass(kind, tuple) else []
        outer = str(kind.__module__)
        return ["class", place, str(kind.__name__), bases, special, fields, outer]

    def resolve_other(self, tag: str, rest: list[Any]) -> Any:
        if tag == "exception":
            return _exception(*rest)
        if tag == "name":
            return functools.reduce(getattr, rest[1].split("."), importlib.import_module(rest[0]))
        place = rest[0]
        if place not in self._functions:
            self._functions[place] = self._function(*rest) if tag == "function" else self._items(place)
            self._places_of_tests[id(self._functions[place])] = place
        return self._functions[place]

    def _function(self, place: int, name: str, doc: Any, header: str, call: str) -> Any:
        names: dict[str, Any] = {"ask": functools.partial(self._ask_tests, place), "absent": _ABSENT}
        exec(f"def function({header}): return ask({call})", names)
        function = names["function"]
        function.__name__ = function.__qualname__ = name
        function.__doc__ = doc
        return function

    def _ask_tests(self, place: int, *args: object, **named: object) -> Any:
        args = tuple(value for value in args if value is not _ABSENT)
        return self.request("call", place, args, {k: value for k, value in named.items() if value is not _ABSENT})

    def _items(self, place: int) -> Iterator[Any]:
        with contextlib.suppress(StopIteration):
            while True:
                yield self._ask_tests(place)


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

    def ask(self, op: str, *operands: object) -> Any:
        self.asked += op != "name"
        try:
            if op not in _LOOKS:
                if op not in ("iter", "name", "copy", "deepcopy"):
                    self._looks.clear()
                return self.request(op, *operands)
            if self.touched():
                self._looks.clear()
            handle, *more = operands
            key = op, _number(handle), json.dumps([self.encode(value) for value in more])
            return self._steady(key, self.request(op, *operands))
        except StopIteration as e:
            if op == "next":
                raise
            raise Stopped("the program raised StopIteration") from e

    def _steady(self, key: tuple[object, ...], seen: Any) -> Any:
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
        theirs = isinstance(value, (Handle, Meta)) and name in _JUDGES and not hasattr(TYPES.get(value.copied), name)
        return self.get(value, name, made=True) if theirs else getattr(value, name)

    def has(self, container: Any, item: Any) -> Any:
        """Whether an object that the tests have made contains an item."""
        asked = isinstance(container, Handle) and "__contains__" in container.special and not container.copied
        return self.ask("contains", container, item) if asked else item in container

    def items(self, handle: Any) -> Any:
        """Iterates over a program's object."""
        itself, iterator = self.ask("iter", handle)
        return handle if itself is True else self._each(handle, iterator)

    def _each(self, handle: Any, iterator: Any) -> Iterator[Any]:
        for i in itertools.count():
            try:
                item = self.request("next", iterator)
            except StopIteration:
                self._steady(("end", _number(handle)), i)
                if "__len__" in getattr(type(handle), "special", ()) and self.ask("len", handle) != i:
                    raise Undecided("the length of an object is not the number of its items") from None
                return
            yield self._steady(("item", _number(handle), i), item)

    def item(self, handle: Any, key: Any) -> Any:
        special = type(handle).special
        if type(key) not in (int, slice) or "__iter__" not in special or "keys" in special:
            return self.ask("getitem", handle, key)
        if type(key) is int and key >= 0 and "__len__" not in special:
            for item in itertools.islice(self.items(handle), key, None):
                return item
            raise IndexError("index out of range")
        return list(self.items(handle))[key]

    def do(self, op: str, operands: list[Any]) -> Any:
        if op != "call" or len(operands) != 3 or operands[0] not in range(len(self.objects)):
            raise Gone(f"no such request: {op}")
        place, args, named = operands
        try:
            return self.objects[place](*args, **named)
        except BaseException as e:
            framework = type(e).__module__.startswith(("_pytest", "unittest"))
            self.failed |= (isinstance(e, AssertionError) or framework) and "_place" not in vars(e)
            e.__dict__["_crossed"] = True
            raise

    def scalar(self, value: Any) -> Any:
        """Widens a number of numpy: infinite or whole ones of few bits equal numbers that they are not."""
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.integer) and value.dtype != numpy.uint64:
            return numpy.int64(value)
        whole = isinstance(value, numpy.floating) and (not numpy.isfinite(value) or value == numpy.trunc(value))
        return numpy.float64(value) if whole else value

    def copied_base(self, value: Any) -> str:
        return type(value).copied if isinstance(value, Handle) else ""

    def refer(self, value: Any) -> Any:
        if isinstance(value, Handle) or (isinstance(value, Meta) and "number" in vars(value)):
            return ["yours", _number(value)]
        if isinstance(value, BaseException):
            return self.encode_error(value)
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "builtins":
            return self.encode_class(value)
        if hasattr(value, "__next__"):
            return ["iterator", self.export(value.__next__)]
        if (name := _shared_name(value)) is not None:
            return ["name", *name]
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType) and function.__globals__ is self.names:
            return ["function", self.export(value), function.__name__, function.__doc__, *_signature(value)]
        if isinstance(value, types.BuiltinMethodType) and type(value.__self__) in TYPES.values():
            call = "*args, **named"
            return ["function", self.export(value), value.__name__, value.__doc__, call, call]
        raise Unsupported(f"they hand the program a {type(value).__name__}")

    def encode_class(self, kind: type) -> Any:
        builtin = next(above.__name__ for above in kind.__mro__ if above.__module__ == "builtins")
        return ["exception", builtin, kind.__name__]

    def resolve_other(self, tag: str, rest: list[Any]) -> Any:
        if tag == "exception" and rest[0] not in _SWALLOWING:
            return _exception(rest[0])
        if tag == "class":
            return self._classes.get(rest[0]) or self._class(*rest)
        if tag == "object" and rest[0] not in self._handles:
            kind = self.decode(rest[1])
            base = next((base for base in IMMUTABLE.values() if issubclass(kind, base)), None)
            contents = [] if base is None else [base(self.decode(rest[2]))]
            handle = base.__new__(kind, *contents) if base is not None else kind.__new__(kind)
            object.__setattr__(handle, "_number", int(rest[0]))
            self._handles[rest[0]] = handle
        return self._handles[rest[0]]

    def _class(self, number: int, name: str, bases: Any, special: list[str], fields: list[str], outer: str) -> Any:
        """Makes the class that stands for one of the program's, once."""
        shared = name in _SHARED.get(outer, ()) and outer in sys.modules
        real = getattr(sys.modules[outer], name) if shared else _OF_PYTHON.get(name) if outer == "builtins" else None
        above = tuple(_exception(base[1]) if base[0] == "exception" else self.decode(base) for base in bases)
        body: dict[str, Any] = {"number": int(number), "side": self, "__doc__": _Doc()}
        if any(issubclass(base, BaseException) for base in above):
            body |= {"__str__": _text, "__getattr__": _attribute_of_error}
            mine = real is not None and issubclass(real, BaseException)
            self._classes[number] = real if mine else Meta(str(name), above, body)
            return self._classes[number]
        kinds = {**IMMUTABLE, **MUTABLE}
        base = next((n for n, kind in kinds.items() if any(issubclass(parent, kind) for parent in above)), "")
        hidden = {*dir(kinds[base])} - {*dir(object), *_CHANGING, "__setitem__", "__delitem__"} if base else set()
        body |= {"copied": base if base in MUTABLE else "", "special": frozenset(special)}
        methods = _METHODS if base else _METHODS | _OPERATORS
        body |= {n: method for n, method in methods.items() if n not in hidden and (n in special or n in _OPERATORS)}
        body |= {"__eq__": kinds[base].__eq__, "__hash__": kinds[base].__hash__} if base else {}
        body |= {n: _method(n) for n in special if base in MUTABLE and n in _CHANGING}
        if real is not None and not above:
            body["__class__"] = property(lambda _: real)
        for i, field in enumerate(fields):
            if field.isidentifier() and field[0] != "_" and field not in _JUDGES | body.keys():
                body[field] = property(operator.itemgetter(i))
        handles = above if any(issubclass(parent, Handle) for parent in above) else (Handle, *above)
        self._classes[number] = Meta(str(name), handles, body)
        return self._classes[number]


@functools.cache
def _exception(name: str, own: str = "") -> Any:
    """Returns a builtin exception, or the stand-in of a subclass of the tests."""
    kind = getattr(builtins, name)
    if not issubclass(kind, BaseException):
        raise ValueError(name)
    return kind if own in ("", name) else type(own, (kind,), {"__module__": "builtins"})


def _number(value: Any) -> Any:
    if isinstance(value, BaseException):
        return "error", value.__dict__["_place"]
    return value.__dict__["number"] if isinstance(value, type) else object.__getattribute__(value, "_number")


def _attribute_of_error(error: Any, name: str) -> Any:
    if "_place" not in error.__dict__:
        raise AttributeError(name)
    return type(error).side.get(error, name)


def _shape(value: Any, depth: int = 4) -> Any:
    """Returns what must stay the same of a value that is looked at again."""
    if isinstance(value, Handle) or depth == 0:
        return type(value).__name__
    if isinstance(value, dict):
        return [(_shape(k, depth - 1), _shape(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [_shape(item, depth - 1) for item in value]
    return repr(value)


def _text(error: Any) -> str:
    return str(error.__dict__.get("_text", ""))


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


def _signature(function: Any) -> tuple[str, str]:
    """Returns the parameters of a function, whose defaults stay here, and the arguments that hand them on."""
    import inspect  # takes as long as all others together

    header, call, kinds = [], [], inspect.Parameter
    parameters = inspect.signature(function).parameters.values()
    spread = any(parameter.kind is kinds.VAR_POSITIONAL for parameter in parameters)
    for parameter in parameters:
        name, kind = parameter.name, parameter.kind
        header.append(parameter.replace(annotation=kinds.empty, default=kinds.empty))
        if parameter.default is not kinds.empty:
            header[-1] = header[-1].replace(default=_ABSENT)
        star = "*" if kind is kinds.VAR_POSITIONAL else "**" if kind is kinds.VAR_KEYWORD else ""
        by_name = kind is kinds.KEYWORD_ONLY or (kind is kinds.POSITIONAL_OR_KEYWORD and not spread)
        call.append(f"{name}={name}" if by_name else star + name)
    return str(inspect.Signature(header))[1:-1], ", ".join(call)


class Meta(type):
    """The class of classes that stand for the program's."""

    def __call__(cls, *args: object, **named: object) -> Any:
        return cls.side.ask("call", cls, args, named)

    def __getattr__(cls, name: str) -> Any:
        if "number" not in vars(cls):
            raise AttributeError(name)
        return cls.side.get(cls, name)

    def __setattr__(cls, name: str, value: object) -> None:
        cls.side.ask("set", cls, name, value)

    def __iter__(cls) -> Any:
        return cls.side.items(cls)

    def __len__(cls) -> Any:
        return cls.side.ask("len", cls)

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: object) -> Any:
        return cls.side.ask("getitem", cls, key)


class _Doc:
    def __get__(self, handle: Any, kind: Any) -> Any:
        return kind.side.get(kind if handle is None else handle, "__doc__")


class Handle(metaclass=Meta):
    """An object of the program."""

    side: TestsSide
    special: frozenset[str] = frozenset()
    copied = ""
    __array_ufunc__ = None  # numpy leaves operators to Python

    def __getattr__(self, name: str) -> Any:
        return type(self).side.get(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        type(self).side.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        type(self).side.ask("del", self, name)

    def __eq__(self, other: object) -> Any:
        known = "__eq__" not in type(self).special and "__eq__" not in getattr(type(other), "special", ())
        if known or other is self:
            return other is self
        raise Undecided("the program compares its objects")

    def __hash__(self) -> int:
        if "__eq__" in type(self).special:
            raise Undecided("the program compares its objects")
        return id(self)

    def __str__(self) -> Any:
        return type(self).side.ask("str", self)

    def __repr__(self) -> Any:
        return type(self).side.ask("repr", self)

    def __format__(self, spec: str) -> Any:
        return type(self).side.ask("format", self, spec)

    def __copy__(self) -> Any:
        return type(self).side.ask("copy", self)

    def __deepcopy__(self, _: object) -> Any:
        return type(self).side.ask("deepcopy", self)


def _look(op: str) -> Callable[..., Any]:
    return lambda self, *more: type(self).side.ask(op, self, *more)


def _operator(op: str, reflected: bool) -> Callable[..., Any]:
    def operate(self: Any, other: object) -> Any:
        if not isinstance(other, Handle):
            raise Undecided("the program calculates with a value of the tests")
        return type(self).side.ask(op, *((other, self) if reflected else (self, other)))

    return operate


def _refuse_order(self: Any, other: object) -> Any:
    raise Undecided("the program orders its objects")


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **named: type(self).side.get(self, name)(*args, **named)


_METHODS: dict[str, Any] = {
    **{f"__{op}__": _look(op) for op in (*_UNARY, "next", "setitem", "delitem") if op != "get"},
    "__call__": lambda self, *args, **named: type(self).side.ask("call", self, args, named),
    "__iter__": lambda self: type(self).side.items(self),
    "__reversed__": lambda self: iter(list(self)[::-1]),
    "__getitem__": lambda self, key: type(self).side.item(self, key),
    "__enter__": lambda self: type(self).side.get(self, "__enter__")(),
    "__exit__": lambda self, kind, error, _: (type(self).side.get(self, "__exit__")(kind, error, None), None)[1],
}  # never ends an error: the asserts after it would not run
_OPERATORS = {f"__{op.strip('_')}__": _operator(op, reflected=False) for op in _BOTH}
_OPERATORS |= {f"__r{op.strip('_')}__": _operator(op, reflected=True) for op in _BOTH}
_OPERATORS |= dict.fromkeys(("__lt__", "__le__", "__gt__", "__ge__"), _refuse_order)


class Captured(io.StringIO):
    """A standard output that keeps its text for the next answer."""

    def taken(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text
