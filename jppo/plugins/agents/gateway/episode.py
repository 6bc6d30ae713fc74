"""One episode: an agent's requests to the policy, and the trajectories that they become."""

import asyncio
import dataclasses
import itertools
import json
import re
import secrets
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jppo.errors import BadRequest, UserError
from jppo.plugins.agents.calls import OPENING, Call, Parser, opened_thought, without_calls
from jppo.plugins.agents.gateway import history
from jppo.plugins.agents.gateway import request as r
from jppo.plugins.agents.gateway.history import Turn
from jppo.plugins.agents.gateway.process import ProgramEnd
from jppo.plugins.agents.gateway.request import Body, Choice, Message, Reply, Request, ToolCall
from jppo.plugins.agents.turn_tokens import Chat
from jppo.rewards.earned import finite, short
from jppo.rollout.protocol import Answer, sample_seed
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
        self.refusal = ""  # of its last request that could not be answered
        self._language, self._rules, self._ask = language, rules, ask
        self._prompt, self._sampling, self._seed = prompt, sampling, seed
        self._sample_numbers = itertools.count()
        self._events = itertools.count()  # requests and replies
        self._messages: dict[str, Message] = {}  # the messages of `earlier`, once each
        self._turns: list[Turn] = []
        self._posted_rewards: list[tuple[Turn, float]] = []
        self._calls = self._call_errors = 0
        self._out_of_room = False  # a request had no room for an answer
        self._began = time.monotonic()
        self._waiting, self._waits_since, self._waited_s = 0, 0.0, 0.0  # for the engine

    def task(self) -> dict[str, Any]:
        """Returns the prompt's row, as the agent gets it."""
        p = self._prompt
        row = {"uid": p.uid, "prompt": p.messages, "data_source": p.data_source, "ground_truth": p.ground_truth}
        return row | {"extra": p.extra}

    def remember(self, reply: str, messages: Sequence[Message]) -> None:
        """Remembers the conversation up to a reply."""
        intern = self._messages.setdefault
        self.earlier[reply] = tuple(intern(json.dumps(message, sort_keys=True), message) for message in messages)

    async def answer(self, request: Request) -> Reply:
        """Samples the answers to a request and remembers them as turns."""
        asked_at = next(self._events)
        try:
            new_ids, parent, state = self._context(request, json.dumps(request.tools, ensure_ascii=False))
        except (UserError, UnicodeError, TypeError, ValueError, LookupError, RecursionError) as e:
            raise BadRequest(f"the request cannot be rendered: {e}") from e  # by the template or the tokenizer
        ids = new_ids if parent is None else parent.ids + new_ids
        if not ids:
            raise BadRequest("the prompt has no tokens; send some text")
        limit = self._rules.max_prompt_length
        room = min(len(ids), limit) + self._sampling.max_tokens if parent is None else parent.room
        if room - len(ids) < 1:
            raise self._too_long(
                f"{len(ids)} tokens, and the conversation has room for {room} with an answer, by"
                f" data.max_prompt_length={limit} and data.max_response_length={self._sampling.max_tokens}"
            )
        max_tokens = room - len(ids) if request.max_tokens is None else min(room - len(ids), request.max_tokens)
        stop = tuple(dict.fromkeys((*self._sampling.stop, *request.stop)))
        sampling = dataclasses.replace(self._sampling, max_tokens=max_tokens, stop=stop)
        numbers = itertools.islice(self._sample_numbers, request.n)
        seeds = [self._seed if i == 0 else sample_seed(self._seed, i, 0) for i in numbers]
        answers = await self._await_answers([self._ask(ids, sampling=sampling, seed=seed) for seed in seeds])
        thought = opened_thought(self._language.spell(ids[-OPENING:]))
        choices = tuple(self._make_choice(answer, request, thought) for answer in answers)
        reply = Reply(secrets.token_hex(16), int(time.time()), MODEL, len(ids), choices)
        with_task = history.begins_with_task(self._turns, request, self._task) if parent is None else parent.of_task
        fields = dict(reply=reply.id, asked=asked_at, answered=next(self._events), of_task=with_task, room=room)
        for i, (answer, choice) in enumerate(zip(answers, choices, strict=True)):
            self._turns.append(history.make_turn(parent, new_ids, answer, choice, request, state, index=i, **fields))
        return reply

    def post(self, body: Body) -> dict[str, Any]:
        """Records a reward for the turn of the reply `id`, or for the last turn."""
        amount, reply_id = finite(body.get("reward")), r.optional(body, "id", str)
        if amount is None:
            raise BadRequest(f"reward={short(body.get('reward'))} must be a finite number")
        turn = self._turn_of_reply(reply_id) if reply_id is not None else self._turns[-1] if self._turns else None
        if turn is None:
            raise BadRequest("the reward is for no answer of this episode; post it after one, with its id or without")
        self._posted_rewards.append((turn, amount))
        return {"object": "reward", "reward": amount}

    def trajectory(self, ended: ProgramEnd, stray_refusal: str = "") -> Trajectory:
        """Returns the branch of the episode's answer with the episode's reward and the other branches.

        `stray_refusal` is that of a request of some episode, perhaps of this one if it has no other request.
        """
        if not self._turns:
            self.refusal = self.refusal or stray_refusal
        posted = sum(amount for _, amount in self._posted_rewards)
        reported = _reported(ended.last)
        reward, fault = self._program_reward(ended, reported)
        answer_id = reported.get("answer_id")
        if fault is None and answer_id is not None and self._turn_of_reply(answer_id) is None:
            fault = f"the agent reported answer_id={short(answer_id)}, which is no answer of this episode"
        truncated = self._out_of_room and bool(self._turns) and ended.code not in (None, 0)
        refusal = f"a request was refused: {self.refusal}" if self.refusal else ""
        fault = None if truncated or fault is None else "\n".join(filter(None, (fault, refusal, ended.tail)))
        fields: dict[str, Any] = dict(calls=self._calls, call_errors=self._call_errors, call_s=0.0, fault=fault)
        fields |= dict(score=posted + reward, program_s=max(0.0, time.monotonic() - self._began - self._waited_s))
        fields |= dict(refusal=self.refusal)
        paths, prompt = history.list_branches(self._turns, self._turn_of_reply(answer_id)), self._prompt
        if not paths:
            return history.empty_trajectory(prompt.uid, prompt.ids, Exchange(**fields))
        trained, trajectories = set[int](), []
        for path in paths[: self._rules.branches]:
            t = history.to_trajectory(prompt.uid, path, trained, self._language.decode)
            rewards = history.branch_rewards(path, t, self._posted_rewards)
            exchange = Exchange(**fields, earned=rewards, branches_left_out=max(0, len(paths) - self._rules.branches))
            trajectories.append(dataclasses.replace(t, exchange=exchange, finish="length" if truncated else t.finish))
        return dataclasses.replace(trajectories[0], branches=tuple(trajectories[1:]))

    @property
    def _task(self) -> str:
        """Returns the last text of the prompt."""
        messages = self._prompt.messages
        return messages if isinstance(messages, str) else messages[-1]["content"]

    def _turn_of_reply(self, reply: Any) -> Turn | None:
        """Returns the last turn of the reply with this id."""
        name = re.split("[-_]", reply)[-1] if isinstance(reply, str) else None
        return next((turn for turn in reversed(self._turns) if name == turn.reply), None)

    def _context(self, request: Request, schemas: str) -> tuple[list[int], Turn | None, Any]:
        """Returns the tokens that follow a turn, the turn, and the hash of the conversation."""
        characters = len(schemas) + len(request.text or "") + sum(map(history.length, request.messages))
        if characters > self._language.longest:
            raise self._too_long(f"{characters} characters, more than fit")
        chat = self._language.chat(schemas)
        single_text = request.text
        if self._language.format == "plain" and [m["role"] for m in request.messages] == ["user"]:
            single_text = request.messages[0]["content"]
        if single_text is not None and single_text == self._prompt.messages:
            return self._prompt.ids.tolist(), None, history.find_parent((), request.messages, schemas)[0]
        return history.resolve(self._turns, request, chat, schemas)

    def _too_long(self, size: str) -> BadRequest:
        self._out_of_room = True
        return BadRequest(f"the request has {size}", code="context_length_exceeded")

    async def _await_answers(self, requests: list[Awaitable[Answer]]) -> list[Answer]:
        """Awaits the engine's answers, and adds the time to that without the agent."""
        if not self._waiting:
            self._waits_since = time.monotonic()
        self._waiting += 1
        try:
            return await asyncio.gather(*requests) if len(requests) > 1 else [await requests[0]]
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._waited_s += time.monotonic() - self._waits_since

    def _make_choice(self, answer: Answer, request: Request, thought: str) -> Choice:
        """Makes an answer as the agent gets it: without stop text, with its calls parsed."""
        language, tokens = self._language, answer.tokens
        text = language.spell(tokens[:-1] if tokens[-1] in language.ends else tokens)
        stops = [(text.index(stop), stop) for stop in request.stop if stop in text]
        text_end, stopped_by = min(stops, default=(len(text), None))
        text, tail = text[:text_end], text[text_end:]
        parsed = language.parse(thought + text, request.tools) if request.tools and request.calls else []
        valid = [call for call in parsed if isinstance(call, Call)]
        calls = tuple(ToolCall(f"call_{secrets.token_hex(12)}", call.name, call.arguments) for call in valid)
        self._calls += len(parsed)
        self._call_errors += len(parsed) - len(calls)
        if len(calls) < len(parsed) or (len(calls) > 1 and not request.parallel):  # they are sent as text
            calls = ()
        return Choice(
            text=without_calls(thought + text, language.format).removeprefix(thought) if calls else text,
            tail=tail,
            raw=text + tail,
            calls=calls,
            finish="tool_calls" if calls else answer.finish,
            stopped_by=stopped_by,
            length=len(tokens),
            tokens=tuple(zip(language.pieces(tokens), answer.logprob, strict=True)) if request.logprobs else (),
        )

    def _program_reward(self, ended: ProgramEnd, reported: dict[str, Any]) -> tuple[float, str | None]:
        """Returns what the program earned by its end, and why the sample is left out, or None.

        By `rollout.agent_reward`: exit code 0 earns 1, the last line reports the reward, or a grader gives it later.
        """
        source, code = self._rules.reward, ended.code
        if code is None:
            limit = f"rollout.agent_timeout_s={self._rules.timeout_s:g}"
            return 0.0, f"the agent took longer than {limit}, with {len(self._turns)} answers of the policy so far"
        if code != 0 and not (source == "exit" and code == 1):
            return 0.0, f"the agent exited with {code}: {textwrap.shorten(ended.error, 200) or 'no error output'}"
        if not self._turns:
            return 0.0, f"the agent {'received no answer' if self.refusal else 'sent no request to the policy'}"
        if source != "reported":
            return float(source == "exit" and code == 0), None
        reported_reward = reported.get("reward")
        amount = finite(reported_reward)
        if amount is None and (reported_reward is not None or not self._posted_rewards):
            return 0.0, f'the agent reported no reward, as {{"reward": NUMBER}}; its last line is {short(ended.last)}'
        return amount or 0.0, None


def _reported(last: str) -> dict[str, Any]:
    """Returns the JSON object of the output's last line; empty if it is none."""
    try:
        report = json.loads(last or "null")
    except (ValueError, RecursionError):
        report = None
    return report if isinstance(report, dict) else {}
