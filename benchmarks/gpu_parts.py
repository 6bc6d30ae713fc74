"""The parts of gpu.py: each takes whether it is tiny, and yields its measurements."""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np

from jppo import settings
from jppo.algorithms import advantage
from jppo.errors import UserError
from jppo.learner import sharding
from jppo.learner.make import chunk_tokens
from jppo.models import decoder, fused, heads, lora
from jppo.models.lora import Lora
from jppo.plugins.carriers import device_carriers
from jppo.plugins.forecast.machines import GPUS

Line = dict[str, Any]
KIND = jax.devices()[0].device_kind
ON_GPU = jax.default_backend() == "gpu"
DTYPE = "bfloat16" if ON_GPU else "float32"
PEAK = sharding.known_peak(KIND, DTYPE) if ON_GPU else None  # FLOP/s
HBM = next((gpu.hbm for gpu in GPUS.values() if gpu.kind == KIND), None)  # bytes/s


def share(part: float, whole: float | None) -> float | None:
    """Returns part / whole; None if the whole is unknown."""
    return None if whole is None else part / whole


def require_gpu(user: str) -> None:
    """Raises UserError on a machine without an NVIDIA GPU."""
    if not ON_GPU:
        raise UserError(f"{user} needs an NVIDIA GPU, and JAX runs on a {KIND}; run this part on one")


def attempt(case: Line, measure: Callable[[], Line]) -> Line:
    """Returns the case with its figures, or with the error; a UserError says what this machine lacks."""
    begun = time.perf_counter()
    try:
        found = measure()
    except UserError as e:
        found = {"left_out": str(e)}
    except Exception as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            return case | {"left_out": "it ran out of memory"}
        found = {"failed": f"{type(e).__name__}: {' '.join(str(e).split())}"[:400]}
    return case | found | {"took_s": round(time.perf_counter() - begun, 1)}


def compiled(function: Any, *args: Any) -> tuple[Any, float]:
    """Compiles a function of jax.jit for these arguments; returns also the seconds."""
    begun = time.perf_counter()
    return function.lower(*args).compile(), time.perf_counter() - begun


def seconds_of(call: Callable[[], Any], *, repeats: int = 5, inner: int = 1) -> float:
    """Returns the median seconds of a call, each of `inner` calls in a row, after a first one."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        out = [call() for _ in range(inner)]
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - begun) / inner)
    return statistics.median(seconds)


def apart(found: Any, expected: Any) -> float:
    """Returns the relative distance of two trees of arrays."""
    pairs = list(zip(*(map(np.float32, jax.tree.leaves(jax.device_get(x))) for x in (found, expected)), strict=True))
    return float(max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs))


IPC_CHILD = """
import json, sys, time, jax, jax.numpy as jnp
from jppo.plugins.carriers import transports
told = json.loads(sys.argv[1])
target = jax.block_until_ready(jnp.zeros(told["count"], jnp.int32))
gpu = transports.CudaDevice(jax.local_devices()[0].local_hardware_id)
begun = time.perf_counter()
with gpu.opened(told["handles"][gpu.uuid]) as address:
    gpu.copy(target.unsafe_buffer_pointer(), address + told["offset"], 4 * told["count"])
    gpu.wait()
seconds = time.perf_counter() - begun
if not jnp.all(target == jnp.arange(told["count"])):
    sys.exit("the array is another one")
