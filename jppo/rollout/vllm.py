"""Rollouts by vLLM behind the `Sampler` protocol: servers started here, or attached to by URL.

    engine = start_vllm(...)      returns at once; the servers import and load while the trainer compiles
    sampler = engine.ready()      waits for them, and checks that they are what the trainer needs

Token ids go in and token ids come out; every sample is a request of its own with a seed of its own, so that a
batch cut in any way, or asked again, gives the same samples.
"""

import asyncio
import functools
import math
import pathlib
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jppo.config import UserError
from jppo.rollout import weights
from jppo.rollout.buffers import Buffers, make_buffers
from jppo.rollout.endpoint import Endpoint
from jppo.rollout.sampler import Answer, Done, RolloutError, respond, sample_seed
from jppo.rollout.server import Server, ServerSettings, check_ports, check_vllm, environment, flags
from jppo.structs import Prompt, Sampling, Trajectory

CONNECTIONS = 256  # requests under way at one server; it queues what it cannot run at once
GENERATE = "/inference/v1/generate"
ADAPTER = "/v1/load_lora_adapter"


class VllmSampler:
    """The Sampler over vLLM servers; prompts are shared out among them."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        buffers: Buffers,
        *,
        models: Sequence[str],
        max_model_len: int,
        eos_token_ids: Sequence[int],
        decode: Callable[[list[int]], str],
        close: Callable[[], None],
    ):
        self.endpoints = endpoints
        self._buffers = buffers
        self._models = models
        self._max_model_len = max_model_len
        self._eos_token_ids = list(eos_token_ids)
        self._decode = decode
        self._close = close
        self._adapters = None if buffers.folder is None else weights.Adapters(buffers.folder)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, version: int, done: Done | None = None
    ) -> list[Trajectory]:
        """Samples `sampling.n` responses a prompt, side by side, by the weights `version`; `done` gets each at once."""
        longest = max((len(prompt.ids) for prompt in prompts), default=0)
        if longest + sampling.max_tokens > self._max_model_len:
            raise UserError(
                f"a prompt of {longest} tokens and max_tokens={sampling.max_tokens} must fit the server's"
                f" max_model_len={self._max_model_len}; start it with more, or ask for less"
            )
        return _run(self._generate(prompts, sampling, version, done))

    def load(self, tensors: Iterable[tuple[str, np.ndarray]], *, version: int) -> None:
        """Replaces the whole model by `tensors` (HF names, a tied embedding once) and names it `version`."""
        weights.publish(self.endpoints, self._buffers, tensors, version)
        if self._adapters is not None:
            self._adapters.name = None  # they were beside another model

    def load_adapter(self, save: Callable[[pathlib.Path], object], *, version: int) -> None:
        """Puts adapters beside the model that was loaded last and names both `version`; `save` writes peft's files."""
        assert self._adapters is not None  # start_vllm was told that there will be some
        self._adapters.publish(self.endpoints, save, version)

    def close(self) -> None:
        """Ends the servers that were started here and frees the weights' files; may be called twice."""
        self._close()

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, version: int, done: Done | None
    ) -> list[Trajectory]:
        room = [asyncio.Semaphore(CONNECTIONS) for _ in self.endpoints]

        adapter = None if self._adapters is None else self._adapters.name

        async def ask(i: int, j: int) -> Trajectory:
            at = i % len(self.endpoints)
            model = self._models[at] if adapter is None else adapter
            body = self._request(prompts[i], sampling, sample_seed(sampling.seed, i, j), model)
            async with room[at]:
                choice = (await self.endpoints[at].ask(GENERATE, body))["choices"][0]
            trajectory = self._trajectory(prompts[i], choice, version)
            if done is not None:
                done(i * sampling.n + j, trajectory)
            return trajectory

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(i, j)) for i in range(len(prompts)) for j in range(sampling.n)]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the first; the others were cancelled or are like it
        return [task.result() for task in tasks]

    def _request(self, prompt: Prompt, sampling: Sampling, seed: int, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "token_ids": prompt.ids.tolist(),
            "sampling_params": {
                "n": 1,
                "seed": seed,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "max_tokens": sampling.max_tokens,
                "min_tokens": 0,
                # the trainer alone says what ends a response
                "ignore_eos": True,
                "stop_token_ids": self._eos_token_ids,
                "logprobs": 0,  # of the sampled token only
                "detokenize": False,
            },
        }

    def _trajectory(self, prompt: Prompt, choice: dict[str, Any], version: int) -> Trajectory:
        tokens = choice["token_ids"]
        logprob = [position["logprob"] for position in choice["logprobs"]["content"]]
        finish = choice["finish_reason"]
        if finish not in ("stop", "length"):
            raise RolloutError(
                f"prompt {prompt.uid}: vLLM ended the response with {finish!r}: did another client pause it?"
            )
        if not tokens or len(logprob) != len(tokens) or not all(map(math.isfinite, logprob)):
            raise RolloutError(f"prompt {prompt.uid}: {len(tokens)} tokens came with the log-probs {logprob[:8]}...")
        spans = choice["weight_versions"]
        found = {span["version"] for span in spans}
        if found != {str(version)}:
            names = ", ".join(sorted(found)) or "unnamed"
            raise RolloutError(
                f"prompt {prompt.uid} was sampled by the weights {names}, not by version"
                f" {version}: another trainer uses the server, or it was started again"
            )
        answer = Answer(tokens, logprob, [version] * len(tokens), finish)
        return respond(prompt, answer, text=self._decode(tokens))


