"""OpenAI's /v1/chat/completions. Pure."""

from collections.abc import Iterator
from typing import Any

from jppo.agent.gateway import request as r
from jppo.agent.gateway.request import BadRequest, Body, Choice, Message, Reply, Request
from jppo.rewards.earned import short


def read(body: Body) -> Request:
    """Parses a request."""
    r.refuse(body, "response_format", ["text"], r.FREE)
    r.refuse(body, "tool_choice", ["auto", "none"], r.FREE)
    r.unsupported_sampling(body)
    r.unsupported(body, functions=[], function_call="auto", modalities=["text"], web_search_options=None)
    r.unsupported(body, continue_final_message=False, add_generation_prompt=True, chat_template_kwargs={})
    if r.get(body, "top_logprobs", int, 0):
        raise BadRequest("top_logprobs must be 0: only the sampled tokens' log-probs are there; leave it out")
    limits = [r.whole(body, name) for name in ("max_completion_tokens", "max_tokens")]
    return r.check(
        Request(
            messages=tuple(message(one) for one in r.need(body, "messages", list)),
            tools=tuple(r.schema(r.need(tool, "function", dict)) for tool in r.tools_of(body, "function")),
            n=r.whole(body, "n", 1, r.MOST_CHOICES) or 1,
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            stop=r.texts(body, "stop"),
            stream=r.get(body, "stream", bool, False),
            usage=r.get(r.get(body, "stream_options", dict, {}), "include_usage", bool, False),
            logprobs=r.get(body, "logprobs", bool, False),
            parallel=r.get(body, "parallel_tool_calls", bool, True),
            calls=r.may_call(body),
        )
    )


def message(said: Any) -> Message:
    """Normalises a message."""
    role = r.need(said, "role", str)
    r.unsupported(said, function_call=None, audio=None)
    if role not in r.ROLES:
        raise BadRequest(f"role={short(role)} must be one of {', '.join(r.ROLES)}")
    found: Message = {"role": r.ROLES[role], "content": r.text_of(said.get("content"), ["text"])}
    if role == "tool":
        found["tool_call_id"] = r.get(said, "tool_call_id", str, "")
    if calls := r.get(said, "tool_calls", list, []):
        found["tool_calls"] = [
            r.call_of(r.get(call, "id", str, ""), r.need(made, "name", str), r.get(made, "arguments", (str, dict), ""))
            for call in calls
            for made in [r.need(call, "function", dict)]
        ]
    return found


def write(reply: Reply, request: Request) -> dict[str, Any]:
    """Returns the response."""
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": _content(choice), "refusal": None} | _calls(choice),
            "logprobs": _logprobs(choice) if request.logprobs else None,
            "finish_reason": choice.finish,
        }
        for i, choice in enumerate(reply.choices)
    ]
    return head(reply, "chat.completion") | {"choices": choices, "usage": usage(reply)}


def events(reply: Reply, request: Request) -> Iterator[tuple[str, Any]]:
    """Yields the events of a stream: a role, a text, calls and an end per choice."""
    begin = head(reply, "chat.completion.chunk")
    for i, choice in enumerate(reply.choices):
        calls = [{"index": k, **call} for k, call in enumerate(_calls(choice).get("tool_calls", []))]
        text = [{"content": choice.text}] if choice.text else []
        for delta in ({"role": "assistant", "content": ""}, *text, *([{"tool_calls": calls}] if calls else [])):
            yield "", begin | {"choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]}
        logprobs = _logprobs(choice) if request.logprobs else None
        end = {"index": i, "delta": {}, "logprobs": logprobs, "finish_reason": choice.finish}
        yield "", begin | {"choices": [end]}
    if request.usage:
        yield "", begin | {"choices": [], "usage": usage(reply)}


def usage(reply: Reply) -> dict[str, int]:
    """Returns the token counts."""
    read, made = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def head(reply: Reply, kind: str, prefix: str = "chatcmpl-") -> dict[str, Any]:
    """Returns the fields that every object of OpenAI's completions begins with."""
    return {"id": prefix + reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _content(choice: Choice) -> str | None:
    return None if choice.calls and not choice.text else choice.text


def _calls(choice: Choice) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in choice.calls
    ]
    return {"tool_calls": calls} if calls else {}


def _logprobs(choice: Choice) -> dict[str, Any]:
    def one(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}

    return {"content": [one(*token) for token in choice.tokens], "refusal": None}