print(json.dumps({"copy_s": seconds}))
"""


def ipc(tiny: bool) -> Iterator[Line]:
    """An array of JAX in another process, by the handle of CUDA IPC; NCCL's library, by a broadcast to no other."""
    count = 2**20 if tiny else 2**28
    array = jax.block_until_ready(jnp.arange(count, dtype=jnp.int32))

    def by_handle() -> Line:
        carrier = device_carriers.make_ipc_carrier()
        begun = time.perf_counter()
        with carrier.offer([("x", array)]) as (entries, more):
            offered = time.perf_counter() - begun
            told = json.dumps({**more, "count": count, "offset": entries[0].offset})
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-c", IPC_CHILD, told]
            child = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=30)
        carrier.close()
        if child.returncode:
            raise RuntimeError(child.stderr[-300:])
        return {"gb": 4 * count / 1e9, "offer_s": offered, **json.loads(child.stdout.splitlines()[-1])}

    def by_nccl() -> Line:
        require_gpu("NCCL")
        one, communicator = jnp.ones(1), device_carriers.Communicator(jax.local_devices()[0].local_hardware_id)
        communicator.join(communicator.unique_id(), 1, jax.block_until_ready(one).unsafe_buffer_pointer())
        communicator.broadcast(array.unsafe_buffer_pointer(), array.nbytes)
        communicator.wait()
        communicator.abort()
        return {"gb": array.nbytes / 1e9}

    yield attempt({"carrier": "ipc"}, by_handle)
    yield attempt({"carrier": "nccl"}, by_nccl)


def attention(tiny: bool) -> Iterator[Line]:
    """Attention at the shapes of 0.5B, 1.5B and 7B: rows of one trajectory and of four; numbers, with padding."""
    shapes = [(2, 256, 4, 2, 64)] if tiny else [(16, 1024, 14, 2, 64), (8, 4096, 12, 2, 128), (8, 4096, 28, 4, 128)]
    drawn = [draw_heads(*shape) for shape in shapes]
    speeds = [(x, *case) for x in drawn for case in (("cudnn", 1), ("packed", 1), ("packed", 4))]
    for arrays, kernel, trajectories in [*speeds, (drawn[0], "xla", 1)]:
        R, T, H, A = arrays[0].shape
        case: Line = {"kernel": kernel, "shape": name_shape(arrays), "trajectories": trajectories}
        segment = jnp.tile(1 + jnp.arange(T, dtype=jnp.int32) * trajectories // T, (R, 1))
        flops = 2 * R * T * T * H * A / trajectories  # the causal half, forward
        yield attempt(case, functools.partial(attention_speed, kernel, arrays, segment, flops))
    for arrays in drawn[:2]:
        arrays, T = [x[:2] for x in arrays], arrays[0].shape[1]
        place, padding = jnp.arange(T, dtype=jnp.int32), T // 16
        one = jnp.where(place < T - padding, 1, 0)
        two = jnp.where(place < T // 2, one, 2 * one)
        for kernel, segment in (("cudnn", jnp.stack([one, one])), ("packed", jnp.stack([one, two]))):
            case = {"kernel": kernel, "shape": name_shape(arrays), "padding": padding}
            yield attempt(case, functools.partial(attention_numbers, kernel, arrays, segment))


def draw_heads(R: int, T: int, H: int, K: int, A: int) -> list[jax.Array]:
    """Draws queries, keys and values."""
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (R, T, n, A), jnp.bfloat16) for key, n in zip(keys, (H, K, K), strict=True)]


def name_shape(arrays: Sequence[jax.Array]) -> str:
    """Returns rows, length, heads of queries and of keys, and their size."""
    (R, T, H, A), K = arrays[0].shape, arrays[1].shape[2]
    return f"{R}x{T}x{H}/{K}x{A}"


def make_attend(kernel: str, head_dim: int) -> Callable[..., jax.Array]:
    """Makes one of the kernels for rows, on a CPU as XLA computes the same."""
    needs = fused.Needs(head_dim**-0.5, None, (None,), head_dim, "bfloat16", one_segment=kernel == "cudnn")
    made = fused.make_attention("xla" if kernel == "xla" else "cudnn", needs, interpret=not ON_GPU)
    return lambda q, k, v, segment: made(q, k, v, segment, 0)


@functools.cache
def attention_functions(kernel: str, head_dim: int) -> tuple[Any, Any]:
    """Makes the kernel, and the gradient of the sum of its squared outputs at tokens."""
    attend = make_attend(kernel, head_dim)

    def squares(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array) -> jax.Array:
        out = attend(q, k, v, segment).astype(jnp.float32)
        return jnp.sum(jnp.where((segment > 0)[..., None, None], out, 0) ** 2)

    return jax.jit(attend), jax.jit(jax.grad(squares, argnums=(0, 1, 2)))


