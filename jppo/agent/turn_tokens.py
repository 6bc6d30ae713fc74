"""The tokens that a turn of the policy answers: the conversation so far, as the chat template renders it.

Sampled tokens are never encoded again. If the rendering begins with the text of the earlier prompt and answer, its rest
is encoded and appended. Otherwise the template has changed an earlier turn, for example by removing its thoughts, and
the tokens of the whole rendering begin a new branch. With rollout.history=sampled all turns stay as they were sampled,
also where the template changes them.
"""

import dataclasses
import functools
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jppo.agent.calls import Parser, Schema
from jppo.agent.template_check import SAID, Form, changes, check_template
from jppo.data.prompts import Messages
from jppo.data.rows import Row
from jppo.data.template import make_renderer
from jppo.data.tokenizer import spell, tokenize
from jppo.settings import UserError

_PLACE = Row("rollout.multi_turn", 1, {}, "made-up conversation")
# of templates and tokenizers, in a conversation that cannot be rendered or encoded
UNREADABLE = (UserError, UnicodeError, TypeError, ValueError, LookupError, RecursionError)

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Spoken:
    """A turn of the policy in its conversation."""

    asked: Sequence[Message]  # the messages before it
    said: Message  # the turn as a message, with its calls as fields
    text: str  # of the turn, with its calls
    ids: list[int]  # up to its end
    sampled: int  # number of its tokens


Follow = Callable[[Spoken, Sequence[Message]], tuple[list[int], bool]]
Render = Callable[[Sequence[Message]], str]  # with the start of the next turn
Encode = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True)
class Chat:
    """Functions that continue a conversation in tokens."""

    # (a turn, the messages after it) -> the ids of both with the start of the next turn, and whether they begin with
    # the ids up to the turn
    follow: Follow
    # (messages or text of a prompt, its ids, a first observation) -> the messages and ids of both
    opening: Callable[[Messages, list[int], str], tuple[list[Message], list[int]]]
    # messages -> the ids of all of them with the start of the next turn
    whole: Callable[[Sequence[Message]], list[int]]
    # (text, whether it begins a conversation) -> its ids
    text: Callable[[str, bool], list[int]]
    form: Form


def templated(
    tokenizer: Any,
    schemas: Sequence[Schema],
    *,
    roles: Sequence[str],
    name: str,
    parse: Parser,
    arguments: Mapping[str, Any] = types.MappingProxyType({}),
    setting: str = "rollout.multi_turn.format",
    history: str = "template",
    parallel: int = 1,
) -> Chat:
    """Builds a Chat from the chat template, after checking that it shows tools, calls and messages of these roles.

    `setting` is where the run has `name`, the format of calls that `parse` reads; `parallel` of them are in a turn.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{setting}={name!r} needs a chat template, and the tokenizer has none; give one in"
            f" tokenizer_config.json or chat_template.jinja, or set {setting}=plain"
        )
    bare, encode = make_renderer(tokenizer, schemas, arguments), functools.partial(tokenize, tokenizer)

    def render(messages: Sequence[Message], opened: bool = True) -> str:
        text: str = bare(messages, _PLACE, opened=opened)
        return text

    kept = history == "sampled"
    read = None if kept else parse
    form = check_template(render, schemas, roles=roles, name=name, parse=read, setting=setting, parallel=parallel)

    def opening(prompt: Messages, ids: list[int], text: str) -> tuple[list[Message], list[int]]:
        before = as_messages(prompt)
        if before[-1]["role"] == "user":  # many templates refuse two consecutive user turns
            before, text = before[:-1], f"{before[-1]['content']}\n{text}"
        messages: list[Message] = [*before, {"role": "user", "content": text}]
        return messages, encode(render(messages))

    @functools.lru_cache(maxsize=64)  # the samples of a prompt begin with the same messages
    def begun(messages: str) -> list[int]:
        return encode(render(json.loads(messages)))

    if found := changes(render, roles):
        how = "such turns stay as they were sampled" if kept else "the next turn then begins a new trajectory"
        said = f"the chat template changes {', '.join(found)}; {how} (rollout.history={history})"
        print(f"conversations: {said}", file=sys.stderr, flush=True)
    follow = _follow_sampled(render, encode) if kept else _follow_template(tokenizer, render, encode, form.parsed)
    return Chat(follow, opening, lambda messages: [*begun(json.dumps(messages))], encode, form)


def _follow_template(tokenizer: Any, render: Render, encode: Encode, parsed: bool) -> Follow:
    """Makes `Chat.follow`: the template's rendering, which begins a new branch where it changes an earlier turn.

    `parsed`: the template needs calls as fields of the turn (`Form.parsed`); otherwise its raw text is tried first.
    """

    def after(last: int, text: str) -> list[int]:
        """Encodes a text after a token, which a tokenizer may need to see."""
        ids = encode(spell(tokenizer, [last]) + text)
        return ids[1:] if ids and ids[0] == last else encode(text)

    def follow(turn: Spoken, new: Sequence[Message]) -> tuple[list[int], bool]:
        before = render(turn.asked) + spell(tokenizer, turn.ids[-turn.sampled :])
        raw = {"role": "assistant", "content": turn.text}
        for said in (turn.said,) if parsed else (raw, turn.said):
            whole = render([*turn.asked, said, *new])
            if whole.startswith(before):
                return turn.ids + after(turn.ids[-1], whole[len(before) :]), True
        return encode(whole), False

    return follow


def _follow_sampled(render: Render, encode: Encode) -> Follow:
    """Makes `Chat.follow`: the turns as they were sampled, then the new messages as the template renders them."""

    def follow(turn: Spoken, new: Sequence[Message]) -> tuple[list[int], bool]:
        whole = render([{"role": "user", "content": "anything"}, {"role": "assistant", "content": SAID}, *new])
        ids = encode(whole[whole.index(SAID) + len(SAID) :])
        return turn.ids + (ids[1:] if ids and ids[0] == turn.ids[-1] else ids), True

    return follow


def as_messages(prompt: Messages) -> list[dict[str, str]]:
    """Returns a prompt's messages, copied; a text is a user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]


def plain(tokenizer: Any) -> Chat:
    """Builds a Chat for models without a template: [[a tool's answer]], and other messages on their own lines."""
    encode = functools.partial(tokenize, tokenizer)

    def written(message: Message) -> str:
        content: str = message["content"]
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", [])]
            return content + "".join(f"<<{c['name']} {json.dumps(c['arguments'])}>>" for c in calls)
        return f"[[{content}]]" if message["role"] == "tool" else f"\n{content}\n"

    def follow(turn: Spoken, new: Sequence[Message]) -> tuple[list[int], bool]:
        return turn.ids + encode("".join(map(written, new))), True

    def opening(prompt: Messages, ids: list[int], text: str) -> tuple[list[Message], list[int]]:
        return [*as_messages(prompt), {"role": "user", "content": text}], ids + encode(f"{text}\n")

    def whole(messages: Sequence[Message]) -> list[int]:
        return encode(messages[0]["content"] + "".join(map(written, messages[1:])), True)

    return Chat(follow, opening, whole, encode, Form("plain"))
