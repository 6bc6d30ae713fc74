"""Rollouts by vLLM behind the `Sampler` protocol: servers started here, or attached to by URL.

    engine = start_vllm(...)      returns at once; the servers import and load while the trainer compiles
    sampler = engine.ready()      waits for them and checks them

Token ids go in and token ids come out. Every sample is a request with its own seed, so samples depend neither on how a
batch is split nor on repeated requests. `servers/member.py` chooses a server for each.
"""

import base64
import dataclasses
import io
import math
import pathlib
import shlex
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from jppo.rollout.protocol import Kept, RolloutError
from jppo.rollout.servers import guard
from jppo.rollout.servers.delivery import Completion, sampling_params
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.fleet import ServerEngine
from jppo.rollout.servers.member import ServerLimits
from jppo.rollout.servers.process import Server, check_ports
from jppo.rollout.servers.repair import Lookup
from jppo.rollout.vllm import arguments, buckets, device_carriers
from jppo.rollout.vllm.arguments import ServerSettings
from jppo.rollout.vllm.publish import Buffers, FilePublisher, call_workers
from jppo.settings import UserError
from jppo.types import OVERFLOW, Sampling

GENERATE = "/inference/v1/generate"
ADAPTER = "/v1/load_lora_adapter"


@dataclasses.dataclass(frozen=True)
class Vllm:
    """vLLM's `ServerApi`."""

    eos_token_ids: Sequence[int]
    how: str  # command that starts a suitable server
    needed: Sequence[str]  # routes
    dtype: str  # compute dtype, and the dtype of published weights
    publish_via: str = "file"
    experts: bool = False  # answers must have the experts of each token
    kept: bool = False  # answers must have the kept tokens of each sample
    resume_route: str = "/resume"

    def request(self, ids: Sequence[int], sampling: Sampling, seed: int, model: str) -> tuple[str, dict[str, Any]]:
        """Sends every field, so no default of the server applies."""
        return GENERATE, {
            "model": model,
            "token_ids": list(ids),
            "sampling_params": {
                **sampling_params(sampling, self.eos_token_ids),
                "seed": seed,
                "max_tokens": sampling.max_tokens,
                "min_tokens": 0,
                # only the trainer's ids and texts end a response, not the server's own end token
                "ignore_eos": True,
                "include_stop_str_in_output": True,
                "detokenize": bool(sampling.stop),  # stop texts need decoded text
                "logprobs": 0,  # of the sampled token only
                **({"extra_args": {"kept": sampling.kept}} if sampling.kept else {}),
            },
        }

    def part(self, reply: Any, sampling: Sampling) -> Completion:
        """Parses the tokens with their log-probs and weight versions."""
        try:
            choice = reply["choices"][0]
            tokens, finish = choice["token_ids"], choice["finish_reason"]
            logprob = [float(position["logprob"]) for position in choice["logprobs"]["content"]]
            spans = [(span["start"], span["end"], str(span["version"])) for span in choice["weight_versions"]]
            version = [name for start, end, name in spans for _ in range(start, end)]
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise ServerFault(f"vLLM's answer has no {e}: {str(reply)[:200]}") from e
        cut = finish == "abort"
        experts = _experts(choice.get("routed_experts")) if sampling.experts else None
        if finish not in ("stop", "length", "abort") or not (tokens or cut):
            raise ServerFault(f"vLLM ended a response of {len(tokens)} tokens with {finish!r}")
        if not (len(tokens) == len(logprob) == len(version)) or not all(map(math.isfinite, logprob)):
            raise ServerFault(
                f"vLLM gave {len(tokens)} tokens with {len(version)} versions and the log-probs {logprob[:8]}..."
            )
        kept = _kept(choice.get("sampling_mask"), tokens, sampling.kept) if sampling.kept else None
        return Completion(tokens, logprob, version, finish, experts=experts, kept=kept)

    def inspect(self, endpoint: Endpoint) -> tuple[str, int]:
        """Checks the routes, the worker and the settings that training needs."""
        try:
            model = endpoint.get("/v1/models")["data"][0]["id"]
            info = call_workers(endpoint, "jppo_info")[0]
            routes = endpoint.get("/openapi.json")["paths"]
            found = [
                info[name]
                for name in ("logprobs_mode", "device", "chunked_prefill", "max_model_len", "dtype", "experts", "kept")
            ]
        except (KeyError, IndexError, TypeError) as e:
            raise ServerFault(f"the server at {endpoint.url} does not answer as vLLM would: no {e}") from e
        mode, device, chunked, length, dtype, experts, kept = found
        for fit, fault in (
            *((route in routes, f"has no {route}") for route in self.needed),
            (dtype == self.dtype, f"computes in {dtype}, rollout.dtype is {self.dtype}"),
            (mode == "processed_logprobs", f"gives {mode}"),
            (
                self.publish_via == "file" or info.get("buckets"),
                f"takes files, rollout.publish_via is {self.publish_via}",
            ),
            (not (device == "cpu" and chunked), "prefills in chunks on a CPU"),
            (experts or not self.experts, "returns no experts, which rollout.routing_replay needs"),
            (kept or not self.kept, "returns no kept tokens of every sample, which rollout.mask_replay needs"),
        ):
            if not fit:
                raise UserError(f"the server at {endpoint.url} {fault}; {self.how}")
        return model, length

    def paused(self, endpoint: Endpoint) -> bool:
        """Whether requests would wait."""
        return bool(endpoint.get_field("/is_paused", "is_paused"))

    def version(self, endpoint: Endpoint) -> int | None:
        """Returns the version that its worker loaded last, or of the adapters added after it."""
        answered = endpoint.get("/weight_info")
        named = str(answered.get("weight_version")) if isinstance(answered, dict) else ""
        return int(named) if named.isdecimal() else None

    def working(self, endpoint: Endpoint, requests: int) -> bool:
        """Asks its workers, which answer between two steps of sampling."""
        try:
            return any(has["requests"] >= min(requests, has["most"]) for has in call_workers(endpoint, "jppo_working"))
        except (RolloutError, KeyError, TypeError):
            return False

    def pause(self, endpoint: Endpoint, mode: str) -> None:
        """Also drops the prefix cache."""
        endpoint.post(f"/pause?mode={mode}")

    def resume(self, endpoint: Endpoint) -> None:
        """Ends a pause."""
        endpoint.post("/resume")

    def sleep(self, endpoint: Endpoint, level: int) -> None:
        """Level 1 keeps the weights in host memory, level 2 drops them."""
        endpoint.post(f"/sleep?level={level}&mode=wait")

    def wake_up(self, endpoint: Endpoint, what: str) -> None:
        """Weights first; the cache follows after loading."""
        endpoint.post(f"/wake_up?tags={what}")


