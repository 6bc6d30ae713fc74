"""The tokens between two turns of the policy: what a tool, a user or an environment says, and the next turn's start.

Sampled tokens stay as they were sampled: nothing of them is decoded and encoded again. What is put behind them is the
difference of two renderings of the chat template, one of a made-up conversation up to a turn of the assistant and one
that goes on from there. It begins with the end of that turn, which is left out where it was sampled.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jppo.agent.calls import Schema
from jppo.config import UserError
from jppo.data.prompts import Messages
from jppo.data.rows import Row
from jppo.data.template import make_renderer

_SAID, _AGAIN = "said-by-the-assistant", "said-by-it-again"
_ANYTHING: list[dict[str, str]] = [{"role": "user", "content": "anything"}]
_PLACE = Row("rollout.multi_turn", 1, {}, "made-up conversation")


@dataclasses.dataclass(frozen=True)
class Chat:
    """How a conversation goes on, in tokens."""

    # (messages, the last sampled token) -> their ids with the start of the next turn
    between: Callable[[Sequence[dict[str, str]], int], list[int]]
    # (messages or text of a prompt, its ids, a first observation) -> the ids of both
    opening: Callable[[Messages, list[int], str], list[int]]


def templated(
    tokenizer: Any,
    schemas: Sequence[Schema],
    *,
    roles: Sequence[str],
    name: str,
    arguments: Mapping[str, Any] = types.MappingProxyType({}),
) -> Chat:
    """By the chat template of the tokenizer, once it is seen to keep what was said for messages of these roles."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"rollout.multi_turn.format={name!r} needs a chat template, and the tokenizer has none; give one in"
            " tokenizer_config.json or chat_template.jinja, or set rollout.multi_turn.format=plain"
        )
    render = make_renderer(tokenizer, schemas, arguments)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def between(messages: Sequence[dict[str, str]], last: int) -> list[int]:
        whole = render([*_ANYTHING, {"role": "assistant", "content": _SAID}, *messages], _PLACE)
        ids = encode(whole[whole.index(_SAID) + len(_SAID) :])
        return ids[1:] if ids and ids[0] == last else ids

    def opening(prompt: Messages, ids: list[int], text: str) -> list[int]:
        if isinstance(prompt, str):
            return ids + encode(text)
        if prompt[-1]["role"] == "user":  # many templates refuse two users in turn
            before, text = prompt[:-1], f"{prompt[-1]['content']}\n{text}"
        else:
            before = list(prompt)
        return encode(render([*before, {"role": "user", "content": text}], _PLACE))

    for role in roles:
        _check_prefix(render, role)
    if schemas:
        _check_named(render, schemas)
    return Chat(between, opening)


def plain(tokenizer: Any) -> Chat:
    """For models without a template: [[what a tool says]], and a line of its own for what others say."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def between(messages: Sequence[dict[str, str]], last: int) -> list[int]:
        texts = [f"[[{m['content']}]]" if m["role"] == "tool" else f"\n{m['content']}\n" for m in messages]
        return encode("".join(texts))

    return Chat(between, lambda prompt, ids, text: ids + encode(f"{text}\n"))


def _check_prefix(render: Any, role: str) -> None:
    """UserError where a longer conversation does not begin as the shorter one did, or loses what was said."""
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
            "rollout.multi_turn.enable=True: the tokenizer's chat template renders the beginning of a conversation"
            f" anew when messages of the role {role!r} follow, so that tokens cannot be put behind it; use a template"
            " that keeps it, or rollout.multi_turn.format=plain"
        )


def _check_named(render: Any, schemas: Sequence[Schema]) -> None:
    rendered = render(_ANYTHING, _PLACE)
    lacking = [name for name in (schema["function"]["name"] for schema in schemas) if name not in rendered]
    if lacking:
        raise UserError(
            f"the tokenizer's chat template does not tell the model of its tools: {', '.join(lacking)} is not in what"
            " it renders; use a template that reads `tools`, or rollout.multi_turn.format=plain"
        )
