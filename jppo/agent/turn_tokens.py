"""The tokens between two turns of the policy: messages of tools or users, and the start of the next turn.

Sampled tokens are never decoded and re-encoded. The inserted tokens are the difference of two renderings of the chat
template: of a dummy conversation up to an assistant turn, and of its continuation. They begin with the end token of
that turn, unless it was sampled.
"""

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jppo.agent.calls import Schema
from jppo.data.prompts import Messages
from jppo.data.rows import Row
from jppo.data.template import make_renderer
from jppo.data.tokenizer import tokenize
from jppo.settings import UserError

_SAID, _AGAIN = "said-by-the-assistant", "said-by-it-again"
_ANYTHING: list[dict[str, str]] = [{"role": "user", "content": "anything"}]
_PLACE = Row("rollout.multi_turn", 1, {}, "made-up conversation")


@dataclasses.dataclass(frozen=True)
class Chat:
    """Functions that continue a conversation in tokens."""

    # (messages, the last sampled token) -> their ids with the start of the next turn
    between: Callable[[Sequence[dict[str, str]], int], list[int]]
    # (messages or text of a prompt, its ids, a first observation) -> the ids of both
    opening: Callable[[Messages, list[int], str], list[int]]
    # messages -> the ids of all of them with the start of the next turn
    whole: Callable[[Sequence[dict[str, Any]]], list[int]]
    # (text, whether it begins a conversation) -> its ids
    text: Callable[[str, bool], list[int]]


def templated(
    tokenizer: Any,
    schemas: Sequence[Schema],
    *,
    roles: Sequence[str],
    name: str,
    arguments: Mapping[str, Any] = types.MappingProxyType({}),
    setting: str = "rollout.multi_turn.format",
) -> Chat:
    """Builds a Chat from the chat template, after checking that it keeps earlier messages of these roles.

    `setting` is where the run has `name`, the format of calls.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{setting}={name!r} needs a chat template, and the tokenizer has none; give one in"
            f" tokenizer_config.json or chat_template.jinja, or set {setting}=plain"
        )
    render, encode = make_renderer(tokenizer, schemas, arguments), functools.partial(tokenize, tokenizer)

    def between(messages: Sequence[dict[str, str]], last: int) -> list[int]:
        whole = render([*_ANYTHING, {"role": "assistant", "content": _SAID}, *messages], _PLACE)
        ids = encode(whole[whole.index(_SAID) + len(_SAID) :])
        return ids[1:] if ids and ids[0] == last else ids

    def opening(prompt: Messages, ids: list[int], text: str) -> list[int]:
        if isinstance(prompt, str):
            return ids + encode(text)
        if prompt[-1]["role"] == "user":  # many templates refuse two consecutive user turns
            before, text = prompt[:-1], f"{prompt[-1]['content']}\n{text}"
        else:
            before = list(prompt)
        return encode(render([*before, {"role": "user", "content": text}], _PLACE))

    @functools.lru_cache(maxsize=64)  # the samples of a prompt begin with the same messages
    def begun(messages: str) -> list[int]:
        return encode(render(json.loads(messages), _PLACE))

    for role in roles:
        _check_prefix(render, role, setting)
    if schemas:
        _check_named(render, schemas, setting)
    return Chat(between, opening, lambda messages: [*begun(json.dumps(messages))], encode)


def plain(tokenizer: Any) -> Chat:
    """Builds a Chat for models without a template: [[a tool's answer]], and other messages on their own lines."""
    encode = functools.partial(tokenize, tokenizer)

    def written(message: dict[str, Any]) -> str:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", [])]
            return message["content"] + "".join(f"<<{c['name']} {json.dumps(c['arguments'])}>>" for c in calls)
        return f"[[{message['content']}]]" if message["role"] == "tool" else f"\n{message['content']}\n"

    def between(messages: Sequence[dict[str, Any]], last: int) -> list[int]:
        return encode("".join(map(written, messages)))

    def whole(messages: Sequence[dict[str, Any]]) -> list[int]:
        return encode(messages[0]["content"] + "".join(map(written, messages[1:])), True)

    return Chat(between, lambda prompt, ids, text: ids + encode(f"{text}\n"), whole, encode)


def _check_prefix(render: Any, role: str, setting: str) -> None:
    """UserError if rendering a longer conversation changes its beginning."""
    turns = [
        *_ANYTHING,
        {"role": "assistant", "content": _SAID},
        {"role": role, "content": "1"},
        {"role": "assistant", "content": _AGAIN},
        {"role": role, "content": "2"},
    ]
    short, opened, long = (
        render(turns[:3], _PLACE, opened=False),
        render(turns[:3], _PLACE),
        render(turns, _PLACE, opened=False),
    )
    if short.count(_SAID) != 1 or not opened.startswith(short) or not long.startswith(short) or _AGAIN not in long:
        raise UserError(
            "the tokenizer's chat template changes the beginning of a conversation"
            f" when messages of the role {role!r} follow, so tokens cannot be appended; use a template"
            f" that keeps it, or {setting}=plain"
        )


def _check_named(render: Any, schemas: Sequence[Schema], setting: str) -> None:
    rendered = render(_ANYTHING, _PLACE)
    lacking = [name for name in (schema["function"]["name"] for schema in schemas) if name not in rendered]
    if lacking:
        raise UserError(
            f"the tokenizer's chat template does not show the tools to the model: {', '.join(lacking)} is missing in"
            f" its output; use a template that reads `tools`, or {setting}=plain"
        )
