"""Which requests continue a conversation, which branch holds the answer, and what an episode keeps."""

import asyncio
import dataclasses
import functools
import itertools
import json
import random
import tracemalloc

import pytest

from jppo.plugins.agents.gateway.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from jppo.plugins.agents.gateway.episode import Episode
from jppo.plugins.agents.gateway.process import ProgramEnd
from jppo.rollout.protocol import Answer, greedy
from tests.plugins.agents.test_gateway import CALCULATOR, RULES, answer_of, language
from tests.plugins.agents.test_gateway_requests import CALL, USER, answered, episode

DONE = ProgramEnd(0, '{"reward": 1}', "")
THOUGHT = "<think>\nI multiply.\n</think>\n\n"
TOOLS = {"tools": [CALCULATOR]}


def continues(ask):
    """Whether the second request continued the tokens of the first answer."""
    return ask.asked[1][: len(ask.asked[0]) + len(ask.answers[0])] == ask.asked[0] + ask.answers[0]


@pytest.mark.parametrize(
    "content,arguments,own_ids,known",
    [
        (None, '{"x": 1}', True, True),  # frameworks that drop text beside calls
        ("See.", '{"x": 1}', True, True),  # or the thinking
        (f"{THOUGHT}See.", '{"x": 1}', False, True),  # everything is there, with other ids
        ("See.", '{"x": 1}', False, False),
        ("Look.", '{"x": 1}', True, False),  # another text
        ("See.", '{"x": 2}', True, False),  # another call
    ],
)
def test_a_turn_is_recognised_by_the_ids_of_its_calls(hermes, content, arguments, own_ids, known):
    one, ask = episode(hermes, THOUGHT + "See." + CALL % '{"x": 1}', "1")
    said = answered(one, TOOLS)["choices"][0]["message"]
    said["content"] = content
    said["tool_calls"][0]["function"]["arguments"] = arguments
    if not own_ids:
        said["tool_calls"][0]["id"] = "other"
    answered(one, TOOLS | {"messages": [USER, said, {"role": "tool", "content": "1"}]})
    assert continues(ask) == known
    assert len(one.trajectory(DONE).branches) == (0 if known else 1)


def test_the_ids_of_calls_tell_equal_answers_apart(hermes):
    """Of two equal answers, the one that the agent continues is the parent."""
    one, _ = episode(hermes, CALL % '{"x": 1}', CALL % '{"x": 1}', "1")
    first, _ = (choice["message"] for choice in answered(one, TOOLS | {"n": 2})["choices"])
    answered(one, TOOLS | {"messages": [USER, first, {"role": "tool", "content": "1"}]})
    assert one._turns[2].parent is one._turns[0]


