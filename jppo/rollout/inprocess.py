"""The in-process rollout engine: a `Sampler` on the trainer's devices, mesh and parameters.

    sampler = InprocessEngine(...).ready(...)    has no weights yet
    sampler.hold(policy, ...)                    sets the trainer's arrays to sample from; compiles at the first call

Batching is continuous: a fixed number of rows decodes together (`jppo/models/generate.py`), and a finished row takes
the next waiting sample. The host returns finished samples between device calls, which are long enough to keep the
device busy.
"""

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jppo.errors import UserError
from jppo.learner import sharding
from jppo.models import fused, generate, placing
from jppo.models.attention import Attend
from jppo.models.cache import AttendCached, Cache, LayerCache, count_slots, grow_cache, make_attend_cached
from jppo.models.config import ModelConfig
from jppo.models.decoder import attention_settings
from jppo.models.generate import Filled, SamplingRule, Slots
from jppo.models.lora import Weights
from jppo.models.sequence_parallel import WHOLE
from jppo.rollout import protocol
from jppo.rollout.protocol import Answer, Done, Kept, RolloutError, Sampler, Served, Talk, cut_at, greedy, require_kept
from jppo.types import Params, Prompt, Sampling, Trajectory

TURNS = 32  # tokens per row between two checks by the host
_FREE = 8  # while samples wait, a call ends when one in this many rows is free
_FILL_TOKENS = 4096  # about this many prompt tokens are prefilled at once on each device
_SHORTEST = 32  # prompts are padded to the longest, half of it, a quarter ... down to this
_FEWEST_SLOTS = 512  # the cache begins with at least so many, and is doubled as rows grow


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
    of_cache: NamedSharding  # sharding of keys and values [R, K, S, A]
    cut: bool  # compile the top_p, top_k or min_p variant at the start, too
    experts: bool = False  # answers have the experts of each token
    kept: int = 0  # answers have up to so many kept tokens of each sample

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh of the rows."""
        return cast(Mesh, self.by_row.mesh)

    @property
    def slot_counts(self) -> list[int]:
        """Returns the sizes of the cache, increasing."""
        counts = [max(1, self.max_model_len - 1)]
        while counts[-1] // 2 >= _FEWEST_SLOTS:
            counts.append(-(-counts[-1] // 2))
        return counts[::-1]

    @property
    def prompt_shapes(self) -> list[tuple[int, int]]:
        """Returns the shapes of prefills, by increasing length."""
        lengths = [self.max_prompt_length]
        while lengths[-1] // 2 >= _SHORTEST:
            lengths.append(-(-lengths[-1] // 2))
        multiple = self.row_multiple
        most_prompts = -(-self.rows // multiple) * multiple
        return [(min(most_prompts, max(1, _FILL_TOKENS // length) * multiple), length) for length in reversed(lengths)]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled functions, each compiled once per prefill shape."""

    empty: Callable[[], Slots]
    prepare: Callable[[Weights], Params]
    prefill: Callable[..., Filled]  # (model, prompts, length)
    place: Callable[..., Slots]  # (slots, filled, source, length, until, seed)
    grow: Callable[..., Cache]  # (cache, count, slot), of one layer
    advance: Callable[..., Slots]  # (model, slots, choice, enough)
    advance_cut: Callable[..., Slots]  # the same with top_p, top_k and min_p

    def choose_advance(self, sampling: Sampling, vocab_size: int) -> Callable[..., Slots]:
        """Returns the program with or without top_p, top_k and min_p, as `sampling` needs."""
        cut = sampling.top_p < 1.0 or 1 <= sampling.top_k < vocab_size or sampling.min_p > 0.0
        return self.advance_cut if cut else self.advance


def cached_dtype(mesh: Mesh, dtype: str) -> str:
    """Returns the dtype of a cache, float32 on CPUs: XLA would convert all of a narrower one at each step there."""
    return "float32" if sharding.platform(mesh) == "cpu" else dtype


