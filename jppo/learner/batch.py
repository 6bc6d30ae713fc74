"""A step's batch: flat [B, L] on the host and for advantages, packed rows [R, T] for the models.

A row of the flat batch [B, L] has the tokens of one response. For scoring, the whole batch is packed once. For
learning, each epoch of an update shuffles and packs its own mini-batches. `unpack_rows` and `pack_like` convert between
the layouts, by trajectory and position.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jppo.errors import UserError
from jppo.learner import packing, sharding, streams
from jppo.learner.views import COLUMN, PART
from jppo.models import lora
from jppo.types import Array, Batch, Counts, Reward, Rows, Scored, Trajectory


def flatten(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[Reward],
    group: np.ndarray,
    greedy: np.ndarray | None = None,
    *,
    shape: tuple[int, int],
    filter_truncated: bool = False,
    has_earned: bool = False,
    has_given: bool = False,
    episode: np.ndarray | None = None,
    parts: tuple[str, ...] = (),
    columns: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Batch:
    """Makes the flat batch of a step from graded trajectories: arrays [B, L] = `shape`, a row each, then padding rows.

    With `filter_truncated`, no token of a truncated response is trained on, but its score counts in its group.
    `has_earned`: rewards may be earned inside a response, and the batch has their array `earned`. `has_given`: texts of
    the algorithm may replace samples, and the batch marks them in `given`. `episode`: the first branch of each
    trajectory's episode. `parts` names the parts of rewards to add, `columns` has numbers of trajectories by name.
    """
    B, L = shape
    count = len(trajectories)

    def pad_with_zeros(x: Sequence[Any] | np.ndarray, dtype: Any = np.float32) -> np.ndarray:
        return np.pad(np.array(x, dtype), (0, B - count))

    by_name = {f"{PART}{name}": pad_with_zeros([part_of(r, name) for r in rewards]) for name in parts}
    by_name |= {f"{COLUMN}{name}": pad_with_zeros(x) for name, x in columns.items()}
    batch = Batch(
        mask=np.zeros(shape, np.bool_),
        rollout_logprob=np.zeros(shape, np.float32),
        first=np.zeros(B, np.int32),
        score=np.full(B, np.nan, np.float32),
        group=np.arange(B, dtype=np.int32),
        length=np.zeros(B, np.float32),
    ).with_arrays(
        greedy=None if greedy is None else pad_with_zeros(greedy),
        given=pad_with_zeros([t.given for t in trajectories], np.bool_) if has_given else None,
        episode=None if episode is None else np.concatenate([episode, np.arange(count, B)]).astype(np.int32),
        earned=np.zeros(shape, np.float32) if has_earned else None,
        **by_name,
    )
    batch.score[:count] = [r.score for r in rewards]
    batch.group[:count] = group
    for b, t in enumerate(trajectories):
        sampled_entries = np.flatnonzero(t.sampled[1:])  # by entry: the first token has none
        if not sampled_entries.size:
            continue
        response = slice(sampled_entries[0], len(t.tokens) - 1)
        length = response.stop - response.start
        if length > L:
            raise ValueError(f"trajectory {t.uid} has a response of {length} tokens, the batch holds {L}")
        sampled = t.sampled[1:][response]
        batch.first[b] = response.start
        batch.length[b] = sampled.sum()
        batch.mask[b, :length] = sampled & (rewards[b].unusable is None and not filtered_out(t, filter_truncated))
        batch.rollout_logprob[b, :length] = np.where(sampled, t.logprob[1:][response], 0.0)
        for k, amount in rewards[b].earned if has_earned else ():
            batch["earned"][b, k] += amount
    return batch


def part_of(reward: Reward, name: str) -> float:
    """Returns a part of a reward, 0 without a score; raises UserError if a graded reward lacks it."""
    if reward.unusable is not None:
        return 0.0
    if name not in reward.parts:
        known = ", ".join(reward.parts) or "none"
        why = "return it for every response" if reward.error is None else f"its grading failed: {reward.error}"
        raise UserError(
            f"a reward lacks the part {name!r} that the estimator reads (algorithm.gdpo_reward_keys or its `parts`); it"
            f" has {known}; {why}"
        )
    return reward.parts[name]


def filtered_out(t: Trajectory, filter_truncated: bool) -> bool:
    """Whether over-long filtering keeps a response out of the loss; a given one stays, however it was cut."""
    return filter_truncated and t.finish == "length" and not t.given


def with_reference_logprobs(batch: Batch, logprobs: Sequence[np.ndarray]) -> Batch:
    """Adds the reference's log-probs, given for all tokens of each trajectory."""
    ref_logprob = np.zeros(batch.mask.shape, np.float32)
    for b, logprob in enumerate(logprobs):
        response = logprob[batch.first[b] + 1 :][: ref_logprob.shape[1]]  # entry t is about token t + 1
        ref_logprob[b, : len(response)] = response
    return batch.with_arrays(ref_logprob=ref_logprob)


