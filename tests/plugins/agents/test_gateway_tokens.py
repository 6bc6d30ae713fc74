"""The gateway without processes: 1,000 random episodes against a recording engine, hostile bodies, many at once."""

import asyncio
import json
import random
import string
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.errors import BadRequest
from jppo.learner.episodes import Episodes, with_branches
from jppo.plugins.agents.gateway.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from jppo.plugins.agents.gateway.episode import Episode
from jppo.plugins.agents.gateway.process import ProgramEnd
from jppo.rewards.parts import ConversationPart, PartWeights, RewardSum
from jppo.rollout.protocol import Answer, greedy
from jppo.runlog import trajectories
from jppo.types import Exchange, Reward
from tests.make import sample
from tests.plugins.agents.test_gateway import CALCULATOR, RULES, language


class Recording:
    """An engine that answers with random tokens, most of which no tokenizer would make of their text."""

    def __init__(self, hall, rng):
        self.rng, self.vocab, self.end = rng, len(hall.tokenizer), hall.tokenizer.eos_token_id
        self.call = hall.encode('<tool_call>{"name": "calculator", "arguments": {"x": 1}}</tool_call>')
        self.gave = []  # (prompt, answer)

    async def __call__(self, ids, *, sampling, seed):
        await asyncio.sleep(0)
        tokens = [self.rng.randrange(self.vocab) for _ in range(self.rng.randint(1, 12))]
        tokens += self.call if self.rng.random() < 0.3 else []
        tokens = [t for t in tokens if t != self.end] + [self.end]
        answer = tokens[: sampling.max_tokens]
        self.gave.append((list(ids), answer))
        logprob = [float(-len(self.gave) - i / 100) for i in range(len(answer))]
        return Answer(answer, logprob, [seed % 5] * len(answer), "stop" if answer == tokens else "length")


async def an_episode(hall, seed, spoken=None):
    """An agent that goes on, goes back, rewrites, asks several times at once, and over any of the protocols."""
    rng = random.Random(seed)
    engine = Recording(hall, rng)
    episode = Episode(spoken or language(hall), RULES, engine, hall.prompt(), greedy(400), seed)
    histories = [[{"role": "user", "content": "What is 12*34?"}]]
    for _ in range(rng.randint(1, 6)):
        history = rng.choice(histories)
        body = {"messages": history, "n": rng.choice([1, 1, 2]), "tools": [CALCULATOR] if seed % 2 else None}
        try:
            reply = await episode.answer(request := CHAT.read(body))
        except BadRequest as e:
            assert e.code == "context_length_exceeded"
            break
        for choice in json.loads(json.dumps(CHAT.write(reply, request)))["choices"]:  # as it goes over the wire
            said = choice["message"]
            calls = [{"role": "tool", "tool_call_id": c["id"], "content": "1"} for c in said.get("tool_calls", [])]
            text = "".join(rng.choices(string.printable, k=5))
            if rng.random() < 0.2:
                said = {"role": "assistant", "content": "something else"}
            histories.append([*history, said, *(calls or [{"role": "user", "content": text}])])
    return engine, episode.trajectory(ProgramEnd(0, '{"reward": 1}', ""))


@pytest.mark.parametrize("part", range(4))
def test_no_trained_token_differs_from_the_sampled_one(hermes, part):
    """Of 250 episodes each: every trained stretch is an answer in full, with its log-probs, after its own prompt."""
    spoken, complete = language(hermes), 0
    for seed in range(250 * part, 250 * part + 250):
        engine, t = asyncio.run(an_episode(hermes, seed, spoken))
        left = list(engine.gave)
        for branch in (t, *t.branches):
            tokens, at = branch.tokens.tolist(), 0
            while at < len(tokens):
                if not branch.sampled[at]:
                    at += 1
                    continue
                found = next((g for g in left if g[0] == tokens[:at] and g[1] == tokens[at : at + len(g[1])]), None)
                assert found is not None, (seed, at)
                number, here = engine.gave.index(found) + 1, slice(at, at + len(found[1]))
                expected = np.float32([-number - i / 100 for i in range(len(found[1]))])
                assert branch.sampled[here].all() and (branch.logprob[here] == expected).all()
                left.remove(found)
                at += len(found[1])
            assert (branch.version[~branch.sampled] == -1).all() and (branch.logprob[~branch.sampled] == 0).all()
        if t.exchange.branches_left_out == 0:
            assert left == []  # each answer is trained on exactly once
            complete += 1
    assert complete > 0


