"""A request and its reply in one form for all APIs, and checks of their fields. Pure.

Messages are OpenAI's, with text as content and with parsed arguments of tool calls.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jppo.errors import BadRequest
from jppo.plugins.agents.calls import Schema
from jppo.rewards.earned import short

Message = dict[str, Any]
Body = Mapping[str, Any]
MOST_CHOICES = 128
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclasses.dataclass(frozen=True)
class Request:
    """Messages or a text to continue. The run's own sampling settings apply, so a request has none."""

    messages: tuple[Message, ...] = ()
    text: str | None = None  # in place of messages
    tools: tuple[Schema, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # the stream ends with the usage
    logprobs: bool = False
    parallel: bool = True  # an answer may have several tool calls
    calls: bool = True  # an answer may have tool calls


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        return json.dumps(self.arguments)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One answer of the policy, as the agent gets it."""

    text: str  # without tool calls, end token and stop text
    tail: str  # the stop text, with the rest of its last token
    raw: str  # with calls and tail
    calls: tuple[ToolCall, ...]
    finish: str  # 'stop', 'length' or 'tool_calls'
    stopped_by: str | None  # a stop text of the request
    length: int  # sampled tokens
    tokens: tuple[tuple[str, float], ...]  # text and log-prob of each, if the request asks for them

    @property
    def message(self) -> Message:
        """Returns the answer as a message."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [make_call(call.id, call.name, call.arguments) for call in self.calls]
        return message


@dataclasses.dataclass(frozen=True)
class Reply:
    """All answers to a request."""

    id: str
    created: int  # Unix time
    model: str
    prompt_tokens: int
    choices: tuple[Choice, ...]

    @property
    def completion_tokens(self) -> int:
        return sum(choice.length for choice in self.choices)


def make_call(id: str, name: str, arguments: Any) -> Message:
    """Returns a tool call as an entry of a message; JSON text of arguments is parsed where it is valid."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def optional(body: Any, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Returns a field; `default` if it is absent or null; BadRequest if it has another type."""
    if not isinstance(body, dict):
        raise BadRequest(f"{short(body)} must be a JSON object")
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise BadRequest(f"{name}={short(value)} must be of type {' or '.join(k.__name__ for k in kinds)}")
    return value


def required(body: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    value = optional(body, name, kind)
    if value is None:
        raise BadRequest(f"{short(body)} lacks {name!r}")
    return value


def whole_number(body: Body, name: str, least: int = 1, most: int | None = None) -> int | None:
    """Returns an optional integer within bounds."""
    value: int | None = optional(body, name, int)
    if value is not None and not (least <= value and (most is None or value <= most)):
        upper = "" if most is None else f" and at most {most}"
        raise BadRequest(f"{name}={short(value)} must be at least {least}{upper}")
    return value


def text_list(body: Body, name: str) -> tuple[str, ...]:
    """Returns an optional text or list of texts, none of them empty."""
    value = optional(body, name, (str, list), [])
    strings = [value] if isinstance(value, str) else value
    if not all(isinstance(text, str) and text for text in strings):
        raise BadRequest(f"{name}={short(value)} must be texts that are not empty")
    if any("\ud800" <= character <= "\udfff" for text in strings for character in text):
        raise BadRequest(f"{name}={short(value)} has half a character; send valid Unicode")
    return tuple(strings)


def content_text(content: Any, kinds: Sequence[str]) -> str:
    """Returns the text of a message's content: a text, or parts of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"content={short(content)} must be a text or a list of parts")
    return "".join(required(part, "text", str) for part in content if require_kind(part, kinds))


def require_kind(part: Any, kinds: Sequence[str]) -> bool:
    """Returns True for a part of one of these kinds; else BadRequest."""
    if required(part, "type", str) not in kinds:
        raise BadRequest(f"a content part has type={short(part['type'])}; the policy reads {', '.join(kinds)}")
    return True


def list_tools(body: Body, kind: str) -> list[Any]:
    """Returns the tools, all of this kind."""
    tools: list[Any] = optional(body, "tools", list, [])
    for tool in tools:
        if (tool_kind := optional(tool, "type", str, kind)) != kind:
            raise BadRequest(f"a tool has type={short(tool_kind)}; the policy calls tools of type={kind!r} only")
    return tools


def may_call(body: Body) -> bool:
    """Whether `tool_choice` lets the policy call tools; BadRequest if it has to."""
    refuse_constraint(body, "tool_choice", ["auto", "none"])
    choice = body.get("tool_choice")
    return (choice.get("type") if isinstance(choice, dict) else choice) != "none"


def schema(function: Any, parameters: str = "parameters") -> Schema:
    """Returns the schema of a tool in OpenAI's chat form."""
    head = {"name": required(function, "name", str), "description": optional(function, "description", str, "")}
    params = optional(function, parameters, dict, {})
    if not all(isinstance(name, str) for name in optional(params, "required", list, [])):
        raise BadRequest(f"required={short(params['required'])} of the tool {short(head['name'])} must be names")
    optional(params, "properties", dict)
    return {"type": "function", "function": {**head, "parameters": params}}


def refuse_constraint(body: Body, field: str, allowed: Sequence[Any]) -> None:
    """BadRequest if a field asks for what the policy cannot be held to."""
    value = body.get(field)
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind is not None and kind not in allowed:
        raise BadRequest(
            f"{field}={short(kind)}: the policy's sampling is not constrained in training; leave it out, or use"
            f" {', '.join(map(repr, allowed))}"
        )


def unsupported(body: Body, **neutral: Any) -> None:
    """BadRequest for a field with another value than the one that changes nothing."""
    for name, value in neutral.items():
        if body.get(name) not in (None, value):
            raise BadRequest(f"{name}={short(body[name])} is not supported for agent programs; leave it out")


def unsupported_sampling(body: Body) -> None:
    """BadRequest for parameters that change the distribution, and are no settings of the run."""
    unsupported(body, frequency_penalty=0, presence_penalty=0, repetition_penalty=1, logit_bias={})
    unsupported(body, min_tokens=0, ignore_eos=False, stop_token_ids=[], use_beam_search=False)
    unsupported(body, structured_outputs={}, guided_json=None, guided_regex=None, guided_choice=None)
    unsupported(body, guided_grammar=None, structural_tag=None, regex=None, ebnf=None, json_schema=None, grammar=None)
    unsupported(body, allowed_token_ids=None, bad_words=[], logits_processors=[], no_repeat_ngram_size=0)


def require_answerable(request: Request) -> Request:
    """Returns a request that has something to answer."""
    if request.text is None and (not request.messages or request.messages[-1]["role"] == "assistant"):
        raise BadRequest("the messages must not be empty and must end with another role than 'assistant'")
    return request
