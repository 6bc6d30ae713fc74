"""The APIs of the gateway: OpenAI's chat completions, completions and responses, and Anthropic's messages. Pure.

Each has the same three functions; `APIS` has them by path.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jppo.errors import BadRequest
from jppo.plugins.agents.gateway import request as r
from jppo.plugins.agents.gateway.request import Body, Choice, Message, Reply, Request
from jppo.rewards.earned import short


class Api(NamedTuple):
    """An API's form of requests and replies."""

    read: Callable[..., Request]  # of a body, and for `RESPONSES` of the conversation up to each earlier response
    write: Callable[[Reply, Request], dict[str, Any]]  # as one response
    events: Callable[[Reply, Request], Iterator[tuple[str, Any]]]  # of a stream, with their names or ''


def _read_chat(body: Body) -> Request:
    """Reads a request of OpenAI's chat completions."""
    r.refuse_constraint(body, "response_format", ["text"])
    r.unsupported_sampling(body)
    r.unsupported(body, functions=[], modalities=["text"], web_search_options=None, echo=False)
    if body.get("function_call") != "none":
        r.unsupported(body, function_call="auto")
    r.unsupported(body, continue_final_message=False, add_generation_prompt=True, chat_template_kwargs={})
    if r.optional(body, "top_logprobs", int, 0):
        raise BadRequest("top_logprobs must be 0: only the sampled tokens' log-probs are there; leave it out")
    limits = [r.whole_number(body, name) for name in ("max_completion_tokens", "max_tokens")]
    return r.require_answerable(
        Request(
            messages=tuple(_chat_message(message) for message in r.required(body, "messages", list)),
            tools=tuple(r.schema(r.required(tool, "function", dict)) for tool in r.list_tools(body, "function")),
            n=r.whole_number(body, "n", 1, r.MOST_CHOICES) or 1,
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            stop=r.text_list(body, "stop"),
            stream=r.optional(body, "stream", bool, False),
            usage=r.optional(r.optional(body, "stream_options", dict, {}), "include_usage", bool, False),
            logprobs=r.optional(body, "logprobs", bool, False),
            parallel=r.optional(body, "parallel_tool_calls", bool, True),
            calls=r.may_call(body),
        )
    )


def _chat_message(message: Any) -> Message:
    """Normalises a message."""
    role = r.required(message, "role", str)
    r.unsupported(message, function_call=None, audio=None)
    if role not in r.ROLES:
        raise BadRequest(f"role={short(role)} must be one of {', '.join(r.ROLES)}")
    normalised: Message = {"role": r.ROLES[role], "content": r.content_text(message.get("content"), ["text"])}
    if role == "tool":
        normalised["tool_call_id"] = r.optional(message, "tool_call_id", str, "")
    if calls := r.optional(message, "tool_calls", list, []):
        normalised["tool_calls"] = [_chat_call(call) for call in calls]
    return normalised


def _chat_call(call: Any) -> Message:
    function = r.required(call, "function", dict)
    arguments = r.optional(function, "arguments", (str, dict), "")
    return r.make_call(r.optional(call, "id", str, ""), r.required(function, "name", str), arguments)


def _write_chat(reply: Reply, request: Request) -> dict[str, Any]:
    choices = []
    for i, choice in enumerate(reply.choices):
        content = None if choice.calls and not choice.text else choice.text
        message = {"role": "assistant", "content": content, "refusal": None} | _chat_calls(choice)
        logprobs = _chat_logprobs(choice) if request.logprobs else None
        choices.append({"index": i, "message": message, "logprobs": logprobs, "finish_reason": choice.finish})
    return _completion_head(reply, "chat.completion") | {"choices": choices, "usage": _usage(reply)}


