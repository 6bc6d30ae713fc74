"""vLLM over HTTP: rollouts behind the `Sampler` protocol, and the log-probs of a reference or teacher (`ref.url`).

    engine = start_vllm(...)      returns at once; the servers import and load while the trainer compiles
    sampler = engine.ready(...)   waits for them and checks them

Token ids go in and token ids come out. Every sample is a request with its own seed, so samples depend neither on how a
batch is split nor on repeated requests. `servers/member.py` chooses a server for each.

A reference is any running `jppo serve MODEL`, a plain vLLM: a prompt and its response are sent as the token ids
of one prompt, which vLLM answers with a log-prob per token, always at temperature 1.
"""

import base64
import dataclasses
import io
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jppo import plugins
from jppo.errors import UserError
from jppo.rollout.protocol import Kept, RolloutError
from jppo.rollout.servers import guard, replies
from jppo.rollout.servers.api import Completion, sampling_params
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.fleet import ServerEngine
from jppo.rollout.servers.member import Server, ServerFacts, ServerSettings, require_free_ports
from jppo.rollout.servers.repair import Lookup
from jppo.rollout.vllm import arguments
from jppo.rollout.vllm.publish import Buffers, FilePublisher, call_workers
from jppo.types import OVERFLOW, Sampling, Trajectory

GENERATE = "/inference/v1/generate"
ADAPTER = "/v1/load_lora_adapter"


@dataclasses.dataclass(frozen=True)
class Vllm:
    """vLLM's `ServerApi`."""

    eos_token_ids: Sequence[int]
    settings: ServerSettings
    advice: str  # command that starts a suitable server
    resume_route: str = "/resume"

    def request(self, ids: Sequence[int], sampling: Sampling, seed: int, model: str) -> tuple[str, dict[str, Any]]:
        """Returns the route and body of a request, with every field, so that no default of the server applies."""
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

    def parse_reply(self, reply: Any, sampling: Sampling) -> Completion:
        """Parses the tokens with their log-probs and weight versions."""
        choice = replies.single_entry(reply["choices"], "choices")
        logprob = [position["logprob"] for position in choice["logprobs"]["content"]]
        part = replies.completion(
            choice["token_ids"],
            logprob,
            replies.span_versions(choice["weight_versions"], len(logprob)),
            choice["finish_reason"],
            sampling=sampling,
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.settings.vocab_size,
        )
        shape = self.settings.experts
        experts = _decode_experts(choice.get("routed_experts"), shape) if sampling.experts else None
        kept = _read_kept(choice.get("sampling_mask"), part.tokens, sampling.kept, self.settings.vocab_size)
        return dataclasses.replace(part, experts=experts, kept=kept)

    def inspect(self, endpoint: Endpoint) -> ServerFacts:
        """Returns what the server reports; UserError if it lacks a route, worker or setting that training needs."""
        s = self.settings
        info: dict[str, Any] = call_workers(endpoint, "jppo_info")[0]
        models, routes = endpoint.get("/v1/models"), endpoint.get_field("/openapi.json", "paths", dict)
        with replies.reading(f"the server at {endpoint.url}", [models, info]):
            model = replies.text(models["data"][0]["id"], "id")
            length = replies.whole(info["max_model_len"], "max_model_len")
            process = replies.text(info.get("process", ""), "process")
            names = ("logprobs_mode", "device", "chunked_prefill", "dtype", "experts", "kept")
            mode, device, chunked, dtype, experts, kept = [info[name] for name in names]
        for is_suitable, fault in (
            (GENERATE in routes, f"has no {GENERATE}"),
            (ADAPTER in routes or not s.lora_rank, f"has no {ADAPTER}"),
            (dtype == s.dtype, f"computes in {dtype}, rollout.dtype is {s.dtype}"),
            (mode == "processed_logprobs", f"gives {mode}"),
            (s.publish_via == "file" or info.get("buckets"), f"takes files, rollout.publish_via is {s.publish_via}"),
            (not (device == "cpu" and chunked), "prefills in chunks on a CPU"),
            (experts or not s.experts, "returns no experts, which rollout.routing_replay needs"),
            (kept or not s.mask_replay, "returns no kept tokens of every sample, which rollout.mask_replay needs"),
        ):
            if not is_suitable:
                raise UserError(f"the server at {endpoint.url} {fault}; {self.advice}")
        return ServerFacts(model, length, process)

    def paused(self, endpoint: Endpoint) -> bool:
        return endpoint.get_field("/is_paused", "is_paused", bool)

    def version(self, endpoint: Endpoint) -> int | None:
        """Returns the version that its worker loaded last, or of the adapters added after it."""
        answered = endpoint.get("/weight_info")
        return replies.version(answered.get("weight_version")) if isinstance(answered, dict) else None

    def working(self, endpoint: Endpoint, requests: int) -> bool:
        """Whether it is sampling for so many requests: asks its workers, which answer between two steps."""
        try:
            workers = call_workers(endpoint, "jppo_working")
            with replies.reading(f"the server at {endpoint.url}", workers):
                return any(worker["requests"] >= min(requests, worker["most"]) for worker in workers)
        except RolloutError:
            return False

    def pause(self, endpoint: Endpoint, mode: str) -> None:
        """Also drops the prefix cache."""
        endpoint.post(f"/pause?mode={mode}")

    def resume(self, endpoint: Endpoint) -> None:
        endpoint.post("/resume")

    def sleep(self, endpoint: Endpoint, level: int) -> None:
        """Level 1 keeps the weights in host memory, level 2 drops them."""
        endpoint.post(f"/sleep?level={level}&mode=wait")

    def wake_up(self, endpoint: Endpoint, tag: str) -> None:
        """Weights first; the cache follows after loading."""
        endpoint.post(f"/wake_up?tags={tag}")


