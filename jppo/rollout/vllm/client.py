"""vLLM over HTTP: rollouts behind the `Sampler` protocol, and the log-probs of a reference or teacher (`ref.url`).

    engine = start_vllm(...)      returns at once; the servers import and load while the trainer compiles
    sampler = engine.ready(...)   waits for them and checks them

Token ids go in and token ids come out. Every sample is a request with its own seed, so samples depend neither on how a
batch is split nor on repeated requests. `servers/member.py` chooses a server for each.

A reference is any running `vllm serve MODEL`, with nothing of jppo: a prompt and its response are sent as the token ids
of one prompt, which vLLM answers with a log-prob per token, always at temperature 1.
"""

import base64
import dataclasses
import io
import math
import pathlib
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jppo.rollout.protocol import Kept, RolloutError
from jppo.rollout.servers import guard
from jppo.rollout.servers.delivery import Completion, sampling_params
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.fleet import ServerEngine
from jppo.rollout.servers.member import Server, ServerLimits, check_ports
from jppo.rollout.servers.repair import Lookup
from jppo.rollout.vllm import arguments, buckets, device_carriers
from jppo.rollout.vllm.arguments import ServerSettings
from jppo.rollout.vllm.publish import Buffers, FilePublisher, call_workers
from jppo.settings import UserError
from jppo.types import OVERFLOW, Sampling, Trajectory

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
            reported = [
                info[name]
                for name in ("logprobs_mode", "device", "chunked_prefill", "max_model_len", "dtype", "experts", "kept")
            ]
        except (KeyError, IndexError, TypeError) as e:
            raise ServerFault(f"the server at {endpoint.url} does not answer as vLLM would: no {e}") from e
        mode, device, chunked, length, dtype, experts, kept = reported
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

    def wake_up(self, endpoint: Endpoint, tag: str) -> None:
        """Weights first; the cache follows after loading."""
        endpoint.post(f"/wake_up?tags={tag}")


def _experts(encoded: str | None) -> np.ndarray | None:
    """Decodes the experts in an answer."""
    if encoded is None:
        return None
    try:
        experts: np.ndarray = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except (ValueError, EOFError, TypeError) as e:
        raise ServerFault(f"vLLM's experts cannot be read: {e}") from e
    if experts.ndim != 3:
        raise ServerFault(f"vLLM's experts have the shape {experts.shape}, not one of tokens, layers and experts")
    return experts.astype(np.int16)


def _kept(ids: Any, tokens: Sequence[int], most: int) -> Kept | None:
    """Reads up to `most` kept tokens of each sample in an answer; an interrupted one without tokens has none."""
    if ids is None:
        return None if tokens else []
    try:
        return [np.array(kept if len(kept) <= most else [OVERFLOW], np.int32) for kept in ids]
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
        command = how_to_start(model, settings)
        return Vllm(
            eos_token_ids, command, routes, settings.dtype, settings.publish_via, settings.experts, settings.kept
        )

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
        program = arguments.vllm_program(
            i, model=model, run_dir=run_dir, settings=settings, build=build, folder=buffers.folder
        )
        servers.append(Server(program))
    return ServerEngine(servers, urls, publisher, speak, limits, start_timeout_s=settings.start_timeout_s)


def how_to_start(model: Sequence[str], settings: ServerSettings) -> str:
    """Returns the start command of a server for `rollout.urls`."""

    def command(build: str) -> str:
        variables = " ".join(f"{name}={value}" for name, value in arguments.vllm_environment(settings, build).items())
        options = shlex.join([*model, *arguments.vllm_options(settings, build)])
        return f"{guard.TOKEN}=... {variables} python -m {arguments.MODULE} {options}"

    on_cpu = "" if settings.sleeps else f", on a CPU with `{command('cpu')}`"  # which cannot sleep
    return f"start it on a GPU with `{command('gpu')}`{on_cpu}, and set {guard.TOKEN} alike here"


SCORE_ROUTE = "/v1/completions"
CONCURRENT = 64  # requests
TRIES, PAUSE_S = 3, 1.0  # the pause doubles after each try
LOWEST = -9998.0  # vLLM writes -9999 for minus infinity


