"""Rollouts by SGLang behind the `Sampler` protocol: servers started here, or attached to by URL; and their weights.

As in `vllm/client.py`, token ids go in and come out, with one request and seed per sample. Differences: an answer has
one version for all of its tokens, so no update may overlap a request; a whole policy comes as a model directory.

    write the directory -> pause -> load, set and check the version name (take) -> resume

SGLang has no route that checks a directory without loading it, and it silently keeps old values for missing tensors. So
names and shapes are compared with the first publish here, before any server loads them; the agreement of log-probs
checks every publish. Two directories are written alternately, like the files of `vllm/publish.py`.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jppo import child_process, tensorheader
from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import guard, replies
from jppo.rollout.servers.api import Completion, sampling_params
from jppo.rollout.servers.delivery import Delivery, Publisher
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.fleet import ServerEngine
from jppo.rollout.servers.http_client import brief
from jppo.rollout.servers.member import Server, ServerFacts, ServerProgram, ServerSettings, require_free_ports
from jppo.rollout.servers.repair import Lookup
from jppo.rollout.vllm import layout
from jppo.rollout.vllm.arguments import (
    make_program,
    parse_engine_args,
    run_probe,
    triton_env,
    visible_devices,
)
from jppo.rollout.vllm.publish import SHARED_MEMORY, make_folder, write_tensors
from jppo.types import Sampling

GENERATE = "/generate"
AWAKE = "/health_generate"  # answers when any token was sampled since the request
AWAKE_S = 60.0  # it gives up after 20 by itself


@dataclasses.dataclass(frozen=True)
class Sglang:
    """SGLang's `ServerApi`."""

    eos_token_ids: Sequence[int]
    vocab_size: int
    advice: str  # command that starts a suitable server
    resume_route: str = "/continue_generation -H 'Content-Type: application/json' -d '{}'"

    def request(self, ids: Sequence[int], sampling: Sampling, seed: int, model: str) -> tuple[str, dict[str, Any]]:
        """Returns the route and body of a request, with every field, so that no default of the server applies."""
        if sampling.ignore_eos and sampling.stop_ids:
            raise UserError(
                f"stop_ids={sampling.stop_ids} with ignore_eos: SGLang ignores these tokens too; leave ignore_eos out"
            )
        return GENERATE, {
            "input_ids": list(ids),
            "sampling_params": {
                **sampling_params(sampling, self.eos_token_ids),
                "sampling_seed": seed,
                "max_new_tokens": sampling.max_tokens,
                "min_new_tokens": 0,
                "ignore_eos": sampling.ignore_eos,  # also the end tokens above
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "logprob_start_len": -1,  # of the answer only
            "top_logprobs_num": 0,  # of the sampled token only
            "stream": False,
        }

    def parse_reply(self, reply: Any, sampling: Sampling) -> Completion:
        """Parses the tokens with their log-probs, all of one weight version."""
        meta = reply["meta_info"]
        finish, matched = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
        # an answer that was aborted before it began has none
        entries = meta.get("output_token_logprobs", []) if finish == "abort" else meta["output_token_logprobs"]
        tokens, logprob = [token for _, token, *_ in entries], [logprob for logprob, *_ in entries]
        version = [replies.text(meta["weight_version"], "weight_version")] * len(tokens) if tokens else []
        if finish == "stop" and tokens:
            self._require_end(matched, tokens, sampling)
        completion = replies.completion(
            tokens,
            logprob,
            version,
            finish,
            sampling=sampling,
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.vocab_size,
        )
        text = replies.text(reply.get("text", ""), "text")
        if completion.finish == "length" and any(stop in text for stop in sampling.stop):
            return dataclasses.replace(completion, finish="stop")  # SGLang checks the length first
        return completion

    def inspect(self, endpoint: Endpoint) -> ServerFacts:
        """Returns what the server reports; UserError unless it supports seeds."""
        models, info = endpoint.get("/v1/models"), endpoint.get("/server_info")
        with replies.reading(f"the server at {endpoint.url}", [models, info]):
            name = replies.text(models["data"][0]["id"], "id")
            longest = min(
                replies.whole(models["data"][0]["max_model_len"], "max_model_len"),
                replies.whole(info["max_total_num_tokens"], "max_total_num_tokens"),
            )
            deterministic = info["enable_deterministic_inference"]
        weights_name(endpoint)
        if deterministic is not True:
            raise UserError(f"the server at {endpoint.url} ignores seeds; {self.advice}")
        return ServerFacts(name, longest - ROOM, endpoint.process)

    def paused(self, endpoint: Endpoint) -> bool:
        """Whether requests would wait: no route reports it, but one samples a token and gives up."""
        endpoint.get(INFO)
        try:
            endpoint.with_timeout(min(AWAKE_S, endpoint.timeout_s)).check(AWAKE)
        except ServerFault:
            return True
        return False

    def version(self, endpoint: Endpoint) -> int | None:
        return replies.version(weights_name(endpoint))

    def working(self, endpoint: Endpoint, requests: int) -> bool:
        """Says nothing: a token that another request gets does not show that this one is not lost."""
        return False

    def pause(self, endpoint: Endpoint, mode: str) -> None:
        """Stops sampling; returns when no request is in flight. In mode wait the fleet has already waited."""
        if mode not in ("wait", "abort"):
            raise UserError(f"rollout.on_update={mode!r} needs rollout.name=vllm; use wait or abort")
        endpoint.post("/pause_generation", {"mode": "abort"})

    def resume(self, endpoint: Endpoint) -> None:
        endpoint.post("/continue_generation", {})

    def sleep(self, endpoint: Endpoint, level: int) -> None:
        """Frees device memory: both levels drop the weights, which come anew. SGLang sleeps only while paused."""
        endpoint.post("/pause_generation", {"mode": "abort"})
        endpoint.post_for_text("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def wake_up(self, endpoint: Endpoint, tag: str) -> None:
        endpoint.post_for_text("/resume_memory_occupation", {"tags": [tag]})

    def _require_end(self, matched: Any, tokens: Sequence[int], sampling: Sampling) -> None:
        """Raises ValueError or UserError unless a response ended at an end token or stop text."""
        if matched in sampling.stop:
            return
        if not isinstance(matched, int) or tokens[-1] != matched:
            raise ValueError(f"a response ended at {brief(matched)}, but its last tokens are {brief(tokens[-8:])}")
        if matched not in (*self.eos_token_ids, *sampling.stop_ids):
            raise UserError(
                f"SGLang ended a response at token {matched}, which is no end token here; add it to eos_token_id in the"
                " generation_config.json of model.path"
            )


def start_sglang(
    model_dir: str, run_dir: str, *, settings: ServerSettings, urls: Sequence[str] | Lookup
) -> ServerEngine:
    """Starts the servers on `model_dir` (config, tokenizer) or attaches to those at `urls`, if any; does not block."""
    config = pathlib.Path(model_dir) / "config.json"
    if not config.is_file():
        raise UserError(f"no config.json in {model_dir!r}: SGLang needs a folder with the model's config and tokenizer")
    if json.loads(config.read_text()).get("quantization_config") is not None:
        raise UserError(
            f"{config}: quantization_config: the trainer publishes plain weights only; set rollout.name=vllm"
        )
    if not urls:
        check_sglang(settings.python)
        sglang_options(settings)  # may refuse engine_args
        require_free_ports(settings.port, settings.servers)

    def speak(eos_token_ids: Sequence[int]) -> Sglang:
        return Sglang(eos_token_ids, settings.vocab_size, how_to_start(model_dir, settings))

    publisher = DirectoryPublisher(settings.publish_dir, config)
    servers = [
        Server(sglang_program(i, model_dir=model_dir, run_dir=run_dir, settings=settings, folder=publisher.folder))
        for i in range(0 if urls else settings.servers)
    ]
    return ServerEngine(servers, urls, publisher, speak, settings)


def how_to_start(model_dir: str, settings: ServerSettings) -> str:
    """Returns the start command of a server for `rollout.urls`."""
    variables = " ".join(f"{name}={value}" for name, value in sglang_environment(settings).items())
    options = " ".join(sglang_options(settings))
    command = f"{guard.TOKEN}=... {variables} python -m {MODULE} --model-path {model_dir} {options}"
    return f"start it with `{command}`, and set {guard.TOKEN} alike here"


MODULE = "jppo.plugins.sglang.guarded"
ROOM = 2  # tokens of its context that SGLang never fills

# Options that engine_args may not set, and the settings that do.
RESERVED_OPTIONS = {
    **dict.fromkeys(("--model-path", "--model", "--served-model-name", "--host", "--load-format"), "jppo"),
    **dict.fromkeys(("--enable-deterministic-inference", "--weight-version", "--skip-tokenizer-init"), "jppo"),
    "--port": "rollout.port",
    "--enable-memory-saver": "rollout.sleep_level",
    "--dtype": "rollout.dtype",
    "--context-length": "data.max_prompt_length and data.max_response_length",
    "--max-running-requests": "rollout.max_num_seqs",
    "--disable-cuda-graph": "rollout.enforce_eager",
    "--mem-fraction-static": "rollout.gpu_memory_utilization",
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--tp"), "rollout.tensor_model_parallel_size"),
}

# Run in the server's interpreter without importing SGLang, which would take seconds.
_PROBE = """
import importlib.metadata, importlib.util
print(importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else "")
"""


def check_sglang(python: str) -> str:
    """Returns the version of the interpreter's SGLang; UserError if it has none."""
    executable, version = run_probe(python, _PROBE)
    if not version:
        raise UserError(
            f"SGLang is not installed for {executable}; pip install 'sglang>=0.5.23,<0.6' in a separate environment and"
            " set rollout.python to its interpreter, or rollout.urls to servers elsewhere"
        )
    return version


def sglang_options(settings: ServerSettings) -> list[str]:
    """Returns the options that make its tokens, log-probs and weights match the trainer's."""
    options = [
        "--enable-deterministic-inference",  # required for seeds
        *("--load-format", "dummy"),  # the trainer is the only source of weights
        *("--dtype", settings.dtype),
        *("--context-length", str(settings.max_model_len + ROOM)),
        *("--max-running-requests", str(settings.max_num_seqs)),
        *("--mem-fraction-static", str(settings.gpu_memory_utilization)),
        *("--tp-size", str(settings.tensor_model_parallel_size)),
    ]
    if settings.enforce_eager:
        options.append("--disable-cuda-graph")
    if settings.sleep_level:
        options.append("--enable-memory-saver")
    return [*options, *parse_engine_args(settings.engine_args, RESERVED_OPTIONS)]


def sglang_environment(settings: ServerSettings) -> dict[str, str]:
    """Returns SGLang's additional environment variables."""
    return {
        "PYTHONPATH": child_process.python_path(),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # otherwise a paused server is unhealthy
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the tokens of ROOM, which never occur
        "HF_HUB_OFFLINE": "1",
        **triton_env(settings.dtype),
    }


def sglang_program(index: int, *, model_dir: str, run_dir: str, settings: ServerSettings, folder: str) -> ServerProgram:
    """Returns the SGLang program number `index` of a run."""
    env = {**os.environ, **sglang_environment(settings), **visible_devices(index, settings)}
    env.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # log-probs must be at the sampling temperature
    start = [MODULE, "--model-path", model_dir]
    return make_program(index, start, sglang_options(settings), env, run_dir=run_dir, settings=settings, folder=folder)


LOAD = "/update_weights_from_disk"
INFO = "/model_info"
FILE = "model.safetensors"
HEAD_ROOM = 1 << 20  # bytes reserved for the header, which is known after all tensors are written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Directory(Delivery):
    """A whole policy in one of the two directories; no route checks it without loading."""

    path: pathlib.Path

    def take(self, endpoint: Endpoint) -> None:
        """Loads it on the server and checks the version name."""
        body = {
            "model_path": str(self.path),
            "load_format": "safetensors",  # otherwise the start option applies, which is 'dummy'
            "weight_version": str(self.version),
            "flush_cache": True,
            "abort_all_requests": False,  # the pause has handled them
        }
        answered = endpoint.post(LOAD, body)
        if not isinstance(answered, dict) or answered.get("success") is not True:
            raise RolloutError(f"the server at {endpoint.url} did not load version {self.version}: {brief(answered)}")
        if (reported := weights_name(endpoint)) != str(self.version):
            raise ServerFault(f"the server at {endpoint.url} was given version {self.version} but reports {reported!r}")


class DirectoryPublisher(Publisher):
    """Writes whole policies as directories: two, in shared memory or in `publish_dir`, with the model's `config`."""

    def __init__(self, publish_dir: str, config: pathlib.Path):
        if not publish_dir and os.path.isdir(SHARED_MEMORY):
            publish_dir = SHARED_MEMORY
        self.folder = make_folder(publish_dir)
        self._folders = [pathlib.Path(self.folder) / name for name in ("a", "b")]
        for folder in self._folders:
            folder.mkdir()
            shutil.copy(config, folder)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def whole(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> Directory:
        """Writes a whole policy; RolloutError if its tensors differ from the first publish."""
        path, entries = self._write(tensors)
        shapes = {entry.name: entry.shape for entry in entries}
        self._shapes = self._shapes or shapes
        if differ := sorted(name for name in {*shapes, *self._shapes} if shapes.get(name) != self._shapes.get(name)):
            name = differ[0]
            raise RolloutError(
                f"version {version} of the weights differs from the first published model: {name} has shape"
                f" {_shape_text(shapes.get(name))} instead of {_shape_text(self._shapes.get(name))};"
                " no server received it"
            )
        return Directory(version=version, path=path)

    def adapter(self, save: Callable[[pathlib.Path], object], version: int) -> Directory:
        """Refuses: SGLang only loads whole policies."""
        raise UserError("rollout.lora_sync='adapter' needs rollout.name=vllm; use rollout.lora_sync=merge")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, tensors: Iterable[tuple[str, np.ndarray]]) -> tuple[pathlib.Path, list[layout.TensorEntry]]:
        """Writes into the directory that was not written last."""
        self._folders.reverse()
        folder = self._folders[0]
        try:
            (folder / FILE).unlink(missing_ok=True)  # a file that a server still reads stays unchanged
            with (folder / FILE).open("wb") as file:
                entries = write_tensors(file.fileno(), tensors, start=HEAD_ROOM, align=1)
                head = tensorheader.make_header(((e.name, e.dtype, e.shape, e.nbytes) for e in entries), room=HEAD_ROOM)
                if len(head) > HEAD_ROOM:
                    raise UserError(f"a model of {len(entries)} tensors is too large for SGLang; use vLLM")
                file.write(head)
        except OSError as e:
            raise UserError(
                f"the weights cannot be written to {self.folder}: {e}; set rollout.publish_dir to a folder with"
                " room for two copies"
            ) from e
        return folder, entries


def weights_name(endpoint: Endpoint) -> str:
    return endpoint.get_field(INFO, "weight_version", str)


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
