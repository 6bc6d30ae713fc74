"""The tokens that a turn of the policy answers: the conversation so far, as the chat template renders it.

Sampled tokens are never encoded again. If the rendering begins with the text of the earlier prompt and answer, its rest
is encoded and appended. Otherwise the template has changed an earlier turn, for example by removing its thoughts, and
the tokens of the whole rendering begin a new branch. With rollout.history=sampled all turns stay as they were sampled,
also where the template changes them.

`check_template` tries made-up conversations first: a template is refused if it hides tools or messages from the
policy, or writes calls in a format that the run's parser does not read.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jppo.data.prompts import Messages
from jppo.data.rows import Row
from jppo.data.tokenizer import Renderer, spell, tokenize
from jppo.errors import UserError
from jppo.plugins.agents.calls import Call, ParsedCall, Parser, Schema, opened_thought, without_calls

_PROMPT: list[dict[str, Any]] = [{"role": "user", "content": "asked-first"}]
SAID = "said-by-the-assistant"  # the text of a made-up turn, which no template has
_TURN: dict[str, Any] = {"role": "assistant", "content": SAID}
_VALUES = {"string": "a b", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a turn of the policy and its answers are given to the template."""

    format: str  # of calls
    parsed: bool = False  # the template needs calls as fields of the turn's message
    answers: str = "tool"  # the role of answers to a turn without such fields, as to an invalid call

    def with_answers(
        self, turn: dict[str, Any], thought: str, calls: Sequence[ParsedCall], replies: list[dict[str, str]], first: int
    ) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Returns a turn and the answers to its calls, whose ids count from `first`.

        `thought` is the beginning of a thought at the end of the turn's prompt.
        """
        valid = [call for call in calls if isinstance(call, Call)]
        if len(valid) < len(calls) or len(calls) != len(replies):
            return turn, [reply | {"role": self.answers} for reply in replies]
        fields = call_fields(valid, first)
        text = without_calls(thought + turn["content"], self.format).removeprefix(thought)
        answers = [reply | {"tool_call_id": call["id"]} for reply, call in zip(replies, fields, strict=True)]
        return turn | {"content": text, "tool_calls": fields}, answers


def call_fields(calls: Sequence[Call], first: int = 0) -> list[dict[str, Any]]:
    """Returns calls as `tool_calls` of a message, in OpenAI's form; ids count from `first`."""
    return [
        {"id": f"call{first + i:05d}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for i, c in enumerate(calls)
    ]


def check_template(
    render: Callable[..., str],
    schemas: Sequence[Schema],
    *,
    roles: Sequence[str],
    name: str,
    parse: Parser | None,
    setting: str,
    parallel: int,
) -> Form:
    """Returns the form of messages that the template shows in full; UserError if there is none.

    Without `parse` calls stay in the text.
    """
    for role in roles:
        if role != "tool":
            _require_shown(render, role, _TURN, setting)
    if not schemas:
        return Form(name)
    _require_tool_names(render, schemas, setting)
    parsed, counts = False, range(1, 1 + min(parallel, 2))
    for schema, count, text in itertools.product(schemas, counts, ("", SAID)) if parse else ():
        calls = [_example_call(schema)] * count
        fields = call_fields(calls)
        turn = _TURN | {"content": text, "tool_calls": fields}
        call_text, answers = _turn_text(render, turn), _answers(count, fields)
        if parse and parse(call_text, schemas) != calls:
            raise _unread_error(call_text, calls, f"{setting}={name!r}")
        _require_shown(render, "tool", turn, setting, count)
        parsed |= render([*_PROMPT, turn, *answers]) != render([*_PROMPT, _TURN | {"content": call_text}, *answers])
    if not parsed:
        _require_shown(render, "tool", _TURN, setting)
        return Form(name)
    with contextlib.suppress(UserError):  # such a template may refuse answers to a text
        if _shows(render, "tool", _TURN):
            return Form(name, parsed)
    _require_shown(render, "user", _TURN, setting)
    return Form(name, parsed, "user")


def changed_turns(render: Callable[..., str], roles: Sequence[str]) -> list[str]:
    """Returns the turns of the policy that the template changes, each with the role of the messages that follow."""
    changed, prompt_text = [], render(_PROMPT)
    for role in roles:
        for suffix, thought in (("", ""), (" with a thought", "<think>\nhm\n</think>\n\n")):
            text = thought.removeprefix(opened_thought(prompt_text)).lstrip() + SAID
            with contextlib.suppress(UserError):  # a template may refuse tools' answers to a text
                rendering = render([*_PROMPT, _TURN | {"content": text}, *(m | {"role": role} for m in _answers(1))])
                if not rendering.startswith(prompt_text + text):
                    changed.append(f"a turn{suffix} before the role {role!r}")
    return changed


def _turn_text(render: Callable[..., str], turn: Mapping[str, Any]) -> str:
    """Returns the text of a turn without its head and end."""
    prompt_text, rendering, text = (render([*_PROMPT, *turns], opened=False) for turns in ([], [turn], [_TURN]))
    head, _, end = text[_common_length(prompt_text, text) :].partition(SAID)
    return rendering[_common_length(prompt_text, rendering) :].removeprefix(head).removesuffix(end)


def _common_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _example_call(schema: Schema) -> Call:
    """Returns a call with the required arguments."""
    parameters: Mapping[str, Any] = schema["function"].get("parameters") or {}
    arguments = {}
    for name in parameters.get("required") or []:
        parameter = (parameters.get("properties") or {}).get(name)
        kind = parameter.get("type") if isinstance(parameter, Mapping) else None
        kinds = kind if isinstance(kind, list) else [kind]
        arguments[name] = next((_VALUES[name_of_type] for name_of_type in kinds if name_of_type in _VALUES), "a b")
    return Call(schema["function"]["name"], arguments)


def _answers(count: int, calls: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Returns tools' answers to calls, or to a text without them."""
    answers: list[dict[str, Any]] = [
        {"role": "tool", "content": f"answer{i}of{count}", "name": "error"} for i in range(count)
    ]
    for answer, call in zip(answers, calls, strict=False):
        answer |= {"name": call["function"]["name"], "tool_call_id": call["id"]}
    return answers


def _shows(render: Callable[..., str], role: str, turn: Mapping[str, Any], count: int = 1) -> bool:
    """Whether the messages of a role that answer a turn are in the rendering."""
    answers = [answer | {"role": role} for answer in _answers(count, turn.get("tool_calls", []))]
    rendered = render([*_PROMPT, turn, *answers])
    return all(answer["content"] in rendered for answer in answers)


def _require_shown(
    render: Callable[..., str], role: str, turn: Mapping[str, Any], setting: str, count: int = 1
) -> None:
    if not _shows(render, role, turn, count):
        raise UserError(
            f"the tokenizer's chat template leaves out messages of the role {role!r} that answer the policy; use a"
            f" template that shows them, or {setting}=plain"
        )


def _unread_error(written: str, calls: Sequence[Call], format: str) -> UserError:
    fault = (
        f"writes a call as {written.strip()!r:.150}" if calls[0].name in written else "leaves out calls of the policy"
    )
    return UserError(
        f"the tokenizer's chat template {fault}, and the run reads {format}; use a template with such calls, set the"
        " format of the template, or set rollout.history=sampled"
    )


def _require_tool_names(render: Callable[..., str], schemas: Sequence[Schema], setting: str) -> None:
    """Raises UserError unless the template shows the names of all tools."""
    rendered = render(_PROMPT)
    if missing := [name for schema in schemas if (name := schema["function"]["name"]) not in rendered]:
        raise UserError(
            f"the tokenizer's chat template does not show the tools to the model: {', '.join(missing)} is missing in"
            f" its output; use a template that reads `tools`, or {setting}=plain"
        )


_EXAMPLE_ROW = Row("rollout.multi_turn", 1, {}, "made-up conversation")
# of templates and tokenizers, in a conversation that cannot be rendered or encoded
UNREADABLE = (UserError, UnicodeError, TypeError, ValueError, LookupError, RecursionError)

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy in its conversation."""

    earlier: Sequence[Message]  # the messages before it
    message: Message  # the turn as a message, with its calls as fields
    text: str  # of the turn, with its calls
    ids: list[int]  # up to its end
    sampled: int  # number of its tokens


Follow = Callable[[SampledTurn, Sequence[Message]], tuple[list[int], bool]]
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


def template_chat(
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
    renderer, encode = Renderer(tokenizer, schemas, arguments), functools.partial(tokenize, tokenizer)

    def render(messages: Sequence[Message], opened: bool = True) -> str:
        text: str = renderer(messages, _EXAMPLE_ROW, opened=opened)
        return text

    as_sampled = history == "sampled"
    parser = None if as_sampled else parse
    form = check_template(render, schemas, roles=roles, name=name, parse=parser, setting=setting, parallel=parallel)

    def opening(prompt: Messages, ids: list[int], text: str) -> tuple[list[Message], list[int]]:
        before = as_messages(prompt)
        if before[-1]["role"] == "user":  # many templates refuse two consecutive user turns
            before, text = before[:-1], f"{before[-1]['content']}\n{text}"
        messages: list[Message] = [*before, {"role": "user", "content": text}]
        return messages, encode(render(messages))

    @functools.lru_cache(maxsize=64)  # the samples of a prompt begin with the same messages
    def conversation_ids(messages: str) -> list[int]:
        return encode(render(json.loads(messages)))

    if changed := changed_turns(render, roles):
        effect = "such turns stay as they were sampled" if as_sampled else "the next turn then begins a new trajectory"
        notice = f"the chat template changes {', '.join(changed)}; {effect} (rollout.history={history})"
        print(f"conversations: {notice}", file=sys.stderr, flush=True)
    follow = _follow_sampled(render, encode) if as_sampled else _follow_template(tokenizer, render, encode, form.parsed)
    return Chat(follow, opening, lambda messages: [*conversation_ids(json.dumps(messages))], encode, form)


def _follow_template(tokenizer: Any, render: Render, encode: Encode, parsed: bool) -> Follow:
    """Makes `Chat.follow`: the template's rendering, which begins a new branch where it changes an earlier turn.

    `parsed`: the template needs calls as fields of the turn (`Form.parsed`); otherwise its raw text is tried first.
    """

    def encode_after(last_token: int, text: str) -> list[int]:
        """Encodes a text after a token, which a tokenizer may need to see."""
        ids = encode(spell(tokenizer, [last_token]) + text)
        return ids[1:] if ids and ids[0] == last_token else encode(text)

    def follow(turn: SampledTurn, replies: Sequence[Message]) -> tuple[list[int], bool]:
        rendered_so_far = render(turn.earlier) + spell(tokenizer, turn.ids[-turn.sampled :])
        raw = {"role": "assistant", "content": turn.text}
        for message in (turn.message,) if parsed else (raw, turn.message):
            rendering = render([*turn.earlier, message, *replies])
            if rendering.startswith(rendered_so_far):
                return turn.ids + encode_after(turn.ids[-1], rendering[len(rendered_so_far) :]), True
        return encode(rendering), False

    return follow


def _follow_sampled(render: Render, encode: Encode) -> Follow:
    """Makes `Chat.follow`: the turns as they were sampled, then the new messages as the template renders them."""

    def follow(turn: SampledTurn, replies: Sequence[Message]) -> tuple[list[int], bool]:
        rendering = render([{"role": "user", "content": "anything"}, {"role": "assistant", "content": SAID}, *replies])
        ids = encode(rendering[rendering.index(SAID) + len(SAID) :])
        return turn.ids + (ids[1:] if ids and ids[0] == turn.ids[-1] else ids), True

    return follow


def as_messages(prompt: Messages) -> list[dict[str, str]]:
    """Returns a prompt's messages, copied; a text is a user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]


def plain_chat(tokenizer: Any) -> Chat:
    """Builds a Chat for models without a template: [[a tool's answer]], and other messages on their own lines."""
    encode = functools.partial(tokenize, tokenizer)

    def message_text(message: Message) -> str:
        content: str = message["content"]
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", [])]
            return content + "".join(f"<<{c['name']} {json.dumps(c['arguments'])}>>" for c in calls)
        return f"[[{content}]]" if message["role"] == "tool" else f"\n{content}\n"

    def follow(turn: SampledTurn, replies: Sequence[Message]) -> tuple[list[int], bool]:
        return turn.ids + encode("".join(map(message_text, replies))), True

    def opening(prompt: Messages, ids: list[int], text: str) -> tuple[list[Message], list[int]]:
        return [*as_messages(prompt), {"role": "user", "content": text}], ids + encode(f"{text}\n")

    def whole(messages: Sequence[Message]) -> list[int]:
        return encode(messages[0]["content"] + "".join(map(message_text, messages[1:])), True)

    return Chat(follow, opening, whole, encode, Form("plain"))
