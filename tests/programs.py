"""Equal programs of a test process are traced, lowered and compiled once.

Each run makes its own functions and passes them to `jax.jit`, which keeps programs by the identity of a function. Two
runs with the same settings trace the same program twice, and that takes most of the time of a small run. `share` gives
functions of jppo that are equal by value one jitted function: the same code, equal closures, defaults and options, the
same globals, or equal ones in a user's file. What has no value here, as an object with a state of its own, is equal
only to itself. A test that counts compilations takes the fixture `own_programs`.
"""

import contextlib
import dataclasses
import enum
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

ATOMS = (type(None), bool, int, float, complex, str, bytes, np.dtype, np.generic, enum.Enum, Mesh, NamedSharding)
ATOMS += (PartitionSpec, SingleDeviceSharding, jax.ShapeDtypeStruct, jax.Device)
DERIVED = (jax.custom_vjp, jax.custom_jvp)
PACKAGES = ("jppo.", "jax.", "optax.", "flax.", "tests.", "numpy", "functools")
LARGEST = 2**20  # bytes of an array that is compared by value
PURE = ("jppo.algorithms", "jppo.learner", "jppo.models", "jax", "numpy", "optax", "flax")
HOST = ("learn", "with_old_logprob", "with_values", "pack_micros", "mini_batches")  # run between programs, never in one


class Same:
    """An object that is equal only to itself; it stays alive, so that no other gets its id."""

    def __init__(self, x):
        self.x = x

    def __hash__(self):
        return id(self.x)

    def __eq__(self, other):
        return isinstance(other, Same) and self.x is other.x


def value_of(x, within=()):
    """Returns what two objects have in common if and only if they compute the same, as something hashable."""
    for depth, one in enumerate(within):
        if x is one:
            return "itself", depth
    inner = functools.partial(value_of, within=(*within, x))
    match x:
        case types.FunctionType():
            cells = [cell.cell_contents for cell in x.__closure__ or ()]
            closed = tuple(inner(y) for y in (cells, x.__defaults__, x.__kwdefaults__))
            return "function", x.__code__, globals_of(x, inner), closed
        case types.MethodType():
            return "method", inner(x.__func__), inner(x.__self__)
        case functools.partial():
            return "partial", inner(x.func), inner(x.args), inner(x.keywords)
        case np.ndarray() | jax.Array() if isinstance(x.dtype, np.dtype) and x.nbytes <= LARGEST:
            place = x.sharding if isinstance(x, jax.Array) else None
            return "array", x.shape, x.dtype, place, np.asarray(x).tobytes()
        case tuple() | list():
            return type(x), tuple(inner(y) for y in x)
        case dict() | types.MappingProxyType():
            return type(x), tuple((inner(k), inner(v)) for k, v in x.items())
        case types.UnionType():
            return "union", inner(x.__args__)
        case type() | types.ModuleType() | types.BuiltinFunctionType():
            return Same(x)
        case _ if isinstance(x, ATOMS):
            return type(x), repr(x) if isinstance(x, float) else x
        case _ if dataclasses.is_dataclass(x):
            return type(x), tuple(inner(getattr(x, field.name)) for field in dataclasses.fields(x))
        case _ if isinstance(x, (*DERIVED, types.SimpleNamespace)):
            return type(x), inner(vars(x))
    return Same(x)


def globals_of(function, inner):
    """Those of a module that all share, or the values that the code of a user's file names."""
    found = function.__globals__
    module = sys.modules.get(found.get("__name__", ""))
    if found.get("__name__", "").startswith(PACKAGES) and module is not None and vars(module) is found:
        return Same(found)
    return tuple((name, inner(found[name])) for name in sorted(names_of(function.__code__)) if name in found)


def names_of(code):
    inner = [names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


class Programs:
    """The jitted functions of this process by the value of what they compute."""

    def __init__(self):
        self.jit, self.kept, self.patches, self.on = jax.jit, {}, weakref.WeakSet(), True

    def __call__(self, fun=None, /, **options):
        if fun is None:
            return functools.partial(self, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not self.on or not caller.startswith("jppo.") or self.patched():
            return self.jit(fun, **options)
        key = value_of(fun), value_of(options), jax.config.read("jax_disable_most_optimizations")
        try:
            known = key in self.kept
        except TypeError:  # something that has no hash
            return self.jit(fun, **options)
        if not known:
            self.kept[key] = self.jit(fun, **options)
        return self.kept[key]

    def patched(self):
        """Whether a test has replaced what a traced function may call."""
        owners = [owner for patch in self.patches for owner, name, _ in patch._setattr if name not in HOST]
        names = [o.__module__ if isinstance(o, type) else getattr(o, "__name__", "") for o in owners]
        return any(f"{name}.".startswith(tuple(f"{pure}." for pure in PURE)) for name in names)

    def forget(self):
        self.kept.clear()
        jax.clear_caches()
        gc.collect()


def share() -> Programs:
    """Replaces `jax.jit` for the functions that jppo makes from here on."""
    programs = Programs()
    begin = pytest.MonkeyPatch.__init__

    def init(self):
        begin(self)
        programs.patches.add(self)

    pytest.MonkeyPatch.__init__ = init
    jax.jit = programs
    return programs


@contextlib.contextmanager
def apart(programs: Programs) -> Iterator[None]:
    """Within it every function has a program of its own, for tests that count compilations."""
    programs.on = False
    yield
    programs.on = True
