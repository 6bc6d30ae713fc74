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
import itertools
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from jppo.sandbox.plain import IMMUTABLE, MUTABLE, TYPES, Gone, Heap, Plain

_LINE_BYTES = 2**26  # of a message
_UNARY = {
    "bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index, "abs": abs,
    "neg": operator.neg, "pos": operator.pos, "invert": operator.invert, "len": len, "str": str, "repr": repr,
    "round": round, "format": format, "getitem": operator.getitem, "missing": operator.getitem, "get": getattr,
}  # fmt: skip
_LOOKS = {**_UNARY, "contains": operator.contains}  # operations that are asked once between two calls
_CHANGES: dict[str, Any] = {
    "set": setattr, "del": delattr, "setitem": operator.setitem, "delitem": operator.delitem, "iter": iter,
    "next": next, "copy": copy.copy, "deepcopy": copy.deepcopy,
}  # fmt: skip
_SPECIAL = (
    *(
        f"__{op}__"
        for op in (*_UNARY, "contains", "call", "iter", "next", "reversed", "setitem", "delitem", "enter", "exit")
    ),
    "keys",
)
_OPEN = ("__name__", "__qualname__", "__doc__", "__wrapped__", "__members__", "__enter__", "__exit__")
_CHANGING = {
    "append", "appendleft", "extend", "insert", "remove", "pop", "popleft", "popitem", "add", "update", "discard",
    "clear", "sort", "reverse", "setdefault", "copy", "keys", "values", "items", "get", "real", "imag", "elements",
}  # fmt: skip
PLAIN_METHODS = {name for kind in TYPES.values() for name in dir(kind) if name[:1] != "_"} | {"all", "any"}
# Those that judge their arguments. Tests that call one on a result mean the one of plain data.
_JUDGES = PLAIN_METHODS - _CHANGING


class Unsupported(BaseException):
    """Tests hand the program something else than plain data, its own objects and their own functions."""


class _Side(Plain):
    def __init__(self, receives: int, sends: int):
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
        heap = Heap([])
        body = [self.encode(operand, heap) for operand in operands]
        self._send({"op": op, "args": body, "heap": self.drain(heap)})
        while "op" in (message := self._receive()):
            self.answer(message)
        heap = self.fill(message["heap"], heap.objects)
        if printed := message.get("printed"):
            sys.stdout.write(str(printed))
        if "raised" in message:
            raise self.decode_error(message["raised"], heap)
        return self.decode(message.get("value"), heap)

    def answer(self, message: dict[str, Any]) -> None:
        heap, sent = self.fill(message["heap"], []), message["heap"]
        reply: dict[str, Any] = {}
        try:
            operands = [self.decode(operand, heap) for operand in message["args"]]
            reply["value"] = self.encode(self.do(message["op"], operands), heap)
        except (Gone, Unsupported):
            raise
        except BaseException as e:
            reply["raised"] = self.encode_error(e, heap)
        entries = self.drain(heap)
        reply["heap"] = [None if i < len(sent) and entry == sent[i] else entry for i, entry in enumerate(entries)]
        if isinstance(sys.stdout, Captured):
            reply["printed"] = sys.stdout.taken()
        self._send(reply)

    def do(self, op: str, operands: list[Any]) -> Any:
        raise NotImplementedError

    def encode_class(self, kind: type, heap: Heap) -> Any:
        raise NotImplementedError

    def encode_error(self, error: BaseException, heap: Heap, causes: int = 4) -> Any:
        if (place := error.__dict__.get("_place")) is not None:
            return ["yours", place]
        try:
            args = [self.encode(argument, heap) for argument in error.args]
            named = [[str(k), self.encode(v, heap)] for k, v in vars(error).items() if k[:1] != "_"]
            text = str(error)
        except Exception:  # whatever an error of a program does when it is looked at
            args, named, text = [], [], ""
        cause = error.__cause__
        reason = self.encode_error(cause, heap, causes - 1) if isinstance(cause, BaseException) and causes else None
        return ["error", self.encode_class(type(error), heap), args, named, text, reason, self.export(error)]

    def decode_error(self, sent: Any, heap: Heap) -> Any:
        if sent[0] == "yours":
            return self.resolve(sent, heap)
        _, kind, args, named, text, reason, place = sent
        kind, args = self.decode(kind, heap), [self.decode(argument, heap) for argument in args]
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise Gone("no exception")
        try:
            error = kind(*args) if kind.__module__ == "builtins" else kind.__new__(kind, *args)
        except Exception:  # a class whose constructor takes other arguments than those it keeps in `args`
            error = kind.__new__(kind)
        if kind.__module__ != "builtins":
            error.args = tuple(args)
        error.__dict__.update({str(k): self.decode(v, heap) for k, v in named}, _text=str(text), _place=int(place))
        if reason is not None:
            error.__cause__ = self.decode_error(reason, heap)
        return error

    def _send(self, message: dict[str, Any]) -> None:
        left = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        while left:
            left = left[os.write(self._out, left) :]

    def _receive(self) -> dict[str, Any]:
        os.set_blocking(self._in.fileno(), True)  # a program may have changed it
        line = self._in.readline(_LINE_BYTES)
        try:
            message = json.loads(line)
            if not isinstance(message, dict) or not isinstance(message.get("heap"), list):
                raise ValueError
        except (ValueError, RecursionError) as e:
            raise Gone("no message") from e
        return message


