"""Plain data, which crosses as copies between the tests of a graded program and the program, as JSON.

JSON's own values stand for themselves, others are lists that begin with a tag. A container that can change has a
number, and each message has the contents of those that changed: to both sides it is one object. Only values of the
types below are made of what arrives. All else is a reference, which each side makes and resolves in its own way
(`peer.py`).
"""

import collections
import datetime
import decimal
import fractions
import json
import sys
from typing import Any

MUTABLE: dict[str, Any] = {
    "list": list,
    "dict": dict,
    "set": set,
    "bytearray": bytearray,
    "deque": collections.deque,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "defaultdict": collections.defaultdict,
}
IMMUTABLE: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, complex, str, bytes, tuple, frozenset)
}  # with subclasses
COPIED: dict[str, Any] = {  # type, how it is sent, how it is made
    "complex": (complex, lambda v: [v.real, v.imag], lambda sent: complex(*sent)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda sent: range(*sent)),
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
_VIEWS: dict[str, Any] = {  # type, how it is made of its items
    "keys": (type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    "values": (type({}.values()), lambda items: dict(enumerate(items)).values()),
    "items": (type({}.items()), lambda items: dict(items).items()),
}
_TAGS = {kind: tag for tag, (kind, *_) in {**COPIED, **_VIEWS}.items()}
_CONSTANTS = {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}
TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (*MUTABLE.values(), *IMMUTABLE.values(), *_TAGS, bool, type(None))
    if kind not in (kind for kind, _ in _VIEWS.values())
}
_ARRAYS = "biufcSUMmO"  # kinds of numpy's types
_MOST = 512  # containers that are followed from call to call, and items of one
_TABLE = 2  # references to a container that only this side's tables have


class Gone(BaseException):
    """The other side has ended, or sent what is no message."""


class Plain:
    """Makes messages of values, and values of messages; a subclass has the references."""

    parity = 0  # of the numbers that this side gives to containers

    def __init__(self) -> None:
        self._shared: dict[int, Any] = {}  # containers by number, the newest last
        self._numbers: dict[int, int] = {}  # by the id of the container
        self._contents: dict[int, str] = {}  # as both sides have them
        self._used: set[int] = set()  # by the message that is being made
        self._count = 0

    def refer(self, value: Any) -> Any:
        raise NotImplementedError

    def resolve(self, sent: list[Any]) -> Any:
        raise NotImplementedError

    def scalar(self, value: Any) -> Any:
        return value

    def copied_base(self, value: Any) -> str:
        """Names the mutable type of which a reference is sent as a copy, too; '' for none."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if value.bit_length() < 10_000 else ["int", hex(value)]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.encode(item) for item in value]]
        if kind is slice:
            return ["slice", [self.encode(bound) for bound in (value.start, value.stop, value.step)]]
        if kind in MUTABLE.values():
            return ["@", self._number_of(value)]
        tag = _TAGS.get(kind, "")
        if tag in _VIEWS:
            return [tag, [self.encode(item) for item in value]]
        if tag and type(getattr(value, "tzinfo", None)) in (type(None), datetime.timezone):
            return [tag, COPIED[tag][1](value)]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        if isinstance(value, type) and TYPES.get(value.__name__) == value:
            return ["type", value.__name__]
        if kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "?") in _ARRAYS:
            if isinstance(value, sys.modules["numpy"].generic):
                return ["scalar", _array(self, value)]
            if kind is sys.modules["numpy"].ndarray:
                return ["@", self._number_of(value)]
        if self.copied_base(value):
            return ["@", self._number_of(value)]
        return self.refer(value)

    def decode(self, sent: Any) -> Any:
        if sent is None or isinstance(sent, (bool, int, float, str)):
            return sent
        try:
            return self._made(sent)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, ImportError) as e:
            raise Gone("no value") from e

    def _made(self, sent: Any) -> Any:
        tag = sent[0]
        if tag == "@":
            return self._shared[sent[1]]
        if tag == "int":
            return int(sent[1], 16)
        if tag in ("tuple", "frozenset"):
            return TYPES[tag]([self.decode(item) for item in sent[1]])
        if tag == "slice":
            return slice(*(self.decode(bound) for bound in sent[1]))
        if tag in _VIEWS:
            return _VIEWS[tag][1]([self.decode(item) for item in sent[1]])
        if tag in COPIED:
            return COPIED[tag][2](sent[1])
        if tag in ("constant", "type"):
            return (_CONSTANTS if tag == "constant" else TYPES)[sent[1]]
        if tag == "scalar":
            return self.scalar(_made_array(self, sent[1], filled=True)[()])
        return self.resolve(sent)

    def _number_of(self, value: object) -> int:
        if id(value) not in self._numbers:
            self._count += 1
            self._register(2 * self._count + self.parity, value)
        self._used.add(number := self._numbers[id(value)])
        return number

    def _register(self, number: int, value: object) -> None:
        self._shared[number], self._numbers[id(value)] = value, number

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._contents.pop(number, None)
            self._numbers.pop(id(self._shared.pop(number, None)), None)

    def changes(self) -> tuple[list[Any], list[int]]:
        """Returns the containers that changed, with their contents, and those that this side can no longer meet."""
        changed, done = [], set[int]()
        while left := [n for n in self._shared if n not in done]:
            for number in left:
                done.add(number)
                value = self._shared[number]
                if number in self._contents and number not in self._used and _size(value) > _MOST:
                    continue
                text = json.dumps(entry := self._entry(value))
                if self._contents.get(number) != text:
                    self._contents[number] = text
                    changed.append([number, entry])
        old = [n for n in self._shared if n not in self._used]
        value = None
        gone = [n for n in old[-_MOST:] if sys.getrefcount(self._shared[n]) <= _TABLE]
        self.forget(gone := [*old[:-_MOST], *gone])
        self._used.clear()
        return changed, gone

    def touched(self) -> bool:
        """Whether this side has changed a container since the last message."""
        followed = ((n, value) for n, value in self._shared.items() if _size(value) <= _MOST)
        return any(self._contents.get(n) != json.dumps(self._entry(value)) for n, value in followed)

    def apply(self, changed: list[Any], gone: list[int]) -> None:
        """Takes the other side's changes over."""
        try:
            for number, entry in changed:
                if number not in self._shared:
                    self._register(int(number), self._empty(entry))
            for number, entry in changed:
                self._fill(self._shared[number], entry)
            for number, _ in changed:
                self._contents[number] = json.dumps(self._entry(self._shared[number]))
            self.forget(gone)
        except (TypeError, ValueError, LookupError, AttributeError) as e:
            raise Gone("no containers") from e
        self._used.clear()

    def _entry(self, value: Any) -> list[Any]:
        base = self.copied_base(value) or type(value).__name__
        if base == "ndarray":
            body: Any = _array(self, value)
        elif base == "bytearray":
            body = bytearray.hex(value)
        elif issubclass(TYPES[base], dict):
            body = [[self.encode(k), self.encode(v)] for k, v in TYPES[base].items(value)]
        else:
            body = [self.encode(item) for item in TYPES[base].__iter__(value)]
        more = value.maxlen if base == "deque" else value.default_factory if base == "defaultdict" else None
        return [base, body, self.encode(more), self.refer(value) if self.copied_base(value) else None]

    def _empty(self, entry: list[Any]) -> Any:
        base, body, more, reference = entry
        if reference is not None:
            return self.resolve(
                reference,
            )
        if base == "ndarray":
            return _made_array(self, body, filled=False)
        return MUTABLE[base](maxlen=more) if base == "deque" else MUTABLE[base]()

    def _fill(self, target: Any, entry: list[Any]) -> None:
        base, body, more, _ = entry
        if base == "ndarray":
            target[...] = _made_array(self, body, filled=True)
            return
        kind = MUTABLE[base]
        if not isinstance(target, kind):
            raise ValueError(base)
        if base == "bytearray":
            target[:] = bytes.fromhex(body)
        elif issubclass(kind, dict):
            pairs = [(self.decode(k), self.decode(v)) for k, v in body]
            kind.clear(target)
            for key, value in pairs:
                kind.__setitem__(target, key, value)
            if base == "defaultdict":
                target.default_factory = self.decode(more)
        else:
            items = [self.decode(item) for item in body]
            kind.clear(target)
            (set.update if base == "set" else kind.extend)(target, items)


def _size(value: Any) -> int:
    return int(value.size) if type(value).__name__ == "ndarray" else len(value)


def _array(side: Plain, value: Any) -> list[Any]:
    numpy = sys.modules["numpy"]
    flat = numpy.ravel(value)
    flat = flat.view("i8") if value.dtype.kind in "Mm" else flat
    return [value.dtype.str, list(value.shape), [side.encode(item) for item in flat.tolist()]]


def _made_array(side: Plain, sent: list[Any], filled: bool) -> Any:
    """Makes an array; one that is not filled has the same shape, and its contents come later."""
    import numpy  # which few programs have

    dtype, shape, flat = numpy.dtype(sent[0]), sent[1], sent[2]
    if dtype.kind not in _ARRAYS or dtype.fields:
        raise ValueError(sent[0])
    items = [side.decode(item) if filled else None for item in flat]
    if dtype.kind == "O":
        made = numpy.empty(len(items), object)
        made[:] = items
        return made.reshape(shape)
    if not filled:
        return numpy.zeros(len(items), dtype).reshape(shape)
    return numpy.array(items, "i8" if dtype.kind in "Mm" else dtype).view(dtype).reshape(shape)
