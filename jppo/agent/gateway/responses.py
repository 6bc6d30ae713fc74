"""OpenAI's /v1/responses. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from jppo.agent.gateway import request as r
from jppo.agent.gateway.request import BadRequest, Body, Message, Reply, Request
from jppo.rewards.earned import short

_TEXT = ["input_text", "output_text", "text"]
PREFIX = "resp_"


def read(body: Body, earlier: Mapping[str, tuple[Message, ...]]) -> Request:
    """Parses a request; `earlier` has the conversation up to each earlier response, without instructions."""
    r.refuse(r.get(body, "text", dict, {}), "format", ["text"], r.FREE)
    r.refuse(body, "tool_choice", ["auto", "none"], r.FREE)
    r.unsupported_sampling(body)
    r.unsupported(body, conversation=None, background=False, prompt=None, top_logprobs=0)
    before = r.get(body, "previous_response_id", str)
    if before is not None and before.removeprefix(PREFIX) not in earlier:
        raise BadRequest(f"previous_response_id={short(before)} is no response of this episode")
    said = r.need(body, "input", (str, list))
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    instructions = r.get(body, "instructions", str, "")
    found: list[Message] = [] if before is None else list(earlier[before.removeprefix(PREFIX)])
    for item in items:
        _add(found, item)
    head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return r.check(
        Request(
            messages=(*head, *found),
            tools=tuple(r.schema(tool) for tool in r.tools_of(body, "function")),
            max_tokens=r.whole(body, "max_output_tokens"),
            stream=r.get(body, "stream", bool, False),
            parallel=r.get(body, "parallel_tool_calls", bool, True),
            calls=r.may_call(body),
        )
    )


def _add(messages: list[Message], item: Any) -> None:
    """Appends an item; calls join the message of the assistant before them."""
    kind = r.get(item, "type", str, "message")
    if kind == "message":
        role = r.need(item, "role", str)
        if role not in r.ROLES or role == "tool":
            raise BadRequest(f"role={short(role)} must be system, developer, user or assistant")
        messages.append({"role": r.ROLES[role], "content": r.text_of(item.get("content"), _TEXT)})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = r.call_of(r.need(item, "call_id", str), r.need(item, "name", str), r.need(item, "arguments", str))
        messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", []), call]}
    elif kind == "function_call_output":
        output = r.text_of(item.get("output"), _TEXT)
        messages.append({"role": "tool", "content": output, "tool_call_id": r.need(item, "call_id", str)})
    elif kind != "reasoning":
        raise BadRequest(f"an input item has type={short(kind)}, which is not supported")


def write(reply: Reply, request: Request) -> dict[str, Any]:
    """Returns the response."""
    (choice,) = reply.choices
    cut = choice.finish == "length"
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    read, made = reply.prompt_tokens, reply.completion_tokens
    return _head(reply) | {
        "status": "incomplete" if cut else "completed",
        "parallel_tool_calls": request.parallel,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(reply),
        "usage": {"input_tokens": read, "output_tokens": made, "total_tokens": read + made} | details,
    }


def events(reply: Reply, request: Request) -> Iterator[tuple[str, Any]]:
    """Yields the events of a stream."""
    done = write(reply, request)
    started = done | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    found: list[dict[str, Any]] = [{"type": "response.created", "response": started}]
    for i, item in enumerate(done["output"]):
        at = {"item_id": item["id"], "output_index": i}
        key = "content" if item["type"] == "message" else "arguments"
        empty = item | {"status": "in_progress", key: [] if key == "content" else ""}
        found.append({"type": "response.output_item.added", "output_index": i, "item": empty})
        if item["type"] == "message":
            part, text = item["content"][0], item["content"][0]["text"]
            at |= {"content_index": 0}
            found += [
                {"type": "response.content_part.added", **at, "part": part | {"text": ""}},
                {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []},
                {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
                {"type": "response.content_part.done", **at, "part": part},
            ]
        else:
            name = "response.function_call_arguments"
            found.append({"type": f"{name}.delta", **at, "delta": item["arguments"]})
            found.append({"type": f"{name}.done", **at, "name": item["name"], "arguments": item["arguments"]})
        found.append({"type": "response.output_item.done", "output_index": i, "item": item})
    found.append({"type": f"response.{done['status']}", "response": done})
    for number, event in enumerate(found):
        yield event["type"], event | {"sequence_number": number}


def _head(reply: Reply) -> dict[str, Any]:
    fixed: dict[str, Any] = {"tool_choice": "auto", "tools": [], "error": None}
    named = {"id": PREFIX + reply.id, "object": "response", "created_at": reply.created, "model": reply.model}
    return named | fixed | {"instructions": None, "metadata": {}, "temperature": None, "top_p": None}


def _items(reply: Reply) -> list[dict[str, Any]]:
    (choice,) = reply.choices
    found: list[dict[str, Any]] = []
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        status = "incomplete" if choice.finish == "length" else "completed"
        said = {"type": "message", "role": "assistant", "status": status, "content": [part]}
        found.append({"id": f"msg_{reply.id}"} | said)
    for call in choice.calls:
        made = {"call_id": call.id, "name": call.name, "arguments": call.text, "status": "completed"}
        found.append({"type": "function_call", "id": f"fc_{call.id}"} | made)
    return found
