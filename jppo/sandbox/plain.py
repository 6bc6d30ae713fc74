"""Plain data, which crosses as copies between the tests of a graded program and the program, as JSON.

JSON's own values stand for themselves, others are lists that begin with a tag. Containers that can change are in the
heap of a message: one that is met twice stays one object, and a call changes those that it was given. Only values of
the types below are made of what arrives. All else is a reference, which each side makes and resolves in its own way
(`peer.py`).
"""

import collections
import datetime
import decimal
import fractions
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
_COPIED: dict[str, Any] = {  # type, how it is sent, how it is made
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
_TAGS = {kind: tag for tag, (kind, *_) in {**_COPIED, **_VIEWS}.items()}
_CONSTANTS = {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}
TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (*MUTABLE.values(), *IMMUTABLE.values(), *_TAGS, bool, type(None), object)
    if kind not in (kind for kind, _ in _VIEWS.values())
}
_ARRAYS = "biufcSUMmO"  # kinds of numpy's types


class Gone(BaseException):
    """The other side has ended, or sent what is no message."""


class Heap:
    """The containers of a request and its reply, in order."""

    def __init__(self, objects: list[Any]):
        self.objects = objects
        self._at = {id(value): i for i, value in enumerate(objects)}

    def place(self, value: object) -> int:
        if id(value) not in self._at:
            self._at[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._at[id(value)]


class Plain:
    """Makes messages of values, and values of messages; a subclass has the references."""

    def refer(self, value: Any, heap: Heap) -> Any:
        raise NotImplementedError

    def resolve(self, sent: list[Any], heap: Heap) -> Any:
        raise NotImplementedError

    def copied_base(self, value: Any) -> str:
        """Names the mutable type of which a reference is sent as a copy, too; '' for none."""
        raise NotImplementedError

    def encode(self, value: Any, heap: Heap) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if value.bit_length() < 10_000 else ["int", hex(value)]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.encode(item, heap) for item in value]]
        if kind is slice:
            return ["slice", [self.encode(bound, heap) for bound in (value.start, value.stop, value.step)]]
        if kind in MUTABLE.values():
            return ["@", heap.place(value)]
        tag = _TAGS.get(kind, "")
        if tag in _VIEWS:
            return [tag, [self.encode(item, heap) for item in value]]
        if tag and type(getattr(value, "tzinfo", None)) in (type(None), datetime.timezone):
            return [tag, _COPIED[tag][1](value)]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        if isinstance(value, type) and TYPES.get(value.__name__) is value:
            return ["type", value.__name__]
        if kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "?") in _ARRAYS:
            if isinstance(value, sys.modules["numpy"].generic):
                return ["scalar", _array(self, value, heap)]
            if kind is sys.modules["numpy"].ndarray:
                return ["@", heap.place(value)]
        if self.copied_base(value):
            return ["@", heap.place(value)]
        return self.refer(value, heap)

    def decode(self, sent: Any, heap: Heap) -> Any:
        if sent is None or isinstance(sent, (bool, int, float, str)):
            return sent
        try:
            return self._made(sent, heap)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, ImportError) as e:
            raise Gone("no value") from e

    def _made(self, sent: Any, heap: Heap) -> Any:
        tag = sent[0]
        if tag == "@":
            return heap.objects[sent[1]]
        if tag == "int":
            return int(sent[1], 16)
        if tag in ("tuple", "frozenset"):
            return TYPES[tag]([self.decode(item, heap) for item in sent[1]])
        if tag == "slice":
            return slice(*(self.decode(bound, heap) for bound in sent[1]))
        if tag in _VIEWS:
            return _VIEWS[tag][1]([self.decode(item, heap) for item in sent[1]])
        if tag in _COPIED:
            return _COPIED[tag][2](sent[1])
        if tag in ("constant", "type"):
            return (_CONSTANTS if tag == "constant" else TYPES)[sent[1]]
        if tag == "scalar":
            return _made_array(self, sent[1], heap)[()]
        return self.resolve(sent, heap)

    def drain(self, heap: Heap) -> list[Any]:
        """Returns the contents of a heap's containers; encoding one may add others."""
        entries: list[Any] = []
        while len(entries) < len(heap.objects):
            value = heap.objects[len(entries)]
            base = self.copied_base(value) or type(value).__name__
            if base == "ndarray":
                body: Any = _array(self, value, heap)
            elif base == "bytearray":
                body = bytearray.hex(value)
            elif issubclass(TYPES[base], dict):
                body = [[self.encode(k, heap), self.encode(v, heap)] for k, v in TYPES[base].items(value)]
            else:
                body = [self.encode(item, heap) for item in TYPES[base].__iter__(value)]
            more = value.maxlen if base == "deque" else value.default_factory if base == "defaultdict" else None
            reference = self.refer(value, heap) if self.copied_base(value) else None
            entries.append([base, body, self.encode(more, heap), reference])
        return entries

    def fill(self, entries: list[Any], known: list[Any]) -> Heap:
        """Makes the containers of a message; known ones, which the request had, get their new contents."""
        try:
            heap = Heap(known + [self._empty(entry) for entry in entries[len(known) :]])
            for target, entry in zip(heap.objects, entries, strict=True):
                if entry is not None:
                    self._fill(target, entry, heap)
        except (TypeError, ValueError, LookupError, AttributeError) as e:
            raise Gone("no heap") from e
        return heap

    def _empty(self, entry: list[Any]) -> Any:
        base, body, more, reference = entry
        if reference is not None:
            return self.resolve(reference, Heap([]))
        if base == "ndarray":
            return _made_array(self, body, None)
        return MUTABLE[base](maxlen=more) if base == "deque" else MUTABLE[base]()

    def _fill(self, target: Any, entry: list[Any], heap: Heap) -> None:
        base, body, more, _ = entry
        if base == "ndarray":
            target[...] = _made_array(self, body, heap)
            return
        kind = MUTABLE[base]
        if not isinstance(target, kind):
            raise ValueError(base)
        if base == "bytearray":
            target[:] = bytes.fromhex(body)
        elif issubclass(kind, dict):
            pairs = [(self.decode(k, heap), self.decode(v, heap)) for k, v in body]
            kind.clear(target)
            for key, value in pairs:
                kind.__setitem__(target, key, value)
            if base == "defaultdict":
                target.default_factory = self.decode(more, heap)
        else:
            items = [self.decode(item, heap) for item in body]
            kind.clear(target)
            (set.update if base == "set" else kind.extend)(target, items)


def _array(side: Plain, value: Any, heap: Heap) -> list[Any]:
    numpy = sys.modules["numpy"]
    flat = numpy.ravel(value)
    flat = flat.view("i8") if value.dtype.kind in "Mm" else flat
    return [value.dtype.str, list(value.shape), [side.encode(item, heap) for item in flat.tolist()]]


def _made_array(side: Plain, sent: list[Any], heap: Heap | None) -> Any:
    """Makes an array; without a heap, one of the same shape whose contents come later."""
    import numpy

    dtype, shape, flat = numpy.dtype(sent[0]), sent[1], sent[2]
    if dtype.kind not in _ARRAYS or dtype.fields:
        raise ValueError(sent[0])
    items = [None if heap is None else side.decode(item, heap) for item in flat]
    if dtype.kind == "O":
        made = numpy.empty(len(items), object)
        made[:] = items
        return made.reshape(shape)
    if heap is None:
        return numpy.zeros(len(items), dtype).reshape(shape)
    return numpy.array(items, "i8" if dtype.kind in "Mm" else dtype).view(dtype).reshape(shape)
