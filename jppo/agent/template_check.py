"""Checks by made-up conversations whether a chat template suits the conversations of a run. Pure.

A template may change earlier turns, which then begin new branches. It is refused if it hides tools or messages from
the policy, or writes calls in a format that the run's parser does not read.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jppo.agent.calls import Call, Found, Parser, Schema, opened_thought, without_calls
from jppo.settings import UserError

_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "asked-first"}]
SAID = "said-by-the-assistant"  # the text of a made-up turn, which no template has
_TEXT: dict[str, Any] = {"role": "assistant", "content": SAID}
_VALUES = {"string": "a b", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a turn of the policy and its answers are given to the template."""

    format: str  # of calls
    parsed: bool = False  # the template needs calls as fields of the turn's message
    answers: str = "tool"  # the role of answers to a turn without such fields, as to an invalid call

    def answered(
        self, said: dict[str, Any], thinks: str, found: Sequence[Found], replies: list[dict[str, str]], first: int
    ) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Returns a turn and the answers to what was found in it; the calls' ids count from `first`.

        `thinks` is the beginning of a thought at the end of the turn's prompt.
        """
        calls = [one for one in found if isinstance(one, Call)]
        if len(calls) < len(found) or len(found) != len(replies):
            return said, [reply | {"role": self.answers} for reply in replies]
        fields = call_fields(calls, first)
        text = without_calls(thinks + said["content"], self.format).removeprefix(thinks)
        answers = [reply | {"tool_call_id": one["id"]} for reply, one in zip(replies, fields, strict=True)]
        return said | {"content": text, "tool_calls": fields}, answers


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
            _require_shown(render, role, _TEXT, setting)
    if not schemas:
        return Form(name)
    _check_named(render, schemas, setting)
    parsed, counts = False, range(1, 1 + min(parallel, 2))
    for schema, count, text in itertools.product(schemas, counts, ("", SAID)) if parse else ():
        calls = [_example(schema)] * count
        fields = call_fields(calls)
        said = _TEXT | {"content": text, "tool_calls": fields}
        written, answers = _written(render, said), _answers(count, fields)
        if parse and parse(written, schemas) != calls:
            raise _unread(written, calls, f"{setting}={name!r}")
        _require_shown(render, "tool", said, setting, count)
        parsed |= render([*_ASKED, said, *answers]) != render([*_ASKED, _TEXT | {"content": written}, *answers])
    if not parsed:
        _require_shown(render, "tool", _TEXT, setting)
        return Form(name)
    with contextlib.suppress(UserError):  # such a template may refuse answers to a text
        if _shown(render, "tool", _TEXT):
            return Form(name, parsed)
    _require_shown(render, "user", _TEXT, setting)
    return Form(name, parsed, "user")


def changes(render: Callable[..., str], roles: Sequence[str]) -> list[str]:
    """Returns the turns of the policy that the template changes, each with the role of the messages that follow."""
    found, before = [], render(_ASKED)
    for role in roles:
        for kind, thought in (("", ""), (" with a thought", "<think>\nhm\n</think>\n\n")):
            text = thought.removeprefix(opened_thought(before)).lstrip() + SAID
            with contextlib.suppress(UserError):  # a template may refuse tools' answers to a text
                whole = render([*_ASKED, _TEXT | {"content": text}, *(m | {"role": role} for m in _answers(1))])
                if not whole.startswith(before + text):
                    found.append(f"a turn{kind} before the role {role!r}")
    return found


def _written(render: Callable[..., str], said: Mapping[str, Any]) -> str:
    """Returns the text of a turn without its head and end."""
    asked, whole, text = (render([*_ASKED, *turn], opened=False) for turn in ([], [said], [_TEXT]))
    head, _, end = text[_same(asked, text) :].partition(SAID)
    return whole[_same(asked, whole) :].removeprefix(head).removesuffix(end)


def _same(a: str, b: str) -> int:
    """Returns the length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _example(schema: Schema) -> Call:
    """Returns a call with the required arguments."""
    parameters: Mapping[str, Any] = schema["function"].get("parameters") or {}
    arguments = {}
    for name in parameters.get("required") or []:
        how = (parameters.get("properties") or {}).get(name)
        kind = how.get("type") if isinstance(how, Mapping) else None
        kinds = kind if isinstance(kind, list) else [kind]
        arguments[name] = next((_VALUES[one] for one in kinds if one in _VALUES), "a b")
    return Call(schema["function"]["name"], arguments)


def _answers(count: int, calls: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Returns tools' answers to calls, or to a text without them."""
    found: list[dict[str, Any]] = [
        {"role": "tool", "content": f"answer{i}of{count}", "name": "error"} for i in range(count)
    ]
    for answer, call in zip(found, calls, strict=False):
        answer |= {"name": call["function"]["name"], "tool_call_id": call["id"]}
    return found


def _shown(render: Callable[..., str], role: str, said: Mapping[str, Any], count: int = 1) -> bool:
    """Whether the messages of a role that answer a turn are in the rendering."""
    answers = [answer | {"role": role} for answer in _answers(count, said.get("tool_calls", []))]
    rendered = render([*_ASKED, said, *answers])
    return all(answer["content"] in rendered for answer in answers)


def _require_shown(
    render: Callable[..., str], role: str, said: Mapping[str, Any], setting: str, count: int = 1
) -> None:
    if not _shown(render, role, said, count):
        raise _hides(setting, role)


def _unread(written: str, calls: Sequence[Call], format: str) -> UserError:
    how = f"writes a call as {written.strip()!r:.150}" if calls[0].name in written else "leaves out calls of the policy"
    return UserError(
        f"the tokenizer's chat template {how}, and the run reads {format}; use a template with such calls, set the"
        " format of the template, or set rollout.history=sampled"
    )


def _hides(setting: str, role: str) -> UserError:
    return UserError(
        f"the tokenizer's chat template leaves out messages of the role {role!r} that answer the policy; use a"
        f" template that shows them, or {setting}=plain"
    )


def _check_named(render: Callable[..., str], schemas: Sequence[Schema], setting: str) -> None:
    rendered = render(_ASKED)
    lacking = [name for name in (schema["function"]["name"] for schema in schemas) if name not in rendered]
    if lacking:
        raise UserError(
            f"the tokenizer's chat template does not show the tools to the model: {', '.join(lacking)} is missing in"
            f" its output; use a template that reads `tools`, or {setting}=plain"
        )