def _decode_experts(encoded: Any, shape: tuple[int, int, int] | None) -> np.ndarray | None:
    """Decodes the experts in an answer; `shape`: layers, active and all experts of the model."""
    if encoded is None:
        return None
    numpy_format: Any = np.lib.format  # untyped
    file = io.BytesIO(base64.b64decode(replies.text(encoded, "routed_experts"), validate=True))
    try:
        numpy_format.read_magic(file)
        sizes, by_columns, dtype = numpy_format.read_array_header_1_0(file)
        experts = np.frombuffer(file.read(), dtype).reshape(sizes, order="F" if by_columns else "C")
    except Exception as e:  # numpy's parser of the header raises those of Python's tokenizer, too
        raise ValueError(f"the experts cannot be read: {e}") from e
    if experts.ndim != 3 or dtype.kind not in "iu":
        raise ValueError(f"the experts are of type {dtype} and shape {sizes}, not integers by token, layer and rank")
    layers, active, expert_count = shape or (*experts.shape[1:], np.iinfo(np.int16).max)
    if experts.shape[1:] != (layers, active) or not np.all((experts >= 0) & (experts < expert_count)):
        raise ValueError(f"the experts of shape {sizes} are not {active} of {expert_count} in each of {layers} layers")
    return experts.astype(np.int16)


def _read_kept(mask: Any, tokens: Sequence[int], most_kept: int, vocab_size: int) -> Kept | None:
    """Reads up to `most_kept` kept tokens of each sample in an answer; an interrupted one without tokens has none."""
    if not most_kept:
        return None
    if mask is None:
        return None if tokens else []
    ids_of_samples = [replies.token_ids(ids, vocab_size) for ids in mask]
    return [np.array(ids if len(ids) <= most_kept else [OVERFLOW], np.int32) for ids in ids_of_samples]


def _make_publisher(settings: ServerSettings, buffers: Buffers) -> FilePublisher:
    """Makes the publisher that carries weights as `rollout.publish_via` says."""
    if settings.publish_via == "file":
        return FilePublisher(buffers)
    buckets, devices = plugins.load("carriers.buckets"), plugins.load("carriers.device_carriers")
    make_carriers = {
        "tcp": lambda: buckets.Tcp(settings.publish_host, settings.request_timeout_s),
        "nccl": devices.make_nccl_carrier,
        "ipc": devices.make_ipc_carrier,
    }
    carrier = make_carriers[settings.publish_via]()
    publisher: FilePublisher = buckets.StreamPublisher(buffers, carrier, changes=settings.publish_delta)
    return publisher


