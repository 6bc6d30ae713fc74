"""The fused attention kernels of JAX, which hold no row's T^2 scores, and the choice among them.

`choose_kernel` names the kernel, `make_attention` builds it with the signature of `attention.Attend`:

    xla     any device        every feature, shared prompts too; it holds the scores
    cudnn   NVIDIA's GPUs     bfloat16 or float16, sliding windows; shared rows on Hopper and newer
    splash  TPUs              shared rows, float32 too, sliding windows, soft cap, sinks
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jppo.errors import UserError
from jppo.models.attention import NAME, Attend, Windows, make_plain
from jppo.models.sequence_parallel import EXCHANGED, Split, repeat_heads, row_axes

NAMES = ("auto", "xla", "cudnn", "splash")

_BACKENDS = {"cudnn": "gpu", "splash": "tpu"}
_AUTO = {backend: kernel for kernel, backend in _BACKENDS.items()}
PACKED = 16  # trajectories that a row may hold for cuDNN: each takes the room of a row's softmax sums

_TILE = 128  # lengths are padded to multiples of it

# (q, k, v, segment, sinks) -> [R, T, H, A], for layers of one window
_Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True)
class Needs:
    """The requirements of a model and its rows on attention."""

    scale: float
    softcap: float | None
    windows: Windows
    head_dim: int
    dtype: Any  # of queries, keys and values
    one_segment: bool  # every row holds one trajectory from its first position on, then padding
    longest: int | None = None  # length of the longest trajectory: a window this large has no effect
    shared: tuple[int, int] | None = None  # rows with prompts that several segments see, as in `attention.make_plain`
    sinks: bool = False  # each head has a learned score of no key

    @property
    def used_windows(self) -> Windows:
        """Returns the windows, None where they have no effect."""
        longest = math.inf if self.longest is None else self.longest
        return tuple(None if window is None or window >= longest else window for window in self.windows)


def capability(device: jax.Device) -> tuple[int, int]:
    """Returns the compute capability of a GPU; (0, 0) for devices of other vendors than NVIDIA."""
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(version[1]), int(version[2])) if version else (0, 0)


def choose_kernel(
    name: str, needs: Needs, *, backend: str, gpu: tuple[int, int] = (0, 0), setting: str = "model.attention"
) -> tuple[str, str | None]:
    """Resolves `name` to a kernel on `backend` ('cpu', 'gpu' or 'tpu'); returns also the reason if none is fused.

    A named kernel that lacks a requirement is a UserError. 'auto' takes the backend's, and XLA with a one-sentence
    reason if that does not fit. `gpu` is the compute capability of a GPU.
    """
    if name not in NAMES:
        raise UserError(f"{setting}={name!r} must be one of {', '.join(NAMES)}")
    window = next((window for window in needs.used_windows if window is not None), None)
    if needs.shared is not None and window is not None:
        raise UserError(
            f"data.packing=prefix: the model has a sliding window of {window} tokens, less than a prompt and a response"
            f" may have ({needs.longest}), and it would attend to other samples; use data.packing=buckets"
        )

    def reason(kernel: str) -> str | None:
        if backend != _BACKENDS[kernel]:
            return f"it runs on a {_BACKENDS[kernel]}, and the devices are of platform {backend}"
        return _unsupported_reason(kernel, needs, gpu if backend == "gpu" else None)

    if name == "auto":
        if (kernel := _AUTO.get(backend)) is None:
            return "xla", None
        if (fault := reason(kernel)) is None:
            return kernel, None
        return "xla", f"no fused attention, so the scores of whole rows are held in memory ({kernel}: {fault})"
    if name != "xla" and (fault := reason(name)) is not None:
        raise UserError(f"{setting}={name}: {fault}; use {setting}=auto")
    return name, None


def make_attention(
    kernel: str, needs: Needs, *, mesh: Mesh | None = None, split: Split = EXCHANGED, interpret: bool = False
) -> Attend:
    """Makes attention by one of the kernels, rows and heads sharded over the mesh; UserError if it lacks something.

    If the devices that share heads do not divide the query heads, each of them computes all.
    `interpret` runs a kernel on any device, slowly: as its own program, and cudnn's as the same call to XLA.
    """
    if kernel == "xla":
        return make_plain(scale=needs.scale, softcap=needs.softcap, windows=needs.used_windows, shared=needs.shared)
    if (fault := _unsupported_reason(kernel, needs, None)) is not None:
        raise UserError(f"attention by {kernel}: {fault}; use xla")
    cudnn = _make_cudnn if needs.one_segment else _make_packed_cudnn
    makers = {"cudnn": cudnn, "splash": _make_splash}
    make_kernel = functools.partial(makers[kernel], needs, interpret=interpret)
    windows = tuple(dict.fromkeys(needs.used_windows))
    kernels = [_shard(_pad_to_tiles(make_kernel(window)), mesh, split) for window in windows]
    kernel_of_kind = tuple(windows.index(window) for window in needs.used_windows)  # of each kind

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment: jax.Array,
        kind: jax.Array | int,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        chex.assert_rank([q, k, v, segment], [4, 4, 4, 2])
        A, W = q.shape[3], v.shape[3]
        if A != W:  # the kernels take heads of one size; zeros change no score
            q, k, wide_v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, max(A, W) - x.shape[3]))) for x in (q, k, v))
            return attend(q, k, wide_v, segment, kind, sinks)[..., :W]
        if len(kernels) == 1:
            return kernels[0](q, k, v, segment, sinks)
        out: jax.Array = jax.lax.switch(jnp.asarray(kernel_of_kind, jnp.int32)[kind], kernels, q, k, v, segment, sinks)
        return out

    return attend


def _unsupported_reason(kernel: str, needs: Needs, gpu: tuple[int, int] | None) -> str | None:
    """Returns why a kernel does not support these needs, else None. `gpu` None: any GPU that supports it."""
    dtype, A = jnp.dtype(needs.dtype), needs.head_dim
    if needs.shared is not None:
        return "it lets a token see its own segment alone, and data.packing=prefix has prompts that several see"
    if gpu is not None and gpu < (8, 0):
        capability_text = "none" if gpu == (0, 0) else f"{gpu[0]}.{gpu[1]}"
        return f"it needs a GPU of compute capability 8.0 or more, and this one has {capability_text}"
    if kernel != "splash" and needs.softcap is not None:
        return f"it has no soft cap, and the model caps its scores at {needs.softcap:g}"
    if kernel != "splash" and needs.sinks:
        return "it has no attention sinks, and the model has one for each head"
    if kernel == "cudnn":
        max_head_dim = 128 if gpu is not None and gpu < (9, 0) else 256
        if not needs.one_segment and gpu is not None and gpu < (9, 0):
            return (
                "it takes rows of several trajectories, as of data.packing=segments, from compute capability 9.0 on,"
                f" and this GPU has {gpu[0]}.{gpu[1]}"
            )
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"it computes in bfloat16 or float16, and the model in {dtype}"
        if A % 8 or max_head_dim < A:
            return f"it takes heads of a multiple of 8 up to {max_head_dim}, and the model's head_dim is {A}"
    return None


def _make_cudnn(needs: Needs, window: int | None, *, interpret: bool) -> _Kernel:
    """Makes attention by cuDNN's kernel, which masks by causality alone: padding follows its row's trajectory."""

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array, __: jax.Array | None) -> jax.Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=needs.scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),  # before a token and after it
            implementation="xla" if interpret else "cudnn",
        )

    return kernel


def _make_packed_cudnn(needs: Needs, window: int | None, *, interpret: bool) -> _Kernel:
    """Makes attention by cuDNN's kernel for rows of up to `PACKED` trajectories, each by its offset in the row.

    The kernel leaves what lies in no trajectory unwritten, forward and backward: zeros are selected there.
    """

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, _: jax.Array | None) -> jax.Array:
        filled = (segment > 0)[..., None, None]
        q, k, v = (jnp.where(filled, x, 0) for x in (q, k, v))
        attend = _attend_packed_by_xla if interpret else _attend_packed
        return jnp.where(filled, attend(q, k, v, *find_segments(segment), needs.scale, window), 0)

    return kernel


def find_segments(segment: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the starts and lengths of the trajectories in each row, [R, PACKED] int32, in order; -1 for none."""
    here = segment[:, None] == jnp.arange(1, PACKED + 1)[None, :, None]
    length = here.sum(-1, dtype=jnp.int32)
    present = length > 0
    return jnp.where(present, jnp.argmax(here, -1).astype(jnp.int32), -1), jnp.where(present, length, -1)