NAMES = "messages role content type text tools function name prompt input output id tool_calls arguments n stop"
NAMES += " max_tokens stream stop_sequences system tool_choice call_id tool_use_id user assistant tool message auto"
NAMES += " function_call function_call_output tool_use tool_result instructions previous_response_id logprobs"
name = st.sampled_from(NAMES.split())
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800") | name
OBJECTS = st.dictionaries(name, PLAIN | st.dictionaries(name, PLAIN, max_size=3), max_size=5)
JSON = PLAIN | OBJECTS | st.lists(PLAIN | OBJECTS, max_size=3)
ITEMS = st.lists(st.dictionaries(name, name | JSON, max_size=5), max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([CHAT, COMPLETIONS, MESSAGES, RESPONSES]), st.dictionaries(name, JSON), ITEMS)
def test_any_body_is_read_or_refused_with_a_line(api, body, said):
    body = body | ({"messages": said, "input": said} if said else {})
    try:
        request = api.read(body, {}) if api is RESPONSES else api.read(body)
    except BadRequest as e:
        assert "\n" not in str(e) and len(str(e)) < 400
    else:
        assert request.n >= 1 and all(isinstance(m["content"], str) for m in request.messages)


def test_a_message_that_the_template_or_the_tokenizer_cannot_take_is_refused(hermes):
    episode = Episode(language(hermes), RULES, Recording(hermes, random.Random(0)), hermes.prompt(), greedy(50), 0)
    for content, why in (("\ud800", "cannot be rendered"), ("a " * 600, "room for"), ("x" * 2 * 10**6, "characters")):
        with pytest.raises(BadRequest, match=why):
            asyncio.run(episode.answer(CHAT.read({"messages": [{"role": "user", "content": content}]})))


def test_the_time_of_a_program_is_without_that_of_the_engine(plain, monkeypatch):
    """4 s, two requests at once of 2 s each, 5 s, and a request of 2 s: 9 of 15 s are the program's."""
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0)
    monkeypatch.setattr("jppo.plugins.agents.gateway.episode.time", clock)

    async def engine(ids, *, sampling, seed):
        await asyncio.sleep(0)
        now[0] += 2.0
        return Answer([plain.tokenizer.eos_token_id], [-1.0], [0], "stop")

    async def talk():
        request = CHAT.read({"messages": [{"role": "user", "content": "12*34="}]})
        now[0] += 4.0
        await asyncio.gather(episode.answer(request), episode.answer(request))
        now[0] += 5.0
        await episode.answer(request)

    episode = Episode(language(plain), RULES, engine, plain.prompt("12*34="), greedy(50), 0)
    asyncio.run(talk())
    assert now == [15.0]
    assert episode.trajectory(ProgramEnd(0, '{"reward": 1}', "")).exchange.program_s == 9.0


def test_branches_are_packed_and_trained_with_their_episode(hermes):
    found = [asyncio.run(an_episode(hermes, seed))[1] for seed in range(40)]
    assert any(t.branches for t in found)
    for before, after in zip(found, trajectories.deserialise(trajectories.serialise(found)), strict=True):
        assert len(before.branches) == len(after.branches) and before.exchange == after.exchange
        for a, b in zip((before, *before.branches), (after, *after.branches), strict=True):
            assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in trajectories.ARRAYS)
    several = [t for t in found if t.branches][:2]
    rewards = [Reward(1.0, {}, None, earned=((0, 9.0),)), Reward(2.0, {}, None, unusable="too late")]
    some = several[1].branches[0]
    told = Exchange(0, 0, 0.0, 0.0, None, earned=((3, 0.5),), tool_earned=((4, 0.25),))
    branch = type(some)(**{**vars(some), "exchange": told})
    several[1] = type(some)(**{**vars(several[1]), "branches": (branch,)})
    parts = {"agent_score": ConversationPart(), "tool_score": ConversationPart(tools=True)}
    weights = PartWeights({"agent_score": 2.0, "tool_score": 8.0}, {("other", "tool_score"): None})
    summed = RewardSum(parts, weights, score_on_error=None)
    prompts = [sample("", source=source).prompt for source in ("other", "gsm8k")]
    one = np.arange(2, dtype=np.int32)
    found = with_branches(Episodes(prompts, several, rewards, one, one, np.float32([5, 6])), summed.earned)
    graded, counts = found.rewards, [len(t.branches) for t in several]
    assert len(found.trajectories) == len(graded) == 2 + sum(counts) and found.trajectories[-1] is branch
    assert found.first.tolist() == [0, 1, *[0] * counts[0], 1]
    assert found.group.tolist() == list(range(2 + sum(counts)))
    assert found.sources == ["other", "gsm8k", *["other"] * counts[0], "gsm8k"]
    assert found.greedy.tolist() == [5, 6, *[5] * counts[0], 6]
    assert graded[2].score == 1.0 and graded[-1].unusable == "too late" and graded[-1].earned == ((3, 1.0), (4, 2.0))
    rewards[1] = Reward(0.0, {}, "no judge")  # scored by reward.score_on_error, so its turns earned nothing
    found = with_branches(Episodes(prompts, several, rewards, one, one, np.float32([5, 6])), summed.earned)
    assert (found.rewards[-1].score, found.rewards[-1].earned) == (0.0, ())