def attention_speed(kernel: str, arrays: Sequence[jax.Array], segment: jax.Array, flops: float) -> Line:
    """Measures a kernel forward, and forward and backward."""
    (forward, forward_s), (both, both_s) = (
        compiled(function, *arrays, segment) for function in attention_functions(kernel, arrays[0].shape[3])
    )
    found = [seconds_of(lambda f=f: f(*arrays, segment), inner=10 if ON_GPU else 1) for f in (forward, both)]
    return {
        "compile_s": forward_s + both_s,
        "forward_ms": 1e3 * found[0],
        "both_ms": 1e3 * found[1],
        "forward_tflops": flops / found[0] / 1e12,
        "both_tflops": 3.5 * flops / found[1] / 1e12,
        "both_of_peak": share(3.5 * flops / found[1], PEAK),
    }


def attention_numbers(kernel: str, arrays: Sequence[jax.Array], segment: jax.Array) -> Line:
    """Compares a kernel with XLA's attention in float32, and looks at its padding."""
    head_dim, filled = arrays[0].shape[3], np.asarray(segment > 0)[..., None, None]
    in_f32 = [x.astype(jnp.float32) for x in arrays]
    with jax.default_matmul_precision("highest"):
        exact = [f(*in_f32, segment) for f in attention_functions("xla", head_dim)]
    found = [f(*arrays, segment) for f in attention_functions(kernel, head_dim)]
    leaves = [np.float32(x) for x in jax.tree.leaves(jax.device_get(found))]
    return {
        "out_apart": apart(np.where(filled, leaves[0], 0), np.where(filled, np.float32(exact[0]), 0)),
        "gradient_apart": apart(found[1], exact[1]),
        "nan": int(sum(np.isnan(x).sum() for x in leaves)),
        "padding_zero": all(not np.where(filled, 0, x).any() for x in leaves),
    }