def start_vllm(model_dir: str, run_dir: str, *, settings: ServerSettings, urls: Sequence[str] | Lookup) -> ServerEngine:
    """Starts the servers on `model_dir` (config, tokenizer) or attaches to those at `urls`, if any; does not block."""
    model = ["--model", model_dir, *arguments.model_options(model_dir, run_dir)]
    build = "gpu"
    if not urls:
        if not (pathlib.Path(model_dir) / "config.json").is_file():
            raise UserError(
                f"no config.json in {model_dir!r}: vLLM needs a folder with the model's config and tokenizer"
            )
        build = arguments.check_vllm(settings.python)
        arguments.require_served(settings, build)
        require_free_ports(settings.port, settings.servers)
    spare_folders = [] if urls else [run_dir, tempfile.gettempdir()]  # other machines do not see them
    buffers = Buffers(settings.publish_dir, named=settings.lora_rank > 0, spare=spare_folders)
    publisher = _make_publisher(settings, buffers)
    servers = [
        Server(
            arguments.vllm_program(
                i, model=model, run_dir=run_dir, settings=settings, build=build, folder=buffers.folder
            )
        )
        for i in range(0 if urls else settings.servers)
    ]

    def speak(eos_token_ids: Sequence[int]) -> Vllm:
        return Vllm(eos_token_ids, settings, HOW_TO_START)

    return ServerEngine(servers, urls, publisher, speak, settings)


HOW_TO_START = (
    f"start it by `{guard.TOKEN}=... python -m jppo.serve --host=0.0.0.0` with this run's --config and a rollout.port,"
    f" and set {guard.TOKEN} alike here"
)
SCORE_ROUTE = "/v1/completions"
CONCURRENT = 64  # requests
TRIES, PAUSE_S = 3, 1.0  # the pause doubles after each try


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

        def score(source: str, trajectory: Trajectory) -> tuple[np.ndarray, int]:
            server = self._by_source.get(source) or self._by_source[""]
            return server.logprob(trajectory)

        with ThreadPoolExecutor(CONCURRENT) as pool:
            results = list(pool.map(score, sources, trajectories))
        return [logprob for logprob, _ in results], {"ref/retries": float(sum(tries for _, tries in results))}


class ServedReference:
    """The server at `url`, checked for a `longest` sequence and for the token ids of `tokenizer`."""

    def __init__(self, url: str, *, longest: int, tokenizer: Any, timeout_s: float):
        self.url = url
        self._endpoint = Endpoint(url, timeout_s=timeout_s, explain=lambda: "")
        ids = sorted(tokenizer.get_vocab().values())
        try:
            models = self._endpoint.get("/v1/models")
            with replies.reading(f"the server at {url}", models):
                self.model = replies.text(models["data"][0]["id"], "id")
                max_model_len = replies.whole(models["data"][0]["max_model_len"], "max_model_len")
            text = self._endpoint.post("/detokenize", {"model": self.model, "tokens": ids})
            with replies.reading(f"the server at {url}", text):
                text = replies.text(text["prompt"], "prompt")
        except RolloutError as e:
            raise RolloutError(f"ref.url: {e}; start vLLM there, or correct the address") from e
        if max_model_len <= longest:
            raise UserError(
                f"ref.url={url}: the server's max_model_len={max_model_len} must be above data.max_prompt_length +"
                f" data.max_response_length={longest}; start it with --max-model-len {longest + 1}"
            )
        if text != tokenizer.decode(ids):
            raise UserError(
                f"ref.url={url}: {self.model} reads the policy's token ids, and decodes them to other text than the"
                " tokenizer of model.path; serve a model with that tokenizer"
            )

    def logprob(self, trajectory: Trajectory) -> tuple[np.ndarray, int]:
        """Returns the log-prob of every token, and how many requests failed before."""
        body = {"model": self.model, "prompt": trajectory.tokens.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        for attempt in range(TRIES):
            try:
                reply = self._endpoint.post(SCORE_ROUTE, body)
                with replies.reading(f"the server at {self.url}", reply):
                    return _read_logprobs(reply, trajectory), attempt
            except ServerFault as e:
                if attempt + 1 == TRIES:
                    raise RolloutError(
                        f"ref.url has no log-probs for prompt {trajectory.uid} after {TRIES} tries: {e}; start the"
                        " server again and repeat the command, which resumes"
                    ) from e
            time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError


def _read_logprobs(reply: Any, t: Trajectory) -> np.ndarray:
    """Reads the log-probs of the tokens that were sent."""
    _, *further = replies.single_entry(reply["choices"], "choices")["prompt_logprobs"]
    if len(further) + 1 != len(t.tokens):
        raise ValueError(f"{len(further) + 1} of {len(t.tokens)} tokens have log-probs")
    logprobs = [candidates[str(token)]["logprob"] for token, candidates in zip(t.tokens[1:], further, strict=True)]
    return np.array([0.0, *replies.log_probs(logprobs)], np.float32)
