"""What a run remembers of its prompts: the state of a user's class of `data.sampler`, or the memory of an algorithm.

Both are values that user-defined functions make, read and return. Between all calls a memory is text, which is in every
checkpoint: a resumed run calls the functions with what an uninterrupted one calls them with, and no call can change
what another gets.
"""

import base64
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jppo.errors import UserError
from jppo.registry import at_line, did_you_mean, explain, resolve
from jppo.types import Prompt, Reward, StepData

Order = Callable[[int], np.ndarray]  # epoch -> indices of all prompts, [n] i64
_ARRAY, _PAIRS = "__array__", "__pairs__"  # keys of what JSON has no form for
_KEYS = (str, int, float, bool, type(None))


def to_text(memory: Any) -> str:
    """Writes a memory, a pytree of arrays, dicts, lists, numbers and texts, as JSON to the bit; TypeError for other."""
    return json.dumps(_encode(memory))


def from_text(text: str) -> Any:
    """Reads the memory anew; its arrays may be changed."""
    return json.loads(text, object_hook=_decode)


def _encode(value: Any) -> Any:
    """Returns the JSON form of nested values; arrays and dicts with other keys than texts are marked objects."""
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in (_ARRAY, _PAIRS) for key in value):
            return {key: _encode(item) for key, item in value.items()}
        keys = [key.item() if isinstance(key, np.generic) else key for key in value]
        if wrong_types := [type(key).__name__ for key in keys if not isinstance(key, _KEYS)]:
            raise TypeError(f"a key of a dict is of type {wrong_types[0]}; it must be a text or a number")
        return {_PAIRS: [[key, _encode(item)] for key, item in zip(keys, value.values(), strict=True)]}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    names = [name for name in (array.dtype.str, array.dtype.name) if _is_dtype(name, array.dtype)]
    if not names or array.dtype.hasobject:
        raise TypeError(f"an array of dtype {array.dtype} cannot be written; use numbers or texts")
    shape = None if isinstance(value, np.generic) else list(array.shape)
    return {_ARRAY: [names[0], shape, base64.b64encode(array.tobytes()).decode()]}


def _is_dtype(name: str, dtype: np.dtype[Any]) -> bool:
    try:
        return np.dtype(name) == dtype
    except TypeError:
        return False


def _decode(value: dict[str, Any]) -> Any:
    """Restores an array or a dict from its marked object; the inverse of `_encode`."""
    if _PAIRS in value:
        return dict(map(tuple, value[_PAIRS]))
    if _ARRAY not in value:
        return value
    dtype, shape, data = value[_ARRAY]
    array = np.frombuffer(base64.b64decode(data), np.dtype(dtype))
    return array[0] if shape is None else array.reshape(shape).copy()


class Memory:
    """User-defined functions of a memory; '' is the first memory."""

    draws = True  # it chooses the prompts of a step
    order: Order | None = None  # where it does not: a user-defined one

    def __init__(self, label: str, prompts: Sequence[Prompt]):
        """`label` begins the errors."""
        self._label, self._prompts = label, prompts

    def batch(self, text: str, size: int, seeds: Sequence[int]) -> tuple[np.ndarray, str]:
        """Returns the indices of the next `size` prompts, [N] i64, by the memory in `text`, and the memory after them.

        `seeds`, numbers that no other batch of the run has, begin one generator of random numbers.
        """
        raise NotImplementedError

    def _make_first(self) -> str:
        raise NotImplementedError

    @functools.cached_property
    def first(self) -> str:
        return self._make_first()

    def read(self, text: str) -> Any:
        return from_text(text or self.first)

    def _check_indices(self, name: str, indices: Any, size: int, rule: str, returned: Any) -> np.ndarray:
        """Returns the indices of a batch, [N] i64; UserError unless they are `size` different prompts."""
        row_indices: np.ndarray = self._call(name, np.asarray, indices)
        if row_indices.dtype.kind not in "iu" or row_indices.shape != (size,) or len(set(row_indices.tolist())) < size:
            raise UserError(f"{self._label}: {name} must return {rule}, not {str(returned)[:99]}")
        if row_indices.min() < 0 or row_indices.max() >= len(self._prompts):
            raise UserError(f"{self._label}: {name} returns indices outside 0 to {len(self._prompts) - 1}; correct it")
        return row_indices.astype(np.int64)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a user-defined function; any exception becomes a UserError that names it."""
        try:
            return function(*arguments)
        except Exception as e:  # a user's function may raise anything
            raise UserError(f"{self._label}: {name} raises {explain(e)}; correct it{at_line(e)}") from e

    def _to_text(self, name: str, memory: Any) -> str:
        return str(self._call(name, to_text, memory))


class Curriculum(Memory):
    """A class of `data.sampler`, whose batches depend on earlier scores."""

    def __init__(self, spec: str, prompts: Sequence[Prompt], *, seed: int, batch_size: int):
        """Makes the user's object and draws a first batch, to fail before anything starts."""
        super().__init__(f"data.sampler={spec!r}", prompts)
        self._index_of = {prompt.uid: i for i, prompt in enumerate(prompts)}
        self._sampler = self._call("__init__", resolve(spec, "data.sampler"), prompts, seed)
        for name in ("begin", "batch", "update"):
            if not callable(getattr(self._sampler, name, None)):
                raise UserError(f"{self._label} has no method {name}; a class has begin, batch and update")
        self.batch("", batch_size, seeds=())

    def _make_first(self) -> str:
        return self._to_text("begin", self._call("begin", self._sampler.begin))

    def batch(self, text: str, size: int, seeds: Sequence[int]) -> tuple[np.ndarray, str]:
        """Calls the user's `batch`; returns the indices of the next `size` prompts, [N] i64, and the next state."""
        returned = self._call("batch", self._sampler.batch, self.read(text), size)
        indices, after = returned if isinstance(returned, tuple) and len(returned) == 2 else ((), None)
        checked = self._check_indices("batch", indices, size, f"({size} different indices, state)", returned)
        return checked, self._to_text("batch", after)

    def update(self, text: str, prompts: Sequence[Prompt], rewards: Sequence[Reward]) -> str:
        """Returns the state after a batch, by the user's `update`; `rewards` has n consecutive ones per prompt."""
        n = len(rewards) // len(prompts)
        groups = [rewards[i : i + n] for i in range(0, len(rewards), n)]
        scores = [[r.score for r in group if r.unusable is None] for group in groups]
        indices = [self._index_of[prompt.uid] for prompt in prompts]
        return self._to_text("update", self._call("update", self._sampler.update, self.read(text), indices, scores))


