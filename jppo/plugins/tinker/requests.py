"""Requests of the Tinker API as arguments of `jppo.open`'s models, and its binary messages. Pure.

Requests are JSON, those for gradients a message in protobuf's encoding; log-probs and samples are answered by such
messages. An option that jppo lacks is a BadRequest.
"""

import hashlib
import math
import pathlib
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from jppo.errors import BadRequest
from jppo.run.api.inputs import require_sampling

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
_LARGEST = {int: 2**63 - 1, float: sys.float_info.max}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
SCHEME = "tinker://"
FLOAT32, INT64 = 1, 2
Message = Any  # of MESSAGES
# Messages of the API with their fields, * for repeated ones and ? for those that may be absent; jppo reads no others.
_SCHEMA = {
    "Text": "bytes tokens=1",
    "Chunk": "Text encoded_text=1",
    "Sparse": "bytes values=1",
    "Tensor": "bytes dense=1, Sparse sparse=2, int64 dtype=3, *int64 shape=4",
    "Input": "string key=1, Tensor value=2",
    "Datum": "*Chunk chunks=1, *Input inputs=2",
    "Number": "?double number=1",
    "Option": "string key=1, Number value=2",
    "ForwardBackwardRequest": "string model_id=1, int64 seq_id=2, *Datum data=3, string loss=4, bool forward_only=6,"
    " *Option options=7",
    "Column": "bytes data=1, bytes offsets=2, int64 dtype=3",
    "Named": "string key=1, Column value=2",
    "Record": "*Named columns=2, int64 rows=3",
    "Metric": "string key=1, double value=2",
    "ForwardBackwardOutput": "string type=1, Record record=2, *Metric metrics=3",
    "Sequence": "int64 stop=1, bytes tokens=2, bytes logprobs=3",
    "SampleResponse": "*Sequence sequences=1, bytes prompt_logprobs=2",
}
_MOST_PARTS = 2**16  # examples, chunks and arrays of a request
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
    if value is None and kind is not float:
        value = default
    valid = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if kind in _LARGEST:
        valid = valid and -_LARGEST[kind] <= value <= _LARGEST[kind]
    if not valid:
        within = f" and at most {_LARGEST[kind]:g}" if kind in _LARGEST else ""
        raise BadRequest(f"{name}={str(body.get(name))[:60]!r} must be of type {kind.__name__}{within}")
    return value


def require_known(where: str, body: Body, known: Collection[str]) -> None:
    """Raises BadRequest for an option that is set and not supported; None, False, 0 and [] are the API's 'not set'."""
    for name, value in body.items():
        if name not in known and value not in (None, False, 0, []):
            raise BadRequest(f"{where}{name[:60]}={str(value)[:60]} is not supported; leave it out", status=422)


def name_of(body: Body) -> str:
    """Returns the request's name of a checkpoint, else its number; BadRequest for one that is not safe as a path."""
    name: str = field(body, "path", str, f"{field(body, 'seq_id', int):06d}")
    if not _NAME.fullmatch(name):
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
    if (wanted := field(body, "base_model", str)) != name:
        raise BadRequest(f"base_model={wanted[:120]!r} is not served; it is {name!r}", status=422)
    lora: Body = field(body, "lora_config", dict, {"rank": 0})
    require_known("lora_config.", lora, ("rank", "seed", "train_unembed", "train_mlp", "train_attn"))
    if (wanted := field(lora, "rank", int)) != rank:
        kind = f"adapters of rank {rank}" if rank else "whole weights, asked for by rank 0"
        raise BadRequest(f"lora_config.rank={wanted}: this server trains {kind}; see --lora", status=422)
    for part in ("train_mlp", "train_attn"):
        if not field(lora, part, bool, True):
            raise BadRequest(f"lora_config.{part}=False is not supported; leave it out", status=422)
    kind = field(body, "optimizer_config", dict, {}).get("type", "adamw")
    if kind != "adamw":
        raise BadRequest(f"optimizer_config.type={str(kind)[:60]!r} is not supported; take 'adamw'", status=422)
    return None if lora.get("seed") is None else field(lora, "seed", int) % 2**31