class ProgramSide(_Side):
    """The program's end: it does what the tests ask."""

    def __init__(self, receives: int, sends: int, look_up: Callable[[str], Any]):
        super().__init__(receives, sends)
        self._look_up = look_up
        self._functions: dict[int, Any] = {}  # of the tests

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
            function, args, named, *_ = operands
            return function(*args, **named)
        if op in ("iter", "get", "copy"):
            value = {**_LOOKS, **_CHANGES}[op](*operands)
            bound = op == "get" and getattr(value, "__self__", None) is operands[0] and callable(value)
            return value is operands[0] or bound, _Kept(value) if op == "iter" or bound else value
        if op == "missing":
            return operands[0].__missing__(operands[1])
        return {**_LOOKS, **_CHANGES}[op](*operands)

    def copied_base(self, value: Any) -> str:
        kinds = [] if isinstance(value, type) or type(value) in MUTABLE.values() else type(value).__mro__
        return next((name for kind in kinds for name, base in MUTABLE.items() if kind is base), "")

    def refer(self, value: Any, heap: Heap) -> Any:
        if isinstance(value, _Kept):
            return self._reference(value.value, heap)
        if (place := getattr(value, "_place", None)) is not None and self._functions.get(place) is value:
            return ["yours", place]
        if isinstance(value, BaseException):
            return self.encode_error(value, heap)
        return self._reference(value, heap)

    def _reference(self, value: Any, heap: Heap) -> Any:
        if isinstance(value, type):
            return self.encode_class(value, heap)
        base = next((kind for kind in IMMUTABLE.values() if isinstance(value, kind)), None)
        contents = None
        if base is not None:  # past the methods of a subclass
            plain: Any = base.__getnewargs__(value) if base is not frozenset else (frozenset.copy(value),)
            contents = self.encode(plain[0] if len(plain) == 1 else base(*plain), heap)
        return ["object", self.export(value), self.encode_class(type(value), heap), contents]

    def encode_class(self, kind: type, heap: Heap) -> Any:
        if TYPES.get(kind.__name__) is kind:
            return ["type", kind.__name__]
        if issubclass(kind, BaseException) and kind.__module__ == "builtins":
            return ["exception", kind.__name__]
        place = self.export(kind)
        bases = [self.encode_class(base, heap) for base in kind.__bases__ if base is not object]
        own = {name for above in kind.__mro__[:-1] if above not in TYPES.values() for name in vars(above)}
        special = [name for name in (*_SPECIAL, *_CHANGING) if name in own]
        fields = list(getattr(kind, "_fields", ())) if issubclass(kind, tuple) else []
        outer = "" if kind.__flags__ & 2**9 else kind.__module__  # not a heap type, and so not a program's
        outer = kind.__module__ if kind.__module__ in sys.stdlib_module_names else outer
        return ["class", place, str(kind.__name__), bases, special, fields, outer]

    def resolve(self, sent: Any, heap: Heap) -> Any:
        tag, *rest = sent
        if tag == "yours":
            return self.objects[rest[0]]
        if tag == "error":
            return self.decode_error(sent, heap)
        if tag == "exception":
            return _exception(rest[0])
        if tag == "name":
            return functools.reduce(getattr, rest[1].split("."), importlib.import_module(rest[0]))
        place = rest[0]
        if place not in self._functions:
            self._functions[place] = self._function(*rest) if tag == "function" else self._items(place)
        return self._functions[place]

    def _function(self, place: int, name: str, doc: Any, header: str, call: str, defaults: Any, named: Any) -> Any:
        ask = functools.partial(self._ask_tests, place)
        names: dict[str, Any] = {"ask": ask}
        exec(f"def function({header}): return ask({call})", names)
        function = names["function"]
        function.__name__ = function.__qualname__ = name
        function.__doc__ = doc
        function.__defaults__, function.__kwdefaults__ = (self.decode(value, Heap([])) for value in (defaults, named))
        function._place = place
        return function

    def _ask_tests(self, place: int, *args: object, **named: object) -> Any:
        return self.request("call", place, args, named)

    def _items(self, place: int) -> Iterator[Any]:
        with contextlib.suppress(StopIteration):
            while True:
                yield self._ask_tests(place)


