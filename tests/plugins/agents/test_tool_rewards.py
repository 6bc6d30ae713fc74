"""Rewards that tools return: in the conversation, and from there to advantages, by hand."""

import asyncio
import dataclasses
import math

import jax
import numpy as np
import pytest

from jppo.algorithms import advantage
from jppo.learner import batch, estimate, estimators
from jppo.plugins.agents.calls import Call
from jppo.plugins.agents.conversation import Turns, make_environment
from jppo.plugins.agents.tools import Toolbox, ToolLimits
from jppo.rewards.parts import ConversationPart, RewardSum, parse_weights, sample_of
from jppo.runlog import trajectories
from jppo.types import Prompt

GAMMA, LAM = 0.9, 0.8
PARTS = ("environment_score", "tool_score")
PROMPT = Prompt("p", "s", "q", np.zeros(6, np.int32), "", {})


class Paying:
    """Answers call <<k>> with the k-th result."""

    rewards = True

    def __init__(self, *results):
        self.results = results
        function = {"name": "pay", "parameters": {"properties": {"x": {"type": "string"}}, "required": ["x"]}}
        self.schema = {"type": "function", "function": function}

    async def __call__(self, arguments, context):
        return self.results[int(arguments["x"])]


def graded(t, weights="environment_score=1,tool_score=1"):
    parts = {"environment_score": ConversationPart(), "tool_score": ConversationPart(tools=True)}
    reward_sum = RewardSum(parts, parse_weights(weights, PARTS), score_on_error=None)
    (reward,) = reward_sum.grade([sample_of(PROMPT, t)])
    return reward


def hold(hall, *said):
    return hall.hold(*said, prompt=hall.prompt("12*34="))[0]


def ends_of(t):
    """The last sampled token of each turn, from the first sampled one on."""
    response = t.sampled[np.argmax(t.sampled) :]
    return np.flatnonzero(response & ~np.append(response[1:], False)).tolist()


def test_a_reward_is_earned_at_the_end_of_the_turn_that_calls(plain):
    plain.tools = [Paying(("1", 0.5), ("2", np.float32(-0.25)), "3", ("4", None))]
    t = hold(plain, "<<0>>", "12")
    first, _ = ends_of(t)
    assert t.text == "<<0>>[[1]]12" and t.exchange.tool_earned == ((first, 0.5),)
    t = hold(plain, "<<0>>", "<<1>><<0>>", "<<2>>", "<<3>>", "5")
    assert t.exchange.tool_earned == ((ends_of(t)[0], 0.5), (ends_of(t)[1], 0.25))  # of a turn's calls the sum
    assert (t.exchange.score, t.exchange.earned, t.exchange.fault) == (0.0, (), None)
    plain.turns = Turns(assistant=1, user=-1)
    assert hold(plain, "<<0>>").exchange.tool_earned == ()  # a call that is not made


def test_tools_and_an_environment_have_their_own_parts_and_weights(plain, tmp_path):
    (tmp_path / "world.py").write_text(
        "class World:\n    def reset(self, prompt):\n        return ''\n"
        "    def step(self, text):\n        return '34', 2.0, text == '7'\n"
    )
    plain.tools = [Paying(("1", 0.5))]
    plain.begin = make_environment(f"{tmp_path / 'world.py'}:World", user_code=plain.user_code, timeout_s=60)
    t = hold(plain, "<<0>>", "5", "7")
    call, five, seven = ends_of(t)
    reward = graded(t, "environment_score=1,tool_score=10")
    assert reward.score == 9.0 and reward.parts == {"environment_score": 4.0, "tool_score": 0.5}
    assert reward.earned == ((five, 2.0), (seven, 2.0), (call, 5.0))
    (back,) = trajectories.deserialise(trajectories.serialise([t]))
    assert back.exchange == t.exchange


