"""XLA's memory account of a running program, and the peak memory of a run."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jppo.forecast import account as accounts
from jppo.forecast.account import Account


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """A running program; bytes on one device."""

    name: str
    gradients: int  # f32 gradient sums in memory
    temporaries: int  # XLA's account, including results that alias no argument
    brought: int = 0  # offloaded, copied here for it
    account: Account | None = None  # of its program; None if not compiled
    useful: int = 0  # FLOP that the model needs, on all devices
    entries: int = 0  # of its rows; 0 without rows

    @property
    def needs(self) -> int:
        """All of its bytes."""
        return self.gradients + self.temporaries + self.brought

    def beside(self, held: int) -> "ProgramMemory":
        """Returns it with more bytes for this program alone."""
        return dataclasses.replace(self, temporaries=self.temporaries + held)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The bytes of a run on one device: permanent parts, and per program."""

    parts: dict[str, int]
    moments: tuple[ProgramMemory, ...]
    host: dict[str, int] = dataclasses.field(default_factory=dict)  # offloaded from this device

    @property
    def worst(self) -> ProgramMemory:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.needs)

    @property
    def refused(self) -> list[ProgramMemory]:
        """Programs that fail to compile; on a TPU also for lack of memory."""
        return [one for one in self.moments if one.account is not None and one.account.error is not None]

    @property
    def code(self) -> int:
        """Bytes of compiled code."""
        return sum(one.account.code for one in self.moments if one.account is not None)

    @property
    def peak(self) -> int:
        """Peak bytes in use."""
        return sum(self.parts.values()) + self.code + self.worst.needs


def size(tree: Any) -> int:
    """Returns the bytes on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * _itemsize(x) for x in jax.tree.leaves(tree))


def global_size(tree: Any) -> int:
    """Returns the arrays' global bytes, each counted once."""
    return sum(math.prod(x.shape) * _itemsize(x) for x in jax.tree.leaves(tree))


def _itemsize(x: Any) -> int:
    return int(np.dtype(x.dtype).itemsize)


def account(
    name: str,
    gradients: int,
    fn: Any,
    *args: Any,
    brought: int = 0,
    useful: int = 0,
    masked: float = 1.0,
    entries: int = 0,
) -> ProgramMemory:
    """Compiles `fn` for these arguments and returns XLA's memory account.

    `masked` is the share of its rows' `entries` that are in the mask.
    """
    found = accounts.of_program(fn.lower(*args), _axes(args), share=masked)
    return ProgramMemory(name, gradients, found.temporaries + found.results, brought, found, useful, entries)


def _axes(args: Any) -> dict[str, int]:
    """Returns the axis sizes of the arguments' mesh."""
    places = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
    mesh = next(place.mesh for place in places if isinstance(place, jax.sharding.NamedSharding))
    return dict(mesh.shape)