def _chat_events(reply: Reply, request: Request) -> Iterator[tuple[str, Any]]:
    """Yields the events of a stream: a role, a text, calls and an end per choice."""
    begin = _completion_head(reply, "chat.completion.chunk")
    for i, choice in enumerate(reply.choices):
        calls = [{"index": k, **call} for k, call in enumerate(_chat_calls(choice).get("tool_calls", []))]
        text = [{"content": choice.text}] if choice.text else []
        for delta in ({"role": "assistant", "content": ""}, *text, *([{"tool_calls": calls}] if calls else [])):
            yield "", begin | {"choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]}
        logprobs = _chat_logprobs(choice) if request.logprobs else None
        end = {"index": i, "delta": {}, "logprobs": logprobs, "finish_reason": choice.finish}
        yield "", begin | {"choices": [end]}
    if request.usage:
        yield "", begin | {"choices": [], "usage": _usage(reply)}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _completion_head(reply: Reply, kind: str, prefix: str = "chatcmpl-") -> dict[str, Any]:
    """Returns the fields that every object of OpenAI's completions begins with."""
    return {"id": prefix + reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _chat_calls(choice: Choice) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in choice.calls
    ]
    return {"tool_calls": calls} if calls else {}


def _chat_logprobs(choice: Choice) -> dict[str, Any]:
    entries = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in choice.tokens
    ]
    return {"content": entries, "refusal": None}


def _read_completion(body: Body) -> Request:
    """Reads a request of OpenAI's completions."""
    prompt = r.required(body, "prompt", (str, list))
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise BadRequest(f"prompt={short(prompt)} must be one text; send one request for each")
        prompt = prompt[0]
    if r.optional(body, "echo", bool, False) or r.optional(body, "suffix", str, ""):
        raise BadRequest("echo and suffix are not supported; leave them out")
    if (r.whole_number(body, "logprobs", 0) or 0) > 1:
        raise BadRequest("logprobs must be 0 or 1: only the sampled tokens' log-probs are there")
    n = r.whole_number(body, "n", 1, r.MOST_CHOICES) or 1
    r.unsupported_sampling(body)
    r.unsupported(body, best_of=n)
    return Request(
        text=prompt,
        n=n,
        max_tokens=r.whole_number(body, "max_tokens"),
        stop=r.text_list(body, "stop"),
        stream=r.optional(body, "stream", bool, False),
        usage=r.optional(r.optional(body, "stream_options", dict, {}), "include_usage", bool, False),
        logprobs=body.get("logprobs") is not None,
    )


def _write_completion(reply: Reply, request: Request) -> dict[str, Any]:
    choices = [_text_choice(i, choice, request) for i, choice in enumerate(reply.choices)]
    return _text_head(reply) | {"choices": choices, "usage": _usage(reply)}


def _completion_events(reply: Reply, request: Request) -> Iterator[tuple[str, Any]]:
    """Yields the events of a stream: one per choice."""
    for i, choice in enumerate(reply.choices):
        yield "", _text_head(reply) | {"choices": [_text_choice(i, choice, request)]}
    if request.usage:
        yield "", _text_head(reply) | {"choices": [], "usage": _usage(reply)}


def _text_head(reply: Reply) -> dict[str, Any]:
    return _completion_head(reply, "text_completion", "cmpl-")


def _text_choice(index: int, choice: Choice, request: Request) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        tokens, numbers = [text for text, _ in choice.tokens], [number for _, number in choice.tokens]
        offsets = list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
        logprobs = {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": None, "text_offset": offsets}
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}


_REASON = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _read_messages(body: Body) -> Request:
    """Reads a request of Anthropic's messages."""
    may_call = r.may_call(body)
    choice = r.optional(body, "tool_choice", dict, {})
    r.unsupported(body, output_format=None, mcp_servers=[], container=None)
    r.unsupported(r.optional(body, "output_config", dict, {}), format=None)
    system = r.content_text(body.get("system"), ["text"])
    messages = [one for message in r.required(body, "messages", list) for one in _split_message(message)]
    return r.require_answerable(
        Request(
            messages=({"role": "system", "content": system}, *messages) if system else tuple(messages),
            tools=tuple(r.schema(tool, "input_schema") for tool in r.list_tools(body, "custom")),
            max_tokens=r.whole_number(body, "max_tokens"),
            stop=r.text_list(body, "stop_sequences"),
            stream=r.optional(body, "stream", bool, False),
            parallel=not r.optional(choice, "disable_parallel_tool_use", bool, False),
            calls=may_call,
        )
    )