@pytest.mark.parametrize(
    "answer, said",
    [
        (("1", math.nan), "('1', nan); it must be text, or (text, a finite number or None)"),
        (("1", "0.5"), "('1', '0.5'); it must be"),
        ((1, 0.5), "(1, 0.5); it must be"),
        (("1", 0.5, {}), "('1', 0.5, {}); it must be"),
        (("1", [0.5]), "('1', [0.5]); it must be"),
        (("1", 10**400), "('1', 1000000"),
        (("1", 10**5000), "tuple; it must be"),
        (["1", 0.5], "['1', 0.5]; it must be"),
        ({"text": "1", "reward": 0.5}, "{'text': '1', 'reward': 0.5}; it must be"),
        (0.5, "0.5; it must be"),
    ],
)
def test_a_reward_of_another_form_is_an_error_of_its_response(plain, answer, said):
    plain.tools = [Paying(answer)]
    t = hold(plain, "<<0>>")
    assert t.turns == 1 and t.exchange.fault.startswith(f"the tool pay returned {said}")
    assert t.exchange.call_errors == 1
    reward = graded(t)
    assert math.isnan(reward.score) and "tool_score: the tool pay" in reward.error and reward.earned == ()
    assert reward.unusable


@pytest.mark.parametrize("says_so", [True, False])
def test_a_tuple_of_a_tool_without_rewards_is_an_error_that_the_policy_sees(plain, monkeypatch, says_so):
    monkeypatch.delattr(Paying, "rewards")
    tool = Paying(("1", 0.5))
    if says_so:
        tool.rewards = False
    box = Toolbox([tool], ToolLimits(1, 200, "middle", 5.0), plain.user_code)
    told = asyncio.run(box.call([Call("pay", {"x": "0"})], PROMPT, {}))
    assert "only a tool with rewards=True may" in told.messages[0]["content"]
    assert (told.errors, told.reward, told.fault, box.may_reward) == (1, 0.0, None, False)


def test_rewards_beyond_float32_are_errors(plain):
    plain.tools = [Paying(("1", 1e308), ("1", 1.0))]
    for said, weights in (("<<0>><<0>>", "tool_score=1"), ("<<0>>", "tool_score=1"), ("<<1>>", "tool_score=1e39")):
        t = hold(plain, said, "5")
        reward = graded(t, f"environment_score=off,{weights}")
        assert "must be finite in float32" in reward.error and math.isnan(reward.score)


def test_gae_credits_the_turn_and_a_group_sees_the_sum(plain):
    """GAE by its definition over the sampled tokens; the tool's tokens are passed over."""
    plain.tools = [Paying(("1", 0.5), ("22", -1.5))]
    held = [hold(plain, *said) for said in (["<<0>>", "<<1>>", "5"], ["<<1>>", "55"], ["5"])]
    rewards = [graded(t, "environment_score=off,tool_score=1") for t in held]
    assert [one.score for one in rewards] == [-1.0, -1.5, 0.0]
    longest = max(len(t.tokens) for t in held)
    data = batch.flatten(held, rewards, np.zeros(3, np.int32), shape=(4, longest), has_earned=True)
    value = np.random.default_rng(0).normal(size=data.mask.shape).astype(np.float32)
    how = dict(kl_penalty=None, correction=None, bypass=True)

    def advantages(estimator, data):
        run = jax.jit(estimate.make_advantages(dataclasses.replace(estimator, transforms=()), **how))
        return np.asarray(run(data, 0.0)[0]["advantage"])

    gae = estimators.gae(gamma=GAMMA, lam=LAM, lam_alpha=None, critic_lam=None)
    found = advantages(gae, data.with_arrays(value=value))
    for b, (t, paid) in enumerate(zip(held, ([0.5, -1.5, 0.0], [-1.5, 0.0], [0.0]), strict=True)):
        chosen = np.flatnonzero(t.sampled[np.argmax(t.sampled) :])
        reward = np.zeros(longest)
        reward[ends_of(t)] = paid
        values = np.append(value[b, chosen], 0.0)
        delta = reward[chosen] + GAMMA * values[1:] - values[:-1]
        expected = [sum((GAMMA * LAM) ** j * d for j, d in enumerate(delta[k:])) for k in range(len(delta))]
        np.testing.assert_allclose(found[b, chosen], expected, rtol=1e-5, atol=1e-5)
        assert not np.delete(found[b], chosen).any()
    found = advantages(estimators.by_group(advantage.grpo, norm_adv_by_std=False), data)
    for b, expected in enumerate(np.array([-1.0, -1.5, 0.0]) - (-2.5 / 3)):
        np.testing.assert_allclose(found[b][data.mask[b]], expected, rtol=1e-5)
