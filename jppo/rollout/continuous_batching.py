"""Continuous batching of the in-process engine: its programs and shapes, and the loop that fills free rows.

A fixed number of rows decodes together (`jppo/models/generate.py`); a finished row takes the next waiting sample. The
host returns finished samples between device calls, which are long enough to keep the device busy.
"""

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jppo.models import experts, generate
from jppo.models.config import ModelConfig
from jppo.models.generate import SamplingRule, Slots
from jppo.models.lora import Weights
from jppo.rollout.protocol import Answer, RolloutError, cut_at, greedy, require_kept
from jppo.types import Params, Sampling

TURNS = 32  # tokens per row between two checks by the host
FREE = 8  # while samples wait, a call ends when one in this many rows is free
FILL_TOKENS = 4096  # about this many prompt tokens are prefilled at once on each device
SHORTEST = 32  # prompts are padded to the longest, half of it, a quarter ... down to this


@dataclasses.dataclass(frozen=True)
class InprocessSettings:
    """The model and the shapes of the engine."""

    cfg: ModelConfig  # with the vocabulary padded for the mesh
    rows: int  # decoded together
    row_multiple: int  # number of devices that share them
    max_prompt_length: int
    max_model_len: int  # prompt and response together
    dtype: str  # of products and cache
    by_row: NamedSharding  # sharding of arrays [R, ...]
    of_cache: NamedSharding  # sharding of keys and values [R, T, K, A]
    cut: bool  # compile the top_p, top_k or min_p variant at the start, too
    experts: bool = False  # answers have the experts of each token
    kept: int = 0  # answers have up to so many kept tokens of each sample

    @property
    def prompt_shapes(self) -> list[tuple[int, int]]:
        """Returns the shapes of prefills, by increasing length."""
        lengths = [self.max_prompt_length]
        while lengths[-1] // 2 >= SHORTEST:
            lengths.append(-(-lengths[-1] // 2))
        m = self.row_multiple
        most = -(-self.rows // m) * m
        return [(min(most, max(1, FILL_TOKENS // length) * m), length) for length in reversed(lengths)]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled functions, each compiled once per prefill shape."""

    empty: Callable[[], Slots]
    prepare: Callable[[Weights], Params]
    fill: Callable[..., Slots]
    advance: Callable[..., Slots]  # (model, slots, choice, enough)
    advance_cut: Callable[..., Slots]  # the same with top_p, top_k and min_p

    def advancing(self, sampling: Sampling, vocab_size: int) -> Callable[..., Slots]:
        """Returns the program with or without top_p, top_k and min_p, as `sampling` needs."""
        cut = sampling.top_p < 1.0 or 1 <= sampling.top_k < vocab_size or sampling.min_p > 0.0
        return self.advance_cut if cut else self.advance


def make_empty(s: InprocessSettings) -> tuple[Callable[[], Slots], Any]:
    """Makes the function that allocates free rows; returns also the shardings of its result."""
    shape = dict[str, Any](rows=s.rows, length=s.max_model_len, dtype=s.dtype, experts=s.experts, kept=s.kept)
    empty = functools.partial(generate.empty_slots, s.cfg, **shape)
    places: Any = jax.tree.map(lambda _: s.by_row, jax.eval_shape(empty))
    return empty, dataclasses.replace(places, cache=jax.tree.map(lambda _: s.of_cache, places.cache))


def make_programs(s: InprocessSettings, ends: Sequence[int], *, turns: int) -> Programs:
    """Closes the pure functions over model and shapes; `turns` is the number of tokens per row and call."""
    empty, places = make_empty(s)  # rows keep their sharding across programs; otherwise XLA would recompile
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=s.by_row)
    on_mesh: dict[str, Any] = dict(constrain=constrain, mix=experts.make_mix(s.by_row.mesh, whole_rows=True))

    def fill(model: Params, slots: Slots, *new: Any) -> Slots:
        return generate.fill(model, s.cfg, slots, *new, **on_mesh)

    def advance(model: Params, slots: Slots, choice: SamplingRule, enough: Any, *, cut: bool) -> Slots:
        return generate.next_tokens(
            model, s.cfg, slots, choice, enough, ends=tuple(ends), turns=turns, cut=cut, **on_mesh
        )

    in_place = functools.partial(jax.jit, donate_argnums=1, out_shardings=places)
    return Programs(
        empty=jax.jit(empty, out_shardings=places),
        prepare=jax.jit(functools.partial(generate.prepare_model, cfg=s.cfg, dtype=s.dtype)),
        fill=in_place(fill),
        advance=in_place(functools.partial(advance, cut=False)),
        advance_cut=in_place(functools.partial(advance, cut=True)),
    )


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A waiting request."""

    number: int  # in order of arrival
    ids: np.ndarray
    sampling: Sampling
    seed: int
    answer: asyncio.Future[Answer]

    @property
    def beginning(self) -> bytes:
        """Returns the prefix that equal requests share; it is prefilled once."""
        return self.ids.tobytes()


class Batcher:
    """Answers all requests, row by row, with one version of the weights."""

    def __init__(
        self,
        settings: InprocessSettings,
        programs: Programs,
        model: Params,
        ends: frozenset[int],
        decode: Callable[[list[int]], str],
        version: int,
    ):
        self.settings = settings
        self._programs = programs
        self._model = model
        self._ends = ends
        self._decode = decode
        self._version = version
        self._waiting: list[Waiting] = []
        self._came = asyncio.Event()
        self._asked = 0

    async def ask(self, ids: Sequence[int], *, sampling: Sampling, seed: int, near: Hashable) -> Answer:
        """Returns one answer to `ids`; waits for a row."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(self._asked, np.asarray(ids, np.int32), sampling, seed, answer))
        self._asked += 1
        self._came.set()
        return await answer

    def compile(self) -> None:
        """Runs every program on empty rows, so later calls do not compile."""
        slots, choice = self._programs.empty(), choice_of(greedy(1))
        for shape in self.settings.prompt_shapes:
            slots = self._programs.fill(self._model, slots, *self._filling([], [], shape))
        rows = np.int32(self.settings.rows)
        for advance in (self._programs.advance, *([self._programs.advance_cut] if self.settings.cut else [])):
            slots = advance(self._model, slots, choice, rows)
        jax.block_until_ready(slots)

    async def answer_all(self) -> None:
        """Answers requests until it is cancelled."""
        s = self.settings
        slots, under_way = self._programs.empty(), dict[int, Waiting]()
        while True:
            if not under_way:
                self._came.clear()
                while not self._waiting:
                    await self._came.wait()
            await asyncio.sleep(0)  # lets answered and new callers submit requests
            # Longest first, so prompts of a prefill are similar; samples of a prompt stay together and share it.
            asked = (request for request in self._waiting if not request.answer.done())  # its caller may have gone
            waiting = sorted(asked, key=lambda r: (-len(r.ids), r.number))
            if not (under_way or waiting):
                self._waiting = []
                continue
            sampling = (next(iter(under_way.values())) if under_way else waiting[0]).sampling
            free = [row for row in range(s.rows) if row not in under_way]
            while waiting and free:
                slots, taken = self._fill(slots, waiting, free)
                under_way |= dict(zip(free, taken, strict=False))
                waiting, free = waiting[len(taken) :], free[len(taken) :]
            self._waiting = waiting
            enough = max(1, s.rows // FREE) if waiting else s.rows
            advance = self._programs.advancing(sampling, s.cfg.vocab_size)
            slots = advance(self._model, slots, choice_of(sampling), np.int32(enough))
            looked_at = (slots.tokens, slots.logprob, slots.last, slots.until, slots.experts, slots.kept)
            tokens, logprob, last, until, experts, kept = await asyncio.to_thread(jax.device_get, looked_at)
            # The device knows neither stop texts, nor `stop_ids`, nor callers that have gone.
            here_only = (r.sampling.stop or r.sampling.stop_ids or r.answer.done() for r in under_way.values())
            until, tell = until.copy(), any(here_only)
            for row, request in list(under_way.items()):
                gone, begin, end = request.answer.done(), len(request.ids), int(last[row]) + 1
                length = self._stopped(tokens[row, begin:end], request.sampling)
                if length is None and end <= until[row] and not gone:
                    continue
                here = slice(begin, end if length is None else begin + length)
                by_id = not sampling.ignore_eos and int(tokens[row, here.stop - 1]) in self._ends
                finish = "stop" if by_id or length is not None else "length"
                if not gone:
                    read = None if experts is None else experts[row, : here.stop - 1]
                    ids = [one[one != -1] for one in kept[row, here]] if sampling.kept else None
                    answer = self._answer(tokens[row, here], logprob[row, here], finish, read)
                    if sampling.kept:
                        require_kept(answer.tokens, ids, sampling.kept, "the engine")
                    request.answer.set_result(dataclasses.replace(answer, kept=ids))
                del under_way[row]
                until[row] = last[row]
            if tell:
                slots = dataclasses.replace(slots, until=jax.device_put(until, s.by_row))

    def _fill(self, slots: Slots, waiting: Sequence[Waiting], free: Sequence[int]) -> tuple[Slots, Sequence[Waiting]]:
        """Fills free rows with the first waiting requests, as many as one prefill takes; returns them."""
        count, length = next(shape for shape in self.settings.prompt_shapes if shape[1] >= len(waiting[0].ids))
        read: dict[bytes, int] = {}
        taken = list(
            itertools.takewhile(lambda r: read.setdefault(r.beginning, len(read)) < count, waiting[: len(free)])
        )
        return self._programs.fill(self._model, slots, *self._filling(taken, free, (count, length))), taken

    def _filling(self, taken: Sequence[Waiting], free: Sequence[int], shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
        """Returns the further arguments of `generate.fill`: prompts, source, length, until and seed."""
        prompts, source, length, until, seed = filling(self.settings.rows, shape)
        places: dict[bytes, int] = {}
        for row, request in zip(free, taken, strict=False):
            ids = request.ids
            place = places.setdefault(request.beginning, len(places))
            prompts[place, : len(ids)] = ids
            source[row], length[row], seed[row] = place, len(ids), request.seed
            until[row] = len(ids) - 1 + request.sampling.max_tokens
        return prompts, source, length, until, seed

    def _stopped(self, tokens: np.ndarray, sampling: Sampling) -> int | None:
        """Returns the number of tokens up to the first stop text or id; None without one."""
        length = cut_at(tokens.tolist(), self._decode, sampling.stop, new=TURNS)
        by_id = np.flatnonzero(np.isin(tokens, sampling.stop_ids))
        return length if not len(by_id) else min(length or len(tokens), int(by_id[0]) + 1)

    def _answer(
        self, tokens: np.ndarray, logprob: np.ndarray, finish: str, experts: np.ndarray | None = None
    ) -> Answer:
        if not np.isfinite(logprob).all():
            raise RolloutError(
                f"an answer has tokens with the log-probs {logprob[:8]}...: the weights of version {self._version} give"
                " no finite numbers"
            )
        return Answer(tokens.tolist(), logprob.tolist(), [self._version] * len(tokens), finish, experts=experts)


def filling(rows: int, shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Returns the arguments of `generate.fill` without a prompt: prompts, source, length, until and seed."""
    prompts, seed = np.zeros(shape, np.int32), np.zeros(rows, np.uint32)
    return prompts, np.full(rows, -1, np.int32), np.ones(rows, np.int32), np.zeros(rows, np.int32), seed


def choice_of(how: Sampling) -> SamplingRule:
    """Returns the sampling parameters as arrays for the programs."""
    fields: dict[str, Any] = dict(
        temperature=np.float32(how.temperature),
        top_p=np.float32(how.top_p),
        top_k=np.int32(how.top_k),
        min_p=np.float32(how.min_p),
        ignore_eos=np.bool_(how.ignore_eos),
    )
    return SamplingRule(**fields)
