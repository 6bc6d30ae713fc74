"""A program at work, as XLA accounts for it, and what a run holds at its worst moment."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jppo.targets import account as accounts
from jppo.targets.account import Account


@dataclasses.dataclass(frozen=True)
class Moment:
    """A program at work: all on one device, in bytes."""

    name: str
    gradients: int  # the f32 sums that are there
    temporaries: int  # XLA's account, with results that take no argument's place
    brought: int = 0  # what waits on the host and is there for it
    account: Account | None = None  # of its program; None for what is not compiled
    useful: int = 0  # FLOP that the model needs for it on all devices
    entries: int = 0  # of its rows; 0 where it has none

    @property
    def needs(self) -> int:
        """All of it."""
        return self.gradients + self.temporaries + self.brought

    def beside(self, held: int) -> "Moment":
        """The same with so many more bytes that are there for the program alone."""
        return dataclasses.replace(self, temporaries=self.temporaries + held)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The bytes of a run on one device: what is always there, and what its programs need beside it."""

    parts: dict[str, int]
    moments: tuple[Moment, ...]
    host: dict[str, int] = dataclasses.field(default_factory=dict)  # what waits on the host for this device

    @property
    def worst(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.needs)

    @property
    def refused(self) -> list[Moment]:
        """Programs that the compiler refuses; on a TPU also for want of memory."""
        return [one for one in self.moments if one.account is not None and one.account.error is not None]

    @property
    def code(self) -> int:
        """The compiled programs themselves."""
        return sum(one.account.code for one in self.moments if one.account is not None)

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return sum(self.parts.values()) + self.code + self.worst.needs


def size(tree: Any) -> int:
    """Bytes of the arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * _itemsize(x) for x in jax.tree.leaves(tree))


def whole(tree: Any) -> int:
    """Bytes of the arrays, each counted once, wherever they lie."""
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
) -> Moment:
    """What the program that `fn` is for such arguments sets aside, by XLA's account of it.

    `masked` is the share of its rows' `entries` that are in the mask.
    """
    found = accounts.of_program(fn.lower(*args), _axes(args), share=masked)
    return Moment(name, gradients, found.temporaries + found.results, brought, found, useful, entries)


def _axes(args: Any) -> dict[str, int]:
    """The sizes of the mesh that the arguments are sharded over."""
    places = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
    mesh = next(place.mesh for place in places if isinstance(place, jax.sharding.NamedSharding))
    return dict(mesh.shape)
