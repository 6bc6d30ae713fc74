"""The header of a safetensors file: eight bytes of length, and JSON of dtype, shape and offsets by name. Pure.

The tensors' bytes follow it directly. `models/tensorfile.py` writes and reads such files as checkpoints;
`rollout/sglang/client.py` writes them for a server.
"""

import json
import struct
from collections.abc import Iterable

CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # numpy's name to safetensors'


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], *, room: int = 0) -> bytes:
    """Makes the header, of `room` bytes or more, for tensors given by name, dtype, shape and byte count."""
    # transformers requires a format; it only means row-major
    items: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, count in tensors:
        begin, end = end, end + count
        items[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(items, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % 8, room - 8 - len(text))  # the data starts aligned
    return struct.pack("<Q", len(text)) + text
