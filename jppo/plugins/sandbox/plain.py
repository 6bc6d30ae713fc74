"""Plain data, which crosses as copies between the tests of a graded program and the program, as JSON.

JSON's own values stand for themselves, others are lists that begin with a tag. A container that can change has a
number, and each message has the contents of those that changed: to both sides it is one object. Only values of the
types below are made of what arrives, and only values of exactly these types are sent. All else is a reference, which
each side makes and resolves in its own way (`peer.py`).
"""

import collections
import datetime
import decimal
import fractions
import gc
import json
import sys
from typing import Any

_MUTABLE = (list, dict, set, bytearray, collections.deque, collections.OrderedDict, collections.Counter)
MUTABLE: dict[str, Any] = {kind.__name__: kind for kind in (*_MUTABLE, collections.defaultdict)}
IMMUTABLE = (int, float, complex, str, bytes, tuple, frozenset)
_COPIED: dict[str, Any] = {  # type, how it is sent, how it is made
    "complex": (complex, lambda v: [v.real, v.imag], lambda sent: complex(*sent)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda sent: range(*sent)),
    "slice": (slice, lambda v: [v.start, v.stop, v.step], lambda sent: slice(*sent)),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator], lambda sent: fractions.Fraction(*sent)),
    "timedelta": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda sent: datetime.timedelta(*sent),
    ),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
}
_TAGS = {kind: tag for tag, (kind, *_) in _COPIED.items()}
COPIES = (*IMMUTABLE, *_TAGS)
_VIEWS: dict[str, Any] = {"keys": dict.keys, "values": dict.values, "items": dict.items}
_TAGS_OF_VIEWS = {type(view({})): tag for tag, view in _VIEWS.items()}
TYPES = {kind.__name__: kind for kind in (*MUTABLE.values(), *COPIES, bool, type(None))}
_KNOWN_VALUES: dict[str, Any] = {**TYPES, "Ellipsis": Ellipsis, "NotImplemented": NotImplemented}
_NAMES = {id(value): name for name, value in _KNOWN_VALUES.items()}
_ARRAYS = "biufcSUMm"  # kinds of numpy's types
_NUMBERS = ("b1", "i8", "u8", "f8", "c16")  # narrower numbers round and overflow, so they are references
_MOST = 512  # containers that are followed from call to call, and items of one
_TABLE = 2  # references to a container that only this side's tables have


class Gone(BaseException):
    """The other side has ended, or sent what is no message."""


