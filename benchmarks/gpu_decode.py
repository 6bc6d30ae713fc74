"""The in-process engine for gpu.py: attention to the cache, tokens, prompts."""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import models
import numpy as np
from gpu_parts import DTYPE, HBM, ON_GPU, PEAK, Line, apart, attempt, compiled, require_gpu, seconds_of, share

from jppo.learner import cost, sharding
from jppo.models import cache, config_reader, decoder
from jppo.rollout import inprocess
from jppo.rollout.inprocess import InprocessSettings, Programs

Case = tuple[str, int, int, str]  # model, rows, longest prompt and response, attention to the cache


def decode(tiny: bool) -> Iterator[Line]:
    """The in-process engine: attention to the cache alone, tokens, prompts."""
    yield from cache_attention([(4, 64)] if tiny else [(64, 1023), (64, 1024), (256, 1023), (256, 1024)])
    if tiny:
        yield from decode_model("tiny", [*cases("tiny", 4, 256), ("tiny", 4, 257, "xla")], prompts=True)
        return
    for name in ("q15", "q05"):
        wide = [case for rows in (64, 256) for case in cases(name, rows, 1024)] + [(name, 16, 1024, "xla")]
        # With one position more, the number of slots is a multiple of 8.
        yield from decode_model(name, [*wide, (name, 64, 1025, "xla")], prompts=name == "q15")


def decode_again(tiny: bool) -> Iterator[Line]:
    """Tokens alone, with the process's XLA flags."""
    if tiny:
        yield from decode_model("tiny", cases("tiny", 4, 256))
        return
    yield from decode_model("q15", [*cases("q15", 64, 1024), ("q15", 256, 1024, "xla")])
    yield from decode_model("q05", [("q05", 64, 1024, "xla")])


def cases(name: str, rows: int, length: int) -> list[Case]:
    """Returns a case with each attention to the cache."""
    return [(name, rows, length, kind) for kind in CACHED]


def attend_cached_by_cudnn(*, scale: float, softcap: float | None) -> cache.AttendCached:
    """Makes attention to a cache by cuDNN, whose mask is a bias."""
    require_gpu("cuDNN")
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    assert softcap is None

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, sinks: Any = None) -> jax.Array:
        assert sinks is None
        mask = visible[:, None, None]
        narrow = q[:, :, None].astype(k.dtype)
        out: jax.Array = cudnn.dot_product_attention(narrow, k, v, None, mask, scale=scale, qkv_layout="BNTH")
        return out[:, :, 0].astype(q.dtype)

    return attend


CACHED = {"xla": cache.make_attend_cached, "cudnn": attend_cached_by_cudnn}


def cache_attention(sizes: Sequence[tuple[int, int]]) -> Iterator[Line]:
    """Attention of one token a row to its cache, with the heads of 1.5B."""
    H, K, A = 12, 2, 128
    for rows, slots in sizes:
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (jax.random.normal(key, (rows, *shape, A), DTYPE) for key, shape in zip(
            keys, ((H,), (K, slots), (K, slots)), strict=True))  # fmt: skip
        visible = jnp.arange(slots)[None] % (rows + 1) != jnp.arange(rows)[:, None]

        def measure(kind: str, *arrays: jax.Array) -> Line:
            made = CACHED[kind](scale=A**-0.5, softcap=None)
            run, compile_s = compiled(jax.jit(made), *arrays)
            expected = jax.jit(CACHED["xla"](scale=A**-0.5, softcap=None))(*(
                x if x.dtype == bool else x.astype(jnp.float32) for x in arrays))  # fmt: skip
            seconds = seconds_of(lambda: run(*arrays), inner=20)
            found = {"compile_s": compile_s, "us": 1e6 * seconds, "apart": apart(run(*arrays), expected)}
            bound = share(arrays[1].nbytes + arrays[2].nbytes, HBM)
            return found | {"of_bound": None if bound is None else bound / seconds}

        for kind in CACHED:
            case = {"stage": "attention to the cache", "attention": kind, "rows": rows, "slots": slots}
            yield attempt(case, functools.partial(measure, kind, q, k, v, visible))


def make_engine(case: Case) -> tuple[InprocessSettings, Programs]:
    """The engine's settings and programs, with one of the attentions to the cache."""
    name, rows, length, kind = case
    cfg = config_reader.parse_config(models.MODELS[name], path=name)
    mesh = sharding.mesh_of_shape((1,), jax.devices()[:1])
    s = InprocessSettings(
        cfg=cfg,
        rows=rows,
        row_multiple=1,
        max_prompt_length=length // 2,
        max_model_len=length,
        dtype=DTYPE,
        by_row=sharding.whole_rows_sharding(mesh),
        of_cache=sharding.cache_sharding(mesh, cache.cache_heads(cfg)),
        cut=False,
    )
    with mock.patch.object(inprocess, "make_attend_cached", CACHED[kind]):
        return s, inprocess.make_programs(s, (0,), steps=inprocess.TURNS)


