"""Requests of the Tinker API as arguments of `jppo.open`'s models; BadRequest for options that it lacks. Pure."""

import hashlib
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jppo.agent.gateway.request import BadRequest
from jppo.run.own_inputs import require_sampling
from jppo.tinker.wire import Datum, GradientRequest

Body = Mapping[str, Any]
NO_DUAL_CLIP = 1e9  # the API's PPO has none
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# Options and arrays of each loss, besides target_tokens.
OPTIONS: dict[str, dict[str, float]] = {"ppo": CLIPS, "cispo": CLIPS, "dro": {"beta": 0.05}}
POLICY = ("logprobs", "advantages")
ARRAYS = {"cross_entropy": ("weights",)} | dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), POLICY)
NAMES = {"weights": "weight", "logprobs": "old_logprob", "advantages": "advantage"}
ADAM = {"learning_rate": (1e-4, "lr"), "beta1": (0.9, "beta1"), "beta2": (0.95, "beta2"), "eps": (1e-12, "eps")}
ADAM |= {"weight_decay": (0.0, "weight_decay"), "grad_clip_norm": (0.0, "grad_clip")}
SAMPLING = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
SAMPLE = ("num_samples", "prompt", "sampling_params", "sampling_session_id", "seq_id", "type", "prompt_logprobs",
          "prompt_logprobs_last_n")  # fmt: skip
MOST_SAMPLES = 1024
SCHEME = "tinker://"


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


def adam(body: Body) -> dict[str, float]:
    """Returns the arguments of `optim_step`."""
    if "adam_params" not in body:
        raise BadRequest("adam_params is missing; the one optimizer is AdamW")
    params = field(body, "adam_params", dict)
    require_known("adam_params.", params, ADAM)
    return {ours: float(field(params, name, float, usual)) for name, (usual, ours) in ADAM.items()}


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


def loss(request: GradientRequest) -> tuple[str, dict[str, Any]]:
    """Returns the name and options of a loss for `forward_backward`; sums over tokens, as the API's."""
    if request.loss not in ARRAYS:
        raise BadRequest(f"loss_fn={request.loss[:60]!r} is not supported; take one of {', '.join(ARRAYS)}")
    known = OPTIONS.get(request.loss, {})
    for name in request.options.keys() - known.keys():
        raise BadRequest(f"loss_fn_config[{name[:60]!r}] is not supported by {request.loss}; leave it out")
    given, options = known | request.options, dict[str, Any](loss_agg_mode="token-sum")
    if known is CLIPS:
        options["clip_ratio_low"] = 1.0 - given["clip_low_threshold"]
        options["clip_ratio_high"] = given["clip_high_threshold"] - 1.0
    if request.loss == "ppo":
        options["clip_ratio_c"] = NO_DUAL_CLIP
    if request.loss == "dro":
        options["dro_beta"] = given["beta"]
    return request.loss, options


def examples(data: Sequence[Datum], loss: str) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, Any]]:
    """Returns inputs, targets and arrays for `Model.examples`."""
    if not data:
        raise BadRequest("data is empty; give one example at least")
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in ARRAYS[loss]}
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
        for name, found in arrays.items():
            found.append(inputs.get(name, np.ones(len(datum.tokens), np.float32)).astype(np.float32))
            if not np.isfinite(found[-1]).all():
                raise BadRequest(f"data[{row}].{name} has a non-finite number; correct it")
    targets = [datum.inputs["target_tokens"] for datum in data]
    return [datum.tokens for datum in data], targets, {NAMES[name]: found for name, found in arrays.items()}


def prompt(body: Body, longest: int, vocabulary: int) -> np.ndarray:
    """Returns the tokens to continue."""
    require_known("", body, SAMPLE)
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


def scored(body: Body, prompt: np.ndarray) -> int | None:
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


def sampling(body: Body, longest: int, vocabulary: int) -> dict[str, Any]:
    """Returns the arguments of `Model.sample`."""
    params = field(body, "sampling_params", dict)
    require_known("sampling_params.", params, SAMPLING)
    found = dict[str, Any](
        n=field(body, "num_samples", int, 1),
        max_tokens=field(params, "max_tokens", int, longest),
        temperature=float(field(params, "temperature", float, 1.0)),
        top_k=field(params, "top_k", int, -1),
        top_p=float(field(params, "top_p", float, 1.0)),
    )
    if params.get("seed") is not None:
        found["seed"] = field(params, "seed", int) % 2**31
    stop = params.get("stop")
    if stop == []:
        found["ignore_eos"] = True
    elif stop is not None:
        texts = [stop] if isinstance(stop, str) else field(params, "stop", list)
        found["stop"] = tuple(one for one in texts if isinstance(one, str))
        found["stop_ids"] = tuple(one for one in texts if not isinstance(one, str))
    require_sampling(found, {"n": MOST_SAMPLES, "max_tokens": longest}, vocabulary)
    return found


def checkpoint(folder: pathlib.Path, owner: str, name: str) -> pathlib.Path:
    """Returns the folder of a checkpoint, which the key `owner` alone reaches."""
    parts = name.split("/")
    if len(parts) != 3 or parts[1] != "weights" or any(p.startswith(".") or not p for p in parts):
        raise BadRequest(f"path={name[:160]!r} must be {SCHEME}MODEL/weights/NAME")
    key = hashlib.sha256(owner.encode()).hexdigest()[:32]
    return folder / key / parts[0].replace(":", "-") / "/".join(parts[1:])
