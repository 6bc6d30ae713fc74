"""One episode: an agent's requests to the policy, and the trajectories that they become."""

import asyncio
import dataclasses
import itertools
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jppo.agent.calls import OPENING, Call, Parser, opened_thought, without_calls
from jppo.agent.gateway import history
from jppo.agent.gateway import request as r
from jppo.agent.gateway.history import Turn
from jppo.agent.gateway.process import Ended
from jppo.agent.gateway.request import BadRequest, Body, Choice, Message, Reply, Request, ToolCall
from jppo.agent.turn_tokens import Chat
from jppo.rewards.earned import finite, short
from jppo.rollout.protocol import Answer, sample_seed
from jppo.settings import UserError
from jppo.types import Exchange, Prompt, Sampling, Trajectory

MODEL = "policy"


@dataclasses.dataclass(frozen=True)
class Language:
    """Functions between the policy's tokens and messages."""

    chat: Callable[[str], Chat]  # by the tools' schemas as JSON
    parse: Parser
    format: str  # of tool calls
    decode: Callable[[list[int]], str]  # drops special tokens
    spell: Callable[[list[int]], str]  # keeps them
    pieces: Callable[[list[int]], list[str]]  # the text of each token
    ends: tuple[int, ...]
    longest: int  # characters of a request; more have too many tokens


@dataclasses.dataclass(frozen=True)
class Rules:
    """The limits of an episode, and the source of its reward."""

    max_prompt_length: int
    branches: int  # trained on
    reward: str  # 'graders', 'exit' or 'reported'
    timeout_s: float


