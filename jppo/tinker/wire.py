"""The Tinker API's binary messages in protobuf's encoding: gradients in, log-probs and samples out. Pure."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jppo.agent.gateway.request import BadRequest

FLOAT32, INT64 = 1, 2
Message = dict[int, list[Any]]  # the values of each field
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
LOGPROBS = "logprobs"


class Datum(NamedTuple):
    """An example of a gradient."""

    tokens: np.ndarray  # [t] i32
    inputs: dict[str, np.ndarray]  # arrays of the loss by name


class GradientRequest(NamedTuple):
    """A request for a gradient, or with `forward_only` for log-probs."""

    data: list[Datum]
    loss: str
    options: dict[str, float]
    forward_only: bool


def read(data: bytes) -> Message:
    """Returns the values of a message by field number: integers of varints, and bytes."""
    found, at = dict[int, list[Any]](), 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        value: Any
        if kind == 0:
            value, at = _varint(data, at)
        else:
            if kind not in (1, 2, 5):
                raise BadRequest(f"the body is no protobuf message: wire type {kind}")
            size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise BadRequest("the body is no protobuf message: it ends within a field")
        found.setdefault(tag >> 3, []).append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise BadRequest("the body is no protobuf message: it ends within a number")
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise BadRequest("the body is no protobuf message: a number has more than 10 bytes")


def write(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    """Returns a message of (number, value): integers of at least 0, doubles, texts, and bytes or messages."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += _number(number << 3) + _number(value)
        elif isinstance(value, float):
            out += _number(number << 3 | 1) + struct.pack("<d", value)
        else:
            raw = value.encode() if isinstance(value, str) else value
            out += _number(number << 3 | 2) + _number(len(raw)) + raw
    return bytes(out)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def read_order(message: Message) -> tuple[str, int]:
    """Returns the model and the number of a ForwardBackwardRequest."""
    try:
        return message[1][0].decode(), int(message[2][0])
    except (KeyError, AttributeError, ValueError) as e:
        raise BadRequest(f"the body is no ForwardBackwardRequest: {type(e).__name__} {e}") from e


def read_gradient(message: Message) -> GradientRequest:
    """Reads a ForwardBackwardRequest; raises BadRequest for contents that jppo does not train on."""
    try:
        options = dict[str, float]()
        for entry in map(read, message.get(7, [])):
            name, value = entry[1][0].decode(), read(entry[2][0])
            if 1 not in value:
                raise BadRequest(f"loss_fn_config[{name!r}] must be a number")
            options[name] = struct.unpack("<d", value[1][0])[0]
        return GradientRequest(
            [_datum(read(one), i) for i, one in enumerate(message.get(3, []))],
            message[4][0].decode(),
            options,
            bool(message.get(6, [0])[0]),
        )
    except (KeyError, AttributeError, TypeError, ValueError, struct.error) as e:
        raise BadRequest(f"the body is no ForwardBackwardRequest: {type(e).__name__} {e}") from e


def _datum(message: Message, row: int) -> Datum:
    tokens = []
    for chunk in map(read, message.get(1, [])):
        if 1 not in chunk:
            raise BadRequest(f"data[{row}].model_input has an image or audio; jppo reads text only: send tokens")
        tokens.append(np.frombuffer(read(chunk[1][0]).get(1, [b""])[0], "<i4"))
    inputs = dict[str, np.ndarray]()
    for entry in map(read, message.get(2, [])):
        name, tensor = entry[1][0].decode(), read(entry[2][0])
        dtype = DTYPES.get(tensor.get(3, [0])[0])
        if 2 in tensor or dtype is None:
            raise BadRequest(f"data[{row}].{name} must be a dense array of float32 or int64")
        inputs[name] = np.frombuffer(tensor.get(1, [b""])[0], dtype)
        shape = [n for one in tensor.get(4, []) for n in (_packed(one) if isinstance(one, bytes) else [one])]
        if len(shape) > 1:
            raise BadRequest(f"data[{row}].{name} has the shape {shape}; give one number for each token")
    return Datum(np.concatenate(tokens) if tokens else np.zeros(0, np.int32), inputs)


def _packed(data: bytes) -> list[int]:
    found, at = list[int](), 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def write_gradient(logprobs: Sequence[np.ndarray], metrics: dict[str, float]) -> bytes:
    """Returns a ForwardBackwardOutput with the log-probs of each example's targets."""
    rows = [np.ascontiguousarray(row, "<f4") for row in logprobs]
    offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8")
    tensor = write((1, b"".join(row.tobytes() for row in rows)), (2, offsets.tobytes()), (3, FLOAT32))
    record = write((2, write((1, LOGPROBS), (2, tensor))), (3, len(rows)))
    told = [(3, write((1, name), (2, float(value)))) for name, value in metrics.items()]
    return write((1, "ArrayRecord"), (2, record), *told)


def write_samples(samples: Sequence[tuple[np.ndarray, np.ndarray, bool]], prompt: np.ndarray | None = None) -> bytes:
    """Returns a SampleResponse of (tokens, log-probs, whether the length ended it), and of the prompt's log-probs."""
    of_prompt = [] if prompt is None else [(2, prompt.astype("<f4").tobytes())]
    return write(
        *(
            (1, write((1, int(cut)), (2, tokens.astype("<i4").tobytes()), (3, logprob.astype("<f4").tobytes())))
            for tokens, logprob, cut in samples
        ),
        *of_prompt,
    )