class ServedReferences:
    """The servers of `ref.url`: one for each data source, or one for all of them under ''."""

    def __init__(self, urls: Mapping[str, str], *, longest: int, tokenizer: Any, timeout_s: float):
        self._by_source = {
            source: ServedReference(url, longest=longest, tokenizer=tokenizer, timeout_s=timeout_s)
            for source, url in urls.items()
        }

    def __str__(self) -> str:
        servers = self._by_source.items()
        return ", ".join(f"{server.model} at {server.url}{source and f' for {source}'}" for source, server in servers)

    def logprobs(
        self, trajectories: Sequence[Trajectory], sources: Sequence[str]
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Returns the log-prob of every token of each trajectory, [n] f32 with 0 first, and metrics.

        A failed request is repeated and counted; RolloutError names the prompt after the last try.
        """
        with ThreadPoolExecutor(CONCURRENT) as pool:
            pairs = zip(sources, trajectories, strict=True)
            scored = list(pool.map(lambda pair: self._of(pair[0]).logprob(pair[1]), pairs))
        return [logprob for logprob, _ in scored], {"ref/retries": float(sum(tries for _, tries in scored))}

    def _of(self, source: str) -> "ServedReference":
        return self._by_source.get(source) or self._by_source[""]


class ServedReference:
    """The server at `url`, checked for a `longest` sequence and for the token ids of `tokenizer`."""

    def __init__(self, url: str, *, longest: int, tokenizer: Any, timeout_s: float):
        self.url = url
        self._endpoint = Endpoint(url, timeout_s=timeout_s, why=lambda: "")
        ids = sorted(tokenizer.get_vocab().values())
        try:
            model = self._endpoint.get("/v1/models")["data"][0]
            self.model, most = str(model["id"]), int(model["max_model_len"])
            text = self._endpoint.post("/detokenize", {"model": self.model, "tokens": ids})["prompt"]
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise ServerFault(f"ref.url={url} does not answer as vLLM would: no {e}") from e
        except RolloutError as e:
            raise RolloutError(f"ref.url: {e}; start vLLM there, or correct the address") from e
        if most <= longest:
            raise UserError(
                f"ref.url={url}: the server's max_model_len={most} must be above data.max_prompt_length +"
                f" data.max_response_length={longest}; start it with --max-model-len {longest + 1}"
            )
        if text != tokenizer.decode(ids):
            raise UserError(
                f"ref.url={url}: {self.model} reads the policy's token ids, and decodes them to other text than the"
                " tokenizer of model.path; serve a model with that tokenizer"
            )

    def logprob(self, t: Trajectory) -> tuple[np.ndarray, int]:
        """Returns the log-prob of every token, and how many requests failed before."""
        body = {"model": self.model, "prompt": t.tokens.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        for tries in range(TRIES):
            try:
                return _scored(self._endpoint.post(SCORE_ROUTE, body), t), tries
            except ServerFault as e:
                if tries + 1 == TRIES:
                    raise RolloutError(
                        f"ref.url has no log-probs for prompt {t.uid} after {TRIES} tries: {e}; start the server again"
                        " and repeat the command, which resumes"
                    ) from e
            time.sleep(PAUSE_S * 2**tries)
        raise AssertionError


def _scored(reply: Any, t: Trajectory) -> np.ndarray:
    """Reads the log-probs of the tokens that were sent."""
    try:
        _, *others = reply["choices"][0]["prompt_logprobs"]
        rest = [candidates[str(token)]["logprob"] for token, candidates in zip(t.tokens[1:], others, strict=True)]
        logprob = np.array([0.0, *rest], np.float32)
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise ServerFault(f"vLLM's answer has no log-prob of each of {len(t.tokens)} tokens ({e!r})") from e
    if not np.all((logprob > LOWEST) & (logprob <= 0)):
        raise ServerFault(f"vLLM's log-probs are from {logprob.min()} to {logprob.max()}, which none should be")
    return logprob