def _attend_packed(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, length: jax.Array, scale: float, window: int | None
) -> jax.Array:
    """Calls cuDNN's attention with offsets, which JAX does not export."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        mask, attend = cudnn.MaskType.PADDING_CAUSAL, cudnn.dot_product_attention
    except (ImportError, AttributeError) as e:
        raise UserError(
            f"JAX {jax.__version__} has no attention by cuDNN over rows of several trajectories; use"
            " data.packing=buckets or model.attention=xla"
        ) from e
    if jax.__version_info__ < (0, 12):  # it would compute the offsets of keys with the queries' number of heads
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    offsets = jnp.pad(start, ((0, 0), (0, 1)), constant_values=-1)
    out: jax.Array = attend(
        q, k, v, None, None, length, length, offsets, offsets,
        scale=scale, mask_type=mask, sliding_window_length=window,
    )  # fmt: skip
    return out


def _attend_packed_by_xla(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, length: jax.Array, scale: float, window: int | None
) -> jax.Array:
    """Computes what cuDNN does with these offsets."""
    at = jnp.arange(q.shape[1])[None, None]
    inside = (start[..., None] <= at) & (at < (start + length)[..., None])  # [R, PACKED, T]
    before = at.swapaxes(1, 2) - at  # positions from a key to a query
    near = (before >= 0) & (before < (q.shape[1] if window is None else window))
    seen = jnp.any(inside[..., None] & inside[:, :, None], axis=1) & near
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=scale, implementation="xla")


def _make_splash(needs: Needs, window: int | None, *, interpret: bool) -> _Kernel:
    """Makes attention by JAX's splash kernel (TPUs)."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    head_bytes = jnp.dtype(needs.dtype).itemsize * needs.head_dim

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, sinks: jax.Array | None) -> jax.Array:
        T, H = q.shape[1:3]
        square = (T, T)
        mask = splash.CausalMask(square) if window is None else splash.LocalMask(square, (window - 1, 0), offset=0)
        attend = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * H),
            block_sizes=splash.BlockSizes(**_splash_blocks(T, head_bytes)),
            attn_logits_soft_cap=needs.softcap,
            residual_checkpoint_name=NAME,
            interpret=interpret,
        )
        scaled = (needs.scale * q.astype(jnp.float32)).astype(q.dtype)  # the kernel takes no scale
        heads_first = (x.swapaxes(1, 2) for x in (scaled, k, v))
        by_row = jax.vmap(functools.partial(attend, sinks=sinks))
        out: jax.Array = by_row(*heads_first, splash.SegmentIds(segment, segment)).swapaxes(1, 2)
        return out

    return kernel