def loss_options(request: GradientRequest) -> tuple[str, dict[str, Any]]:
    """Returns the name and options of a loss for `forward_backward`; sums over tokens, as the API's."""
    if request.loss not in _ARRAYS:
        raise BadRequest(f"loss_fn={request.loss[:60]!r} is not supported; take one of {', '.join(_ARRAYS)}")
    known = _OPTIONS.get(request.loss, {})
    for name in request.options.keys() - known.keys():
        raise BadRequest(f"loss_fn_config[{name[:60]!r}] is not supported by {request.loss}; leave it out")
    values, options = known | request.options, dict[str, Any](loss_agg_mode="token-sum")
    if known is _CLIPS:
        options["clip_ratio_low"] = 1.0 - values["clip_low_threshold"]
        options["clip_ratio_high"] = values["clip_high_threshold"] - 1.0
    if request.loss == "ppo":
        options["clip_ratio_c"] = _NO_DUAL_CLIP
    if request.loss == "dro":
        options["dro_beta"] = values["beta"]
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


def prompt_tokens(body: Body, max_prompt: int, vocabulary: int) -> np.ndarray:
    """Returns the prompt's tokens [t] i32, 1 to `max_prompt`; raises BadRequest for others."""
    require_known("", body, _SAMPLE)
    tokens = list[int]()
    for chunk in field(field(body, "prompt", dict), "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise BadRequest("prompt has an image or audio; jppo reads text only: send tokens")
        tokens += field(chunk, "tokens", list)
    if not 1 <= len(tokens) <= max_prompt:
        raise BadRequest(
            f"the prompt has {len(tokens)} tokens; it must have 1 to {max_prompt}: see data.max_prompt_length"
        )
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise BadRequest(f"the prompt has a token outside of 0 to {vocabulary - 1}; take the model's tokenizer")
    return np.asarray(tokens, np.int32)


def scored_count(body: Body, prompt: np.ndarray) -> int | None:
    """Returns how many of the prompt's last tokens get log-probs; None: the request wants none."""
    wants_scores = field(body, "prompt_logprobs", bool, False)
    count = body.get("prompt_logprobs_last_n")
    if not wants_scores:
        require_known("", {"prompt_logprobs_last_n (without prompt_logprobs)": count}, ())
        return None
    count = max(1, len(prompt) - 1) if count is None else field(body, "prompt_logprobs_last_n", int)
    if not 1 <= count <= max(1, len(prompt) - 1):
        raise BadRequest(f"prompt_logprobs_last_n={count} must be 1 to {len(prompt) - 1}, one less than the prompt")
    return count


def sampling_options(body: Body, max_tokens: int, vocabulary: int) -> dict[str, Any]:
    """Returns the arguments of `Model.sample`; `max_tokens` is the largest and the default."""
    params = field(body, "sampling_params", dict)
    require_known("sampling_params.", params, _SAMPLING)
    options = dict[str, Any](
        n=field(body, "num_samples", int, 1),
        max_tokens=field(params, "max_tokens", int, max_tokens),
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
        if re.search("[\ud800-\udfff]", "".join(options["stop"])):
            raise BadRequest("stop has half a character; send valid Unicode")
        options["stop_ids"] = tuple(one for one in texts if not isinstance(one, str))
    require_sampling(options, limits={"n": _MOST_SAMPLES, "max_tokens": max_tokens}, vocabulary=vocabulary)
    return options


def checkpoint_folder(folder: pathlib.Path, owner: str, name: str) -> pathlib.Path:
    """Returns the folder of a checkpoint, which the key `owner` alone reaches."""
    parts = name.split("/")
    if len(parts) != 3 or parts[1] != "weights" or not all(_NAME.fullmatch(p.replace(":", "-")) for p in parts):
        raise BadRequest(f"path={name[:160]!r} must be {SCHEME}MODEL/weights/NAME")
    key = hashlib.sha256(owner.encode()).hexdigest()[:32]
    return folder / key / parts[0].replace(":", "-") / "/".join(parts[1:])


def _make_messages() -> dict[str, Any]:
    """Makes protobuf's classes of the messages in _SCHEMA."""
    file = descriptor_pb2.FileDescriptorProto(name="jppo_tinker.proto", package="jppo", syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for mark, kind, field_name, number in re.findall(r"(\W?)(\w+) (\w+)=(\d+)", fields):
            added = message.field.add(name=field_name, number=int(number), label=3 if mark == "*" else 1)
            if kind.islower():
                added.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
            else:
                added.type_name = f".jppo.{kind}"
            if mark == "?":
                added.oneof_index = 0
                message.oneof_decl.add(name="optional")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return dict(message_factory.GetMessageClassesForFiles([file.name], pool))


# Classes of protobuf's library by the names of _SCHEMA.
MESSAGES = {name.removeprefix("jppo."): kind for name, kind in _make_messages().items()}


def read_message(body: bytes) -> Message:
    """Returns a ForwardBackwardRequest."""
    try:
        return MESSAGES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as e:
        raise BadRequest("the body is no protobuf message; send a ForwardBackwardRequest") from e


def read_gradient(message: Message) -> GradientRequest:
    """Reads a ForwardBackwardRequest; raises BadRequest for too many parts, and for what jppo does not train on."""
    parts = len(message.data) + len(message.options)
    if parts <= _MOST_PARTS:
        parts += sum(len(datum.chunks) + len(datum.inputs) for datum in message.data)
    if parts > _MOST_PARTS:
        raise BadRequest(f"the request has {parts} examples and arrays or more; send at most {_MOST_PARTS}")
    options = {entry.key: entry.value.number for entry in message.options if entry.value.HasField("number")}
    for entry in message.options:
        if not math.isfinite(options.get(entry.key, math.nan)):
            raise BadRequest(f"loss_fn_config[{entry.key[:60]!r}] must be a finite number")
    data = [_read_datum(one, row) for row, one in enumerate(message.data)]
    return GradientRequest(data, message.loss, options, message.forward_only)


def _read_datum(datum: Message, row: int) -> Datum:
    """Reads the example number `row` of a message; raises BadRequest for an array that jppo does not train on."""
    if any(not chunk.HasField("encoded_text") for chunk in datum.chunks):
        raise BadRequest(f"data[{row}].model_input has an image or audio; jppo reads text only: send tokens")
    inputs = dict[str, np.ndarray]()
    for entry in datum.inputs:
        name, tensor = entry.key[:60], entry.value
        dtype = _DTYPES.get(tensor.dtype)
        if tensor.HasField("sparse") or dtype is None:
            raise BadRequest(f"data[{row}].{name} must be a dense array of float32 or int64")
        if len(tensor.shape) > 1:
            raise BadRequest(f"data[{row}].{name} has the shape {tensor.shape[:8]}; give one number for each token")
        inputs[name] = _read_array(tensor.dense, dtype)
    return Datum(_read_array(b"".join(chunk.encoded_text.tokens for chunk in datum.chunks), np.dtype("<i4")), inputs)


def _read_array(raw: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(raw) % dtype.itemsize:
        raise BadRequest(f"an array has {len(raw)} bytes; it must have {dtype.itemsize} for each number")
    return np.frombuffer(raw, dtype)


def gradient_message(logprobs: Sequence[np.ndarray], metrics: dict[str, float]) -> bytes:
    """Returns a ForwardBackwardOutput with the log-probs of each example's targets."""
    rows = [np.ascontiguousarray(row, "<f4") for row in logprobs]
    offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8")
    arrays = {"data": b"".join(row.tobytes() for row in rows), "offsets": offsets.tobytes(), "dtype": FLOAT32}
    record = {"columns": [{"key": _LOGPROBS, "value": arrays}], "rows": len(rows)}
    metric_fields = [{"key": name, "value": float(value)} for name, value in metrics.items()]
    output = MESSAGES["ForwardBackwardOutput"](type="ArrayRecord", record=record, metrics=metric_fields)
    return bytes(output.SerializeToString())


def samples_message(samples: Sequence[tuple[np.ndarray, np.ndarray, bool]], prompt: np.ndarray | None = None) -> bytes:
    """Returns a SampleResponse of (tokens, log-probs, whether the length ended it), and of the prompt's log-probs."""
    sequences = [
        {"stop": int(cut), "tokens": tokens.astype("<i4").tobytes(), "logprobs": logprob.astype("<f4").tobytes()}
        for tokens, logprob, cut in samples
    ]
    make_layer_cache = b"" if prompt is None else prompt.astype("<f4").tobytes()
    output = MESSAGES["SampleResponse"](sequences=sequences, prompt_logprobs=make_layer_cache)
    return bytes(output.SerializeToString())