def configure(name: str, *, length: int, sequences: int, micro: int, **changes: Any) -> Any:
    """Returns the settings of an update of so many sequences, in micro-batches of `micro` tokens."""
    values = {
        "data.max_prompt_length": length // 2,
        "data.max_response_length": length // 2,
        "data.train_batch_size": sequences,
        "actor.ppo_mini_batch_size": sequences,
        "actor.max_tokens_per_device": micro,
        "model.scan_layers": True,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return settings.typed(models.make_config(name, DTYPE, [f"{key}={value}" for key, value in values.items()]))


def make_subject(name: str, c: Any, *, repeats: int) -> models.Subject:
    """The model with random weights, and its sequences."""
    responses = np.full(c.data.train_batch_size, c.data.max_response_length)
    return models.make_subject(name, c, responses, prompt=c.data.max_prompt_length, repeats=repeats)


def figures(x: dict[str, Any]) -> Line:
    """Returns the figures of a pass that models.py has measured."""
    return {
        "seconds": statistics.median(x["seconds"]),
        "tokens_per_s": x["tokens_per_s"],
        "tflops": x["flops_per_s"] / 1e12,
        "of_peak": share(x["flops_per_s"], PEAK),
        "of_product": x["utilisation"],
        "peak_gib": share(x["device_peak"], 2**30) if x["device_peak"] else None,
    }


TINY: Line = dict(length=64, sequences=4, micro=128)
UPDATE: Line = dict(length=4096, sequences=8, micro=16384)
REMATS = ("full", "attention", "dots", "none")  # by increasing memory: a peak shows if it is a process's highest
NARROW = dict.fromkeys(("model__param_dtype", "actor__master_dtype", "actor__moments_dtype"), "bfloat16")


def update(tiny: bool) -> Iterator[Line]:
    """Updates of 1.5B by recomputation, and the share of the head; adapters last."""
    name, sizes = ("tiny", TINY) if tiny else ("q15", UPDATE)
    for remat in REMATS:
        subject = make_subject(name, configure(name, **sizes, model__remat=remat), repeats=2)
        case: Line = {"model": name, "remat": remat}
        if remat == REMATS[0]:
            yield attempt(case | {"stage": "head"}, functools.partial(head_share, subject))
        yield attempt(case | {"stage": "update"}, lambda s=subject: figures(models.updated(s, None)))
        del subject
    yield adapter_update(name, configure(name, **sizes, model__remat=REMATS[0]))


def update_7b(tiny: bool) -> Iterator[Line]:
    """Updates of 7B, whose weights and optimizer are in bfloat16; adapters last."""
    name, sizes = ("tiny", TINY) if tiny else ("q7", UPDATE | dict(sequences=4))
    for remat, micro in (("dots", sizes["micro"] // 2), ("full", sizes["micro"])):
        c = configure(name, **sizes | dict(micro=micro), model__remat=remat, **NARROW)
        subject = make_subject(name, c, repeats=2)
        case = {"model": name, "remat": remat, "micro": micro, "stage": "update"}
        yield attempt(case, lambda s=subject: figures(models.updated(s, None)))
        del subject
    yield adapter_update(name, configure(name, **sizes, model__remat="full", **NARROW))


def adapter_update(name: str, c: Any) -> Line:
    """Measures an update of adapters."""
    adapters = Lora(models.RANK, c.model.lora_alpha, lora.parse_targets(c.model.target_modules))
    case = {"model": name, "remat": c.model.remat, "stage": f"LoRA update, rank {models.RANK}"}
    return attempt(case, lambda: figures(models.updated(make_subject(name, c, repeats=2), adapters)))


def head_share(s: models.Subject) -> Line:
    """Measures the head's part of an update, its gradient with logits computed twice; and scoring, with its part."""
    kernel = decoder.head_kernel(lora.variables(s.trained.learned)["params"], s.cfg)
    rows, options = s.rows[0], dict[str, Any](temperature=1.0, with_entropy=False, mesh=s.mesh)
    options |= dict(chunk_tokens=chunk_tokens(s.c.model, s.cfg, s.mesh), mask=rows.mask)
    hidden = jax.random.normal(jax.random.key(0), (*rows.inputs.shape, s.cfg.hidden_size), jnp.dtype(DTYPE))

    def loss(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(heads.logprob_entropy((hidden, kernel, s.cfg), rows.targets, **options)[0])

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    trunk, scored = (statistics.median(run(s)["seconds"]) for run in (models.forward, models.logprobs))
    return {
        "update_s": len(s.rows) * seconds_of(lambda: gradient(hidden, kernel), repeats=3),
        "logprobs_s": scored,
        "of_logprobs": 1 - trunk / scored,
    }


def allocator(tiny: bool) -> Iterator[Line]:
    """An update with the allocator of the environment; the program is the one of `update`."""
    name, sizes = ("tiny", TINY) if tiny else ("q15", UPDATE)
    subject = make_subject(name, configure(name, **sizes, model__remat="full"), repeats=2)
    case = {"allocator": os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default"), "model": name, "remat": "full"}
    yield attempt(case, lambda: figures(models.updated(subject, None)))


def gae(tiny: bool) -> Iterator[Line]:
    """Advantages of 1,024 responses of 8,192 tokens."""
    shape = (4, 32) if tiny else (1024, 8192)
    reward, value = (jax.random.normal(jax.random.key(i), shape) for i in range(2))
    estimate = jax.jit(functools.partial(advantage.gae, gamma=1.0, lam=0.95))

    def measure() -> Line:
        run, compile_s = compiled(estimate, reward, value, mask := jnp.ones(shape, bool))
        seconds = seconds_of(lambda: run(reward, value, mask), repeats=3)
        floor = share(17 * reward.size, HBM)  # two arrays of f32 read, two written; a mask
        return {"compile_s": compile_s, "ms": 1e3 * seconds, "floor_ms": None if floor is None else 1e3 * floor}

    yield attempt({"shape": f"{shape[0]}x{shape[1]}"}, measure)
