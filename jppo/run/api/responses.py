"""Batches of responses of a loop on `jppo.open`: sampled ones, or given tokens with targets and a mask of their own.

Arrays of a batch are [N, L], as in `types.Batch`: column k of row i is about emitting the k-th token of response i,
which begins with its first sampled token; columns after its end are 0.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jppo.errors import UserError
from jppo.learner import batch, packing, sharding
from jppo.learner.stats import Outputs
from jppo.types import Array, Batch, Counts, Reward, Rows, Trajectory, given_text

# Fields that a loop may set; `weight` multiplies the loss of each token.
FIELDS = ("mask", "old_logprob", "ref_logprob", "value", "weight", "advantage", "returns")


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where the rows of a batch are in its origin, the batch that `batch` or `examples` made; batch[rows] is a part."""

    origin: object  # identifies the origin
    rows: np.ndarray  # [N] row numbers in the origin, each once; with a row twice, a batch is an origin of its own
    count: int  # rows of the origin


@dataclasses.dataclass(frozen=True)
class Responses:
    """N responses and what a loop knows of their tokens. Immutable: `replace` returns another batch."""

    trajectories: tuple[Trajectory, ...]
    data: Batch
    place: Place
    targets: np.ndarray | None = None  # [N, E] i32, of every entry, where they are not the next tokens

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getattr__(self, name: str) -> Any:
        """Returns an array of the batch by its name in `FIELDS`, or `rollout_logprob`."""
        if name not in (*FIELDS, "rollout_logprob"):
            raise AttributeError(f"a batch of responses has no {name!r}; it has {', '.join(FIELDS)}, rollout_logprob")
        return getattr(self.data, name) if name in ("mask", "rollout_logprob") else self.data.get(name)

    def __getitem__(self, rows: Any) -> "Responses":
        """Returns the batch of some rows, by indices, a slice or a mask."""
        index = np.arange(len(self))[rows].reshape(-1)
        if not len(index):
            raise UserError("no row of the batch is selected; a batch has one response at least")
        data: Batch = jax.tree.map(lambda x: np.asarray(x)[index], self.data)
        targets = None if self.targets is None else self.targets[index]
        place = dataclasses.replace(self.place, rows=self.place.rows[index])
        place = place if len(np.unique(index)) == len(index) else _new_place(len(index))
        return Responses(tuple(self.trajectories[i] for i in index), data, place, targets)

    @property
    def lengths(self) -> np.ndarray:
        """Returns the columns of each response, [N]."""
        entries = [len(t.tokens) - 1 for t in self.trajectories]
        return np.subtract(entries, self.data.first)

    def replace(self, **fields: Any) -> "Responses":
        """Returns the batch with other arrays for some of `FIELDS`.

        An array is [N], one number for all tokens of a response, or [N, L], or a list of N arrays with one number for
        each column of their response.
        """
        for name in fields.keys() - {*FIELDS}:
            raise UserError(f"{name!r} is no array of a batch; use one of {', '.join(FIELDS)}")
        arrays: dict[str, Any] = {name: self._broadcast_field(name, x) for name, x in fields.items()}
        mask = np.asarray(arrays.pop("mask", self.data.mask), np.bool_)
        return dataclasses.replace(self, data=dataclasses.replace(self.data, mask=mask).with_arrays(**arrays))

    def _broadcast_field(self, name: str, x: Any) -> np.ndarray:
        """Returns an argument of `replace` as [N, L], 0 after each response; raises UserError for other shapes."""
        shape, lengths = np.asarray(self.data.mask).shape, self.lengths
        inside = np.arange(shape[1]) < lengths[:, None]
        if isinstance(x, list | tuple) and len(x) == len(self) and all(np.ndim(row) == 1 for row in x):
            wrong = [i for i, row in enumerate(x) if len(row) != lengths[i]]
            if wrong:
                i = wrong[0]
                raise UserError(
                    f"{name}[{i}] has {len(x[i])} numbers, and response {i} has {lengths[i]} tokens; give one for each"
                )
            out = np.zeros(shape, np.float32)
            out[inside] = np.concatenate([np.asarray(row, np.float32) for row in x])
            return out
        try:
            array = np.asarray(x, np.float32)
        except (TypeError, ValueError) as e:
            raise UserError(f"{name} is no array of numbers ({e}); give [{len(self)}] or {list(shape)}") from e
        if array.shape == (len(self),):
            array = np.broadcast_to(array[:, None], shape)
        if array.shape != shape:
            raise UserError(
                f"{name} has the shape {list(array.shape)}; it must be [{len(self)}], {list(shape)} or a list of"
                f" {len(self)} arrays with one number for each token"
            )
        return np.where(inside, array, np.float32(0))

    def pack_mini_batch(self, reads: Sequence[str], plan: packing.Plan, mesh: Mesh) -> batch.Mini:
        """Packs the batch for one gradient, with the row numbers of the batch that it is a part of."""
        whole = self._place_in_origin()
        options = dict[str, Any](plan=plan, mesh=mesh, mini_batch_size=len(self), order=self.place.rows)
        (mini,) = batch.mini_batches(whole.data, whole.trajectories, reads=reads, **options)
        micros = [dataclasses.replace(micro, rows=whole._with_targets(micro.rows)) for micro in mini.micros]
        return dataclasses.replace(mini, micros=micros)

    def _place_in_origin(self) -> "Responses":
        """Returns a batch as large as the origin, with these rows at their places and empty rows elsewhere."""
        rows, count = self.place.rows, self.place.count

        def scatter(x: np.ndarray) -> np.ndarray:
            """Puts rows [N, ...] at their places in the origin, [count, ...], between zeros."""
            out = np.zeros((count, *np.shape(x)[1:]), np.asarray(x).dtype)
            out[rows] = x
            return out

        trajectories = dict.fromkeys(range(count), self.trajectories[0]) | dict(
            zip(rows, self.trajectories, strict=True)
        )
        targets = None if self.targets is None else scatter(self.targets)
        return Responses(tuple(trajectories.values()), jax.tree.map(scatter, self.data), self.place, targets)

    def require_part(self, whole: "Responses") -> None:
        """Raises UserError unless each row is a row of `whole`."""
        if self.place.origin is not whole.place.origin or not np.isin(self.place.rows, whole.place.rows).all():
            raise UserError(
                "the loss selects tokens of the whole batch, and `of` has not all rows of this one; make a part as in"
                " of[rows]"
            )

    def counts(self) -> Counts:
        """Returns the denominators of means over the batch."""
        mask = np.asarray(self.data.mask)
        tokens, sequences = max(int(mask.sum()), 1), max(int(mask.any(1).sum()), 1)
        return Counts(tokens=np.asarray(tokens, np.float32), sequences=np.asarray(sequences, np.float32))

    def logprob_of(self, mini: batch.Mini, parts: Sequence[Outputs]) -> np.ndarray | None:
        """Returns the log-probs among the outputs of the micro-batches of `mini`, [N, L]; None without them."""
        if not parts or "logprob" not in parts[0].rows:
            return None
        pairs = [(m.rows, np.asarray(part.rows["logprob"])) for m, part in zip(mini.micros, parts, strict=True)]
        assert mini.batch is not None
        unpacked: np.ndarray = batch.unpack_rows(mini.batch, pairs)[self.place.rows]
        return unpacked

    def pack_micros(self, plan: packing.Plan, mesh: Mesh) -> list[batch.Micro]:
        """Packs the batch for passes without a gradient."""
        micros = batch.pack_micros(self.data, self.trajectories, plan=plan, mesh=mesh)
        if self.targets is None:
            return micros
        with_targets = [self._with_targets(micro.host) for micro in micros]
        return [batch.Micro(rows, sharding.put_rows(rows, mesh)) for rows in with_targets]

    def _with_targets(self, rows: Rows) -> Rows:
        """Replaces the targets of packed rows, the next tokens, by those of the batch if it has its own."""
        if self.targets is None:
            return rows
        sequence, position = np.asarray(rows.sequence), np.asarray(rows.position)
        there = sequence >= 0
        targets = self.targets[np.where(there, sequence, 0), np.where(there, position, 0)]
        return dataclasses.replace(rows, targets=np.where(there, targets, rows.targets).astype(np.int32))


