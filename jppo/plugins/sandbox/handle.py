"""What the tests of a graded program hold of its objects: handles, and classes that stand for the program's.

A `Handle` has the methods and attributes that the program's object has, whose results are plain data or handles. Where
one would decide a comparison, the tests have failed (`Undecided`). An object whose class is one of plain data with
methods of its own that override none (a named tuple, an IntEnum) is that plain data, too.
"""

import builtins
import copy
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from jppo.plugins.sandbox.plain import IMMUTABLE

# Operations on an object that the program does. Between two calls of the tests, a look has the same result.
LOOKS: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index, "abs": abs,
    "neg": operator.neg, "pos": operator.pos, "invert": operator.invert, "len": len, "str": str, "repr": repr,
    "round": round, "format": format, "getitem": operator.getitem, "get": getattr, "contains": operator.contains,
}  # fmt: skip
ACTS: dict[str, Any] = {
    "call": lambda function, args, named: function(*args, **named), "next": next, "set": setattr, "del": delattr,
    "setitem": operator.setitem, "delitem": operator.delitem, "copy": copy.copy, "deepcopy": copy.deepcopy,
    "iter": lambda value: ((iterator := iter(value)) is value, iterator),
}  # fmt: skip
_OPERATORS = [
    f"__{prefix}{op}__"
    for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor",
               "lshift", "rshift")
    for prefix in ("", "r")
]  # fmt: skip
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
# Classes of libraries that the program's objects and errors have in the tests, for isinstance and except.
_SHARED_CLASSES = {
    "dataclasses": {"FrozenInstanceError"}, "decimal": {"DecimalException", "DivisionByZero", "InvalidOperation"},
    "json.decoder": {"JSONDecodeError"}, "numpy.linalg": {"LinAlgError"}, "re": {"Match", "Pattern", "error"},
    "statistics": {"StatisticsError"},
}  # fmt: skip
_PYTHON_CLASSES = {kind.__name__: kind for kind in (types.GeneratorType, types.FunctionType, types.BuiltinFunctionType)}


class Undecided(BaseException):
    """The verdict would be up to an object of the program; the tests have failed."""


def number_of(value: Any) -> Any:
    """Returns the number of the program's object that a handle, class or error stands for."""
    if isinstance(value, BaseException):
        return "error", value.__dict__["_place"]
    return value.__dict__["number"] if isinstance(value, type) else object.__getattribute__(value, "_number")


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


def _operation(op: str) -> Callable[..., Any]:
    """Makes a method that has the program do an operation on its object."""
    return lambda self, *more: type(self).side.ask(op, self, *more)


class Handle(metaclass=Meta):
    """An object of the program."""

    side: Any
    special: frozenset[str] = frozenset()
    __array_ufunc__ = None  # numpy leaves operators to Python

    def __getattr__(self, name: str) -> Any:
        return type(self).side.get(self, name)

    def __eq__(self, other: object) -> Any:
        known = "__eq__" not in type(self).special and "__eq__" not in getattr(type(other), "special", ())
        if known or other is self:
            return other is self
        raise Undecided("the program compares its objects")

    def __hash__(self) -> int:
        if "__eq__" in type(self).special:
            raise Undecided("the program compares its objects")
        return id(self)

    def __deepcopy__(self, _: object) -> Any:
        return type(self).side.ask("deepcopy", self)

    __setattr__, __delattr__, __copy__ = _operation("set"), _operation("del"), _operation("copy")
    __str__, __repr__, __format__ = _operation("str"), _operation("repr"), _operation("format")


def _undecided(self: Any, *args: object) -> Any:
    """The method of all operations whose result would be the verdict."""
    raise Undecided("the program orders its objects, or calculates with values of the tests")


def _exit(self: Any, kind: Any, error: Any, _: object) -> None:
    """Never ends an error: the asserts after it would not run."""
    type(self).side.get(self, "__exit__")(kind, error, None)


