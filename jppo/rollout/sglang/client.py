"""Rollouts by SGLang behind the `Sampler` protocol: servers started here, or attached to by URL.

As in `client.py`, token ids go in and come out, with one request and seed per sample. Differences: an answer has one
version for all of its tokens, so no update may overlap a request; weights come from a directory.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jppo.rollout.servers import guard
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.engine import Engine
from jppo.rollout.servers.member import ServerLimits
from jppo.rollout.servers.membership import Lookup
from jppo.rollout.servers.process import Server, check_ports
from jppo.rollout.servers.server_api import Completion, sampling_params
from jppo.rollout.sglang import arguments
from jppo.rollout.sglang import publish as folders
from jppo.rollout.vllm.arguments import ServerSettings
from jppo.settings import UserError
from jppo.types import Sampling

GENERATE = "/generate"
AWAKE = "/health_generate"  # answers when any token was sampled since the request
AWAKE_S = 60.0  # it gives up after 20 by itself


@dataclasses.dataclass(frozen=True)
class Sglang:
    """SGLang's `ServerApi`."""

    eos_token_ids: Sequence[int]
    how: str  # command that starts a suitable server
    resume_route: str = "/continue_generation -H 'Content-Type: application/json' -d '{}'"

    def request(self, ids: Sequence[int], sampling: Sampling, seed: int, model: str) -> tuple[str, dict[str, Any]]:
        """Sends every field, so no default of the server applies."""
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

    def part(self, reply: Any, sampling: Sampling) -> Completion:
        """Parses the tokens with their log-probs, all of one weight version."""
        try:
            meta = reply["meta_info"]
            finish, matched = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
            # an answer that was aborted before it began has none
            said = meta.get("output_token_logprobs", []) if finish == "abort" else meta["output_token_logprobs"]
            tokens, logprob = [int(each[1]) for each in said], [float(each[0]) for each in said]
            version = [str(meta["weight_version"])] * len(tokens) if tokens else []
            text = str(reply.get("text", ""))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
            raise ServerFault(f"SGLang's answer has no {e}: {str(reply)[:200]}") from e
        if finish not in ("stop", "length", "abort") or not (tokens or finish == "abort"):
            raise ServerFault(f"SGLang ended a response of {len(tokens)} tokens with {finish!r}")
        if not all(map(math.isfinite, logprob)):
            raise ServerFault(f"SGLang gave the log-probs {logprob[:8]}...")
        if finish == "stop":
            self._require_end(matched, tokens, sampling)
        ends = not sampling.ignore_eos and tokens[-1:] and tokens[-1] in self.eos_token_ids
        if finish == "length" and (ends or any(stop in text for stop in sampling.stop)):
            finish = "stop"  # SGLang checks the length first
        return Completion(tokens, logprob, version, finish)

    def inspect(self, endpoint: Endpoint) -> tuple[str, int]:
        """Checks support for seeds, and returns the context length."""
        try:
            model = endpoint.get("/v1/models")["data"][0]
            info = endpoint.get("/server_info")
            name, longest = model["id"], min(model["max_model_len"], info["max_total_num_tokens"])
            heeds = info["enable_deterministic_inference"]
            folders.named(endpoint)
        except (KeyError, IndexError, TypeError) as e:
            raise ServerFault(f"the server at {endpoint.url} does not answer as SGLang would: no {e}") from e
        if not heeds:
            raise UserError(f"the server at {endpoint.url} ignores seeds; {self.how}")
        return name, longest - arguments.ROOM

    def paused(self, endpoint: Endpoint) -> bool:
        """Whether requests would wait: no route reports it, but one samples a token and gives up."""
        endpoint.get(folders.INFO)
        try:
            endpoint.within(AWAKE_S).see(AWAKE)
        except ServerFault:
            return True
        return False

    def version(self, endpoint: Endpoint) -> int | None:
        """Returns the version that it loaded last."""
        has = folders.named(endpoint)
        return int(has) if has.isdecimal() else None

    def working(self, endpoint: Endpoint, requests: int) -> bool:
        """Says nothing: a token that another request gets does not show that this one is not lost."""
        return False

    def pause(self, endpoint: Endpoint, mode: str) -> None:
        """Returns when no request is in flight. In mode wait the fleet has already waited."""
        if mode not in ("wait", "abort"):
            raise UserError(f"rollout.on_update={mode!r} needs rollout.name=vllm; use wait or abort")
        endpoint.post("/pause_generation", {"mode": "abort"})

    def resume(self, endpoint: Endpoint) -> None:
        """Ends a pause."""
        endpoint.post("/continue_generation", {})

    def sleep(self, endpoint: Endpoint, level: int) -> None:
        """Both levels drop the weights: new ones come before the next answer. SGLang sleeps only while paused."""
        endpoint.post("/pause_generation", {"mode": "abort"})
        endpoint.tell("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def wake_up(self, endpoint: Endpoint, what: str) -> None:
        """Allocates memory again, without its content."""
        endpoint.tell("/resume_memory_occupation", {"tags": [what]})

    def _require_end(self, matched: Any, tokens: Sequence[int], sampling: Sampling) -> None:
        if matched in sampling.stop:
            return
        if not isinstance(matched, int) or tokens[-1] != matched:
            raise ServerFault(f"SGLang ended a response at {matched!r}, but its last tokens are {tokens[-8:]}")
        if matched not in self.eos_token_ids:
            raise UserError(
                f"SGLang ended a response at token {matched}, which is no end token here; add it to eos_token_id in the"
                " generation_config.json of model.path"
            )


def start_sglang(
    model_dir: str,
    run_dir: str,
    *,
    settings: ServerSettings,
    urls: Sequence[str] | Lookup,
    limits: ServerLimits,
    publish_dir: str,
) -> Engine:
    """Starts the servers on `model_dir` (config, tokenizer) or attaches to those at `urls`, if any; does not block."""
    config = pathlib.Path(model_dir) / "config.json"
    if not config.is_file():
        raise UserError(f"no config.json in {model_dir!r}: SGLang needs a folder with the model's config and tokenizer")
    if json.loads(config.read_text()).get("quantization_config") is not None:
        raise UserError(
            f"{config}: quantization_config: the trainer publishes plain weights only; set rollout.name=vllm"
        )
    if not urls:
        arguments.check_sglang(settings.python)
        arguments.flags(settings)  # may refuse engine_args
        check_ports(settings.port, settings.servers)

    def speak(eos_token_ids: Sequence[int]) -> Sglang:
        return Sglang(eos_token_ids, how_to_start(model_dir, settings))

    publisher = folders.Publisher(publish_dir, config)
    servers = [
        Server(arguments.program(i, model_dir=model_dir, run_dir=run_dir, settings=settings, folder=publisher.folder))
        for i in range(0 if urls else settings.servers)
    ]
    return Engine(servers, urls, publisher, speak, limits, start_timeout_s=settings.start_timeout_s)


def how_to_start(model_dir: str, settings: ServerSettings) -> str:
    """Returns the start command of a server for `rollout.urls`."""
    variables = " ".join(f"{name}={value}" for name, value in arguments.environment(settings).items())
    options = " ".join(arguments.flags(settings))
    command = f"{guard.TOKEN}=... {variables} python -m {arguments.MODULE} --model-path {model_dir} {options}"
    return f"start it with `{command}`, and set {guard.TOKEN} alike here"