class VllmEngine:
    """Servers on their way to being ready."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        servers: Sequence[Server],
        buffers: Buffers,
        how: Callable[[], str],
        routes: Sequence[str],
        dtype: str,
    ):
        self._endpoints = endpoints
        self._servers = servers
        self._buffers = buffers
        self._how = how
        self._routes = routes
        self._dtype = dtype

    def ready(self, *, eos_token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> VllmSampler:
        """Waits for the servers, checks each, and returns the sampler over all of them."""
        for server in self._servers:
            server.wait_ready()
        served = [_inspect(endpoint, self._how, self._routes, self._dtype) for endpoint in self._endpoints]
        return VllmSampler(
            self._endpoints,
            self._buffers,
            models=[name for name, _ in served],
            max_model_len=min(length for _, length in served),
            eos_token_ids=eos_token_ids,
            decode=decode,
            close=self.close,
        )

    def close(self) -> None:
        """Ends the servers that were started here and frees the weights' files; may be called twice."""
        if self._servers:
            with ThreadPoolExecutor(len(self._servers)) as pool:
                list(pool.map(Server.stop, self._servers))
        self._buffers.close()


def start_vllm(
    model_dir: str,
    run_dir: str,
    *,
    settings: ServerSettings,
    urls: Sequence[str],
    request_timeout_s: float,
    publish_dir: str,
    publish_via: str = "file",
    publish_host: str = "",
) -> VllmEngine:
    """Starts the servers on `model_dir` (config, tokenizer) or attaches to those at `urls`; does not wait."""
    routes = [GENERATE, *([ADAPTER] if settings.lora_rank else [])]
    see_our_files = not urls or publish_via == "tcp"
    make = functools.partial(
        make_buffers,
        publish_dir,
        named=settings.lora_rank > 0,
        spare=[run_dir, tempfile.gettempdir()] if see_our_files else [],
        publish_via=publish_via,
        publish_host=publish_host,
        timeout_s=request_timeout_s,
    )
    if urls:
        buffers = make()
        endpoints = [Endpoint(url, timeout_s=request_timeout_s, why=str) for url in urls]
        return VllmEngine(endpoints, [], buffers, lambda: how_to_start(model_dir, settings), routes, settings.dtype)
    if not (pathlib.Path(model_dir) / "config.json").is_file():
        raise UserError(f"no config.json in {model_dir!r}: vLLM needs a folder with the model's config and tokenizer")
    build = check_vllm(settings.python)
    check_ports(settings.port, settings.servers)
    buffers = make()
    servers = [
        Server(i, model_dir=model_dir, run_dir=run_dir, settings=settings, build=build, folder=buffers.folder)
        for i in range(settings.servers)
    ]
    for server in servers:
        server.start()
    endpoints = [Endpoint(server.url, timeout_s=request_timeout_s, why=server.why) for server in servers]
    return VllmEngine(endpoints, servers, buffers, lambda: how_to_start(model_dir, settings), routes, settings.dtype)


def how_to_start(model_dir: str, settings: ServerSettings) -> str:
    """The command line of a server that `rollout.urls` can attach to."""

    def command(build: str) -> str:
        variables = " ".join(f"{name}={value}" for name, value in environment(settings, build).items())
        options = " ".join(flags(settings, build))
        return f"{variables} python -m vllm.entrypoints.openai.api_server --model {model_dir} {options}"

    return f"start it on a GPU with `{command('gpu')}`, on a CPU with `{command('cpu')}`"


def _inspect(endpoint: Endpoint, how: Callable[[], str], needed: Sequence[str], dtype: str) -> tuple[str, int]:
    """The served model's name and length, once the server is seen to be fit for training."""
    try:
        model = endpoint.get("/v1/models")["data"][0]["id"]
        if endpoint.get("/is_paused")["is_paused"]:
            raise UserError(
                f"the server at {endpoint.url} is paused: requests would wait for ever; if no other trainer"
                f" uses it, resume it with `curl -X POST {endpoint.url}/resume`"
            )
        info = endpoint.call("jppo_info")[0]
        routes = endpoint.get("/openapi.json")["paths"]
    except RolloutError as e:
        raise UserError(f"{e}; {how()}") from e
    for fit, fault in (
        *((route in routes, f"has no {route}") for route in needed),
        (info["dtype"] == dtype, f"computes in {info['dtype']}, rollout.dtype is {dtype}"),
        (info["logprobs_mode"] == "processed_logprobs", f"gives {info['logprobs_mode']}"),
        (not (info["device"] == "cpu" and info["chunked_prefill"]), "prefills in chunks on a CPU"),
    ):
        if not fit:
            raise UserError(f"the server at {endpoint.url} {fault}; {how()}")
    return model, info["max_model_len"]


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:  # a notebook has a loop of its own already
        return pool.submit(asyncio.run, work).result()
