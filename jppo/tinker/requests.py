"""Requests of the Tinker API as arguments of `jppo.open`'s models, and its binary messages. Pure.

Requests are JSON, those for gradients a message in protobuf's encoding; log-probs and samples are answered by such
messages. An option that jppo lacks is a BadRequest.
"""

import hashlib
import pathlib
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jppo.agent.gateway.request import BadRequest
from jppo.run.own_inputs import require_sampling

Body = Mapping[str, Any]
_NO_DUAL_CLIP = 1e9  # the API's PPO has none
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# Options and arrays of each loss, besides target_tokens.
_OPTIONS: dict[str, dict[str, float]] = {"ppo": _CLIPS, "cispo": _CLIPS, "dro": {"beta": 0.05}}
_POLICY = ("logprobs", "advantages")
_ARRAYS = {"cross_entropy": ("weights",)} | dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), _POLICY)
_NAMES = {"weights": "weight", "logprobs": "old_logprob", "advantages": "advantage"}
_ADAM = {"learning_rate": (1e-4, "lr"), "beta1": (0.9, "beta1"), "beta2": (0.95, "beta2"), "eps": (1e-12, "eps")}
_ADAM |= {"weight_decay": (0.0, "weight_decay"), "grad_clip_norm": (0.0, "grad_clip")}
_SAMPLING = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
_SAMPLE = ("num_samples", "prompt", "sampling_params", "sampling_session_id", "seq_id", "type", "prompt_logprobs",
          "prompt_logprobs_last_n")  # fmt: skip
_MOST_SAMPLES = 1024
SCHEME = "tinker://"
FLOAT32, INT64 = 1, 2
Message = dict[int, list[Any]]  # the values of each field
_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
_LOGPROBS = "logprobs"


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


def field(body: Body, name: str, kind: type, default: Any = None) -> Any:
    """Returns a field of this type; without a default it must be there. A null float is the client's NaN."""
    value = body.get(name, default)
    right = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if name in body and body[name] is None and kind is not float:
        value, right = default, default is not None
    if (not right and (name in body or default is None)) or (isinstance(value, bool) and kind is not bool):
        raise BadRequest(f"{name}={str(body.get(name))[:60]!r} must be of type {kind.__name__}")
    return value


def require_known(where: str, body: Body, known: Collection[str]) -> None:
    """Raises BadRequest for an option that is set and not supported; None, False, 0 and [] are the API's 'not set'."""
    for name, value in body.items():
        if name not in known and value not in (None, False, 0, []):
            raise BadRequest(f"{where}{name}={str(value)[:60]} is not supported; leave it out", status=422)


def name_of(body: Body, default: str) -> str:
    """Returns the name of a checkpoint."""
    name: str = field(body, "path", str, default)
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name):
        raise BadRequest(f"path={name[:120]!r} must be a name of letters, digits, '.', '_' and '-', at most 100")
    return name


def adam_options(body: Body) -> dict[str, float]:
    """Returns the arguments of `optim_step`."""
    if "adam_params" not in body:
        raise BadRequest("adam_params is missing; the one optimizer is AdamW")
    params = field(body, "adam_params", dict)
    require_known("adam_params.", params, _ADAM)
    return {ours: float(field(params, name, float, usual)) for name, (usual, ours) in _ADAM.items()}


def require_model(body: Body, name: str, rank: int) -> int | None:
    """Raises BadRequest for a model that this server does not train; returns the seed."""
    if (asked := field(body, "base_model", str)) != name:
        raise BadRequest(f"base_model={asked[:120]!r} is not served; it is {name!r}", status=422)
    lora: Body = field(body, "lora_config", dict, {"rank": 0})
    require_known("lora_config.", lora, ("rank", "seed", "train_unembed", "train_mlp", "train_attn"))
    if (asked := field(lora, "rank", int)) != rank:
        kind = f"adapters of rank {rank}" if rank else "whole weights, asked for by rank 0"
        raise BadRequest(f"lora_config.rank={asked}: this server trains {kind}; see --lora", status=422)
    for part in ("train_mlp", "train_attn"):
        if not field(lora, part, bool, True):
            raise BadRequest(f"lora_config.{part}=False is not supported; leave it out", status=422)
    kind = field(body, "optimizer_config", dict, {}).get("type", "adamw")
    if kind != "adamw":
        raise BadRequest(f"optimizer_config.type={str(kind)[:60]!r} is not supported; take 'adamw'", status=422)
    return lora.get("seed") and int(field(lora, "seed", int)) % 2**31