def make_responses(samples: Sequence[Trajectory], columns: int) -> Responses:
    """Makes the batch of responses, [N, columns]."""
    nothing = [Reward(math.nan, {}, None) for _ in samples]
    data = batch.flatten(samples, nothing, np.arange(len(samples)), shape=(len(samples), columns))
    return Responses(tuple(samples), data, _new_place(len(samples)))


def _new_place(count: int) -> Place:
    return Place(object(), np.arange(count), count)


def make_trajectory(inputs: Any, targets: Any, row: int, vocabulary: int) -> Trajectory:
    """Returns given tokens as a response: entry t is about emitting targets[t] after reading inputs[: t + 1]."""
    arrays = [np.asarray(x) for x in (inputs, targets)]
    for name, x in zip(("inputs", "targets"), arrays, strict=True):
        if x.ndim != 1 or not np.issubdtype(x.dtype, np.integer) or not len(x):
            raise UserError(f"{name}[{row}] has shape {list(x.shape)} and dtype {x.dtype}; give a list of token ids")
        if x.min() < 0 or x.max() >= vocabulary:
            worst = int(x.min() if x.min() < 0 else x.max())
            raise UserError(f"{name}[{row}] has token {worst}; the model's are 0 to {vocabulary - 1}")
    if len(arrays[0]) != len(arrays[1]):
        raise UserError(
            f"inputs[{row}] has {len(arrays[0])} tokens and targets[{row}] {len(arrays[1])}; give one target for each"
        )
    tokens = np.append(arrays[0], arrays[1][-1])
    return given_text(tokens, np.arange(len(tokens)) > 0)


def entry_targets(trajectories: Sequence[Trajectory], targets: Sequence[Array]) -> np.ndarray | None:
    """Returns the targets of every entry, [N, E] i32; None where all are the next tokens."""
    if all(np.array_equal(t.tokens[1:], x) for t, x in zip(trajectories, targets, strict=True)):
        return None
    out = np.zeros((len(targets), max(map(len, targets))), np.int32)
    for row, x in zip(out, targets, strict=True):
        row[: len(x)] = x
    return out
