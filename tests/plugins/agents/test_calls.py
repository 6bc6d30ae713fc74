"""Calls as models write them."""

import pytest

from jppo.plugins.agents.calls import Call, Fault, hermes, opened_thought, plain_calls, qwen3_coder, without_calls


def schema(name, required=(), **types):
    parameters = {"properties": {key: {"type": kind} for key, kind in types.items()}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = schema("add", ["a"], a="integer", b="number", note="string", more="array")
ASK = schema("ask", ["what"], what="string")
BOTH = [ADD, ASK]


@pytest.mark.parametrize("text", ["", "no call here", 'a < b << 3 and {"name": "ask"}', "tool_call"])
def test_text_without_calls_has_none(text):
    assert hermes(text, BOTH) == [] and qwen3_coder(text, BOTH) == []
    assert plain_calls(text.replace("<<", "<"), BOTH) == []


@pytest.mark.parametrize(
    "body,found",
    [
        ('{"name": "ask", "arguments": {"what": "é\\n</x>"}}', Call("ask", {"what": "é\n</x>"})),
        ('\n{"name":"add","arguments":"{\\"a\\": 1}"}\n', Call("add", {"a": 1})),
        ('{"name": "add", "arguments": "[1]"}', Fault("the arguments of add are not an object")),
        ('{"name": "add", "arguments": [1]}', Fault("the arguments of add are not a JSON object")),
        ('{"name": "add"}', Fault("add needs 'a'")),
        ('{"name": "add", "arguments": null}', Fault("add needs 'a'")),
        ('{"name": "add", "arguments": 0}', Fault("the arguments of add are not a JSON object")),
        ('{"name": 3}', Fault('a call is {"name": ..., "arguments": {...}}')),
        ("[]", Fault('a call is {"name": ..., "arguments": {...}}')),
        ('{"name": "sub", "arguments": {}}', Fault("there is no tool 'sub'; there are add, ask")),
    ],
)
def test_hermes(body, found):
    text = f"I call.<tool_call>{body}</tool_call>"
    assert hermes(text, BOTH) == [found]
    assert hermes(text + text, BOTH) == [found, found]


@pytest.mark.parametrize("body", ["{" * 5000, "[" * 100_000, '{"a": 1e999', "\x00", "NaN"])
def test_no_text_is_too_odd_for_hermes(body):
    [found] = hermes(f"<tool_call>{body}</tool_call>", BOTH)
    assert isinstance(found, Fault)
    assert isinstance(hermes(f"<tool_call>{body}", BOTH)[0], Fault)


THOUGHTS = [  # text before a call, text after it, whether it is a call
    ("<think>I could write ", ".</think> No.", False),
    ("<think>I could write ", ", or not", False),  # the thought has no end
    ("I could write ", ".</think> No.", False),  # its beginning is in the prompt
    ("<think>\n\n</think>\n\n", "", True),
    ("<think>Yes.</think> I call ", " <think>Was it right?</think>", True),
    ("<think>a</think> b <think>I could write ", "</think> c", False),
]


@pytest.mark.parametrize(("before", "after", "is_call"), THOUGHTS)
@pytest.mark.parametrize(
    ("parse", "format", "call"),
    [
        (hermes, "hermes", '<tool_call>{"name": "ask", "arguments": {"what": "x"}}</tool_call>'),
        (qwen3_coder, "qwen3_coder", "<tool_call><function=ask><parameter=what>x</parameter></function></tool_call>"),
        (plain_calls, "plain", "<<ask x>>"),
    ],
)
def test_a_call_in_a_thought_is_none(parse, format, call, before, after, is_call):
    text, one = before + call + after, Call("ask", {"what": "x"})
    assert parse(text, BOTH) == ([one] if is_call else [])
    assert without_calls(text, format) == (before + after if is_call else text).rstrip()
    assert parse(text + "</think>" + call, BOTH) == [one]  # a later one counts


def test_a_call_may_have_the_words_of_a_thought():
    call = '<tool_call>{"name": "ask", "arguments": {"what": "</think> or <think>?"}}</tool_call>'
    assert hermes(call + call, BOTH) == [Call("ask", {"what": "</think> or <think>?"})] * 2
    assert opened_thought("<|im_start|>assistant\n<think>\n") == "<think>"
    assert opened_thought("<think>\n\n</think>\n\n") == ""


def test_half_a_character_and_pythons_true():
    body = '{"name": "ask", "arguments": {"what": "\\ud83d"}}'
    assert isinstance(hermes(f"<tool_call>{body}</tool_call>", BOTH)[0], Fault)
    pair = body.replace("d83d", "d83d\\ude00")
    assert hermes(f"<tool_call>{pair}</tool_call>", BOTH) == [Call("ask", {"what": "\U0001f600"})]
    text = "<tool_call><function=sure><parameter=yes>\nTrue\n</parameter></function></tool_call>"
    assert qwen3_coder(text, [schema("sure", yes="boolean")]) == [Call("sure", {"yes": True})]


def test_qwen3_coder_takes_types_from_the_schema():
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n1.5\n</parameter>\n"
        "<parameter=note>\n12\nlines\n</parameter>\n<parameter=more>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    assert qwen3_coder(text, BOTH) == [Call("add", {"a": 12, "b": 1.5, "note": "12\nlines", "more": [1, 2]})]
    [found] = qwen3_coder(text.replace("\n12\n<", "\ntwelve\n<"), BOTH)
    assert isinstance(found, Fault) and found.why.startswith("a is not of its type")
    assert qwen3_coder(text.replace("</parameter>", "", 1), BOTH) == [Fault("the parameter 'a' has no </parameter>")]
    assert isinstance(qwen3_coder("<tool_call>add(1)</tool_call>", BOTH)[0], Fault)
    assert qwen3_coder("<tool_call><function=ask></function></tool_call>", BOTH) == [Fault("ask needs 'what'")]


OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
OTHER = {"$ref": "#/$defs/Other"}


@pytest.mark.parametrize(
    "parameter,text,value",
    [
        (OPTIONAL, "5", 5),
        (OPTIONAL, "null", None),
        (OPTIONAL, "None", None),  # as templates write it
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "True", True),
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, '["A"]', ["A"]),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", "5"),  # may be text
        ({"anyOf": [{}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": 3}, "5", "5"),
        ({"enum": ["5", "6"]}, "5", "5"),
        (OTHER, '{"a": [1]}', {"a": [1]}),
        (OTHER, "red", "red"),  # an enumeration
        ({"anyOf": [OTHER, {"type": "null"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "array"}, OTHER]}, "red", "red"),
    ],
)
def test_qwen3_coder_reads_the_types_of_alternatives(parameter, text, value):
    f = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": parameter}}}}
    call = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    assert qwen3_coder(call, [f]) == [Call("f", {"x": value})]


@pytest.mark.parametrize(
    "text,schemas,found",
    [
        ("<<1+1>>", [ASK], [Call("ask", {"what": "1+1"})]),
        ("<<ask 1 + 1>>", [ASK], [Call("ask", {"what": "1 + 1"})]),
        ("<<ask why>> or <<ask how>>", BOTH, [Call("ask", {"what": "why"}), Call("ask", {"what": "how"})]),
        ('<<add {"a": 1}>>', BOTH, [Call("add", {"a": 1})]),
        ('<<ask {"what": "{}"}>>', BOTH, [Call("ask", {"what": "{}"})]),
        ("<<add 1>>", BOTH, [Fault("the arguments of add are not an object")]),
        ("<<add>>", BOTH, [Fault("add needs 'a'")]),
        ("<<1+1>>", BOTH, [Fault("there is no tool '1+1'; there are add, ask")]),
        ("<<1+1", [ASK], [Fault("the call has no end")]),
        ("<<>>", [ASK], [Call("ask", {"what": ""})]),
    ],
)
def test_plain(text, schemas, found):
    assert plain_calls(text, schemas) == found


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
def test_non_finite_arguments_are_invalid_because_json_has_none(number):
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>'
    [found] = hermes(text, BOTH)
    assert isinstance(found, Fault) and f"{number} is not finite" in found.why
    text = f"<tool_call><function=add><parameter=a>{number}</parameter></function></tool_call>"
    assert isinstance(qwen3_coder(text, BOTH)[0], Fault)
    assert isinstance(plain_calls(f'<<add {{"a": {number}}}>>', BOTH)[0], Fault)


def test_a_schema_may_have_nulls_and_lists_of_types():
    empty = {"type": "function", "function": {"name": "f", "parameters": {"properties": None, "required": None}}}
    assert hermes('<tool_call>{"name": "f"}</tool_call>', [empty]) == [Call("f", {})]
    assert plain_calls("<<f>>", [empty]) == [Call("f", {})]
    text = "<tool_call><function=f><parameter=x>a</parameter></function></tool_call>"
    null = {"type": "function", "function": {"name": "f", "parameters": None}}
    assert hermes('<tool_call>{"name": "f", "arguments": null}</tool_call>', [null]) == [Call("f", {})]
    assert plain_calls("<<f>>", [null]) == [Call("f", {})] and qwen3_coder(text, [null]) == [Call("f", {"x": "a"})]
    assert (
        qwen3_coder(text, [empty]) == qwen3_coder(text, [schema("f", x=["string", "null"])]) == [Call("f", {"x": "a"})]
    )