def make_empty(s: InprocessSettings, slots: int) -> tuple[Callable[[], Slots], Any]:
    """Makes the function that allocates free rows with a cache of `slots`; returns also the shardings of its result."""
    sizes = dict[str, Any](rows=s.rows, length=s.max_model_len, experts=s.experts, kept=s.kept)
    empty = functools.partial(generate.empty_slots, s.cfg, **sizes, slots=slots, dtype=cached_dtype(s.mesh, s.dtype))
    shapes = jax.eval_shape(empty)
    return empty, dataclasses.replace(shardings_of(s, shapes), slot=NamedSharding(s.mesh, PartitionSpec()))


def shardings_of(s: InprocessSettings, rows: Any) -> Any:
    """Returns the shardings of rows or prompts with their cache."""
    by_row = jax.tree.map(lambda _: s.by_row, rows)
    return dataclasses.replace(by_row, cache=_cache_shardings(s, rows.cache))


def _cache_shardings(s: InprocessSettings, cache: Any) -> Any:
    """Returns the shardings of a cache: heads are sharded, recurrent states by row alone."""

    def find(layer: Any) -> Any:
        return jax.tree.map(lambda _: s.of_cache if isinstance(layer, LayerCache) else s.by_row, layer)

    return tuple(map(find, cache))


def choose_attention(s: InprocessSettings) -> tuple[Attend, AttendCached]:
    """Chooses the attention of prompts, by cuDNN where it can, and of new tokens to the cache, by XLA."""
    mesh, settings = s.mesh, attention_settings(s.cfg)
    needs = fused.Needs(
        **settings,
        head_dim=s.cfg.kernel_dim,
        dtype=s.dtype,
        one_segment=True,
        longest=s.max_model_len,
        sinks=s.cfg.sinks,
    )
    platform, gpu = sharding.platform(mesh), fused.capability(mesh.devices.flat[0])
    kernel = fused.choose_kernel("auto" if platform == "gpu" else "xla", needs, backend=platform, gpu=gpu)[0]
    cached = make_attend_cached(scale=settings["scale"], softcap=settings["softcap"])
    return fused.make_attention(kernel, needs, mesh=mesh, split=WHOLE), cached