@pytest.mark.parametrize("api", [MESSAGES, RESPONSES])
def test_the_other_apis_recognise_turns_by_calls_too(hermes, api):
    one, ask = episode(hermes, "See." + CALL % '{"x": 1}', "1")
    if api is MESSAGES:
        tools = {"tools": [{"name": "calculator"}]}
        call = answered(one, tools, api)["content"][1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "1"}
        said = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        answered(one, tools | {"messages": said}, api)
    else:
        tools = {"tools": [{"type": "function", "name": "calculator"}]}
        call = answered(one, tools, api)["output"][1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        answered(one, tools | {"input": [USER, call, result]}, api)
    assert continues(ask)


@pytest.mark.parametrize(
    "content,known", [("408", True), (f"{THOUGHT}408", True), ("I multiply. 408", False), ("", False), ("8", False)]
)
def test_a_text_is_recognised_without_its_thinking(hermes, content, known):
    one, ask = episode(hermes, f"{THOUGHT}408", "yes")
    answered(one, {})
    said = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": "sure?"}]
    answered(one, {"messages": said})
    assert continues(ask) == known


def test_a_conversation_of_shortened_turns_is_one_branch(hermes):
    """Half of its turns were untrained, and each had the tokens of a branch of its own."""
    one, ask = episode(hermes, *[THOUGHT + "See." + CALL % '{"x": %d}' % i for i in range(6)], "408")
    history = [USER]
    for _ in range(7):
        said = answered(one, TOOLS | {"messages": history})["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "1"} for c in said.get("tool_calls", [])]
        history += [said | {"content": None}, *results]
    t = one.trajectory(DONE)
    assert t.branches == () and t.turns == 7 and t.sampled.sum() == sum(map(len, ask.answers))


@pytest.mark.parametrize("api,none", [(CHAT, "none"), (RESPONSES, "none"), (MESSAGES, {"type": "none"})])
def test_a_request_without_a_choice_of_tools_continues_the_conversation(hermes, api, none):
    """The prompt has the tools, and a call in the answer is text."""
    one, ask = episode(hermes, "yes", CALL % "{}")
    tools = {
        CHAT: TOOLS,
        MESSAGES: {"tools": [{"name": "calculator"}]},
        RESPONSES: {"tools": [{"type": "function", "name": "calculator"}]},
    }[api]
    answered(one, tools, api)
    said = [USER, {"role": "assistant", "content": "yes"}, USER]
    found = answered(one, tools | {"messages": said, "input": said, "tool_choice": none}, api)
    assert continues(ask) and "<tool_call>" in json.dumps(found) and one.trajectory(DONE).branches == ()


@pytest.mark.parametrize(
    "most,room,finish", [(2, 400, "stop"), (None, 3, "length"), (9, 3, "length"), (3, 3, "length")]
)
def test_the_agents_own_limit_truncates_no_episode(hermes, most, room, finish):
    ask = hermes.policy("one two three four five six")
    one = Episode(language(hermes), RULES, functools.partial(ask, near=0), hermes.prompt(), greedy(room), 0)
    found = answered(one, {"max_tokens": most})["choices"][0]
    assert found["finish_reason"] == "length" and one.trajectory(DONE).finish == finish
    assert ask.room == [room if most is None else min(most, room)]


@pytest.mark.parametrize("most", [None, 10**6])
def test_a_later_turn_has_the_room_that_the_first_left(hermes, most):
    ask = hermes.policy("one two", "three")
    one = Episode(language(hermes), RULES, functools.partial(ask, near=0), hermes.prompt(), greedy(50), 0)
    said = answered(one, {"max_tokens": most})["choices"][0]["message"]
    answered(one, {"max_tokens": most, "messages": [USER, said, USER]})
    assert continues(ask) and ask.room == [50, len(ask.asked[0]) + 50 - len(ask.asked[1])] and ask.room[1] > 0


class Held:
    """An engine whose answers come in an order that the test chooses."""

    def __init__(self, hall):
        self.hall, self.waiting = hall, {}

    async def __call__(self, ids, *, sampling, seed):
        text = self.hall.tokenizer.decode(ids).rpartition("user\n")[2].partition("<")[0]
        self.waiting[text] = future = asyncio.get_running_loop().create_future()
        await future
        return answer_of([*self.hall.encode(f"to {text}"), self.hall.tokenizer.eos_token_id])


def told(*said):
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(["user", "assistant"]), said)]