def slots_shapes(s: InprocessSettings) -> Any:
    """Returns the shapes of rows with the largest cache."""
    empty, places = inprocess.make_empty(s, s.slot_counts[-1])
    shapes = jax.eval_shape(empty)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def half_full(s: InprocessSettings) -> Any:
    """Returns rows that are half of their length, with a random cache."""
    shapes, half = slots_shapes(s), s.max_model_len // 2
    draw = jax.jit(lambda key, shape, dtype: jax.random.normal(key, shape, dtype), static_argnums=(1, 2))
    keys = iter(jax.random.split(jax.random.key(0), 4 * s.cfg.num_layers))
    rows = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dataclasses.replace(shapes, cache=()))
    last, until = (jnp.full(s.rows, n, jnp.int32) for n in (half, s.max_model_len - 1))
    filled = jax.tree.map(lambda x: draw(next(keys), x.shape, x.dtype), shapes.cache)
    rows = dataclasses.replace(rows, cache=filled, last=last, until=until, slot=jnp.int32(half))
    return jax.device_put(rows, jax.tree.map(lambda x: x.sharding, shapes))


def decode_model(name: str, listed: Sequence[Case], *, prompts: bool = False) -> Iterator[Line]:
    """Measures the cases of a model, compiled together; then, if asked, its prompts with the last one's lengths."""
    able = [case for case in listed if ON_GPU or case[3] != "cudnn"]
    engines = [make_engine(case) for case in able]
    cfg, (_, programs) = engines[0][0].cfg, engines[0]

    def draw(key: jax.Array) -> Any:
        return programs.prepare(decoder.init_params(cfg, key, head="lm", param_dtype=DTYPE))

    model = jax.block_until_ready(jax.jit(draw)(jax.random.key(0)))
    rule = inprocess.make_rule(dataclasses.replace(inprocess.greedy(1), temperature=1.0, ignore_eos=True))
    with concurrent.futures.ThreadPoolExecutor(len(able)) as pool:
        futures = [
            pool.submit(compiled, programs.advance, model, slots_shapes(s), rule, np.int32(s.rows))
            for s, programs in engines
        ]
    for case, (s, _), future in zip(able, engines, futures, strict=True):
        line = {"stage": "tokens", "model": name, "rows": case[1], "slots": s.slot_counts[-1], "attention": case[3]}
        yield attempt(line, functools.partial(tokens_speed, s, model, rule, future))
    if prompts:
        yield attempt({"stage": "prompts", "model": name}, functools.partial(prompts_speed, *engines[-1], model))


def tokens_speed(s: InprocessSettings, model: Any, rule: Any, future: Any) -> Line:
    """Measures the engine's loop over tokens; its bound reads weights and the whole cache for each."""
    advance, compile_s = future.result()
    slots, steps = half_full(s), inprocess.TURNS
    cached = sum(x.nbytes for x in jax.tree.leaves(slots.cache))
    weights, seconds = sum(x.nbytes for x in jax.tree.leaves(model)), []
    for _ in range(4 if ON_GPU else 2):
        begun = time.perf_counter()
        slots = jax.block_until_ready(advance(model, slots, rule, np.int32(s.rows)))
        seconds.append((time.perf_counter() - begun) / steps)
    if int(slots.last[0]) != s.max_model_len // 2 + len(seconds) * steps:
        raise RuntimeError(f"a row has {int(slots.last[0])} tokens")
    token_s, bound = statistics.median(seconds[1:]), share(weights + cached, HBM)
    return {
        "compile_s": compile_s,
        "ms": 1e3 * token_s,
        "tokens_per_s": s.rows / token_s,
        "bound_ms": None if bound is None else 1e3 * bound,
        "of_bound": None if bound is None else bound / token_s,
        "cache_gb": cached / 1e9,
    }


def prompts_speed(s: InprocessSettings, programs: Programs, model: Any) -> Line:
    """Measures a prefill of the longest prompts, their placing into rows, and a growing cache."""
    shape = s.prompt_shapes[-1]
    prompts, length, _, until, seed = inprocess.empty_fill(s.rows, shape)
    length, source = np.full_like(length, shape[1]), np.arange(s.rows, dtype=np.int32) % shape[0]
    prefill_s = seconds_of(lambda: programs.prefill(model, prompts, length))
    filled, slots = programs.prefill(model, prompts, length), programs.empty()
    found: Line = {}
    if len(s.slot_counts) > 1:
        found["grow_ms"] = 1e3 * seconds_of(
            lambda: [programs.grow((layer,), s.slot_counts[-1], slots.slot) for layer in slots.cache]
        )
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        slots = jax.block_until_ready(programs.place(slots, filled, source, length, until, seed))
        seconds.append(time.perf_counter() - begun)
    flops = cost.forward(s.cfg, [shape[1]] * shape[0], head_tokens=0)
    found |= {"prompts": f"{shape[0]}x{shape[1]}", "prefill_ms": 1e3 * prefill_s, "place_ms": 1e3 * min(seconds)}
    return found | {"of_peak": share(flops / prefill_s, PEAK)}