_METHODS: dict[str, Any] = {
    **{f"__{op}__": _operation(op) for op in (*LOOKS, "next", "setitem", "delitem") if op not in ("get", "contains")},
    "__call__": lambda self, *args, **named: type(self).side.ask("call", self, args, named),
    "__iter__": lambda self: type(self).side.items(self),
    "__reversed__": lambda self: iter(list(self)[::-1]),
    "__getitem__": lambda self, key: type(self).side.item(self, key),
    "__enter__": lambda self: type(self).side.get(self, "__enter__")(),
    "__exit__": _exit,
    **dict.fromkeys(("__get__", "__set__", "__delete__", "__set_name__"), _undecided),  # in a class of the tests
}


@functools.cache
def methods_of(plain: type) -> frozenset[str]:
    """Returns the methods by which plain data is judged; an object whose class replaces one is no such data."""
    return frozenset({*dir(plain)} - {*dir(object), *_OPERATORS, "__getnewargs__"} | {"__hash__", *_COMPARISONS})


def fact(kind: type, name: str) -> Any:
    """Returns what Python knows of a class, which its metaclass cannot replace."""
    return type.__dict__[name].__get__(kind)


def plain_base(kind: type) -> Any:
    """Returns the immutable type of plain data that an instance of a class is, whose methods it has; None for none."""
    mro = fact(kind, "__mro__")
    plain = next((base for base in mro if base in IMMUTABLE), None)
    names = [name for base in mro[: mro.index(plain)] for name in fact(base, "__dict__")] if plain else []
    fields = getattr(kind, "_fields", ()) if plain is tuple else ()
    replaced = any(name in methods_of(plain) or (name in fields and names.count(name) > 1) for name in names)
    return None if replaced else plain


def shared_class(outer: str, name: str) -> Any:
    """Returns a class of a library, by its module and name, that is one class to both sides; None for others."""
    if outer == "builtins":
        return _PYTHON_CLASSES.get(name)
    return getattr(sys.modules.get(outer), name, None) if name in _SHARED_CLASSES.get(outer, ()) else None


def make_class(side: Any, number: int, name: str, bases: tuple[Any, ...], special: list[str], outer: str) -> Any:
    """Makes the class that stands for one of the program's: its bases, and the special methods that it has."""
    shared = shared_class(outer, name)
    body: dict[str, Any] = {"number": number, "side": side, "__doc__": _Doc()}
    if any(issubclass(base, BaseException) for base in bases):
        body |= {"__str__": _error_text, "__getattr__": _attribute_of_error}
        is_shared_error = shared is not None and issubclass(shared, BaseException)
        return shared if is_shared_error else Meta(name, bases, body)
    methods = {n: method for n, method in _METHODS.items() if n in special}
    plain = next((kind for kind in IMMUTABLE if any(issubclass(base, kind) for base in bases)), None)
    body["special"] = frozenset(special)
    if plain is None:
        body |= dict.fromkeys((*_OPERATORS, *_COMPARISONS[2:]), _undecided) | methods
    else:
        body |= methods | {n: getattr(plain, n) for n in methods_of(plain)}
        body |= dict.fromkeys(set(special) & set(_OPERATORS), _undecided)
    if shared is not None and not bases:
        body["__class__"] = property(lambda _: shared)
    handles = bases if any(issubclass(base, Handle) for base in bases) else (Handle, *bases)
    return Meta(name, handles, body)


@functools.cache
def exception(name: str, subclass_name: str = "") -> Any:
    """Returns a builtin exception, or the stand-in of a subclass of the tests."""
    kind = getattr(builtins, name)
    if not issubclass(kind, BaseException):
        raise ValueError(name)
    return kind if subclass_name in ("", name) else type(subclass_name, (kind,), {"__module__": "builtins"})


def _attribute_of_error(error: Any, name: str) -> Any:
    if "_place" not in error.__dict__:
        raise AttributeError(name)
    return type(error).side.get(error, name)


def _error_text(error: Any) -> str:
    return str(error.__dict__.get("_text", ""))
