"""A multi-turn conversation as a `Talk`: the policy and a tool, user or environment in turns.

The trajectory has the prompt, sampled and inserted tokens; nothing is encoded twice. Inserted tokens have `sampled`
False, no log-prob and no version. Tools answer a turn with calls, the partner any other turn. The conversation ends
without an answer, at the turn limit, or if the response has no room for the answer and one more token. Calls of the
last turn are not made; the partner still scores its text.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from jppo.agent.calls import Parser
from jppo.agent.partners import Begin, PartnerError, Respond
from jppo.agent.tools import Context, Toolbox, ToolReplies
from jppo.agent.turn_tokens import Chat
from jppo.rollout.protocol import Answer, Ask, Talk, joined, of_tokens, sample_seed
from jppo.settings import UserError
from jppo.types import Exchange, Prompt, Sampling, Trajectory


@dataclasses.dataclass(frozen=True)
class Turns:
    """Turn limits; -1: as many as the response has room for."""

    assistant: int
    user: int  # tools, users and environments


class _Record:
    """A growing trajectory."""

    def __init__(self, prompt: list[int]):
        self.ids = prompt
        self.sampled = [False] * len(prompt)
        self.logprob = [0.0] * len(prompt)
        self.version = [-1] * len(prompt)
        self.experts: np.ndarray | None = None  # of the tokens that the policy has read

    def say(self, answer: Answer) -> None:
        self.ids = self.ids + answer.tokens  # a new list: an engine may still hold the old one
        self.sampled += [True] * len(answer.tokens)
        self.logprob += answer.logprob
        self.version += answer.version
        self.experts = joined(self.experts, answer.experts)

    def hear(self, ids: list[int]) -> None:
        self.ids = self.ids + ids
        self.sampled += [False] * len(ids)
        self.logprob += [0.0] * len(ids)
        self.version += [-1] * len(ids)


@dataclasses.dataclass
class _State:
    """The state of a conversation."""

    prompt: Prompt
    messages: list[dict[str, str]]
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    respond: Respond | None = None
    turns: int = 0
    heard: int = 0
    calls: int = 0
    call_errors: int = 0
    call_s: float = 0.0
    earned: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    tool_earned: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    fault: str | None = None

    async def open(self, begin: Begin | None) -> str:
        """Returns the partner's first message, if any."""
        if begin is None:
            return ""
        try:
            first, self.respond = await begin(Context(self.prompt, {}, self.memory))
        except PartnerError as e:
            first, self.fault = "", str(e)
        return first

    def heard_tools(self, calls: int, told: ToolReplies, end: int) -> list[dict[str, str]]:
        """Returns the answers of tools to the turn that ends at `end`; none after a wrong reward."""
        self.calls += calls
        self.call_errors += told.errors
        self.call_s += told.seconds
        if told.reward:
            self.tool_earned.append((end, told.reward))
        self.fault = self.fault or told.fault
        return told.messages if told.fault is None else []

    def trajectory(self, record: _Record, text: str, finish: str) -> Trajectory:
        """Returns the finished conversation."""
        return Trajectory(
            uid=self.prompt.uid,
            tokens=np.asarray(record.ids, np.int32),
            sampled=np.asarray(record.sampled),
            logprob=np.asarray(record.logprob, np.float32),
            version=np.asarray(record.version, np.int32),
            text=text,
            finish=finish,
            turns=self.turns,
            exchange=Exchange(
                self.calls,
                self.call_errors,
                self.call_s,
                sum(x for _, x in self.earned),
                self.fault,
                tuple(self.earned),
                tuple(self.tool_earned),
            ),
            experts=of_tokens(record.experts, len(record.ids)),
        )


def make_talk(
    chat: Chat,
    parse: Parser,
    toolbox: Toolbox,
    begin: Begin | None,
    *,
    turns: Turns,
    decode: Callable[[list[int]], str],
    spell: Callable[[list[int]], str],
    ends: tuple[int, ...],
) -> Talk:
    """Closes over the parts of a run: `decode` drops special tokens, `spell` keeps them."""

    async def heard(state: _State, tokens: list[int], end: int) -> list[dict[str, str]]:
        """Returns the messages that answer tokens up to `end` of the response; empty if the conversation ends."""
        text = spell(tokens[:-1] if tokens[-1] in ends else tokens)
        state.messages.append({"role": "assistant", "content": text})
        last = state.turns == turns.assistant or state.heard == turns.user
        if found := parse(text, toolbox.schemas) if toolbox.schemas else []:
            if last:
                return []
            told = await toolbox.call(found, state.prompt, state.memory)
            return state.heard_tools(len(found), told, end)
        if state.respond is None:
            return []
        try:
            reply = await state.respond(state.messages)
        except PartnerError as e:
            state.fault = str(e)
            return []
        state.earned.append((end, reply.score))
        return [] if reply.done or last else [{"role": "user", "content": reply.text}]

    async def talk(ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        state = _State(prompt, _as_messages(prompt))
        first = await state.open(begin)
        state.messages += [{"role": "user", "content": first}] if first else []
        room = len(prompt.ids) + sampling.max_tokens
        record = _Record(start := opening(chat, prompt, first, room))
        while True:
            own = dataclasses.replace(sampling, max_tokens=room - len(record.ids))
            drawn_by = seed if state.turns == 0 else sample_seed(seed, state.turns, 0)
            answer = await ask(record.ids, sampling=own, seed=drawn_by, near=near)
            record.say(answer)
            state.turns, finish = state.turns + 1, answer.finish
            new = await heard(state, answer.tokens, len(record.ids) - len(start) - 1) if finish == "stop" else []
            if not new:
                break
            ids = chat.between(new, answer.tokens[-1])
            if len(record.ids) + len(ids) >= room:
                finish = "length"
                break
            record.hear(ids)
            state.messages, state.heard = state.messages + new, state.heard + 1
        return state.trajectory(record, decode(record.ids[len(start) :]), finish)

    return talk


def opening(chat: Chat, prompt: Prompt, first: str, room: int) -> list[int]:
    """Returns the prompt with the environment's opening message; UserError if it exceeds `room` tokens."""
    ids = prompt.ids.tolist()
    whole = chat.opening(prompt.messages, ids, first) if first else ids
    if len(whole) >= room:
        raise UserError(
            f"prompt {prompt.uid}: with the opening message it has {len(whole)} tokens instead of {len(ids)},"
            f" and the response ends at {room}; raise data.max_response_length, or shorten the message"
        )
    return whole


def _as_messages(prompt: Prompt) -> list[dict[str, str]]:
    said = prompt.messages
    return [{"role": "user", "content": said}] if isinstance(said, str) else [dict(m) for m in said]