def loss_options(request: GradientRequest) -> tuple[str, dict[str, Any]]:
    """Returns the name and options of a loss for `forward_backward`; sums over tokens, as the API's."""
    if request.loss not in _ARRAYS:
        raise BadRequest(f"loss_fn={request.loss[:60]!r} is not supported; take one of {', '.join(_ARRAYS)}")
    known = _OPTIONS.get(request.loss, {})
    for name in request.options.keys() - known.keys():
        raise BadRequest(f"loss_fn_config[{name[:60]!r}] is not supported by {request.loss}; leave it out")
    given, options = known | request.options, dict[str, Any](loss_agg_mode="token-sum")
    if known is _CLIPS:
        options["clip_ratio_low"] = 1.0 - given["clip_low_threshold"]
        options["clip_ratio_high"] = given["clip_high_threshold"] - 1.0
    if request.loss == "ppo":
        options["clip_ratio_c"] = _NO_DUAL_CLIP
    if request.loss == "dro":
        options["dro_beta"] = given["beta"]
    return request.loss, options


def loss_inputs(data: Sequence[Datum], loss: str) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, Any]]:
    """Returns inputs, targets and arrays for `Model.examples`."""
    if not data:
        raise BadRequest("data is empty; give one example at least")
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS[loss]}
    for row, datum in enumerate(data):
        inputs = datum.inputs
        require = ("target_tokens", *(name for name in arrays if name != "weights"))
        for name in [*(name for name in require if name not in inputs), *(inputs.keys() - {"target_tokens", *arrays})]:
            why = "missing" if name in require else f"no array of {loss}; leave it out"
            raise BadRequest(f"data[{row}].loss_fn_inputs[{name[:60]!r}] is {why}")
        for name, array in inputs.items():
            if len(array) != len(datum.tokens):
                raise BadRequest(
                    f"data[{row}].{name} has {len(array)} numbers for {len(datum.tokens)} tokens; give one for each"
                )
        for name, column in arrays.items():
            column.append(inputs.get(name, np.ones(len(datum.tokens), np.float32)).astype(np.float32))
            if not np.isfinite(column[-1]).all():
                raise BadRequest(f"data[{row}].{name} has a non-finite number; correct it")
    targets = [datum.inputs["target_tokens"] for datum in data]
    return [datum.tokens for datum in data], targets, {_NAMES[name]: column for name, column in arrays.items()}