class Plain:
    """Makes messages of values, and values of messages; a subclass has the references."""

    parity = 0  # of the numbers that this side gives to containers; 1 are the tests, who only read arrays that cross

    def __init__(self) -> None:
        self._shared: dict[int, Any] = {}  # containers by number, the newest last
        self._numbers: dict[int, int] = {}  # by the id of the container
        self._contents: dict[int, str] = {}  # as both sides have them
        self._used: set[int] = set()  # by the message that is being made
        self._count = 0

    def refer(self, value: Any) -> Any:
        """Encodes a value that is no plain data as a reference."""
        raise NotImplementedError

    def resolve(self, sent: list[Any]) -> Any:
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Returns a value as JSON: itself, or a list with a tag."""
        kind = type(value)
        if kind is float and value != value:
            return ["@", self._number_of(value)]  # Python finds the one NaN in a list by its identity
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if value.bit_length() < 10_000 else ["int", hex(value)]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.encode(item) for item in value]]
        if kind in MUTABLE.values():
            return ["@", self._number_of(value)]
        if kind in _TAGS:
            _, send, make = _COPIED[_TAGS[kind]]
            if repr(make(sent := send(value))) == repr(value):  # not if a time zone has a name, and the like
                return [_TAGS[kind], sent]
        if kind in _TAGS_OF_VIEWS and type(container := gc.get_referents(value)[0]) in MUTABLE.values():
            return [_TAGS_OF_VIEWS[kind], self.encode(container)]
        if id(value) in _NAMES:
            return ["known", _NAMES[id(value)]]
        numpy = sys.modules.get("numpy")
        if numpy and kind is numpy.ndarray and value.dtype.kind in _ARRAYS:
            return ["@", self._number_of(value)]
        scalar = numpy and issubclass(kind, numpy.generic) and getattr(numpy, kind.__name__, None) is kind
        if scalar and (self.parity or value.dtype.kind in "SU" or value.dtype.str[1:] in _NUMBERS):
            return ["scalar", _encode_array(value)]
        return self.refer(value)

    def decode(self, sent: Any) -> Any:
        """Makes the value of its JSON; Gone if it is none."""
        if sent is None or isinstance(sent, (bool, int, float, str)):
            return sent
        try:
            return self._decode_tagged(sent)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, ImportError) as e:
            raise Gone("no value") from e

    def _decode_tagged(self, sent: Any) -> Any:
        """Makes the value of a list with a tag."""
        tag = sent[0]
        if tag == "@":
            return self._shared[sent[1]]
        if tag == "int":
            return int(sent[1], 16)
        if tag in ("tuple", "frozenset"):
            return TYPES[tag]([self.decode(item) for item in sent[1]])
        if tag in _COPIED:
            return _COPIED[tag][2](sent[1])
        if tag in _VIEWS:
            return _VIEWS[tag](self.decode(sent[1]))
        if tag == "known":
            return _KNOWN_VALUES[sent[1]]
        return _decode_array(sent[1])[()] if tag == "scalar" else self.resolve(sent)

    def _number_of(self, value: object) -> int:
        """Returns the number of a container, which is registered first, and notes its use."""
        if id(value) not in self._numbers:
            self._count += 1
            self._register(2 * self._count + self.parity, value)
        self._used.add(number := self._numbers[id(value)])
        return number

    def _register(self, number: int, value: Any) -> None:
        self._shared[number], self._numbers[id(value)] = value, number
        if _is_array(value) and self.parity:
            value.flags.writeable = False  # it may be a view of another one, which would change, too

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._contents.pop(number, None)
            self._numbers.pop(id(self._shared.pop(number, None)), None)

    def changes(self) -> tuple[list[Any], list[int]]:
        """Returns the containers that changed, with their contents, and those that this side can no longer meet."""
        changed, checked = [], set[int]()
        while pending := [n for n in self._shared if n not in checked]:
            for number in pending:
                checked.add(number)
                value = self._shared[number]
                if number in self._contents and number not in self._used and _item_count(value) > _MOST:
                    continue
                text = json.dumps(entry := self._describe(value))
                if self._contents.get(number) != text:
                    self._contents[number] = text
                    changed.append([number, entry])
        unused = [n for n in self._shared if n not in self._used]
        value = None
        gone = [n for n in unused[-_MOST:] if sys.getrefcount(self._shared[n]) <= _TABLE]
        gone = [n for n in gone if getattr(self._shared[n], "base", None) is None]  # no view of an array
        self.forget(gone := [*unused[:-_MOST], *gone])
        self._used.clear()
        return changed, gone

    def has_changed(self) -> bool:
        """Whether this side has changed a container since the last message."""
        followed = ((n, value) for n, value in self._shared.items() if _item_count(value) <= _MOST)
        return any(self._contents.get(n) != json.dumps(self._describe(value)) for n, value in followed)

    def apply(self, changed: list[Any], gone: list[int]) -> None:
        """Takes the other side's changes over."""
        try:
            for number, (type_name, contents, extra) in changed:
                if number not in self._shared:
                    self._register(int(number), _make_empty(type_name, contents, extra))
            for number, entry in changed:
                self._set_contents(self._shared[number], *entry)
            for number, _ in changed:
                self._contents[number] = json.dumps(self._describe(self._shared[number]))
            self.forget(gone)
        except (TypeError, ValueError, LookupError, AttributeError) as e:
            raise Gone("no containers") from e
        self._used.clear()

    def _describe(self, value: Any) -> list[Any]:
        """Returns type, contents, and a deque's length or the factory of a defaultdict."""
        type_name = type(value).__name__
        if _is_array(value):
            return [type_name, _encode_array(value), None]
        if type_name in ("bytearray", "float"):
            return [type_name, value.hex(), None]
        if isinstance(value, dict):
            contents = [[self.encode(k), self.encode(v)] for k, v in value.items()]
            return [type_name, contents, self.encode(getattr(value, "default_factory", None))]
        return [type_name, [self.encode(item) for item in value], getattr(value, "maxlen", None)]

    def _set_contents(self, target: Any, type_name: str, contents: Any, extra: Any) -> None:
        """Sets a container's contents to what the other side sent."""
        if type(target).__name__ != type_name:
            raise ValueError(type_name)
        if type_name == "ndarray":
            target.flags.writeable = True
            target[...] = _decode_array(contents)
            target.flags.writeable = not self.parity
        elif type_name == "float":
            pass
        elif type_name == "bytearray":
            target[:] = bytes.fromhex(contents)
        elif isinstance(target, dict):
            pairs = [(self.decode(k), self.decode(v)) for k, v in contents]
            target.clear()
            for key, value in pairs:
                target[key] = value
            if type_name == "defaultdict":
                target.default_factory = self.decode(extra)  # type: ignore[attr-defined]
        else:
            items = [self.decode(item) for item in contents]
            target.clear()
            (target.update if type_name == "set" else target.extend)(items)


def _is_array(value: object) -> bool:
    return type(value).__name__ == "ndarray"


def _make_empty(type_name: str, contents: Any, extra: Any) -> Any:
    """Makes a new container of a type, which is filled later."""
    if type_name == "ndarray":
        return _decode_array(contents)
    if type_name == "float":
        return float.fromhex(contents)
    return collections.deque(maxlen=extra) if type_name == "deque" else MUTABLE[type_name]()


def _item_count(value: Any) -> int:
    return int(value.size) if _is_array(value) else 1 if type(value) is float else len(value)


def _encode_array(value: Any) -> list[Any]:
    return [value.dtype.str, list(value.shape), value.tobytes().hex()]


def _decode_array(sent: list[Any]) -> Any:
    import numpy  # which few programs have

    dtype, shape, contents = numpy.dtype(sent[0]), sent[1], sent[2]
    if dtype.kind not in _ARRAYS or dtype.fields:
        raise ValueError(sent[0])
    return numpy.ndarray(shape, dtype, bytes.fromhex(contents)).copy()