def _splash_blocks(T: int, head_bytes: int) -> dict[str, Any]:
    """Returns block sizes of the splash kernels for rows of T positions, whose heads have `head_bytes` bytes.

    Larger blocks are faster, as far as they fit in a core's memory. The fused backward kernel computes scores once
    instead of twice. It holds the queries' gradient once per block of keys, so long rows do without.
    """
    block = next(size for size in (1024, 512, 256, 128) if T % size == 0 and size * head_bytes <= 2**18)
    names = ("q", "kv", "q_dkv", "kv_dkv")
    blocks: dict[str, Any] = {f"block_{name}": block for name in names}
    compute = min(block, 512)
    fused = T // block <= 8
    blocks |= dict(block_kv_compute=compute, block_kv_dkv_compute=compute, use_fused_bwd_kernel=fused)
    return blocks if fused else blocks | dict(block_q_dq=block, block_kv_dq=block)


def _pad_to_tiles(kernel: _Kernel) -> _Kernel:
    """Extends the kernel to any T: empty positions fill the last tile.

    Also for cuDNN, whose gradients at other lengths than multiples of a tile have repeatedly been NaN.
    """

    def padded(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, sinks: jax.Array | None) -> jax.Array:
        T = q.shape[1]
        padding = -T % _TILE
        if padding == 0:
            return kernel(q, k, v, segment, sinks)
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
        return kernel(q, k, v, jnp.pad(segment, ((0, 0), (0, padding))), sinks)[:, :T]

    return padded


def _shard(kernel: _Kernel, mesh: Mesh | None, split: Split) -> _Kernel:
    """Runs the kernel on each device with its rows and heads: XLA cannot partition it, and would repeat it on each."""
    if mesh is None or mesh.size == 1:
        return kernel
    head_shards = split.parts(mesh)

    def sharded(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, sinks: jax.Array | None) -> jax.Array:
        H = q.shape[2]
        k, v = repeat_heads(k, H, head_shards), repeat_heads(v, H, head_shards)
        shard_axes = row_axes(split.rows)
        heads = None if H % head_shards else split.heads
        rows, spec = PartitionSpec(shard_axes), PartitionSpec(shard_axes, None, heads)
        ins = spec, spec, spec, rows, PartitionSpec(heads)
        # Splash's kernels do not declare over which axes their results differ, so it cannot be checked.
        return jax.shard_map(kernel, mesh=mesh, in_specs=ins, out_specs=spec, check_vma=False)(q, k, v, segment, sinks)

    return sharded
