"""A policy that says what it is told to, and conversations with it."""

import asyncio
import dataclasses
import functools

import numpy as np
import pytest

from examples import multiplication
from jppo.data.tokenizer import Renderer, decode, load_tokenizer
from jppo.plugins.agents import turn_tokens
from jppo.plugins.agents.built_in_tools import Calculator
from jppo.plugins.agents.calls import PARSERS
from jppo.plugins.agents.conversation import Turns, make_talk
from jppo.plugins.agents.tools import Toolbox, ToolLimits, UserCodeRunner
from jppo.rollout.protocol import Answer, greedy
from jppo.types import Prompt


class Scripted:
    """An engine that gives prepared answers, one a turn, and remembers what it was asked."""

    def __init__(self, answers, finish="stop"):
        self.answers, self.finish = answers, finish
        self.asked, self.room, self.seeds = [], [], []

    async def __call__(self, ids, *, sampling, seed, near):
        said = self.answers[len(self.asked)]
        self.asked.append(list(ids))
        self.room.append(sampling.max_tokens)
        self.seeds.append(seed)
        await asyncio.sleep(0)
        tokens, turn = said[: sampling.max_tokens], len(self.asked)
        logprob = [-turn - i / 100 for i in range(len(tokens))]
        experts = np.full((len(ids) + len(tokens) - 1, 2, 1), turn, np.int16) if sampling.experts else None
        finish = self.finish if tokens == said else "length"
        kept = [np.array([token, turn], np.int32) for token in tokens] if sampling.kept else None
        return Answer(tokens, logprob, [7] * len(tokens), finish, experts=experts, kept=kept)


class Hall:
    """Where conversations are held: a tokenizer, tools or a partner, and what each side says."""

    def __init__(self, tokenizer, format):
        self.tokenizer, self.format, self.user_code = tokenizer, format, UserCodeRunner()
        self.tools, self.begin = [Calculator()], None
        self.limits = dict(parallel=2, characters=60, side="middle", timeout_s=60.0)
        self.turns = Turns(-1, -1)
        self.roles = ("tool", "user")
        self.how, self.branches = {}, 8

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt(self, said="What is 12*34?", **extra):
        messages = said if self.format == "plain" else [{"role": "user", "content": said}]
        ids = self.encode(said)
        if self.format != "plain":
            ids = self.encode(Renderer(self.tokenizer, [t.schema for t in self.tools])(messages, None))
        return Prompt("p:1", "exact", messages, np.array(ids, np.int32), "408", extra)

    def talk(self):
        toolbox = Toolbox(self.tools, ToolLimits(**self.limits), self.user_code)
        if self.format == "plain":
            chat = turn_tokens.plain_chat(self.tokenizer)
        else:
            how = dict(roles=self.roles, name=self.format, parse=PARSERS[self.format], parallel=2)
            chat = turn_tokens.template_chat(self.tokenizer, toolbox.schemas, **how, **self.how)
        return make_talk(
            chat,
            PARSERS[self.format],
            toolbox,
            self.begin,
            turns=self.turns,
            decode=lambda ids: decode(self.tokenizer, ids),
            spell=self.tokenizer.decode,
            ends=(self.tokenizer.eos_token_id,),
            branches=self.branches,
        )

    def policy(self, *said, finish="stop"):
        """One that says these texts, each with its end token, or tokens."""
        end = [self.tokenizer.eos_token_id]
        return Scripted([self.encode(s) + end if isinstance(s, str) else s for s in said], finish)

    def hold(self, *said, room=400, prompt=None, finish="stop", **sampled):
        """One conversation with such a policy."""
        ask = self.policy(*said, finish=finish)
        sampling = dataclasses.replace(greedy(room), temperature=1.0, **sampled)
        prompt = self.prompt() if prompt is None else prompt
        return asyncio.run(self.talk()(ask, prompt, sampling=sampling, seed=5, near=0)), ask


@functools.cache
def tokenizer_of(directory):
    """Read once for all tests: that of Qwen2.5 takes seconds."""
    return load_tokenizer(str(directory))


@pytest.fixture
def hermes(shared):
    """With the real tokenizer of Qwen2.5 and its chat template."""
    hall = Hall(tokenizer_of(shared / "tokenizers/qwen2.5"), "hermes")
    yield hall
    hall.user_code.close()


@pytest.fixture(scope="session")
def characters(tmp_path_factory):
    """The character tokenizer of the multiplication task."""
    directory = tmp_path_factory.mktemp("characters")
    multiplication.write_model(directory)
    return tokenizer_of(directory)


@pytest.fixture
def plain(characters):
    """With that tokenizer, and no template."""
    hall = Hall(characters, "plain")
    yield hall
    hall.user_code.close()
