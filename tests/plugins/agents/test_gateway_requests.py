"""Careless requests to the gateway: they are honoured or refused with a line, and never end the run."""

import asyncio
import functools
import json

import pytest

from jppo.errors import BadRequest
from jppo.plugins.agents.gateway.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from jppo.plugins.agents.gateway.episode import Episode
from jppo.plugins.agents.gateway.process import ProgramEnd
from jppo.rollout.protocol import greedy
from tests.plugins.agents.test_gateway import CALCULATOR, RULES, language

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>{"name": "calculator", "arguments": %s}</tool_call>'


def read(api, body):
    """Parses a body with the API's required fields."""
    body = {"messages": [USER], "prompt": "hi", "input": "hi"} | body
    if api is RESPONSES:
        del body["prompt"]
        return api.read(body, {})
    return api.read(body)


def episode(hall, *said):
    """An episode, and its policy that gives these answers."""
    ask = hall.policy(*said)
    return Episode(language(hall), RULES, functools.partial(ask, near=0), hall.prompt(), greedy(400), 0), ask


def answered(one, body, api=CHAT, **how):
    """The response to a request."""
    request = read(api, body)
    return json.loads(json.dumps(api.write(asyncio.run(one.answer(request, **how)), request)))


@pytest.mark.parametrize(
    "api,body,allowed",
    [
        (CHAT, {"frequency_penalty": 0.5}, {"frequency_penalty": 0.0}),
        (CHAT, {"logit_bias": {"5": 100}}, {"logit_bias": {}}),
        (CHAT, {"functions": [{"name": "f"}]}, {"functions": []}),
        (CHAT, {"modalities": ["text", "audio"]}, {"modalities": ["text"]}),
        (CHAT, {"continue_final_message": True}, {"add_generation_prompt": True}),
        (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}, USER]}, {}),
        (CHAT, {"function_call": {"name": "f"}}, {"function_call": "none"}),
        (CHAT, {"echo": True}, {"echo": False}),
        (CHAT, {"regex": "[0-9]"}, {"regex": None}),
        (CHAT, {"json_schema": "{}"}, {}),
        (CHAT, {"structural_tag": {}}, {}),
        (CHAT, {"allowed_token_ids": [5]}, {"length_penalty": 2.0}),  # of a beam search
        (COMPLETIONS, {"guided_grammar": "root ::= x"}, {"guided_grammar": None}),
        (COMPLETIONS, {"ebnf": "root ::= x"}, {}),
        (COMPLETIONS, {"grammar": "root ::= x"}, {}),
        (COMPLETIONS, {"bad_words": ["a"]}, {"bad_words": []}),
        (COMPLETIONS, {"logits_processors": ["a.B"]}, {"logits_processors": []}),
        (RESPONSES, {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 0}),
        (COMPLETIONS, {"best_of": 3, "n": 2}, {"best_of": 2, "n": 2}),
        (COMPLETIONS, {"repetition_penalty": 1.1}, {"repetition_penalty": 1.0}),
        (COMPLETIONS, {"ignore_eos": True}, {"min_tokens": 0}),
        (RESPONSES, {"conversation": "conv_1"}, {"conversation": None}),
        (RESPONSES, {"background": True}, {"background": False}),
        (RESPONSES, {"top_logprobs": 1}, {"top_logprobs": 0}),
        (RESPONSES, {"presence_penalty": 1}, {"store": False, "temperature": 0.5}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, {"output_config": {"effort": "low"}}),
        (MESSAGES, {"mcp_servers": [{"name": "x"}]}, {"thinking": {"type": "enabled"}, "top_k": 5}),
    ],
)
def test_a_parameter_that_would_change_the_samples_is_refused(api, body, allowed):
    with pytest.raises(BadRequest, match="is not supported for agent programs; leave it out"):
        read(api, body)
    assert read(api, allowed).n >= 1


def of_schema(**parameters):
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    "api,body,said",
    [
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool has type='web_search_"),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "none"}, "calls tools of type='function'"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "a tool has type='custom'"),
        (CHAT, of_schema(required=5), "required=5 must be of type list"),
        (CHAT, of_schema(required=[{}]), "must be names"),
        (CHAT, of_schema(properties=["x"]), "must be of type dict"),
        (CHAT, {"stop": ["\ud800"]}, "has half a character"),
        (CHAT, {"n": 10**400}, "must be at least 1 and at most 128"),
    ],
)
def test_malformed_tools_and_numbers_are_refused(api, body, said):
    with pytest.raises(BadRequest) as e:
        read(api, body)
    assert said in str(e.value) and len(str(e.value)) < 300


def test_requests_that_no_engine_can_answer_are_refused(hermes):
    """They would end the run as errors of the engine, or in the gateway."""
    one, ask = episode(hermes)
    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    calls = [{"function": {"name": "f", "arguments": deep}}]
    for api, body, why in (
        (COMPLETIONS, {"prompt": ""}, "the prompt has no tokens"),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": calls}, USER]}, "cannot be rendered"),
        (CHAT, of_schema(properties=deep), "cannot be rendered"),
        (CHAT, {"tools": [{"function": {"name": 'a"\nb'}}]}, "does not show the tools"),
    ):
        with pytest.raises(BadRequest, match=why) as e:
            answered(one, body, api)
        assert "\n" not in str(e.value)
    assert ask.asked == []