class _Kept:
    """A value that goes as a reference."""

    def __init__(self, value: Any):
        self.value = value


class TestsSide(_Side):
    """The tests' end. `names`: their globals, whose functions the program may call."""

    unsupported = Unsupported

    def __init__(self, receives: int, sends: int):
        super().__init__(receives, sends)
        self.names: dict[str, Any] = {}
        self.asked = 0  # requests other than to look up a name
        self._classes: dict[int, Any] = {}
        self._handles: dict[int, Any] = {}
        self._looks: dict[tuple[object, ...], Any] = {}  # since the last call

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
            handle, *more = operands
            heap = Heap([])
            key = (
                op,
                _number(handle),
                json.dumps([self.encode(value, heap) for value in more]),
                *map(id, heap.objects),
            )
            if key not in self._looks:
                self._looks[key] = self.request(op, *operands)
            return self._looks[key]
        except StopIteration as e:  # one of a call would end a loop of the tests
            if op == "next":
                raise
            raise RuntimeError("the program raised StopIteration") from e

    def get(self, handle: Any, name: str) -> Any:
        """Returns an attribute of a program's object."""
        if name.startswith("__") and name not in _OPEN:
            raise AttributeError(name)
        bound, value = self.ask("get", handle, name)
        if bound is True and isinstance(value, Handle):
            object.__setattr__(value, "_owner", handle)
        return value

    def get_open(self, value: Any, name: str) -> Any:
        """Returns an attribute of an object that the tests have made, also one that judges their values."""
        theirs = isinstance(value, (Handle, Meta)) and name in _JUDGES and not hasattr(TYPES.get(value.copied), name)
        return self.get(value, name) if theirs else getattr(value, name)

    def has(self, container: Any, item: Any) -> Any:
        """Whether an object that the tests have made contains an item."""
        asked = isinstance(container, Handle) and "__contains__" in container.special and not container.copied
        return self.ask("contains", container, item) if asked else item in container

    def items(self, handle: Any) -> Iterator[Any]:
        """Iterates over a program's object; again over the same items, until a call."""
        if (key := ("iter", _number(handle))) not in self._looks:
            itself, iterator = self.ask("iter", handle)
            if itself is True:
                return handle  # type: ignore[no-any-return]
            self._looks[key] = [], iterator
        return self._replay(*self._looks[key])

    def _replay(self, seen: list[Any], iterator: Any) -> Iterator[Any]:
        for i in itertools.count():
            if i == len(seen):
                try:
                    seen.append(self.request("next", iterator))
                except StopIteration:
                    return
            yield seen[i]

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
        place, args, named = operands
        if op != "call" or type(place) is not int or not callable(self.objects[place]):
            raise Gone(f"no such request: {op}")
        return self.objects[place](*args, **named)

    def copied_base(self, value: Any) -> str:
        return type(value).copied if isinstance(value, Handle) else ""

    def refer(self, value: Any, heap: Heap) -> Any:
        if isinstance(value, Handle) or (isinstance(value, Meta) and "number" in vars(value)):
            return ["yours", _number(value)]
        if isinstance(value, BaseException):
            return self.encode_error(value, heap)
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "builtins":
            return ["exception", value.__name__]
        if hasattr(value, "__next__"):
            return ["iterator", self.export(value.__next__)]
        if (name := _shared_name(value)) is not None:
            return ["name", *name]
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType) and function.__globals__ is self.names:
            bound = isinstance(value, types.MethodType)
            header, call = _signature(function, bound)
            defaults = [self.encode(part, heap) for part in (function.__defaults__, function.__kwdefaults__)]
            return ["function", self.export(value), function.__name__, function.__doc__, header, call, *defaults]
        if isinstance(value, types.BuiltinMethodType) and type(value.__self__) in TYPES.values():
            call = "*args, **named"
            return ["function", self.export(value), value.__name__, value.__doc__, call, call, None, None]
        raise Unsupported(f"they hand the program a {type(value).__name__}")

    def encode_class(self, kind: type, heap: Heap) -> Any:
        return ["exception", next(above.__name__ for above in kind.__mro__ if above.__module__ == "builtins")]

    def resolve(self, sent: Any, heap: Heap) -> Any:
        tag, *rest = sent
        if tag == "yours":
            return self.objects[rest[0]]
        if tag == "error":
            return self.decode_error(sent, heap)
        if tag == "exception":
            return _exception(rest[0])
        if tag == "class":
            return self._classes.get(rest[0]) or self._class(*rest)
        if tag == "object" and rest[0] not in self._handles:
            kind = self.decode(rest[1], heap)
            base = next((base for base in IMMUTABLE.values() if issubclass(kind, base)), None)
            contents = [] if base is None else [base(self.decode(rest[2], heap))]
            handle = base.__new__(kind, *contents) if base is not None else kind.__new__(kind)
            object.__setattr__(handle, "_number", int(rest[0]))
            self._handles[rest[0]] = handle
        return self._handles[rest[0]]

    def _class(self, number: int, name: str, bases: Any, special: list[str], fields: list[str], outer: str) -> Any:
        real = vars(sys.modules.get(outer, builtins)).get(name) if outer else None
        above = tuple(self.decode(base, Heap([])) for base in bases)
        if any(issubclass(base, BaseException) for base in above):
            mine = isinstance(real, type) and issubclass(real, BaseException)
            self._classes[number] = (
                real if mine else Meta(str(name), above, {"__str__": _text, "number": number, "side": self})
            )
            return self._classes[number]
        copied = next((n for base in above for n, kind in MUTABLE.items() if issubclass(base, kind)), "")
        plain = next((base for base in above if not issubclass(base, Handle) and base in TYPES.values()), None)
        body: dict[str, Any] = {"number": int(number), "side": self, "copied": copied, "special": frozenset(special)}
        body["__doc__"] = _Doc()
        hidden = set() if plain is None else {*dir(plain)} - {*dir(object), *_CHANGING, "__setitem__", "__delitem__"}
        body |= {name: _METHODS[name] for name in special if name in _METHODS and name not in hidden}
        if copied:
            body |= {n: _method(n) for n in special if n in _CHANGING}
        if isinstance(real, type) and real not in TYPES.values() and not above:
            body["__class__"] = property(lambda _: real)
        body |= {field: property(operator.itemgetter(i)) for i, field in enumerate(fields) if field not in _JUDGES}
        handles = above if any(issubclass(base, Handle) for base in above) else (Handle, *above)
        self._classes[number] = Meta(str(name), handles, body)
        return self._classes[number]