def arrays(batch: Batch, trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Returns the batch's fields by name, with the `tokens` [B, L] of the responses, for inspection."""
    tokens = np.zeros(batch.mask.shape, np.int32)
    for b, t in enumerate(trajectories):
        response = t.tokens[batch.first[b] + 1 :][: tokens.shape[1]]
        tokens[b, : len(response)] = response
    fields = {name: x for name, x in vars(batch).items() if name != "arrays"}
    return fields | batch.arrays | {"tokens": tokens}


def _find_entries(batch: Batch, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns which entries of rows [R, T] are in the flat batch [B, L], and their indices b and columns there."""
    sequence = np.asarray(rows.sequence)
    column = np.asarray(rows.position) - np.asarray(batch.first)[sequence]
    in_batch = (sequence >= 0) & (column >= 0) & (column < batch.mask.shape[1])  # no shared prompt, no padding
    return in_batch, np.where(in_batch, sequence, 0), np.where(in_batch, column, 0)


def unpack_rows(batch: Batch, packed: Sequence[tuple[Rows, np.ndarray]]) -> np.ndarray:
    """Converts rows [R, T] to the layout of the batch; 0 where it has no entry."""
    out = np.zeros(batch.mask.shape, packed[0][1].dtype if packed else np.float32)
    for rows, values in packed:
        in_batch, row, column = _find_entries(batch, rows)
        out[row[in_batch], column[in_batch]] = values[in_batch]
    return out


def pack_like(batch: Batch, array: Any, rows: Rows) -> np.ndarray:
    """Converts an array [B, L] of the batch to the layout of rows [R, T]; 0 at prompts and padding."""
    in_batch, row, column = _find_entries(batch, rows)
    entries = array[row, column]
    return np.where(in_batch, entries, np.zeros((), entries.dtype))


@dataclasses.dataclass(frozen=True)
class Micro:
    """A micro-batch, rows that are scored in one pass: on the host, and on the devices."""

    host: Rows
    device: Rows


def scored_rows(batch: Batch, rows: Rows, reads: Sequence[str]) -> Scored:
    """Joins rows with the batch's arrays that a loss reads, in the rows' layout; it leaves out arrays not there."""
    arrays = {name: np.asarray(batch[name]) for name in reads if name in batch.arrays}
    by_token = {name: np.broadcast_to(x.reshape(len(x), -1), batch.mask.shape) for name, x in arrays.items()}
    return Scored(rows, {name: pack_like(batch, x, rows) for name, x in by_token.items()})


def with_array(scored: Scored, name: str, x: Array) -> Scored:
    return dataclasses.replace(scored, arrays=scored.arrays | {name: x})


def pack_micros(batch: Batch, trajectories: Sequence[Trajectory], *, plan: packing.Plan, mesh: Mesh) -> list[Micro]:
    """Packs the whole batch into micro-batches for scoring."""
    rows = _pack_rows(batch, trajectories, range(len(trajectories)), plan)
    return [Micro(one, sharding.put_rows(one, mesh)) for one in rows]


def _pack_rows(
    batch: Batch, trajectories: Sequence[Trajectory], indices: Sequence[int], plan: packing.Plan
) -> Iterator[Rows]:
    for rows in packing.pack([trajectories[i] for i in indices], indices, plan):
        yield dataclasses.replace(rows, mask=pack_like(batch, batch.mask, rows))


@dataclasses.dataclass(frozen=True)
class Mini:
    """The data of one optimizer step: micro-batches on the host, and the denominators of their losses."""

    micros: list[Any]
    counts: Counts
    place: NamedSharding  # of the rows, on their devices
    learns: bool = True  # False: no token is trained on; the optimizer step is skipped
    batch: Batch | None = None  # the flat batch of the rows


def mini_batches(
    batch: Batch,
    trajectories: Sequence[Trajectory],
    *,
    reads: Sequence[str],
    order: np.ndarray,
    mini_batch_size: int,
    plan: packing.Plan,
    mesh: Mesh,
) -> Iterator[Mini]:
    """Cuts the batch in the given order into mini-batches of trajectories, each packed, on the host.

    `reads` are the arrays that the loss reads (`CompiledLoss.reads`).

    There are as many as `mini_batch_size` fits in, rounded, and their sizes differ by one at most: a remainder in a
    mini-batch of its own would have a whole optimizer step for a few trajectories.
    """
    place = sharding.rows_sharding(mesh)
    for indices in np.array_split(order, mini_batch_count(len(order), mini_batch_size)):
        indices = indices.tolist()
        scored = [scored_rows(batch, rows, reads) for rows in _pack_rows(batch, trajectories, indices, plan)]
        counts = count([micro.rows for micro in scored])
        if "positive" in reads:
            positive = max(sum(float(np.sum(micro.arrays["positive"])) for micro in scored), 1.0)
            scored = [with_array(micro, "positive", micro.arrays["positive"] / positive) for micro in scored]
        yield Mini(scored, counts, place, learns=any(micro.rows.mask.any() for micro in scored), batch=batch)


def with_counts_of_whole(part: Mini, whole: Mini) -> Mini:
    """Gives a part of a mini-batch the denominators and the `before` of the whole, in the same flat layout."""
    micros = part.micros
    if "before" in whole.micros[0].arrays:
        assert whole.batch is not None and part.batch is not None
        before = unpack_rows(whole.batch, [(m.rows, m.arrays["before"]) for m in whole.micros])
        micros = [with_array(m, "before", pack_like(part.batch, before, m.rows)) for m in micros]
    return dataclasses.replace(part, micros=micros, counts=whole.counts)


def with_dropout(mini: Mini, key: Array | None, step: Array, number: int) -> Mini:
    """Adds the seeds of the adapters' dropout to the micro-batches; `number` is the mini-batch's in the step.

    A seed follows from the trajectory and the position of its token.
    """
    assert key is not None
    sequence_seed, position_seed = np.asarray(draw_seeds(key, step, np.int32(number)))

    def seeds_of(rows: Rows) -> np.ndarray:
        sequence_hash = lora.hash_32_bits(np.asarray(rows.sequence).astype(np.uint32) ^ sequence_seed)
        seeds: np.ndarray = lora.hash_32_bits(
            (sequence_hash + np.asarray(rows.position).astype(np.uint32)) ^ position_seed
        )
        return seeds

    return dataclasses.replace(mini, micros=[with_seeds(micro, seeds_of) for micro in mini.micros])


def with_seeds(micro: Scored | Rows, seeds_of: Callable[[Rows], np.ndarray]) -> Scored | Rows:
    """Adds the seeds of dropout, a function of the rows, to a micro-batch."""
    rows = micro.rows if isinstance(micro, Scored) else micro
    rows = dataclasses.replace(rows, dropout=seeds_of(rows))
    return dataclasses.replace(micro, rows=rows) if isinstance(micro, Scored) else rows


@jax.jit
def draw_seeds(key: Array, step: Array, number: Array) -> jax.Array:
    return jax.random.bits(streams.fold(key, step, streams.Step.DROPOUT, number), (2,))


def mini_batch_count(trajectories: int, mini_batch_size: int) -> int:
    """Returns the optimizer steps of an epoch: the quotient rounded to the nearest number, a half up; at least one."""
    return max(1, (2 * trajectories + mini_batch_size) // (2 * mini_batch_size))


def count(rows: Sequence[Rows]) -> Counts:
    """Counts the trained tokens of a mini-batch and the sequences that have any; at least 1 of each."""
    tokens = sum(int(np.sum(one.mask)) for one in rows)
    sequences = sum(np.unique(np.asarray(one.sequence)[np.asarray(one.mask)]).size for one in rows)
    return Counts(tokens=np.asarray(max(tokens, 1), np.float32), sequences=np.asarray(max(sequences, 1), np.float32))