def make_programs(s: InprocessSettings, ends: Sequence[int], *, steps: int) -> Programs:
    """Makes the engine's programs, compiled at their first calls; `steps` is the number of tokens per row and call."""
    # Rows keep their sharding across programs; otherwise XLA would recompile.
    empty, shardings = make_empty(s, s.slot_counts[0])
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=s.by_row)
    on_mesh: dict[str, Any] = dict(dtype=s.dtype, constrain=constrain, mesh=s.mesh)
    attend, attend_cached = choose_attention(s)

    def prefill(model: Params, prompts: Any, length: Any) -> Filled:
        filled = generate.prefill(model, s.cfg, prompts, length, attend=attend, **on_mesh)
        placed: Filled = jax.lax.with_sharding_constraint(filled, shardings_of(s, filled))
        return placed

    def advance(model: Params, slots: Slots, choice: SamplingRule, enough: Any, *, cut: bool) -> Slots:
        return generate.next_tokens(
            model, s.cfg, slots, choice, enough, ends=tuple(ends), steps=steps, cut=cut, attend=attend_cached, **on_mesh
        )

    in_place = functools.partial(jax.jit, out_shardings=shardings)
    return Programs(
        empty=jax.jit(empty, out_shardings=shardings),
        prepare=jax.jit(functools.partial(generate.prepare_model, cfg=s.cfg, dtype=s.dtype)),
        prefill=jax.jit(prefill),
        place=in_place(generate.place, donate_argnums=0),
        grow=jax.jit(grow_cache, static_argnums=1, out_shardings=s.of_cache),
        advance=in_place(functools.partial(advance, cut=False), donate_argnums=1),
        advance_cut=in_place(functools.partial(advance, cut=True), donate_argnums=1),
    )


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A waiting request."""

    number: int  # in order of arrival
    ids: np.ndarray
    sampling: Sampling
    seed: int
    answer: asyncio.Future[Answer]


@dataclasses.dataclass(eq=False)
class _Batcher:
    """Answers all requests, row by row, with one version of the weights."""

    settings: InprocessSettings
    programs: Programs
    model: Params
    ends: frozenset[int]
    decode: Callable[[list[int]], str]
    version: int
    _waiting: list[_Waiting] = dataclasses.field(default_factory=list)
    _request_came: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _request_count: int = 0

    async def ask(self, ids: Sequence[int], *, sampling: Sampling, seed: int, near: Hashable) -> Answer:
        """Returns one answer to `ids`; waits for a row."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(self._request_count, np.asarray(ids, np.int32), sampling, seed, answer))
        self._request_count += 1
        self._request_came.set()
        return await answer

    def compile(self) -> None:
        """Runs every program on empty rows, so later calls do not compile."""
        s, programs = self.settings, self.programs
        for shape in s.prompt_shapes:  # one after another: only one shape's prompts are in memory
            self._place_none(shape)
        slots, choice, rows = programs.empty(), make_rule(greedy(1)), np.int32(s.rows)
        for count in s.slot_counts:
            slots = make_room(programs, s, slots, count)
            for advance in (programs.advance, *([programs.advance_cut] if s.cut else [])):
                slots = advance(self.model, slots, choice, rows)
        jax.block_until_ready(slots)

    def _place_none(self, shape: tuple[int, int]) -> None:
        """Prefills prompts of this shape, and places none of them, with every size of the cache that holds them."""
        s, programs = self.settings, self.programs
        prompts, length, source, *targets = self._fill_arguments([], [], shape)
        filled, slots = programs.prefill(self.model, prompts, length), programs.empty()
        for count in s.slot_counts:
            if shape[1] - 1 <= count:
                slots = make_room(programs, s, slots, count)
                slots = programs.place(slots, filled, source, length, *targets)
        jax.block_until_ready(slots)

    async def answer_all(self) -> None:
        """Answers requests until it is cancelled."""
        s = self.settings
        slots, row_requests = self.programs.empty(), dict[int, _Waiting]()
        last, until = np.zeros(s.rows, np.int32), np.zeros(s.rows, np.int32)
        while True:
            if not row_requests:
                self._request_came.clear()
                while not self._waiting:
                    await self._request_came.wait()
            await asyncio.sleep(0)  # lets answered and new callers submit requests
            # Longest first, so prompts of a prefill are similar; samples of a prompt stay together and share it.
            requests = (request for request in self._waiting if not request.answer.done())  # its caller may have gone
            waiting = sorted(requests, key=lambda r: (-len(r.ids), r.number))
            if not (row_requests or waiting):
                self._waiting = []
                continue
            sampling = (next(iter(row_requests.values())) if row_requests else waiting[0]).sampling
            free_rows = [row for row in range(s.rows) if row not in row_requests]
            while waiting and free_rows:
                slots, placed = self._fill_rows(slots, waiting, free_rows)
                for row, request in zip(free_rows, placed, strict=False):
                    row_requests[row], last[row] = request, len(request.ids) - 1
                    until[row] = last[row] + request.sampling.max_tokens
                waiting, free_rows = waiting[len(placed) :], free_rows[len(placed) :]
            self._waiting = waiting
            longest = max(min(int(last[row]) + TURNS, int(until[row])) for row in row_requests)
            slots = make_room(self.programs, s, slots, longest)
            free_rows_wanted = max(1, s.rows // _FREE) if waiting else s.rows
            advance = self.programs.choose_advance(sampling, s.cfg.vocab_size)
            slots = advance(self.model, slots, make_rule(sampling), np.int32(free_rows_wanted))
            device_arrays = (slots.tokens, slots.logprob, slots.last, slots.until, slots.experts, slots.kept)
            tokens, logprob, last, until, experts, kept = await asyncio.to_thread(jax.device_get, device_arrays)
            last = last.copy()
            # The device knows neither stop texts, nor `stop_ids`, nor callers that have gone.
            need_host_stop = (r.sampling.stop or r.sampling.stop_ids or r.answer.done() for r in row_requests.values())
            until, stop_rows = until.copy(), any(need_host_stop)
            for row, request in list(row_requests.items()):
                abandoned, begin, end = request.answer.done(), len(request.ids), int(last[row]) + 1
                length = self._stop_length(tokens[row, begin:end], request.sampling)
                if length is None and end <= until[row] and not abandoned:
                    continue
                span = slice(begin, end if length is None else begin + length)
                ended_by_id = not sampling.ignore_eos and int(tokens[row, span.stop - 1]) in self.ends
                finish = "stop" if ended_by_id or length is not None else "length"
                if not abandoned:
                    read = None if experts is None else experts[row, : span.stop - 1]
                    kept_ids = [ids[ids != -1] for ids in kept[row, span]] if sampling.kept else None
                    answer = self._make_answer(tokens[row, span], logprob[row, span], finish, read, kept_ids)
                    if sampling.kept:
                        require_kept(answer.tokens, kept_ids, sampling.kept, "the engine")
                    request.answer.set_result(answer)
                del row_requests[row]
                until[row] = last[row]
            if stop_rows:
                slots = dataclasses.replace(slots, until=jax.device_put(until, s.by_row))

    def _fill_rows(
        self, slots: Slots, waiting: Sequence[_Waiting], free_rows: Sequence[int]
    ) -> tuple[Slots, Sequence[_Waiting]]:
        """Fills free rows with the first waiting requests, as many as one prefill takes; returns them."""
        count, length = next(shape for shape in self.settings.prompt_shapes if shape[1] >= len(waiting[0].ids))
        seen: dict[bytes, int] = {}  # prompts that equal requests share, each prefilled once
        batch = list(
            itertools.takewhile(
                lambda r: seen.setdefault(r.ids.tobytes(), len(seen)) < count, waiting[: len(free_rows)]
            )
        )
        prompts, lengths, source, until, seed = self._fill_arguments(batch, free_rows, (count, length))
        filled = self.programs.prefill(self.model, prompts, lengths)
        slots = make_room(self.programs, self.settings, slots, length - 1)
        return self.programs.place(slots, filled, source, lengths, until, seed), batch

    def _fill_arguments(
        self, requests: Sequence[_Waiting], free_rows: Sequence[int], shape: tuple[int, int]
    ) -> tuple[np.ndarray, ...]:
        """Returns prompts and their length, and each row's source, until and seed, to prefill and place requests."""
        prompts, length, source, until, seed = empty_fill(self.settings.rows, shape)
        prompt_indices: dict[bytes, int] = {}
        for row, request in zip(free_rows, requests, strict=False):
            ids = request.ids
            prompt_index = prompt_indices.setdefault(ids.tobytes(), len(prompt_indices))
            prompts[prompt_index, : len(ids)] = ids
            source[row], length[prompt_index], seed[row] = prompt_index, len(ids), request.seed
            until[row] = len(ids) - 1 + request.sampling.max_tokens
        return prompts, length, source, until, seed

    def _stop_length(self, tokens: np.ndarray, sampling: Sampling) -> int | None:
        """Returns the number of tokens up to the first stop text or id; None without one."""
        length = cut_at(tokens.tolist(), self.decode, sampling.stop, new=TURNS)
        stop_id_positions = np.flatnonzero(np.isin(tokens, sampling.stop_ids))
        return length if not len(stop_id_positions) else min(length or len(tokens), int(stop_id_positions[0]) + 1)

    def _make_answer(
        self, tokens: np.ndarray, logprob: np.ndarray, finish: str, experts: np.ndarray | None, kept: Kept | None
    ) -> Answer:
        """Returns the answer with these sampled tokens; RolloutError if a log-prob is not finite."""
        if not np.isfinite(logprob).all():
            reason = f"the weights of version {self.version} give no finite numbers"
            raise RolloutError(f"an answer has tokens with the log-probs {logprob[:8]}...: {reason}")
        return Answer(
            tokens.tolist(), logprob.tolist(), [self.version] * len(tokens), finish, experts=experts, kept=kept
        )


def make_room(programs: Programs, s: InprocessSettings, slots: Slots, tokens: int) -> Slots:
    """Returns rows whose cache has slots for so many tokens."""
    for count in s.slot_counts[1:]:
        if (count_slots(slots.cache) or tokens) < min(tokens, count):
            slots = _grow(programs, slots, count)
    return slots


def _grow(programs: Programs, slots: Slots, count: int) -> Slots:
    """Returns the rows with a cache of `count` slots; each layer's old one is freed before the next layer grows."""
    layers = list(slots.cache)
    for i, layer in enumerate(layers):
        if isinstance(layer, LayerCache):
            [layers[i]] = jax.block_until_ready(programs.grow((layer,), count, slots.slot))
            jax.tree.map(lambda x: x.delete(), layer)
    return dataclasses.replace(slots, cache=tuple(layers), slot=jax.device_put(np.int32(0), slots.slot.sharding))


def empty_fill(rows: int, shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Returns prompts of length 1, and source, until and seed that fill no row, to prefill and place them."""
    prompts, seed = np.zeros(shape, np.int32), np.zeros(rows, np.uint32)
    return prompts, np.ones(shape[0], np.int32), np.full(rows, -1, np.int32), np.zeros(rows, np.int32), seed


def make_rule(sampling: Sampling) -> SamplingRule:
    """Returns the sampling parameters as arrays for the programs."""
    fields: dict[str, Any] = dict(
        temperature=np.float32(sampling.temperature),
        top_p=np.float32(sampling.top_p),
        top_k=np.int32(sampling.top_k),
        min_p=np.float32(sampling.min_p),
        ignore_eos=np.bool_(sampling.ignore_eos),
    )
    return SamplingRule(**fields)


@dataclasses.dataclass(frozen=True)
class InprocessEngine:
    """The engine as `run/start.py` starts and ends it."""

    settings: InprocessSettings

    def ready(
        self, *, eos_token_ids: Sequence[int], decode: Callable[[list[int]], str], talk: Talk | None = None
    ) -> "InprocessSampler":
        """Returns the sampler, which has no weights yet; `talk` None means one turn."""
        return InprocessSampler(
            self.settings, eos_token_ids=eos_token_ids, decode=decode, talk=talk or protocol.one_turn(decode)
        )

    def close(self) -> None:
        """Does nothing."""


class InprocessSampler(Sampler):
    """The Sampler over the trainer's own parameters."""

    def __init__(
        self,
        settings: InprocessSettings,
        *,
        eos_token_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        talk: Talk,
    ):
        self.settings = settings
        self._decode = decode
        self._ends = frozenset(eos_token_ids)
        self._talk = talk
        self._programs = make_programs(settings, eos_token_ids, steps=TURNS)
        self._compiled = False
        self.version: int | None = None
        self._policy: Weights | None = None

    def hold(self, policy: Weights, *, version: int) -> None:
        """Sets the parameters to sample from, as `version`, valid until the caller donates them."""
        self.version, self._policy = version, policy
        if not self._compiled:
            self._batcher(self._programs.prepare(placing.to_device(policy))).compile()
            self._compiled = True

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        done: Done | None = None,
        only: Collection[int] | None = None,
    ) -> Future[list[Trajectory]]:
        """Like `Sampler.start`; blocks, because the devices are the trainer's."""
        self._check(prompts, sampling)
        model = self._programs.prepare(placing.to_device(self._current_weights()))

        async def generate() -> list[Trajectory]:
            """Runs the talks and the batcher that answers them, until all talks have ended."""
            batcher = self._batcher(model)
            batching = asyncio.ensure_future(batcher.answer_all())
            talks = asyncio.ensure_future(protocol.converse(batcher.ask, self._talk, prompts, sampling, done, only))
            try:
                await asyncio.wait([batching, talks], return_when=asyncio.FIRST_COMPLETED)
                if batching.done():  # it ends only by failing
                    batching.result()
                return await talks
            finally:
                batching.cancel()
                talks.cancel()
                await asyncio.gather(batching, talks, return_exceptions=True)

        future: Future[list[Trajectory]] = Future()
        future.set_result(protocol.run(generate()))
        return future

    def close(self) -> None:
        self.version = self._policy = None

    def _batcher(self, model: Params) -> _Batcher:
        assert self.version is not None  # `model` is of it
        return _Batcher(self.settings, self._programs, model, self._ends, self._decode, self.version)

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Raises UserError for a prompt or sampling parameters that the engine cannot serve."""
        settings = self.settings
        for prompt in prompts:
            length = len(prompt.ids)
            if not 1 <= length <= settings.max_prompt_length or length + sampling.max_tokens > settings.max_model_len:
                raise UserError(
                    f"prompt {prompt.uid}: {length} tokens must be 1 to data.max_prompt_length="
                    f"{settings.max_prompt_length}, and with max_tokens={sampling.max_tokens} fit the engine's"
                    f" {settings.max_model_len}; cut the prompt, or request less"
                )
        rule = sampling
        if rule.max_tokens < 1 or rule.temperature < 0 or not 0 < rule.top_p <= 1 or not 0 <= rule.min_p < 1:
            raise UserError(
                f"max_tokens={rule.max_tokens} must be at least 1, temperature={rule.temperature} at least 0,"
                f" top_p={rule.top_p} above 0 and at most 1, min_p={rule.min_p} at least 0 and below 1"
            )

    def _current_weights(self) -> Weights:
        if self._policy is None:
            raise RolloutError("the engine has no weights yet; publish some first")
        if any(x.is_deleted() for x in jax.tree.leaves(self._policy)):
            raise RolloutError(
                f"version {self.version} of the weights is gone: it was trained on, and none was published"
            )
        return self._policy


PolicySampler = Served | InprocessSampler  # the samplers that a policy can be published to


def stream(
    programs: Programs, s: InprocessSettings, model: Params, ids: Sequence[int], sampling: Sampling
) -> Iterator[list[int]]:
    """Yields the tokens after `ids` as they are sampled, a few at a time, including an end token; uses one row.

    They equal the tokens of `InprocessSampler` for the same seed: a token depends only on the seed and its position.
    """
    length = next(n for _, n in s.prompt_shapes if n >= len(ids))
    prompt = np.zeros((1, length), np.int32)
    prompt[0, : len(ids)] = ids
    until, lengths = np.array([len(ids) - 1 + sampling.max_tokens], np.int32), np.array([len(ids)], np.int32)
    slots = make_room(programs, s, programs.empty(), length - 1)
    target = (np.array([0], np.int32), lengths, until, np.array([sampling.seed], np.uint32))
    slots = programs.place(slots, programs.prefill(model, prompt, lengths), *target)
    advance, rule = programs.choose_advance(sampling, s.cfg.vocab_size), make_rule(sampling)
    begin, unfinished = len(ids), True
    while unfinished:
        slots = make_room(programs, s, slots, min(begin - 1 + TURNS, int(until[0])))
        slots = advance(model, slots, rule, np.int32(1))
        tokens, logprob, last, until = jax.device_get((slots.tokens, slots.logprob, slots.last, slots.until))
        new = slice(begin, int(last[0]) + 1)
        if not np.isfinite(logprob[0, new]).all():
            raise RolloutError("the weights give non-finite numbers; train the model again from an earlier checkpoint")
        yield tokens[0, new].tolist()
        begin, unfinished = new.stop, bool(last[0] < until[0])
