"""OpenAI's /v1/completions: a text to continue. Pure."""

import itertools
from collections.abc import Iterator
from typing import Any

from jppo.agent.gateway import request as r
from jppo.agent.gateway.chat import head, usage
from jppo.agent.gateway.request import BadRequest, Body, Choice, Reply, Request
from jppo.rewards.earned import short


def read(body: Body) -> Request:
    """Parses a request."""
    prompt = r.need(body, "prompt", (str, list))
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise BadRequest(f"prompt={short(prompt)} must be one text; send one request for each")
        prompt = prompt[0]
    if r.get(body, "echo", bool, False) or r.get(body, "suffix", str, ""):
        raise BadRequest("echo and suffix are not supported; leave them out")
    if (r.whole(body, "logprobs", 0) or 0) > 1:
        raise BadRequest("logprobs must be 0 or 1: only the sampled tokens' log-probs are there")
    n = r.whole(body, "n", 1, r.MOST_CHOICES) or 1
    r.unsupported_sampling(body)
    r.unsupported(body, best_of=n)
    return Request(
        text=prompt,
        n=n,
        max_tokens=r.whole(body, "max_tokens"),
        stop=r.texts(body, "stop"),
        stream=r.get(body, "stream", bool, False),
        usage=r.get(r.get(body, "stream_options", dict, {}), "include_usage", bool, False),
        logprobs=body.get("logprobs") is not None,
    )


def write(reply: Reply, request: Request) -> dict[str, Any]:
    """Returns the response."""
    choices = [_choice(i, choice, request) for i, choice in enumerate(reply.choices)]
    return _head(reply) | {"choices": choices, "usage": usage(reply)}


def events(reply: Reply, request: Request) -> Iterator[tuple[str, Any]]:
    """Yields the events of a stream: one per choice."""
    for i, choice in enumerate(reply.choices):
        yield "", _head(reply) | {"choices": [_choice(i, choice, request)]}
    if request.usage:
        yield "", _head(reply) | {"choices": [], "usage": usage(reply)}


def _head(reply: Reply) -> dict[str, Any]:
    return head(reply, "text_completion", "cmpl-")


def _choice(index: int, choice: Choice, request: Request) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        tokens, numbers = [text for text, _ in choice.tokens], [number for _, number in choice.tokens]
        offsets = list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
        logprobs = {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": None, "text_offset": offsets}
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}
