"""What crosses between the tests of a graded program and the program, as JSON.

JSON's own values stand for themselves, others are lists that begin with a tag. Containers that can change are in the
heap of a message, so that they stay the same object where they are met twice. Only values of known types are made here
of what arrives, so that an object of the program never takes part in a comparison with a value of the tests.
"""

import collections
import datetime
import decimal
import fractions
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from jppo.sandbox.remote import SHARED, is_plain_class, remote_base, shared_module, shared_name, shared_object

_MUTABLE: dict[Any, str] = {
    list: "list",
    dict: "dict",
    set: "set",
    bytearray: "bytearray",
    collections.deque: "deque",
    collections.OrderedDict: "ordered",
    collections.Counter: "counter",
    collections.defaultdict: "default",
}
_MADE: dict[str, Any] = {name: kind for kind, name in _MUTABLE.items()}
_IMMUTABLE = (int, float, complex, str, bytes, tuple, frozenset)
_UNEXPORTED = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)  # lead to all of a process


class Gone(BaseException):
    """The other side has ended, or sent what is no message."""


class Memo:
    """The containers of a message, in the order of its heap."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._at: dict[int, int] = {}

    def start(self, objects: Iterable[object]) -> None:
        for container in objects:
            self.add(container)

    def add(self, value: object) -> int:
        if id(value) not in self._at:
            self._at[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._at[id(value)]


class Values:
    """The values of one side. `ask` does an operation on the other side, and returns what it does.

    `trusting`: the other side's objects may compare themselves with values of this side.
    """

    def __init__(self, ask: Callable[..., Any], *, trusting: bool):
        self.ask, self.trusting = ask, trusting
        self._objects: list[Any] = []  # what the other side may hold
        self._ids: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._classes: dict[int, Any] = {}
        self._subclasses: dict[tuple[str, ...], Any] = {}
        self._told: set[tuple[str, ...]] = (
            set()
        )  # shared names that both sides have named, or the trusting one has sent
        self.named: set[type] = set()  # the other side's classes that this side asked for by name
        self.given: set[int] = set()  # numbers of objects that this side made by them, never sent by the other since
        self.base = remote_base(self)

    def encoded(self, value: Any, memo: Memo, kept: bool = False) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -(2**53) < value < 2**53 else ["int", hex(value)]
        if issubclass(kind, self.base):
            return ["yours", object.__getattribute__(value, "_id")]
        if issubclass(kind, type):
            return self._encoded_class(value, memo) or ["mine", self._exported(value), None]
        if not kept:
            if kind in _MUTABLE:
                return ["@", memo.add(value)]
            if (copied := self._copied(value, kind, memo)) is not None:
                return copied
        return ["mine", self._exported(value), self._encoded_class(kind, memo)]

    def _copied(self, value: Any, kind: type, memo: Memo) -> list[Any] | None:
        if kind is tuple:
            return ["tuple", [self.encoded(item, memo) for item in value]]
        if kind is frozenset:
            return ["frozenset", [self.encoded(item, memo) for item in value]]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is range:
            return ["range", *(self.encoded(bound, memo) for bound in (value.start, value.stop, value.step))]
        if kind is slice:
            return ["slice", *(self.encoded(bound, memo) for bound in (value.start, value.stop, value.step))]
        if kind in (type({}.keys()), type({}.values()), type({}.items())):
            return ["view", kind.__name__, ["@", memo.add(dict(value.mapping))]]
        if kind is decimal.Decimal:
            return ["decimal", str(value)]
        if kind is fractions.Fraction:
            return ["fraction", hex(value.numerator), hex(value.denominator)]
        if kind is datetime.timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if kind in (datetime.date, datetime.time, datetime.datetime) and type(getattr(value, "tzinfo", None)) in (
            type(None),
            datetime.timezone,
        ):
            return [kind.__name__, value.isoformat()]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__] if self._tells((value.__name__,), value.__name__ in SHARED) else None
        if (shared := shared_name(value)) is not None and self._tells(shared):
            return ["shared", *shared]
        if isinstance(value, BaseException):
            return ["error", *self.described(value, memo)]
        if kind.__module__ == "numpy":
            return self._copied_numpy(value, memo)
        return self._copied_subclass(value, kind, memo)

    def _tells(self, name: tuple[str, ...], known: bool = True) -> bool:
        """Whether a function or module goes by its name: the tests' side takes only names that it has sent itself."""
        if not self.trusting and known:
            self._told.add(name)
        return known and name in self._told

    def _copied_numpy(self, value: Any, memo: Memo) -> list[Any] | None:
        numpy = sys.modules["numpy"]
        if not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.hasobject or value.dtype.fields:
            return None
        flat = [self.encoded(item, memo) for item in numpy.ravel(value).tolist()]
        return ["numpy", value.dtype.str, list(value.shape), isinstance(value, numpy.ndarray), flat]

    def _copied_subclass(self, value: Any, kind: type, memo: Memo) -> list[Any] | None:
        base = next((builtin for builtin in _IMMUTABLE if isinstance(value, builtin)), None)
        if base is None or hasattr(kind, "__members__"):  # an enum's member is itself alone
            return None
        fields = getattr(kind, "_fields", None) if base is tuple else None
        named = list(map(str, fields)) if isinstance(fields, tuple) and len(fields) == tuple.__len__(value) else None
        if named and any(hasattr(tuple, field) for field in named):
            return None
        return ["subclass", base.__name__, str(kind.__name__), named, self.encoded(builtin_value(value), memo)]

    def _exported(self, value: object) -> int:
        if not self.trusting and isinstance(value, _UNEXPORTED):
            raise TypeError(f"{type(value).__name__} cannot be given to a program")
        if id(value) not in self._ids:
            self._ids[id(value)] = len(self._objects)
            self._objects.append(value)  # and so its id stays its own
        return self._ids[id(value)]

    def _encoded_class(self, kind: type, memo: Memo) -> list[Any] | None:
        shared = shared_name(kind)
        if shared is not None and is_plain_class(kind):
            return ["shared", *shared]
        if isinstance(kind.__dict__.get("_class_id"), int) and self._classes.get(kind.__dict__["_class_id"]) is kind:
            return ["yours", kind.__dict__["_class_id"]]
        if kind.__module__ == "builtins":
            return None  # a function, a generator, ...
        bases = [self._encoded_class(base, memo) for base in kind.__bases__ if base is not object]
        return ["class", self._exported(kind), str(kind.__name__), [base for base in bases if base is not None]]

    def drained(self, memo: Memo) -> list[list[Any]]:
        heap: list[list[Any]] = []
        while len(heap) < len(memo.objects):  # encoding one may add others
            value = memo.objects[len(heap)]
            kind = type(value)
            name = _MUTABLE[kind]
            if isinstance(value, dict):
                body = [[self.encoded(k, memo), self.encoded(v, memo)] for k, v in value.items()]
            elif kind is bytearray:
                body = value.hex()
            else:
                body = [self.encoded(item, memo) for item in value]
            more = value.maxlen if kind is collections.deque else None
            if kind is collections.defaultdict:
                more = self.encoded(value.default_factory, memo)
            heap.append([name, body, more])
        return heap

    def filled(self, heap: list[Any], known: list[Any]) -> list[Any]:
        """Makes the containers of a heap; known ones, which the request had, get their new contents."""
        try:
            objects = [known[i] if i < len(known) else _empty(entry) for i, entry in enumerate(heap)]
            for target, entry in zip(objects, heap, strict=True):
                if entry is not None:
                    self._fill(target, entry, objects)
        except (TypeError, ValueError, LookupError) as e:
            raise Gone("no heap") from e
        return objects

    def _fill(self, target: Any, entry: list[Any], objects: list[Any]) -> None:
        name, body, more = entry
        if type(target) is not _MADE[name]:
            raise ValueError(name)
        if name == "bytearray":
            target[:] = bytes.fromhex(body)
            return
        if isinstance(target, dict):
            pairs = [(self.decoded(k, objects), self.decoded(v, objects)) for k, v in body]
            if isinstance(target, collections.defaultdict):
                target.default_factory = self.decoded(more, objects)
            target.clear()
            for key, value in pairs:
                target[key] = value
            return
        items = [self.decoded(item, objects) for item in body]
        target.clear()
        (target.update if name == "set" else target.extend)(items)

    def decoded(self, told: Any, objects: list[Any]) -> Any:
        if not isinstance(told, list):
            if isinstance(told, dict):
                raise Gone("no value")
            return told
        try:
            return self._made(told[0], told[1:], objects)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, ImportError) as e:
            raise Gone("no value") from e

    def _made(self, tag: Any, rest: list[Any], objects: list[Any]) -> Any:
        if tag == "@":
            return objects[rest[0]]
        if tag == "int":
            return int(rest[0], 16)
        if tag in ("tuple", "frozenset"):
            return {"tuple": tuple, "frozenset": frozenset}[tag](self.decoded(item, objects) for item in rest[0])
        if tag == "complex":
            return complex(*rest)
        if tag == "bytes":
            return bytes.fromhex(rest[0])
        if tag in ("range", "slice"):
            return {"range": range, "slice": slice}[tag](*(self.decoded(bound, objects) for bound in rest))
        if tag == "view":
            return {"dict_keys": dict.keys, "dict_values": dict.values, "dict_items": dict.items}[rest[0]](
                self.decoded(rest[1], objects)
            )
        if tag == "decimal":
            return decimal.Decimal(rest[0])
        if tag == "fraction":
            return fractions.Fraction(int(rest[0], 16), int(rest[1], 16))
        if tag == "timedelta":
            return datetime.timedelta(*rest)
        if tag in ("date", "time", "datetime"):
            return getattr(datetime, tag).fromisoformat(rest[0])
        if tag == "constant":
            return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[rest[0]]
        if tag == "module":
            return self._named(tuple(rest), shared_module(rest[0]))
        if tag == "shared":
            return self._named(tuple(rest), shared_object(*rest))
        if tag == "error":
            return self.exception(rest, objects)
        if tag == "numpy":
            return self._made_numpy(rest, objects)
        if tag == "subclass":
            return self._made_subclass(rest, objects)
        if tag == "yours":
            return self._objects[rest[0]]
        if tag == "class":
            return self._class(*rest)
        if tag == "mine":
            kind = self.decoded(rest[1], objects)
            of = kind if isinstance(kind, type) and issubclass(kind, self.base) else self.base
            remote = object.__new__(of)
            if of is self.base and isinstance(kind, type):
                object.__setattr__(remote, "_kind", kind)  # a class of both sides, for isinstance
            self.given.discard(int(rest[0]))
            object.__setattr__(remote, "_id", int(rest[0]))
            return self._remotes.setdefault(int(rest[0]), remote)
        raise ValueError(tag)

    def _named(self, name: tuple[str, ...], shared: Any) -> Any:
        """Takes what the other side has named: on the tests' side a class without effects, or what it sent itself."""
        if self.trusting:
            self._told.add(name)
        elif name not in self._told and not is_plain_class(shared):
            raise ValueError(name)
        return shared

    def _made_numpy(self, rest: list[Any], objects: list[Any]) -> Any:
        dtype, shape, array, flat = rest
        numpy = shared_module("numpy")
        if numpy.dtype(dtype).hasobject:
            raise ValueError(dtype)
        made = numpy.array([self.decoded(item, objects) for item in flat], dtype=dtype).reshape(shape)
        return made if array else made[()]

    def _made_subclass(self, rest: list[Any], objects: list[Any]) -> Any:
        base, name, fields, value = rest
        plain = self.decoded(value, objects)
        if fields is not None:
            if any(hasattr(tuple, field) for field in fields):
                raise ValueError(fields)
            key = (name, *fields)
            kind = self._subclasses.setdefault(key, collections.namedtuple(name, fields))
            return kind._make(plain)
        of = {builtin.__name__: builtin for builtin in _IMMUTABLE}[base]
        kind = self._subclasses.setdefault((base, name), type(str(name), (of,), {}))
        return kind(plain)

    def _class(self, number: int, name: str, bases: list[Any]) -> Any:
        """Makes the class that stands for one of the other side, once."""
        if number not in self._classes:
            above = [parent for parent in (self.decoded(base, []) for base in bases) if isinstance(parent, type)]
            errors = [parent for parent in above if issubclass(parent, BaseException)]
            if errors:
                kind = type(str(name), tuple(errors), self._error_methods(number))
            else:
                above = [parent for parent in above if issubclass(parent, self.base)] or [self.base]
                kind = type(self.base)(str(name), tuple(above), {"_class_id": int(number), "__slots__": ()})
            self._classes[number] = kind
        return self._classes[number]

    def _error_methods(self, number: int) -> dict[str, Any]:
        values = self

        # Where the tests make one, its arguments and attributes are the program's.
        def __init__(error: BaseException, *args: object, **named: object) -> None:
            other = values.ask("call", values._classes[number], args, named)
            error.args = other.args
            error.__dict__.update(other.__dict__)

        def __str__(error: Any) -> Any:
            told = error.__dict__.get("_text")
            return told if told is not None else super(values._classes[number], error).__str__()

        return {"_class_id": int(number), "__init__": __init__, "__str__": __str__}

    def described(self, error: BaseException, memo: Memo, causes: int = 4) -> list[Any]:
        kind, told = type(error), None
        while told is None:  # the nearest class that can be named
            told = self._encoded_class(kind, memo)
            kind = kind.__mro__[1]
        try:
            args = [self.encoded(argument, memo) for argument in error.args]
            attributes = [[str(k), self.encoded(v, memo)] for k, v in vars(error).items() if k[:1] != "_"]
            text = str(error) if self.trusting else None
        except Gone:
            raise
        except BaseException:  # whatever an error of a program does when it is looked at
            args, attributes, text = [], [], None
        cause = error.__cause__
        reason = self.described(cause, memo, causes - 1) if isinstance(cause, BaseException) and causes else None
        return [told, args, attributes, text, reason]

    def exception(self, told: list[Any], objects: list[Any]) -> BaseException:
        kind, args = self.decoded(told[0], objects), [self.decoded(argument, objects) for argument in told[1]]
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise Gone("no exception")
        try:
            error = kind.__new__(kind, *args) if "_class_id" in kind.__dict__ else kind(*args)
        except Exception:  # a class whose constructor takes other arguments than those it keeps in `args`
            error = kind.__new__(kind)
        if "_class_id" in kind.__dict__:
            error.args = tuple(args)
        error.__dict__.update((str(k), self.decoded(v, objects)) for k, v in told[2])
        error.__dict__.update(from_program=True, _text=told[3] if isinstance(told[3], str) else None)
        if told[4] is not None:
            error.__cause__ = self.exception(told[4], objects)
        return error


def builtin_value(value: object) -> Any:
    """Returns the value of an instance of a subclass of a builtin, read past its methods; None of others."""
    if isinstance(value, (str, bytes)):
        return str.__str__(value) if isinstance(value, str) else bytes.__getitem__(value, slice(None))
    for base in (frozenset, tuple, list, set, bytearray):
        if isinstance(value, base):
            return base(base.__iter__(value))  # type: ignore[arg-type]
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, int):
        return int.__add__(value, 0)
    if isinstance(value, float):
        return float.__float__(value)
    return complex.__add__(value, 0) if isinstance(value, complex) else None


def _empty(entry: list[Any]) -> Any:
    name, _, more = entry
    return collections.deque(maxlen=more) if name == "deque" else _MADE[name]()