def _split_message(message: Any) -> Iterator[Message]:
    """Yields the messages of one: results of tools first, then the text with the calls."""
    role, content = r.required(message, "role", str), message.get("content")
    if role not in ("user", "assistant"):
        raise BadRequest(f"role={short(role)} must be 'user' or 'assistant'")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else r.required(message, "content", list)
    text, calls = "", []
    for part in parts:
        r.require_kind(part, ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"])
        if part["type"] == "text":
            text += r.required(part, "text", str)
        elif part["type"] == "tool_use":
            call = (r.required(part, "id", str), r.required(part, "name", str), r.optional(part, "input", dict, {}))
            calls.append(r.make_call(*call))
        elif part["type"] == "tool_result":
            result = r.content_text(part.get("content"), ["text"])
            yield {"role": "tool", "content": result, "tool_call_id": r.required(part, "tool_use_id", str)}
    if text or calls or not any(part["type"] == "tool_result" for part in parts):
        yield {"role": role, "content": text} | ({"tool_calls": calls} if calls else {})


def _write_message(reply: Reply, request: Request) -> dict[str, Any]:
    (choice,) = reply.choices
    return _message_head(reply) | {
        "content": _content_blocks(choice),
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stopped_by,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def _message_events(reply: Reply, request: Request) -> Iterator[tuple[str, Any]]:
    """Yields the events of a stream of Anthropic's messages."""
    (choice,) = reply.choices
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    start = _message_head(reply) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=start)
    for i, block in enumerate(_content_blocks(choice)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            call = next(call for call in choice.calls if call.id == block["id"])
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": call.text}
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    end = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stopped_by}
    yield _event("message_delta", delta=end, usage={"output_tokens": reply.completion_tokens})
    yield _event("message_stop")


def _event(name: str, **fields: Any) -> tuple[str, Any]:
    return name, {"type": name, **fields}


def _message_head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _stop_reason(choice: Choice) -> str:
    return "stop_sequence" if choice.stopped_by is not None and not choice.calls else _REASON[choice.finish]


def _content_blocks(choice: Choice) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": choice.text}] if choice.text else []
    calls = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in choice.calls]
    return [*text, *calls]


_TEXTS = ["input_text", "output_text", "text"]
_RESPONSE_ID = "resp_"


def _read_response(body: Body, earlier: Mapping[str, tuple[Message, ...]]) -> Request:
    """Parses a request; `earlier` has the conversation up to each earlier response, without instructions."""
    r.refuse_constraint(r.optional(body, "text", dict, {}), "format", ["text"])
    r.unsupported_sampling(body)
    r.unsupported(body, conversation=None, background=False, prompt=None, top_logprobs=0)
    previous_id = r.optional(body, "previous_response_id", str)
    if previous_id is not None and previous_id.removeprefix(_RESPONSE_ID) not in earlier:
        raise BadRequest(f"previous_response_id={short(previous_id)} is no response of this episode")
    inputs = r.required(body, "input", (str, list))
    items = [{"role": "user", "content": inputs}] if isinstance(inputs, str) else inputs
    instructions = r.optional(body, "instructions", str, "")
    messages: list[Message] = [] if previous_id is None else list(earlier[previous_id.removeprefix(_RESPONSE_ID)])
    for item in items:
        _add_item(messages, item)
    head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return r.require_answerable(
        Request(
            messages=(*head, *messages),
            tools=tuple(r.schema(tool) for tool in r.list_tools(body, "function")),
            max_tokens=r.whole_number(body, "max_output_tokens"),
            stream=r.optional(body, "stream", bool, False),
            parallel=r.optional(body, "parallel_tool_calls", bool, True),
            calls=r.may_call(body),
        )
    )