# What the agent asks, each a conversation by its last message, and when it asks: after the answers to these.
SIDE = {"main": ([], ["What is 12*34?"]), "a title": ([], ["a title"])}
WORKERS = {
    "main": ([], ["What is 12*34?"]),
    "w1": (["main"], ["w1"]),
    "w2": (["main"], ["w2"]),
    "w2 more": (["w2"], ["w2", "to w2", "w2 more"]),
    "w2 most": (["w2 more"], ["w2", "to w2", "w2 more", "to w2 more", "w2 most"]),
    "end": (["w1", "w2 most"], ["What is 12*34?", "to What is 12*34?", "end"]),
}
BEHIND = {  # work that goes on behind the conversation
    "main": ([], ["What is 12*34?"]),
    "b": (["main"], ["b"]),
    "b more": (["b"], ["b", "to b", "b more"]),
    "b most": (["b more"], ["b", "to b", "b more", "to b more", "b most"]),
    "end": (["main"], ["What is 12*34?", "to What is 12*34?", "end"]),
}
WINDOW = {  # the history loses its beginning
    "main": ([], ["What is 12*34?"]),
    "next": (["main"], ["What is 12*34?", "to What is 12*34?", "next"]),
    "other": (["next"], ["unrelated"]),
    "end": (["other"], ["(cut)", "to next", "end"]),
}
UNMARKED = {  # nobody repeats the task
    "main": ([], ["go"]),
    "w1": (["main"], ["w1"]),
    "w2": (["main"], ["w2"]),
    "w1 more": (["w1"], ["w1", "to w1", "w1 more"]),
    "w1 most": (["w1 more"], ["w1", "to w1", "w1 more", "to w1 more", "w1 most"]),
    "end": (["w1", "w2"], ["go", "to go", "end"]),
}


@pytest.mark.parametrize(
    "asks,graded",
    [(SIDE, "What is 12*34?"), (WORKERS, "end"), (BEHIND, "end"), (WINDOW, "end"), (UNMARKED, "end")],
)
def test_the_graded_branch_does_not_depend_on_which_answer_is_slow(hermes, asks, graded):
    spoken = language(hermes)

    async def hold(rng):
        engine, answers = Held(hermes), {}
        one = Episode(spoken, RULES, engine, hermes.prompt(), greedy(400), 0)
        left = dict(asks)
        while left or any(not task.done() for task in answers.values()):
            ready = [
                name for name, (after, _) in left.items() if all(a in answers and answers[a].done() for a in after)
            ]
            rng.shuffle(ready)
            for name in ready if rng.random() < 0.8 else ready[:1]:
                body = {"messages": told(*left.pop(name)[1])}
                answers[name] = asyncio.ensure_future(one.answer(CHAT.read(body)))
                await asyncio.sleep(0)
            waiting = [future for future in engine.waiting.values() if not future.done()]
            if waiting:
                rng.choice(waiting).set_result(None)
            for _ in range(5):
                await asyncio.sleep(0)
        return one.trajectory(DONE)

    found = {asyncio.run(hold(random.Random(seed))).text.rpartition("to ")[2] for seed in range(60)}
    assert found == {graded}


def test_an_agent_may_name_the_answer(hermes):
    one, _ = episode(hermes, "first", "second", "third")
    ids = [answered(one, {"messages": told(text)})["id"] for text in "abc"]
    t = one.trajectory(ProgramEnd(0, json.dumps({"answer_id": ids[1], "reward": 1}), ""))
    assert t.text == "second" and [b.text for b in t.branches] == ["third", "first"]
    wrong = one.trajectory(ProgramEnd(0, '{"answer_id": "chatcmpl-1", "reward": 1}', ""))
    assert "answer_id='chatcmpl-1', which is no answer of this episode" in wrong.exchange.fault


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_an_episode_keeps_each_token_once(hermes, api):
    """200 turns of 60 tokens kept 12 to 19 MiB, as every turn had all tokens or all text before it."""
    end = hermes.tokenizer.eos_token_id

    async def ask(ids, **how):
        return Answer([*range(1000, 1060), end], [-0.5] * 61, [1] * 61, "stop")

    limits = dataclasses.replace(RULES, max_prompt_length=10**6)
    one = Episode(language(hermes), limits, ask, hermes.prompt(), greedy(10**6), 0)
    body = {"messages": [USER], "prompt": "hi"}
    for turn in range(200):
        request = api.read(body)
        reply = asyncio.run(one.answer(request))
        more = [reply.choices[0].message, {"role": "user", "content": "more"}]
        body = {"messages": [*body["messages"], *more], "prompt": body["prompt"] + reply.choices[0].text + " more"}
        if turn == 19:
            tracemalloc.start()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 4 * 2**20, f"{kept / 2**20:.1f} MiB"
    assert len(one.trajectory(DONE).tokens) > 200 * 61