class Episode:
    """The turns of an episode so far."""

    def __init__(
        self,
        language: Language,
        rules: Rules,
        ask: Callable[..., Awaitable[Answer]],
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
    ):
        """`ask` takes ids, sampling and seed."""
        self.earlier: dict[str, tuple[Message, ...]] = {}  # conversations without instructions, by their last reply
        self._language, self._rules, self._ask = language, rules, ask
        self._prompt, self._sampling, self._seed = prompt, sampling, seed
        self._asked = itertools.count()
        self._turns: list[Turn] = []
        self._posted: list[tuple[Turn, float]] = []
        self._calls = self._call_errors = 0
        self._full = False  # a request had no room for an answer
        self._began = time.monotonic()
        self._waiting, self._waits_since, self._waited_s = 0, 0.0, 0.0  # for the engine

    def task(self) -> dict[str, Any]:
        """Returns the prompt's row, as the agent gets it."""
        p = self._prompt
        said = {"uid": p.uid, "prompt": p.messages, "data_source": p.data_source, "ground_truth": p.ground_truth}
        return said | {"extra": p.extra}

    async def answer(self, request: Request, gone: Callable[[], bool] = lambda: False) -> Reply:
        """Samples the answers to a request and remembers them as turns, unless the client is `gone` by then."""
        try:
            schemas = json.dumps(request.tools, ensure_ascii=False)
            states = history.states(request.messages, schemas)
            ids, parent = self._context(request, schemas, states)
        except (UserError, UnicodeError, TypeError, ValueError, LookupError, RecursionError) as e:
            raise BadRequest(f"the messages cannot be read: {e}") from e  # of the template or the tokenizer
        if not ids:
            raise BadRequest("the prompt has no tokens; send some text")
        limit = self._rules.max_prompt_length
        room = min(len(ids), limit) + self._sampling.max_tokens if parent is None else parent.room
        if room - len(ids) < 1:
            raise self._too_long(f"{len(ids)} tokens, and the conversation has room for {room} with an answer")
        asked = room - len(ids) if request.max_tokens is None else min(room - len(ids), request.max_tokens)
        stop = tuple(dict.fromkeys((*self._sampling.stop, *request.stop)))
        how = dataclasses.replace(self._sampling, max_tokens=asked, stop=stop)
        numbers = itertools.islice(self._asked, request.n)
        seeds = [self._seed if i == 0 else sample_seed(self._seed, i, 0) for i in numbers]
        answers = await self._answers([self._ask(ids, sampling=how, seed=seed) for seed in seeds])
        if gone():  # the agent never saw the answers
            raise BadRequest("the client closed the connection before its answer")
        thinks = opened_thought(self._language.spell(ids[-OPENING:]))
        choices = tuple(self._choice(answer, request, thinks) for answer in answers)
        reply = Reply(secrets.token_hex(16), int(time.time()), MODEL, len(ids), choices)
        for answer, choice in zip(answers, choices, strict=True):
            key = history.extended(states[-1], choice.message).digest()
            text = request.text + choice.text if request.text is not None and choice.text else None
            self._turns.append(Turn(parent, ids + answer.tokens, answer, key, text, room, choice, reply.id))
        return reply

    def post(self, body: Body) -> dict[str, Any]:
        """Records a reward for a turn: that of the reply `id`, or the last one."""
        amount, of = finite(body.get("reward")), r.get(body, "id", str)
        if amount is None:
            raise BadRequest(f"reward={short(body.get('reward'))} must be a finite number")
        name = None if of is None else re.split("[-_]", of)[-1]
        turn = next((turn for turn in reversed(self._turns) if name in (None, turn.reply)), None)
        if turn is None:
            raise BadRequest("the reward is for no answer of this episode; post it after one, with its id or without")
        self._posted.append((turn, amount))
        return {"object": "reward", "reward": amount}

    def trajectory(self, ended: Ended) -> Trajectory:
        """Returns the latest branch with the episode's reward and the other branches."""
        posted = sum(amount for _, amount in self._posted)
        said, fault = self._outcome(ended)
        truncated = self._full and bool(self._turns) and ended.code not in (None, 0)
        fault = None if truncated else fault
        about: dict[str, Any] = dict(calls=self._calls, call_errors=self._call_errors, call_s=0.0, fault=fault)
        about |= dict(score=posted + said, program_s=max(0.0, time.monotonic() - self._began - self._waited_s))
        paths, p = history.branches(self._turns), self._prompt
        if not paths:
            return history.nothing_said(p.uid, p.ids, Exchange(**about))
        trained, found = set[int](), []
        for path in paths[: self._rules.branches]:
            t = history.trajectory(p.uid, path, trained, self._language.decode)
            earned = history.earned(path, t, self._posted)
            exchange = Exchange(**about, earned=earned, branches_left_out=max(0, len(paths) - self._rules.branches))
            found.append(dataclasses.replace(t, exchange=exchange))
        finish = "length" if truncated else found[0].finish
        return dataclasses.replace(found[0], finish=finish, branches=tuple(found[1:]))

    def _context(self, request: Request, schemas: str, states: Sequence[Any]) -> tuple[list[int], Turn | None]:
        characters = len(schemas) + len(request.text or "") + sum(map(history.length, request.messages))
        if characters > self._language.longest:
            raise self._too_long(f"{characters} characters, more than fit")
        chat = self._language.chat(schemas)
        only = request.text
        if self._language.format == "plain" and [m["role"] for m in request.messages] == ["user"]:
            only = request.messages[0]["content"]
        if only is not None and only == self._prompt.messages:
            return self._prompt.ids.tolist(), None
        return history.context(self._turns, request, chat, states)

    def _too_long(self, what: str) -> BadRequest:
        self._full = True
        return BadRequest(f"the request has {what}", code="context_length_exceeded")

    async def _answers(self, asked: list[Awaitable[Answer]]) -> list[Answer]:
        if not self._waiting:
            self._waits_since = time.monotonic()
        self._waiting += 1
        try:
            return await asyncio.gather(*asked) if len(asked) > 1 else [await asked[0]]
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._waited_s += time.monotonic() - self._waits_since

    def _choice(self, answer: Answer, request: Request, thinks: str) -> Choice:
        language, tokens = self._language, answer.tokens
        text = language.spell(tokens[:-1] if tokens[-1] in language.ends else tokens)
        stops = [(text.index(one), one) for one in request.stop if one in text]
        at, stopped_by = min(stops, default=(len(text), None))
        text, tail = text[:at], text[at:]
        found = language.parse(thinks + text, request.tools) if request.tools else []
        valid = [one for one in found if isinstance(one, Call)]
        calls = tuple(ToolCall(f"call_{secrets.token_hex(12)}", one.name, one.arguments) for one in valid)
        self._calls += len(found)
        self._call_errors += len(found) - len(calls)
        if len(calls) < len(found) or (len(calls) > 1 and not request.parallel):  # they are sent as text
            calls = ()
        return Choice(
            text=without_calls(thinks + text, language.format).removeprefix(thinks) if calls else text,
            tail=tail,
            raw=text + tail,
            calls=calls,
            finish="tool_calls" if calls else answer.finish,
            stopped_by=stopped_by,
            length=len(tokens),
            tokens=tuple(zip(language.pieces(tokens), answer.logprob, strict=True)) if request.logprobs else (),
        )

    def _outcome(self, ended: Ended) -> tuple[float, str | None]:
        """Returns what the program earned by its end, and why the sample is left out."""
        kind, code = self._rules.reward, ended.code
        if code is None:
            return 0.0, f"the agent took longer than rollout.agent_timeout_s={self._rules.timeout_s:g}"
        if code != 0 and not (kind == "exit" and code == 1):
            return 0.0, f"the agent exited with {code}: {ended.error[:200] or 'no error output'}"
        if not self._turns:
            return 0.0, "the agent received no answer: it sent no valid request"
        if kind != "reported":
            return float(kind == "exit" and code == 0), None
        try:
            said = json.loads(ended.last or "null")
        except (ValueError, RecursionError):
            said = None
        given = said.get("reward") if isinstance(said, dict) else None
        amount = finite(given)
        if amount is None and (given is not None or not self._posted):
            return 0.0, f"the agent reported no reward; its last line is {short(ended.last)}"
        return amount or 0.0, None
