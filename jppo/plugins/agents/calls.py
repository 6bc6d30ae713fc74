"""Parsers of tool calls in the text of a turn, one pure function per format.

An invalid call becomes a `Fault`, whose message is the answer to the model. Text between <think> and </think>, or up
to a </think> without its beginning, is no call.

    hermes, openai, qwen3
                    <tool_call>{"name": "NAME", "arguments": {"KEY": VALUE}}</tool_call>
    qwen3_coder     <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    plain           <<NAME ARGUMENTS>>, for models without a chat template
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}

OPENING = 8  # tokens at the end of a prompt that have a <think> there
_THOUGHTS = r"<think>.*?(?:</think>|\Z)|(?P<close></think>)|"  # a call may contain these words, so the first one counts
_TAGGED = re.compile(_THOUGHTS + r"<tool_call>(?P<body>.*?)(?P<end></tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_ANGLED = re.compile(_THOUGHTS + r"<<(?P<body>.*?)(?P<end>>>|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool's name and arguments."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fault:
    """An invalid call, with the reason."""

    why: str


ParsedCall = Call | Fault
Parser = Callable[[str, Sequence[Schema]], list[ParsedCall]]


def hermes(text: str, schemas: Sequence[Schema]) -> list[ParsedCall]:
    """Parses calls as JSON between tags, in order."""

    def parse(body: str) -> ParsedCall:
        try:
            call = _parse_json(body)
        except (ValueError, RecursionError) as e:
            return Fault(f"the call is not valid JSON: {e}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return Fault('a call is {"name": ..., "arguments": {...}}')
        arguments = {} if call.get("arguments") is None else call["arguments"]
        if isinstance(arguments, str):  # OpenAI's form: JSON within JSON
            return _require_known(_call_from_json(call["name"], arguments), schemas)
        if not isinstance(arguments, dict):
            return Fault(f"the arguments of {call['name']} are not a JSON object")
        return _require_known(Call(call["name"], arguments), schemas)

    return _parse_tagged(text, parse)


def qwen3_coder(text: str, schemas: Sequence[Schema]) -> list[ParsedCall]:
    """Parses calls as tags for the function and each parameter; the schema gives the types of values."""

    def parse(body: str) -> ParsedCall:
        match = _FUNCTION.fullmatch(body)
        if match is None:
            return Fault("a call is <function=NAME><parameter=KEY>VALUE</parameter></function>")
        name = match[1].strip()
        parameters = _parameter_schemas(name, schemas)
        arguments: dict[str, Any] = {}
        for parameter_text in match[2].split("<parameter=")[1:]:
            key, _, rest = parameter_text.partition(">")
            value, end, _ = rest.partition("</parameter>")
            if not end:
                return Fault(f"the parameter {key.strip()[:40]!r} has no </parameter>")
            try:
                stripped = value.removeprefix("\n").removesuffix("\n")
                arguments[key.strip()] = _convert(stripped, _kinds(parameters.get(key.strip())))
            except (ValueError, RecursionError) as e:
                return Fault(f"{key.strip()} is not of its type: {e}")
        return _require_known(Call(name, arguments), schemas)

    return _parse_tagged(text, parse)


def plain_calls(text: str, schemas: Sequence[Schema]) -> list[ParsedCall]:
    """Parses calls between angle brackets. A single tool needs no name, a single parameter no JSON."""
    names = [schema["function"]["name"] for schema in schemas]

    def parse(body: str) -> ParsedCall:
        name, _, rest = body.strip().partition(" ")
        if name not in names:
            if len(names) != 1:
                return Fault(f"there is no tool {name!r}; there are {', '.join(names)}")
            name, rest = names[0], body
        rest, keys = rest.strip(), list(_parameter_schemas(name, schemas))
        if len(keys) == 1 and not rest.startswith("{"):
            return Call(name, {keys[0]: rest})
        return _require_known(_call_from_json(name, rest or "{}"), schemas)

    return [parse(call["body"]) if call["end"] else Fault("the call has no end") for call in _find_calls(_ANGLED, text)]


def opened_thought(prompt: str) -> str:
    """Returns the <think> at the end of a prompt, which belongs to the text of the turn after it, or ''."""
    return "<think>" if prompt.rstrip().endswith("<think>") else ""


def without_calls(text: str, format: str) -> str:
    """Returns the text without its calls and the spaces after it."""
    for call in reversed(_find_calls(_ANGLED if format == "plain" else _TAGGED, text)):
        text = text[: call.start()] + text[call.end() :]
    return text.rstrip()


def _find_calls(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Returns the calls in a text, without those in thoughts."""
    calls: list[re.Match[str]] = []
    for match in pattern.finditer(text):
        if match["close"]:
            calls = []
        elif match["end"] is not None:
            calls.append(match)
    return calls


def _parse_tagged(text: str, parse: Callable[[str], ParsedCall]) -> list[ParsedCall]:
    """Parses the text between the tags of each call with `parse`."""
    calls = _find_calls(_TAGGED, text)
    return [parse(call["body"]) if call["end"] else Fault("the call has no </tool_call>") for call in calls]


def _call_from_json(name: str, text: str) -> ParsedCall:
    try:
        arguments = _parse_json(text)
    except (ValueError, RecursionError) as e:
        return Fault(f"the arguments of {name} are not valid JSON: {e}")
    return Call(name, arguments) if isinstance(arguments, dict) else Fault(f"the arguments of {name} are not an object")


def _require_known(call: ParsedCall, schemas: Sequence[Schema]) -> ParsedCall:
    """Returns the call if the tool exists and has its required arguments, otherwise a Fault."""
    if isinstance(call, Fault):
        return call
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    if call.name not in functions:
        return Fault(f"there is no tool {call.name!r}; there are {', '.join(functions)}")
    required = (functions[call.name].get("parameters") or {}).get("required") or []
    missing = [key for key in required if key not in call.arguments]
    return Fault(f"{call.name} needs {', '.join(map(repr, missing))}") if missing else call


def _parameter_schemas(name: str, schemas: Sequence[Schema]) -> Mapping[str, Any]:
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    return (functions.get(name, {}).get("parameters") or {}).get("properties") or {}


_CONSTANTS = {"true": "true", "false": "false", "none": "null"}  # templates write Python's True and None


def _kinds(schema: Any) -> list[Any]:
    """Returns the types in a parameter's schema and its alternatives, '$ref' among them; 'string' if there is none."""
    fields = schema if isinstance(schema, Mapping) else {}
    kinds: list[Any] = ["$ref"] if "$ref" in fields else []  # a definition elsewhere, which is not looked up
    for key in ("type", "anyOf", "oneOf"):
        entry = fields.get(key) or []
        for kind in entry if isinstance(entry, list) else [entry]:
            kinds += [kind] if key == "type" else _kinds(kind)
    return kinds or ["string"]


def _convert(value: str, kinds: list[Any]) -> Any:
    """Parses a parameter's text by its types; it stays text if one of them is."""
    if "string" in kinds:
        return value
    try:
        return _parse_json(_CONSTANTS.get(value.strip().lower(), value.strip()))
    except (ValueError, RecursionError):
        if "$ref" in kinds:  # perhaps to an enumeration of texts
            return value
        raise


def _parse_json(text: str) -> Any:
    """Parses JSON without NaN, infinities and half characters, which other parsers of the call refuse."""
    parsed = json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
    json.dumps(parsed, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError
    return parsed


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


PARSERS: dict[str, Parser] = {
    **dict.fromkeys(("hermes", "openai", "qwen3"), hermes),
    "qwen3_coder": qwen3_coder,
    "plain": plain_calls,
}