def prompt_tokens(body: Body, longest: int, vocabulary: int) -> np.ndarray:
    """Returns the tokens to continue."""
    require_known("", body, _SAMPLE)
    tokens = list[int]()
    for chunk in field(field(body, "prompt", dict), "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise BadRequest("prompt has an image or audio; jppo reads text only: send tokens")
        tokens += field(chunk, "tokens", list)
    if not 1 <= len(tokens) <= longest:
        raise BadRequest(
            f"the prompt has {len(tokens)} tokens; it must have 1 to {longest}: see data.max_prompt_length"
        )
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise BadRequest(f"the prompt has a token outside of 0 to {vocabulary - 1}; take the model's tokenizer")
    return np.asarray(tokens, np.int32)


def scored_count(body: Body, prompt: np.ndarray) -> int | None:
    """Returns how many of the prompt's last tokens get log-probs; None: there are none to return."""
    asked = field(body, "prompt_logprobs", bool, False)
    last = body.get("prompt_logprobs_last_n")
    if not asked:
        require_known("", {"prompt_logprobs_last_n (without prompt_logprobs)": last}, ())
        return None
    last = max(1, len(prompt) - 1) if last is None else field(body, "prompt_logprobs_last_n", int)
    if not 1 <= last <= max(1, len(prompt) - 1):
        raise BadRequest(f"prompt_logprobs_last_n={last} must be 1 to {len(prompt) - 1}, one less than the prompt")
    return last


def sampling_options(body: Body, longest: int, vocabulary: int) -> dict[str, Any]:
    """Returns the arguments of `Model.sample`."""
    params = field(body, "sampling_params", dict)
    require_known("sampling_params.", params, _SAMPLING)
    options = dict[str, Any](
        n=field(body, "num_samples", int, 1),
        max_tokens=field(params, "max_tokens", int, longest),
        temperature=float(field(params, "temperature", float, 1.0)),
        top_k=field(params, "top_k", int, -1),
        top_p=float(field(params, "top_p", float, 1.0)),
    )
    if params.get("seed") is not None:
        options["seed"] = field(params, "seed", int) % 2**31
    stop = params.get("stop")
    if stop == []:
        options["ignore_eos"] = True
    elif stop is not None:
        texts = [stop] if isinstance(stop, str) else field(params, "stop", list)
        options["stop"] = tuple(one for one in texts if isinstance(one, str))
        options["stop_ids"] = tuple(one for one in texts if not isinstance(one, str))
    require_sampling(options, {"n": _MOST_SAMPLES, "max_tokens": longest}, vocabulary)
    return options


def checkpoint_folder(folder: pathlib.Path, owner: str, name: str) -> pathlib.Path:
    """Returns the folder of a checkpoint, which the key `owner` alone reaches."""
    parts = name.split("/")
    if len(parts) != 3 or parts[1] != "weights" or any(p.startswith(".") or not p for p in parts):
        raise BadRequest(f"path={name[:160]!r} must be {SCHEME}MODEL/weights/NAME")
    key = hashlib.sha256(owner.encode()).hexdigest()[:32]
    return folder / key / parts[0].replace(":", "-") / "/".join(parts[1:])


def read_message(data: bytes) -> Message:
    """Returns the values of a message by field number: integers of varints, and bytes."""
    fields, at = dict[int, list[Any]](), 0
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
        fields.setdefault(tag >> 3, []).append(value)
    return fields


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


def write_message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
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
        for entry in map(read_message, message.get(7, [])):
            name, value = entry[1][0].decode(), read_message(entry[2][0])
            if 1 not in value:
                raise BadRequest(f"loss_fn_config[{name!r}] must be a number")
            options[name] = struct.unpack("<d", value[1][0])[0]
        return GradientRequest(
            [_datum(read_message(one), i) for i, one in enumerate(message.get(3, []))],
            message[4][0].decode(),
            options,
            bool(message.get(6, [0])[0]),
        )
    except (KeyError, AttributeError, TypeError, ValueError, struct.error) as e:
        raise BadRequest(f"the body is no ForwardBackwardRequest: {type(e).__name__} {e}") from e


def _datum(message: Message, row: int) -> Datum:
    tokens = []
    for chunk in map(read_message, message.get(1, [])):
        if 1 not in chunk:
            raise BadRequest(f"data[{row}].model_input has an image or audio; jppo reads text only: send tokens")
        tokens.append(np.frombuffer(read_message(chunk[1][0]).get(1, [b""])[0], "<i4"))
    inputs = dict[str, np.ndarray]()
    for entry in map(read_message, message.get(2, [])):
        name, tensor = entry[1][0].decode(), read_message(entry[2][0])
        dtype = _DTYPES.get(tensor.get(3, [0])[0])
        if 2 in tensor or dtype is None:
            raise BadRequest(f"data[{row}].{name} must be a dense array of float32 or int64")
        inputs[name] = np.frombuffer(tensor.get(1, [b""])[0], dtype)
        shape = [n for one in tensor.get(4, []) for n in (_packed(one) if isinstance(one, bytes) else [one])]
        if len(shape) > 1:
            raise BadRequest(f"data[{row}].{name} has the shape {shape}; give one number for each token")
    return Datum(np.concatenate(tokens) if tokens else np.zeros(0, np.int32), inputs)


def _packed(data: bytes) -> list[int]:
    numbers, at = list[int](), 0
    while at < len(data):
        value, at = _varint(data, at)
        numbers.append(value)
    return numbers


def gradient_message(logprobs: Sequence[np.ndarray], metrics: dict[str, float]) -> bytes:
    """Returns a ForwardBackwardOutput with the log-probs of each example's targets."""
    rows = [np.ascontiguousarray(row, "<f4") for row in logprobs]
    offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8")
    tensor = write_message((1, b"".join(row.tobytes() for row in rows)), (2, offsets.tobytes()), (3, FLOAT32))
    record = write_message((2, write_message((1, _LOGPROBS), (2, tensor))), (3, len(rows)))
    told = [(3, write_message((1, name), (2, float(value)))) for name, value in metrics.items()]
    return write_message((1, "ArrayRecord"), (2, record), *told)


def samples_message(samples: Sequence[tuple[np.ndarray, np.ndarray, bool]], prompt: np.ndarray | None = None) -> bytes:
    """Returns a SampleResponse of (tokens, log-probs, whether the length ended it), and of the prompt's log-probs."""
    of_prompt = [] if prompt is None else [(2, prompt.astype("<f4").tobytes())]
    return write_message(
        *(
            (1, write_message((1, int(cut)), (2, tokens.astype("<i4").tobytes()), (3, logprob.astype("<f4").tobytes())))
            for tokens, logprob, cut in samples
        ),
        *of_prompt,
    )