def test_long_tool_calls_and_schemas_are_too_long_before_they_are_tokenised(hermes):
    one, _ = episode(hermes, "yes")
    answered(one, {})
    long = "x" * 2 * 10**6
    calls = [{"function": {"name": "f", "arguments": {"a": long}}}]
    for body in ({"messages": [USER, {"role": "assistant", "tool_calls": calls}, USER]}, of_schema(description=long)):
        with pytest.raises(BadRequest, match="characters, more than fit") as e:
            answered(one, body)
        assert e.value.code == "context_length_exceeded"
    t = one.trajectory(ProgramEnd(1, "", "too long"))
    assert t.finish == "length" and t.exchange.fault is None


def test_several_calls_are_text_for_an_agent_that_takes_one(hermes):
    two = CALL % '{"x": 1}' + CALL % '{"x": 2}'
    tools = {"tools": [CALCULATOR]}
    of_anthropic = {
        "tools": [{"name": "calculator"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    one, _ = episode(hermes, two, two, two, CALL % "{}")
    assert len(answered(one, tools)["choices"][0]["message"]["tool_calls"]) == 2
    said = answered(one, tools | {"parallel_tool_calls": False})["choices"][0]
    assert said["message"]["content"] == two and said["finish_reason"] == "stop" and "tool_calls" not in said["message"]
    assert answered(one, of_anthropic, MESSAGES)["content"] == [{"type": "text", "text": two}]
    assert answered(one, tools | {"parallel_tool_calls": False})["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "said,given",
    [
        ('{"x": 1.0, "y": [1e3], "z": 0.5}', '{"z": 0.5, "y": [1000], "x": 1}'),  # as JavaScript writes them
        ("{}", ""),
    ],
)
def test_a_call_is_recognised_as_clients_repeat_it(hermes, said, given):
    one, ask = episode(hermes, f"See. {CALL % said}", "1")
    (call,) = answered(one, {"tools": [CALCULATOR]})["choices"][0]["message"]["tool_calls"]
    repeated = {"id": "other", "function": {"arguments": given, "name": call["function"]["name"]}}
    history = [USER, {"tool_calls": [repeated], "content": [{"type": "text", "text": "See.\n"}], "role": "assistant"}]
    answered(one, {"tools": [CALCULATOR], "messages": [*history, {"role": "tool", "content": "1"}]})
    assert ask.asked[1][: len(ask.asked[0]) + len(ask.answers[0])] == ask.asked[0] + ask.answers[0]
    assert one.trajectory(ProgramEnd(0, '{"reward": 1}', "")).branches == ()


@pytest.mark.parametrize(
    "sampled,added,inserted",
    [
        ("1+1\nSee", "\nSee 2", " 2"),  # what the agent adds begins with the stop text, which the policy sampled
        ("1+1\nSee!", "\nSee! 2", " 2"),  # with the rest of the token that completed it
        ("1+1\nSee!", "\nSee 2", " 2"),
        ("1+1\nSee", "\nNo", "\nNo"),
    ],
)
def test_a_stop_text_that_the_agent_adds_again_is_once_in_the_tokens(hermes, sampled, added, inserted):
    ask = hermes.policy(hermes.encode(sampled), "yes")
    one = Episode(language(hermes), RULES, functools.partial(ask, near=0), hermes.prompt(), greedy(400), 0)
    text = "How?" + answered(one, {"prompt": "How?", "stop": ["\nSee"]}, COMPLETIONS)["choices"][0]["text"]
    assert text == "How?1+1"
    answered(one, {"prompt": text + added}, COMPLETIONS)
    assert ask.asked[1] == ask.asked[0] + ask.answers[0] + hermes.encode(inserted)


def test_a_text_is_asked_anew_after_an_empty_answer(hermes):
    one, ask = episode(hermes, "", "yes", "no")
    text = answered(one, {"prompt": "How?"}, COMPLETIONS)["choices"][0]["text"]
    assert text == "" and ask.asked[0] == hermes.encode("How?")
    answered(one, {"prompt": "How?"}, COMPLETIONS)
    answered(one, {"prompt": "How?yes"}, COMPLETIONS)
    assert ask.asked[1:] == [ask.asked[0], ask.asked[0] + ask.answers[1]]


@pytest.mark.parametrize("last", ['{"reward": NaN}', '{"reward": 1e400}', '{"reward": "1"}', '{"reward": [1]}'])
def test_a_wrong_reported_reward_is_an_error_with_posted_ones_too(hermes, last):
    one, _ = episode(hermes, "yes")
    answered(one, {})
    one.post({"reward": 0.5})
    assert "reported no reward" in one.trajectory(ProgramEnd(0, last, "")).exchange.fault
    for nothing in ("", '{"reward": null}', "done"):
        t = one.trajectory(ProgramEnd(0, nothing, ""))
        assert t.exchange.fault is None and t.exchange.score == 0.5


def test_responses_and_completions_say_what_their_references_do(hermes):
    one, _ = episode(hermes, "one two three", "a b")
    found = answered(one, {"max_output_tokens": 2}, RESPONSES)
    assert found["status"] == found["output"][0]["status"] == "incomplete"
    logprobs = answered(one, {"logprobs": 0}, COMPLETIONS)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", " b", "<|im_end|>"] and logprobs["text_offset"] == [0, 1, 3]