def _exception(name: str) -> Any:
    kind = getattr(builtins, name)
    if not issubclass(kind, BaseException):
        raise ValueError(name)
    return kind


def _number(value: Any) -> Any:
    return value.__dict__["number"] if isinstance(value, type) else object.__getattribute__(value, "_number")


def _text(error: Any) -> str:
    return str(error.__dict__.get("_text", ""))


def _shared_name(value: Any) -> tuple[str, str] | None:
    """Returns (module, name) of a function or class of the standard library: the program has its own."""
    module = getattr(value, "__module__", None) or getattr(
        getattr(value, "__objclass__", None), "__module__", "builtins"
    )
    name = getattr(value, "__qualname__", None)
    if (
        not callable(value)
        or not isinstance(name, str)
        or str(module).partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}
    ):
        return None
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules.get(str(module)))
    except AttributeError:
        return None
    return (str(module), name) if found is value else None


def _signature(function: types.FunctionType, bound: bool) -> tuple[str, str]:
    """Returns the parameters of a function, without defaults, and the arguments that hand them on."""
    code = function.__code__
    names, flags, count = list(code.co_varnames), code.co_flags, code.co_argcount
    first, named = names[:count], names[count : count + code.co_kwonlyargcount]
    rest = iter(names[count + code.co_kwonlyargcount :])
    many = [f"*{next(rest)}"] if flags & 4 else []
    more = [f"**{next(rest)}"] if flags & 8 else []
    header = [*first[: code.co_posonlyargcount], *["/"][: code.co_posonlyargcount], *first[code.co_posonlyargcount :]]
    header, first = (header[1:], first[1:]) if bound else (header, first)
    star = many or (["*"] if named else [])
    call = [*first, *many, *(f"{name}={name}" for name in named), *more]
    return ", ".join([*header, *star, *named, *more]), ", ".join(call)