class AlgorithmMemory(Memory):
    """The memory of an algorithm, by its functions `init`, `prompts`, `columns` and `update`; None for one left out."""

    def __init__(
        self,
        label: str,
        prompts: Sequence[Prompt],
        *,
        init: Callable[[Sequence[Prompt]], Any] | None,
        choose: Callable[[Any, np.random.Generator, int], Sequence[int]] | None,
        columns: Callable[[Any, np.ndarray], Mapping[str, np.ndarray]] | None,
        update: Callable[[Any, StepData], Any] | None,
        order: Order | None = None,
    ):
        """`choose` is the algorithm's function `prompts`; without it they come in the data's order, or in `order`."""
        super().__init__(label, prompts)
        self._init, self._choose, self._columns, self._update = init, choose, columns, update
        self.draws, self.order = choose is not None, order

    def check(self, size: int, names: Sequence[str]) -> None:
        """Calls the functions for a first batch, to fail before anything starts; `names` are the columns read."""
        assert self.first
        if self.draws:
            self.batch("", size, seeds=(0, 0, 0))
        if names:
            self.columns("", np.arange(min(size, len(self._prompts))), names)

    def _make_first(self) -> str:
        return self._to_text("init", None if self._init is None else self._call("init", self._init, self._prompts))

    def batch(self, text: str, size: int, seeds: Sequence[int]) -> tuple[np.ndarray, str]:
        """Calls the user's `prompts`; returns the next `size` indices, [N] i64, and the unchanged memory."""
        assert self._choose is not None
        returned = self._call("prompts", self._choose, self.read(text), np.random.default_rng(list(seeds)), size)
        return self._check_indices("prompts", returned, size, f"{size} different places of prompts", returned), text

    def columns(self, text: str, indices: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Calls the user's `columns` for the prompts at `indices` [N]; returns those of these names, [N, C] f32."""
        assert self._columns is not None
        unique, inverse = np.unique(indices, return_inverse=True)
        returned = self._call("columns", self._columns, self.read(text), unique.copy())
        if not isinstance(returned, Mapping):
            type_name = type(returned).__name__
            raise UserError(f"{self._label}: columns returns {type_name}; it must return arrays by name, as a dict")
        return np.stack([self._column(returned, name, len(unique))[inverse] for name in names], axis=1)

    def _column(self, returned: Mapping[str, Any], name: str, count: int) -> np.ndarray:
        """Returns one of the columns that the user's function has returned, [count] f32; UserError if it is missing."""
        if name not in returned:
            known = ", ".join(map(repr, returned)) or "none"
            hint = did_you_mean(name, list(map(str, returned)))
            raise UserError(f"{self._label}: columns returns no {name!r}, which is read; it returns {known}{hint}")
        array: np.ndarray = self._call("columns", np.asarray, returned[name])
        if array.shape != (count,) or array.dtype.kind not in "fiub":
            raise UserError(
                f"{self._label}: columns returns {name!r} as {array.dtype} of shape {array.shape}; it must have a"
                f" number for each of the {count} prompts, shape ({count},)"
            )
        if not np.isfinite(array).all():
            raise UserError(f"{self._label}: columns returns {name!r} with values that are not finite; correct it")
        return array.astype(np.float32)

    def update(self, text: str, step: StepData | None) -> str:
        """Returns the memory after a step, by the user's `update`; unchanged without one."""
        if self._update is None or step is None:
            return text or self.first
        memory = self._call("update", self._update, self.read(text), step)
        if memory is None and self._init is not None:
            raise UserError(f"{self._label}: update returns None; return the memory for the next step")
        return self._to_text("update", memory)
