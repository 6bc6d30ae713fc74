"""Safetensors files, read as memory maps and written one tensor at a time. Used by `hf.py` and `hf_write.py`.

A file is eight bytes of header length, a JSON header of dtype, shape and offsets by name, and the bytes. This
reader, unlike the safetensors package's, copies nothing, so that a device reads only its shard, and names a bad tensor.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import struct
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jppo import tensorheader
from jppo.errors import UserError

DTYPES = {code: jnp.dtype(name) for name, code in tensorheader.CODES.items()}
_SIZES = {code: dtype.itemsize for code, dtype in DTYPES.items()} | {"U8": 1}
BLOCK = 32  # numbers of MXFP4 with one scale, two in a byte
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Slot:
    """A tensor's file, dtype, shape and offset."""

    file: pathlib.Path
    code: str  # safetensors' name of the dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the file's start
    scales: "Slot | None" = None  # of an MXFP4 tensor, whose blocks are here


def read_tensor(slot: Slot, name: str) -> np.ndarray:
    """Reads the tensor as a read-only memory map; decodes it if it is MXFP4."""
    if slot.scales is not None:
        E, I, O = slot.shape
        parts = (slot, (E, O, I // BLOCK, BLOCK // 2)), (slot.scales, slot.scales.shape)
        return decode_mxfp4(*(np.memmap(s.file, np.uint8, mode="r", offset=s.offset, shape=n) for s, n in parts))
    if slot.code not in DTYPES:
        raise UserError(f"{slot.file}: {name} has dtype {slot.code}; only {', '.join(DTYPES)} are weights")
    return np.memmap(slot.file, DTYPES[slot.code], mode="r", offset=slot.offset, shape=slot.shape)


def slots(directory: pathlib.Path) -> dict[str, Slot]:
    """Lists all tensors of a checkpoint directory by name, from one file or from the index of several."""
    if (directory / SINGLE).is_file():
        return file_slots(directory / SINGLE)
    index = directory / INDEX
    if not index.is_file():
        raise UserError(f"{directory} holds neither {SINGLE} nor {INDEX}; give a directory with safetensors weights")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        is_valid = all(isinstance(shard, str) and pathlib.Path(shard).name == shard for shard in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{index} is no JSON object with a weight_map: {e}; fetch it again") from e
    if not is_valid:
        raise UserError(f"{index}: its weight_map must give the name of a file in its folder for each tensor")
    slots: dict[str, Slot] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            raise UserError(f"{index} names {shard}, which is not in {directory}; fetch the missing file")
        slots |= file_slots(directory / shard)
    missing = sorted(set(weight_map) - set(slots))
    if missing:
        raise UserError(f"{directory / weight_map[missing[0]]} lacks {missing[0]}, which {index.name} puts there")
    return slots


def split_experts(stored: Mapping[str, Slot]) -> dict[str, Slot]:
    """Replaces a layer's experts in two tensors, gate_up_proj [E, 2M, D] and down_proj [E, D, M], by each one's own."""
    split = dict(stored)
    for name, slot in stored.items():
        module, _, last = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
        if not parts or len(slot.shape) != 3 or slot.shape[1] % len(parts):
            continue
        del split[name]
        shape = slot.shape[1] // len(parts), slot.shape[2]
        size = math.prod(shape) * _SIZES.get(slot.code, 0)  # an unknown dtype is rejected by `read_tensor`
        for i, (expert, part) in enumerate(itertools.product(range(slot.shape[0]), parts)):
            expert_slot = dataclasses.replace(slot, shape=shape, offset=slot.offset + i * size)
            split[f"{module}.experts.{expert}.{part}.weight"] = expert_slot
    return split


def pair_mxfp4(stored: Mapping[str, Slot]) -> dict[str, Slot]:
    """Replaces each pair X_blocks and X_scales of MXFP4 by X, with the shape that `read_tensor` returns."""
    paired = dict(stored)
    for name in [name for name in stored if name.endswith("_blocks")]:
        tensor_name = name.removesuffix("_blocks")
        blocks, scales = paired.pop(name), paired.pop(f"{tensor_name}_scales", None)
        if scales is None:
            raise UserError(f"{blocks.file}: {name} has no {tensor_name}_scales; fetch the missing file")
        is_valid = len(blocks.shape) == 4 and blocks.shape[3] == BLOCK // 2 and blocks.shape[:3] == scales.shape
        if not is_valid or (blocks.code, scales.code) != ("U8", "U8"):
            found = f"{blocks.code}{list(blocks.shape)}, its scales {scales.code}{list(scales.shape)}"
            raise UserError(f"{blocks.file}: {name} is {found}; MXFP4 is U8 [E, O, I/32, 16] and [E, O, I/32]")
        E, O, G, _ = blocks.shape
        paired[tensor_name] = dataclasses.replace(blocks, shape=(E, G * BLOCK, O), scales=scales)
    return paired


def file_slots(file: pathlib.Path) -> dict[str, Slot]:
    """Lists the tensors of one file by name, from its header."""
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise UserError(f"{file} is cut: {size} bytes do not hold its header; fetch it again")
        try:
            header = json.loads(f.read(length))
        except (ValueError, RecursionError) as e:
            raise UserError(f"{file} is no safetensors file: its header is no JSON ({e})") from e
    if not isinstance(header, dict):
        raise UserError(f"{file} is no safetensors file: its header is a JSON {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    slots = {}
    for name, item in header.items():
        code, shape, first, last = _read_header_entry(file, name, item)
        if 8 + length + last > size:
            raise UserError(f"{file} is cut: {name} ends at byte {8 + length + last} of {size}; fetch it again")
        if code in _SIZES and last - first != _SIZES[code] * math.prod(shape):
            raise UserError(f"{file}: {name} has {last - first} bytes, which is not {code} of shape {list(shape)}")
        slots[name] = Slot(file, code, shape, 8 + length + first)
    return slots


def _read_header_entry(file: pathlib.Path, name: str, item: object) -> tuple[str, tuple[int, ...], int, int]:
    """Reads a tensor's dtype, shape, first byte and end from the header; raises UserError if it lacks one."""
    entry = item if isinstance(item, dict) else {}
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if isinstance(code, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2:
        are_counts = all(type(n) is int and n >= 0 for n in (*shape, *offsets))
        if are_counts and offsets[0] <= offsets[1]:
            return code, tuple(shape), offsets[0], offsets[1]
    raise UserError(
        f"{file}: {name} is {str(item)[:200]} in the header, which needs dtype, shape and data_offsets, two byte"
        " numbers in order; fetch it again"
    )


def nbytes(x: jax.ShapeDtypeStruct) -> int:
    return int(x.dtype.itemsize * math.prod(x.shape))


def write_tensors(
    file: pathlib.Path, shapes: Mapping[str, jax.ShapeDtypeStruct], tensors: Iterable[np.ndarray]
) -> None:
    """Writes `tensors` as announced, in that order, holding one at a time."""
    header = tensorheader.make_header((name, x.dtype.name, x.shape, nbytes(x)) for name, x in shapes.items())
    with file.open("wb") as f:
        f.write(header)
        for (name, x), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != x.shape or tensor.dtype != x.dtype:
                raise ValueError(f"{name} is {tensor.dtype}{tensor.shape}, announced as {x.dtype}{x.shape}")
            f.write(np.ascontiguousarray(tensor).view(np.uint8).data)


@functools.cache
def _mxfp4_tables() -> tuple[np.ndarray, np.ndarray]:
    """Computes the bfloat16 number in the low and in the high four bits of a byte, by 256 * its scale + byte."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = np.array([*positive, *(-x for x in positive)], np.float32)
    byte, exponent = np.arange(256), np.arange(256, dtype=np.int32)[:, None] - 127
    with np.errstate(over="ignore"):
        low, high = (np.ldexp(values[four], exponent).astype(jnp.bfloat16) for four in (byte & 15, byte >> 4))
    return low.reshape(-1), high.reshape(-1)


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes MXFP4 (OCP Microscaling Formats 1.0) to bfloat16.

    Experts' matrices: blocks [E, O, I/32, 16] and exponents plus 127 [E, O, I/32], u8, to [E, I, O]."""
    E, O, G, _ = blocks.shape
    out = np.empty((E, G, BLOCK // 2, 2, O), jnp.bfloat16)
    low, high = _mxfp4_tables()
    for e in range(E):
        byte = np.ascontiguousarray(blocks[e].transpose(1, 2, 0))  # transposed first: it is the smallest
        index = scales[e].T.astype(np.uint16)[:, None] << 8 | byte
        out[e, :, :, 0], out[e, :, :, 1] = low[index], high[index]
    return out.reshape(E, G * BLOCK, O)