def _add_item(messages: list[Message], item: Any) -> None:
    """Appends an item; calls join the message of the assistant before them."""
    kind = r.optional(item, "type", str, "message")
    if kind == "message":
        role = r.required(item, "role", str)
        if role not in r.ROLES or role == "tool":
            raise BadRequest(f"role={short(role)} must be system, developer, user or assistant")
        messages.append({"role": r.ROLES[role], "content": r.content_text(item.get("content"), _TEXTS)})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = r.make_call(*(r.required(item, name, str) for name in ("call_id", "name", "arguments")))
        messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", []), call]}
    elif kind == "function_call_output":
        output = r.content_text(item.get("output"), _TEXTS)
        messages.append({"role": "tool", "content": output, "tool_call_id": r.required(item, "call_id", str)})
    elif kind != "reasoning":
        raise BadRequest(f"an input item has type={short(kind)}, which is not supported")


def _write_response(reply: Reply, request: Request) -> dict[str, Any]:
    (choice,) = reply.choices
    cut = choice.finish == "length"
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    usage = {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion} | details
    response = {
        "id": _RESPONSE_ID + reply.id,
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "status": "incomplete" if cut else "completed",
        "parallel_tool_calls": request.parallel,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output_items(reply),
        "usage": usage,
    }
    return response | dict.fromkeys(("error", "instructions", "temperature", "top_p"))


def _response_events(reply: Reply, request: Request) -> Iterator[tuple[str, Any]]:
    """Yields the events of a stream of OpenAI's responses."""
    response = _write_response(reply, request)
    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for i, item in enumerate(response["output"]):
        item_fields = {"item_id": item["id"], "output_index": i}
        key = "content" if item["type"] == "message" else "arguments"
        empty = item | {"status": "in_progress", key: [] if key == "content" else ""}
        events.append({"type": "response.output_item.added", "output_index": i, "item": empty})
        if item["type"] == "message":
            part, text = item["content"][0], item["content"][0]["text"]
            item_fields |= {"content_index": 0}
            events += [
                {"type": "response.content_part.added", **item_fields, "part": part | {"text": ""}},
                {"type": "response.output_text.delta", **item_fields, "delta": text, "logprobs": []},
                {"type": "response.output_text.done", **item_fields, "text": text, "logprobs": []},
                {"type": "response.content_part.done", **item_fields, "part": part},
            ]
        else:
            name = "response.function_call_arguments"
            events.append({"type": f"{name}.delta", **item_fields, "delta": item["arguments"]})
            events.append({"type": f"{name}.done", **item_fields, "name": item["name"], "arguments": item["arguments"]})
        events.append({"type": "response.output_item.done", "output_index": i, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    for number, event in enumerate(events):
        yield event["type"], event | {"sequence_number": number}


def _output_items(reply: Reply) -> list[dict[str, Any]]:
    (choice,) = reply.choices
    items: list[dict[str, Any]] = []
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        status = "incomplete" if choice.finish == "length" else "completed"
        message = {"type": "message", "role": "assistant", "status": status, "content": [part]}
        items.append({"id": f"msg_{reply.id}"} | message)
    for call in choice.calls:
        fields = {"call_id": call.id, "name": call.name, "arguments": call.text, "status": "completed"}
        items.append({"type": "function_call", "id": f"fc_{call.id}"} | fields)
    return items


CHAT = Api(_read_chat, _write_chat, _chat_events)
COMPLETIONS = Api(_read_completion, _write_completion, _completion_events)
MESSAGES = Api(_read_messages, _write_message, _message_events)
RESPONSES = Api(_read_response, _write_response, _response_events)
APIS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