class Meta(type):
    """The class of classes that stand for the program's."""

    def __call__(cls, *args: object, **named: object) -> Any:
        return cls.side.ask("call", cls, args, named)

    def __getattr__(cls, name: str) -> Any:
        if name in _JUDGES or "number" not in vars(cls):
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
        if name in _JUDGES:
            raise AttributeError(name)
        return type(self).side.get(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        type(self).side.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        type(self).side.ask("del", self, name)

    def __str__(self) -> Any:
        return type(self).side.ask("str", self)

    def __repr__(self) -> Any:
        return type(self).side.ask("repr", self)

    def __format__(self, spec: str) -> Any:
        return type(self).side.ask("format", self, spec)

    def __copy__(self) -> Any:
        return type(self).side.ask("copy", self)[1]

    def __deepcopy__(self, _: object) -> Any:
        return type(self).side.ask("deepcopy", self)


def _look(op: str) -> Callable[..., Any]:
    return lambda self, *more: type(self).side.ask(op, self, *more)


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **named: type(self).side.get(self, name)(*args, **named)


def _call(self: Any, *args: object, **named: object) -> Any:
    owner = self.__dict__.get("_owner")
    return type(self).side.ask("call", self, args, named, *([] if owner is None else [owner]))


_METHODS: dict[str, Any] = {
    **{f"__{op}__": _look(op) for op in (*_UNARY, "next", "setitem", "delitem") if op != "get"},
    "__call__": _call,
    "__iter__": lambda self: type(self).side.items(self),
    "__reversed__": lambda self: iter(list(self)[::-1]),
    "__getitem__": lambda self, key: type(self).side.item(self, key),
    "__enter__": lambda self: type(self).side.get(self, "__enter__")(),
    "__exit__": lambda self, kind, error, _: (type(self).side.get(self, "__exit__")(kind, error, None), None)[1],
}  # never ends an error: the asserts after it would not run


class Captured:
    """A standard output that keeps its text for the next answer."""

    encoding, errors = "utf-8", "strict"

    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._parts.append(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def taken(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text
