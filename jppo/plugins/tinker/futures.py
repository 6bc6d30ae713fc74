"""A session of the Tinker API with its models, samplers, and the futures of its requests; the results of samples."""

import asyncio
import collections
import dataclasses
import itertools
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jppo.errors import BadRequest, UserError
from jppo.http_server import HttpReply, json_reply
from jppo.plugins.tinker.requests import samples_message
from jppo.run.api.engine import Snapshot
from jppo.run.api.model import Model

PROTOBUF = "application/x-protobuf"
_MOST_RESULTS = 4096  # of a session
_MOST_SAMPLERS = 4096  # of a session
_MOST_UNFINISHED, _MOST_WAITING = 4096, 2**28  # futures of a session, and bytes of their requests


@dataclasses.dataclass(frozen=True, eq=False)
class SampleRequest:
    """A request for responses to a prompt, for its log-probs, or for both."""

    weights: Snapshot
    prompt: np.ndarray
    options: dict[str, Any]  # arguments of `Model.sample`
    scored: int | None  # last tokens of the prompt to score; None: none


@dataclasses.dataclass(eq=False)
class Future:
    """A request that was accepted."""

    id: str
    session: "Session"
    run: Callable[[], dict[str, Any] | bytes] | None  # None: of `sample`
    sample: SampleRequest | None = None
    group: Hashable = None  # of samples that one call of the engine makes
    size: int = 0  # bytes of the request
    reply: HttpReply | None = None  # None: not finished
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # of the server's loop
    loop: asyncio.AbstractEventLoop = dataclasses.field(default_factory=asyncio.get_running_loop)

    def finish(self, result: dict[str, Any] | bytes) -> None:
        """Sets the result, on any thread."""
        self.reply = HttpReply(result, PROTOBUF) if isinstance(result, bytes) else json_reply(result)
        self.run = self.sample = None
        self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        """Wakes who waits for the reply, and frees its place in the session's bounds; on the server's loop."""
        self.done.set()
        self.session.unfinished -= 1
        self.session.unfinished_bytes -= self.size

    def fail(self, error: Exception) -> None:
        """Sets an error: one line of a mistake in the request; of others the type only, and their trace is printed."""
        if isinstance(error, UserError | BadRequest):
            self.finish({"error": " ".join(str(error).split()), "category": "user"})
        else:
            traceback.print_exception(error)
            self.finish({"error": f"the server failed: {type(error).__name__}; see its output", "category": "server"})


@dataclasses.dataclass(eq=False)
class SessionModel:
    """A model of a session."""

    id: str
    model: Model | None = None
    next_number: int = 1  # of the next request to queue
    early_futures: dict[int, Future] = dataclasses.field(default_factory=dict)  # by number; a lower one is missing
    named_weights: dict[str, Snapshot] = dataclasses.field(default_factory=dict)  # to sample from
    unnamed_samplers: collections.deque[str] = dataclasses.field(default_factory=collections.deque)  # ids


@dataclasses.dataclass(eq=False)
class Session:
    """What one client has; only its key reaches it."""

    id: str
    owner: str
    last_seen: float  # of a request or heartbeat, by time.monotonic
    models: dict[str, SessionModel] = dataclasses.field(default_factory=dict)
    samplers: dict[str, Snapshot | None] = dataclasses.field(default_factory=dict)  # None: expired
    futures: dict[str, Future] = dataclasses.field(default_factory=dict)
    unfinished: int = 0  # futures
    unfinished_bytes: int = 0  # of their requests
    ended: bool = False

    def accept(self, future: Future, *, needed: bool = False) -> Future:
        """Adds a future, on the server's loop, beyond the bounds if `needed`; forgets results beyond _MOST_RESULTS."""
        full = self.unfinished >= _MOST_UNFINISHED or self.unfinished_bytes + future.size > _MOST_WAITING
        if full and not needed:
            raise BadRequest(f"{self.unfinished} requests of the session wait; send more after a result", status=429)
        self.unfinished += 1
        self.unfinished_bytes += future.size
        self.futures[future.id] = future
        if len(self.futures) - self.unfinished > _MOST_RESULTS:
            finished = [id for id, accepted in self.futures.items() if accepted.reply is not None]
            for id in finished[: -_MOST_RESULTS // 2]:
                del self.futures[id]
        return future

    def name_sampler(self, id: str, weights: Snapshot | None) -> None:
        """Adds a sampler, or uses it; forgets the least recently used ones beyond _MOST_SAMPLERS."""
        self.samplers.pop(id, None)
        self.samplers[id] = weights
        while len(self.samplers) > _MOST_SAMPLERS:
            del self.samplers[next(iter(self.samplers))]


def answer_samples(base: Model, futures: Sequence[Future]) -> None:
    """Samples and scores for the futures of one group, whose weights and options are equal, and finishes them."""
    requests = [future.sample for future in futures if future.sample is not None]
    first = requests[0]
    scores: list[np.ndarray | None] = [None] * len(requests) if first.scored is None else _score_prompts(base, requests)
    fits = len(first.prompt) <= base.settings.data.max_prompt_length  # else the prompt is scored only
    prompts = [request.prompt for request in requests]
    trajectories = iter(base.sample(prompts, weights=first.weights, **first.options) if fits else [])
    for future, prompt_scores in zip(futures, scores, strict=True):
        samples = list(itertools.islice(trajectories, first.options["n"]))
        if any(t.finish == "abort" for t in samples):
            raise RuntimeError("the engine aborted a response")
        results = [(t.tokens[t.sampled], t.logprob[t.sampled], t.finish == "length") for t in samples]
        future.finish(samples_message(results, prompt_scores))


def _score_prompts(base: Model, requests: Sequence[SampleRequest]) -> list[np.ndarray | None]:
    """Returns the log-probs of each prompt's tokens [t]: the last `scored` of them, NaN for the others."""
    scorable = [request.prompt for request in requests if len(request.prompt) > 1]  # the first token has no log-prob
    rows = iter(base.logprobs(base.examples(scorable), weights=requests[0].weights) if scorable else [])
    scores: list[np.ndarray | None] = []
    for request in requests:
        score = np.full(len(request.prompt), np.nan, np.float32)
        if len(request.prompt) > 1 and request.scored:
            score[-request.scored :] = next(rows)[: len(request.prompt) - 1][-request.scored :]
        scores.append(score)
    return scores
