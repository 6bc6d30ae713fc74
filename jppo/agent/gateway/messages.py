"""Anthropic's /v1/messages. Pure."""

from collections.abc import Iterator
from typing import Any

from jppo.agent.gateway import request as r
from jppo.agent.gateway.request import BadRequest, Body, Choice, Message, Reply, Request
from jppo.rewards.earned import short

_REASON = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Body) -> Request:
    """Parses a request."""
    r.refuse(body, "tool_choice", ["auto", "none"], r.FREE)
    choice = r.get(body, "tool_choice", dict, {})
    r.unsupported(body, output_format=None, mcp_servers=[], container=None)
    r.unsupported(r.get(body, "output_config", dict, {}), format=None)
    system = r.text_of(body.get("system"), ["text"])
    said = [one for message in r.need(body, "messages", list) for one in _messages(message)]
    return r.check(
        Request(
            messages=({"role": "system", "content": system}, *said) if system else tuple(said),
            tools=tuple(r.schema(tool, "input_schema") for tool in r.tools_of(body, "custom")),
            max_tokens=r.whole(body, "max_tokens"),
            stop=r.texts(body, "stop_sequences"),
            stream=r.get(body, "stream", bool, False),
            parallel=not r.get(choice, "disable_parallel_tool_use", bool, False),
            calls=r.may_call(body),
        )
    )


def _messages(said: Any) -> Iterator[Message]:
    """Yields the messages of one: results of tools first, then the text with the calls."""
    role, content = r.need(said, "role", str), said.get("content")
    if role not in ("user", "assistant"):
        raise BadRequest(f"role={short(role)} must be 'user' or 'assistant'")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else r.need(said, "content", list)
    text, calls = "", []
    for part in parts:
        r.require_kind(part, ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"])
        if part["type"] == "text":
            text += r.need(part, "text", str)
        elif part["type"] == "tool_use":
            call = r.need(part, "id", str), r.need(part, "name", str), r.get(part, "input", dict, {})
            calls.append(r.call_of(*call))
        elif part["type"] == "tool_result":
            result = r.text_of(part.get("content"), ["text"])
            yield {"role": "tool", "content": result, "tool_call_id": r.need(part, "tool_use_id", str)}
    if text or calls or not any(part["type"] == "tool_result" for part in parts):
        yield {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})


def write(reply: Reply, request: Request) -> dict[str, Any]:
    """Returns the response."""
    (choice,) = reply.choices
    return _head(reply) | {
        "content": _blocks(choice),
        "stop_reason": _reason(choice),
        "stop_sequence": choice.stopped_by,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def events(reply: Reply, request: Request) -> Iterator[tuple[str, Any]]:
    """Yields the events of a stream."""
    (choice,) = reply.choices
    used = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    start = _head(reply) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
    yield _event("message_start", message=start)
    for i, block in enumerate(_blocks(choice)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            call = next(call for call in choice.calls if call.id == block["id"])
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": call.text}
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    end = {"stop_reason": _reason(choice), "stop_sequence": choice.stopped_by}
    yield _event("message_delta", delta=end, usage={"output_tokens": reply.completion_tokens})
    yield _event("message_stop")


def _event(name: str, **fields: Any) -> tuple[str, Any]:
    return name, {"type": name, **fields}


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _reason(choice: Choice) -> str:
    return "stop_sequence" if choice.stopped_by is not None and not choice.calls else _REASON[choice.finish]


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": choice.text}] if choice.text else []
    calls = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in choice.calls]
    return [*text, *calls]
