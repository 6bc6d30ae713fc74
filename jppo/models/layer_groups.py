"""Stacks: the layers of a model that have the same parameters, which are stored stacked and scanned over."""

import dataclasses
import itertools
from typing import Literal, NamedTuple

Mixer = Literal["attention", "delta"]


Keys = Literal["own", "kept", "shared"]


class Heads(NamedTuple):
    """The sizes of a layer's keys and values."""

    num_kv_heads: int  # K
    head_dim: int  # A


class LayerModules(NamedTuple):
    """The modules of a layer."""

    sparse: bool  # it has experts
    mixer: Mixer = "attention"
    beside: bool = False  # it has an MLP, too
    kind: int | None = None  # index of its kind, where kinds have heads of their own size
    keys: Keys = "own"  # kept: later layers share its keys and values; shared: it takes a kept layer's
    joined: bool = False  # keys and values are one projection

    @property
    def dense(self) -> bool:
        """Whether it has an MLP."""
        return self.beside or not self.sparse

    @property
    def keyed(self) -> bool:
        """Whether it has a projection to keys."""
        return self.keys != "shared"

    @property
    def valued(self) -> bool:
        """Whether it has a projection to values."""
        return self.keyed and not self.joined


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers `first`, `first + step`, ... with the same parameters."""

    path: tuple[str, ...]  # of its parameters
    first: int
    step: int
    count: int
    modules: LayerModules

    @property
    def layers(self) -> slice:
        """Returns the layers' indices."""
        return slice(self.first, self.first + self.step * self.count, self.step)


Group = tuple[Stack, ...]  # stacks of one scan, whose layers take turns


def layer_groups(layer_modules: tuple[LayerModules, ...]) -> tuple[Group, ...]:
    """Returns the scans of a model: one over the periods of a repeated pattern, else one for each run of equal layers.

    The parameters are in `layers` if all layers are alike, in `layers/0`, `layers/1`, ... by their place in the period,
    or in `layers0`, `layers1`, ... by run.
    """
    L = len(layer_modules)
    period = next(n for n in range(1, L + 1) if L % n == 0 and layer_modules == layer_modules[:n] * (L // n))
    if period == 1:
        return ((Stack(("layers",), 0, 1, L, layer_modules[0]),),)
    if period < L:
        return (tuple(Stack(("layers", str(i)), i, period, L // period, layer_modules[i]) for i in range(period)),)
    runs = [[i for i, _ in run] for _, run in itertools.groupby(enumerate(layer_modules), key=lambda pair: pair[1])]
    return tuple((Stack((f"layers{n}",), run[0], 1, len(run), layer_modules[run[0]]),) for n, run in enumerate(runs))
