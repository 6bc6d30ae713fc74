"""What the trainer asks a server of either kind, in its own terms: answers, pauses, sleep; `ServerApi` is the protocol.

The kinds are in `vllm/client.py` and `sglang/client.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jppo.rollout.protocol import Kept
from jppo.rollout.servers.endpoint import Endpoint
from jppo.rollout.servers.member import ServerFacts
from jppo.types import Sampling


@dataclasses.dataclass(frozen=True)
class Completion:
    """A server's answer to one request; `finish` may be 'abort': a weight update interrupted it."""

    tokens: list[int]
    logprob: list[float]
    version: list[str]  # per token, as the server names the weights
    finish: str
    server: str = ""
    experts: np.ndarray | None = None  # as in Answer
    kept: Kept | None = None  # as in Answer


class ServerApi(Protocol):
    """The HTTP interface of one kind of server. Unexpected answers are ServerFaults."""

    @property
    def advice(self) -> str:
        """Returns the command that starts a suitable server."""

    @property
    def resume_route(self) -> str:
        """Returns the route that ends a pause, for `curl -X POST`."""

    def request(self, ids: Sequence[int], sampling: Sampling, seed: int, model: str) -> tuple[str, dict[str, Any]]:
        """Returns the route and the body of a request for one answer."""

    def parse_reply(self, reply: Any, sampling: Sampling) -> Completion:
        """Parses the reply to a request with this `sampling`, inside `replies.reading`."""

    def inspect(self, endpoint: Endpoint) -> ServerFacts:
        """Asks the server about itself; UserError if it is unsuitable for training."""

    def paused(self, endpoint: Endpoint) -> bool:
        """Whether requests would wait."""

    def version(self, endpoint: Endpoint) -> int | None:
        """Returns the version of its weights; None: not from this trainer."""

    def working(self, endpoint: Endpoint, requests: int) -> bool:
        """Whether it is sampling for so many requests, or as many as it can; False if it does not say."""

    def pause(self, endpoint: Endpoint, mode: str) -> None:
        """Stops sampling; `mode` is what happens to requests in flight: wait, abort or keep.

        Caches of the old weights are dropped here, or by the load.
        """

    def resume(self, endpoint: Endpoint) -> None:
        """Ends a pause."""

    def sleep(self, endpoint: Endpoint, level: int) -> None:
        """Frees device memory, with no requests in flight. Level 1 keeps the weights elsewhere, 2 drops them."""

    def wake_up(self, endpoint: Endpoint, tag: str) -> None:
        """Allocates the memory of 'weights' or of the 'kv_cache' again."""


def end_ids(sampling: Sampling, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that end a response."""
    return (*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_ids)


def sampling_params(sampling: Sampling, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters of one answer that all kinds of servers name alike."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(end_ids(sampling, eos_token_ids)),
        "stop": list(sampling.stop),
        "skip_special_tokens": True,  # as in a trajectory's text
        "spaces_between_special_tokens": True,
    }