def _experts(encoded: str | None) -> np.ndarray | None:
    """Decodes the experts in an answer."""
    if encoded is None:
        return None
    try:
        found: np.ndarray = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except (ValueError, EOFError, TypeError) as e:
        raise ServerFault(f"vLLM's experts cannot be read: {e}") from e
    if found.ndim != 3:
        raise ServerFault(f"vLLM's experts have the shape {found.shape}, not one of tokens, layers and experts")
    return found.astype(np.int16)


def _kept(ids: Any, tokens: Sequence[int], most: int) -> Kept | None:
    """Reads up to `most` kept tokens of each sample in an answer; an interrupted one without tokens has none."""
    if ids is None:
        return None if tokens else []
    try:
        return [np.array(one if len(one) <= most else [OVERFLOW], np.int32) for one in ids]
    except (ValueError, TypeError, OverflowError) as e:
        raise ServerFault(f"vLLM's sampling mask cannot be read: {e}") from e


def start_vllm(
    model_dir: str,
    run_dir: str,
    *,
    settings: ServerSettings,
    urls: Sequence[str] | Lookup,
    limits: ServerLimits,
    publish_dir: str,
    publish_host: str = "",
) -> ServerEngine:
    """Starts the servers on `model_dir` (config, tokenizer) or attaches to those at `urls`, if any; does not block."""
    routes = [GENERATE, *([ADAPTER] if settings.lora_rank else [])]
    model = ["--model", model_dir, *arguments.model_options(model_dir, run_dir)]

    def speak(eos_token_ids: Sequence[int]) -> Vllm:
        how = how_to_start(model, settings)
        return Vllm(eos_token_ids, how, routes, settings.dtype, settings.publish_via, settings.experts, settings.kept)

    servers: list[Server] = []
    build = "gpu"
    if not urls:
        if not (pathlib.Path(model_dir) / "config.json").is_file():
            raise UserError(
                f"no config.json in {model_dir!r}: vLLM needs a folder with the model's config and tokenizer"
            )
        build = arguments.check_vllm(settings.python)
        arguments.require_served(settings, build)
        check_ports(settings.port, settings.servers)
    spare = [] if urls else [run_dir, tempfile.gettempdir()]  # other machines do not see them
    buffers = Buffers(publish_dir, named=settings.lora_rank > 0, spare=spare)
    publisher = FilePublisher(buffers)
    if settings.publish_via == "tcp":
        carrier = buckets.Tcp(publish_host, limits.request_timeout_s)
        publisher = buckets.StreamPublisher(buffers, carrier, changes=settings.publish_delta)
    elif settings.publish_via == "nccl":
        publisher = buckets.StreamPublisher(buffers, device_carriers.on_first_gpu())
    elif settings.publish_via == "ipc":
        publisher = buckets.StreamPublisher(buffers, device_carriers.on_gpus())
    for i in range(0 if urls else settings.servers):
        program = arguments.program(
            i, model=model, run_dir=run_dir, settings=settings, build=build, folder=buffers.folder
        )
        servers.append(Server(program))
    return ServerEngine(servers, urls, publisher, speak, limits, start_timeout_s=settings.start_timeout_s)


def how_to_start(model: Sequence[str], settings: ServerSettings) -> str:
    """Returns the start command of a server for `rollout.urls`."""

    def command(build: str) -> str:
        variables = " ".join(f"{name}={value}" for name, value in arguments.environment(settings, build).items())
        options = shlex.join([*model, *arguments.flags(settings, build)])
        return f"{guard.TOKEN}=... {variables} python -m {arguments.MODULE} {options}"

    on_cpu = "" if settings.sleeps else f", on a CPU with `{command('cpu')}`"  # which cannot sleep
    return f"start it on a GPU with `{command('gpu')}`{on_cpu}, and set {guard.TOKEN} alike here"
