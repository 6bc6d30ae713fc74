"""A multi-turn conversation as a `Talk`: the policy and a tool, user or environment in turns.

The trajectory has the prompt, sampled and inserted tokens; no sampled token is encoded again. Inserted tokens have
`sampled` False, no log-prob and no version. Where the chat template changes an earlier turn, the next turn begins a new
trajectory, a branch of the same episode. Tools answer a turn with calls, the partner any other turn. The conversation
ends without an answer, at the turn limit, or if the response has no room for the answer and one more token. Calls of
the last turn are not made; the partner still scores its text.

A partner is a user-defined class. `rollout.multi_turn.interaction='path.py:Class'`, a simulated user, is created once
per run:

    async def respond(self, messages, context) -> (text, done, score)     # score: a number, or None

`rollout.multi_turn.environment='path.py:Class'` is created for every conversation:

    async def reset(self, prompt) -> text                                 # '': no opening message
    async def step(self, text) -> (text, reward, done)

Plain functions run in their own threads. An exception, or a result of another form, ends the conversation, whose
response then has no reward.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

import numpy as np

from jppo.errors import UserError
from jppo.plugins.agents.calls import OPENING, Parser, opened_thought
from jppo.plugins.agents.gateway.history import empty_trajectory
from jppo.plugins.agents.tools import Context, Toolbox, ToolReplies, UserCodeRunner
from jppo.plugins.agents.turn_tokens import UNREADABLE, Chat, Message, SampledTurn, as_messages
from jppo.registry import at_line, explain, resolve
from jppo.rewards.earned import finite, short
from jppo.rollout.protocol import Answer, Ask, Kept, Talk, join_experts, pad_experts, pad_kept, sample_seed
from jppo.types import Exchange, Prompt, Sampling, Trajectory


@dataclasses.dataclass(frozen=True)
class PartnerReply:
    """The reply to a turn of the policy."""

    text: str
    done: bool  # the conversation ends, and the text is dropped
    score: float


class PartnerError(Exception):
    """A user's class failed; the message has the reason."""


Respond = Callable[[list[dict[str, str]]], Awaitable[PartnerReply]]  # gets the conversation, the policy's turn last
Begin = Callable[[Context], Awaitable[tuple[str, Respond]]]  # the opening message, and the function for further turns


def make_interaction(spec: str, *, user_code: UserCodeRunner, timeout_s: float) -> Begin:
    """Makes the simulated user of a run; returns the function that begins a conversation with it."""
    _, user = _load_class(spec, "rollout.multi_turn.interaction", ("respond",))

    async def begin(context: Context) -> tuple[str, Respond]:
        async def respond(messages: list[dict[str, str]]) -> PartnerReply:
            returned = await _call(user_code, user.respond, messages, context, timeout_s=timeout_s)
            text, done, score = _require_three(returned, "respond", "(text, done, score)")
            return _make_reply(text, done, 0.0 if score is None else score, "respond")

        return "", respond

    return begin


def make_environment(spec: str, *, user_code: UserCodeRunner, timeout_s: float) -> Begin:
    """Returns the function that begins a conversation with a new environment."""
    cls, _ = _load_class(spec, "rollout.multi_turn.environment", ("reset", "step"))

    def __init__() -> Any:  # its name is in errors; the class itself would look async if its `__call__` is
        return cls()

    async def begin(context: Context) -> tuple[str, Respond]:
        environment = await _call(user_code, __init__, timeout_s=timeout_s)

        async def respond(messages: list[dict[str, str]]) -> PartnerReply:
            returned = await _call(user_code, environment.step, messages[-1]["content"], timeout_s=timeout_s)
            text, reward, done = _require_three(returned, "step", "(text, reward, done)")
            return _make_reply(text, done, reward, "step")

        opening = await _call(user_code, environment.reset, context.prompt, timeout_s=timeout_s)
        if not isinstance(opening, str):
            raise PartnerError(f"reset returned {type(opening).__name__}; it must be text")
        return _require_unicode(opening, "reset"), respond

    return begin


def _load_class(spec: str, setting: str, methods: tuple[str, ...]) -> tuple[Callable[[], Any], Any]:
    """Returns the class and an object of it, after checking its constructor and methods."""
    cls: Callable[[], Any] = resolve(spec, setting)
    try:
        partner = cls()
    except (Exception, SystemExit) as e:
        raise UserError(
            f"{setting}={spec}: the class cannot be created without arguments ({explain(e)}); fix it"
        ) from e
    for method in methods:
        if not callable(getattr(partner, method, None)):
            raise UserError(f"{setting}={spec}: the class has no method {method!r}; add it")
    return cls, partner


async def _call(user_code: UserCodeRunner, method: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Calls a method of the user's class; PartnerError if it fails or is late."""
    name = getattr(method, "__name__", "it")
    try:
        return await user_code.run(method, *arguments, timeout_s=timeout_s)
    except TimeoutError as e:
        raise PartnerError(f"{name} took longer than {timeout_s:g} s") from e
    except Exception as e:  # a user's class may raise anything
        why = explain(e).encode("utf-8", "backslashreplace").decode()  # it may have half a surrogate pair
        raise PartnerError(f"{name} raised {why}{at_line(e)}") from e


def _require_three(returned: Any, method: str, form: str) -> tuple[Any, Any, Any]:
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise PartnerError(f"{method} returned {type(returned).__name__}; it must be {form}")
    return returned[0], returned[1], returned[2]


def _make_reply(text: Any, done: Any, score: Any, method: str) -> PartnerReply:
    finite_score = finite(score)
    if not isinstance(text, str) or finite_score is None:
        raise PartnerError(f"{method} returned {short(text)} and {short(score)}; they must be text and a finite number")
    return PartnerReply(_require_unicode(text, method), bool(done), finite_score)


def _require_unicode(text: str, method: str) -> str:
    """Returns a text that a tokenizer can encode."""
    half = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
    if half is not None:
        raise PartnerError(f"{method} returned text with {half!a}, half a surrogate pair; it must be valid Unicode")
    return text


@dataclasses.dataclass(frozen=True)
class Turns:
    """Turn limits; -1: as many as the response has room for."""

    assistant: int
    user: int  # tools, users and environments


class _Branch:
    """A growing trajectory, up to where the template changes an earlier turn."""

    def __init__(self, prompt: list[int]):
        self.ids, self.begin, self.turns = prompt, len(prompt), 0
        self.sampled = [False] * len(prompt)
        self.logprob = [0.0] * len(prompt)
        self.version = [-1] * len(prompt)
        self.experts: np.ndarray | None = None  # of the tokens that the policy has read
        self.kept: Kept | None = None  # of the sampled tokens
        self.earned: list[tuple[int, float]] = []
        self.tool_earned: list[tuple[int, float]] = []

    @property
    def end(self) -> int:
        """Returns the index of the last token in the response."""
        return len(self.ids) - self.begin - 1

    def add_answer(self, answer: Answer) -> None:
        self.ids = self.ids + answer.tokens  # a new list: an engine may still hold the old one
        self.sampled += [True] * len(answer.tokens)
        self.logprob += answer.logprob
        self.version += answer.version
        self.experts = join_experts(self.experts, answer.experts)
        self.kept = self.kept if answer.kept is None else [*(self.kept or []), *answer.kept]
        self.turns += 1

    def add_inserted(self, ids: list[int]) -> None:
        """Adds the tokens of `ids` behind the present ones, which the policy has not sampled."""
        count = len(ids) - len(self.ids)
        self.ids = ids
        self.sampled += [False] * count
        self.logprob += [0.0] * count
        self.version += [-1] * count

    def trajectory(self, uid: str, text: str, finish: str, exchange: Exchange) -> Trajectory:
        """Returns the finished branch."""
        sampled = np.asarray(self.sampled)
        return Trajectory(
            uid=uid,
            tokens=np.asarray(self.ids, np.int32),
            sampled=sampled,
            logprob=np.asarray(self.logprob, np.float32),
            version=np.asarray(self.version, np.int32),
            text=text,
            finish=finish,
            turns=self.turns,
            exchange=dataclasses.replace(exchange, earned=tuple(self.earned), tool_earned=tuple(self.tool_earned)),
            experts=pad_experts(self.experts, len(self.ids)),
            kept=pad_kept(self.kept, sampled),
        )


@dataclasses.dataclass
class _State:
    """The state of a conversation."""

    prompt: Prompt
    messages: list[dict[str, str]]  # as the partner gets them
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    respond: Respond | None = None
    history: list[Message] = dataclasses.field(default_factory=list)  # as the template gets them
    branches: list[_Branch] = dataclasses.field(default_factory=list)
    text: str = ""  # of the last turn
    sampled: int = 0  # tokens of the last turn
    turns: int = 0
    num_replies: int = 0
    calls: int = 0
    call_errors: int = 0
    call_s: float = 0.0
    score: float = 0.0
    fault: str | None = None
    finish: str = "abort"

    @property
    def branch(self) -> _Branch:
        return self.branches[-1]

    async def open(self, begin: Begin | None) -> str:
        """Creates the partner by `begin`, if there is one; returns its first message, or ''."""
        opening = ""
        if begin is not None:
            try:
                opening, self.respond = await begin(Context(self.prompt, {}, self.memory))
            except PartnerError as e:
                self.fault = str(e)
        return opening

    def begin(self, chat: Chat, opening: str, room: int) -> list[int]:
        """Begins the first branch: the prompt with the partner's first message; no tokens if it has no room."""
        self.history = list(self.messages)
        ids: list[int] = self.prompt.ids.tolist()
        if opening:
            self.history, with_opening = chat.opening(self.prompt.messages, ids, opening)
            self.messages.append({"role": "user", "content": opening})
            if len(with_opening) >= room:
                self.fault = (
                    f"with the opening message the prompt has {len(with_opening)} tokens instead of {len(ids)}, and the"
                    f" response ends at {room}; raise data.max_response_length, or shorten the message"
                )
                return []
            ids = with_opening
        self.branches = [_Branch(ids)]
        return ids

    def add_answer(self, answer: Answer) -> None:
        self.branch.add_answer(answer)
        self.turns, self.finish, self.sampled = self.turns + 1, answer.finish, len(answer.tokens)

    def follow(self, chat: Chat, turn: Message, replies: list[dict[str, str]], room: int) -> list[int]:
        """Adds the answers to a turn; returns the tokens of the conversation, none at its end."""
        if not replies:
            return []
        try:
            ids, same = chat.follow(SampledTurn(self.history, turn, self.text, self.branch.ids, self.sampled), replies)
        except UNREADABLE as e:
            self.fault = f"the chat template or the tokenizer refuses the conversation: {' '.join(str(e).split()):.200}"
            return []
        if len(ids) >= room:
            self.finish = "length"
            return []
        if not same:
            self.branches.append(_Branch(ids))
        self.branch.add_inserted(ids)
        self.history, self.messages = [*self.history, turn, *replies], self.messages + replies
        self.num_replies += 1
        return ids

    def add_tool_replies(self, calls: int, replies: ToolReplies) -> list[dict[str, str]]:
        """Returns the answers of tools to the last turn; none after a wrong reward."""
        self.calls += calls
        self.call_errors += replies.errors
        self.call_s += replies.seconds
        if replies.reward:
            self.branch.tool_earned.append((self.branch.end, replies.reward))
        self.fault = self.fault or replies.fault
        return replies.messages if replies.fault is None else []

    def trajectory(self, decode: Callable[[list[int]], str], max_branches: int) -> Trajectory:
        """Returns the latest branch with the others, at most so many in all."""
        counts = dict(calls=self.calls, call_errors=self.call_errors, call_s=self.call_s, score=self.score)
        left_out = max(0, len(self.branches) - max_branches)
        exchange = Exchange(**counts, fault=self.fault, branches_left_out=left_out)  # type: ignore[arg-type]
        if not self.turns:
            return empty_trajectory(self.prompt.uid, self.prompt.ids, exchange)
        trajectories = [
            branch.trajectory(
                self.prompt.uid, decode(branch.ids[branch.begin :]), "stop" if i else self.finish, exchange
            )
            for i, branch in enumerate(reversed(self.branches[-max_branches:]))
        ]
        return dataclasses.replace(trajectories[0], branches=tuple(trajectories[1:]))


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
    branches: int = 1,
) -> Talk:
    """Makes the talk of conversations from the parts of a run: `decode` drops special tokens, `spell` keeps them.

    Of the branches of a conversation the latest `branches` are trained on.
    """

    async def get_replies(state: _State, tokens: list[int], prompt_length: int) -> tuple[Message, list[dict[str, str]]]:
        """Returns the policy's turn as a message, and the replies to it; none end the conversation."""
        state.text = text = spell(tokens[:-1] if tokens[-1] in ends else tokens)
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        state.messages.append(dict(turn))
        is_last = state.turns == turns.assistant or state.num_replies == turns.user
        thought = opened_thought(spell(state.branch.ids[max(0, prompt_length - OPENING) : prompt_length]))
        if calls := parse(thought + text, toolbox.schemas) if toolbox.schemas else []:
            if is_last:
                return turn, []
            replies = await toolbox.call(calls, state.prompt, state.memory)
            return chat.form.with_answers(
                turn, thought, calls, state.add_tool_replies(len(calls), replies), state.calls - len(calls)
            )
        if state.respond is None:
            return turn, []
        try:
            reply = await state.respond(state.messages)
        except PartnerError as e:
            state.fault = str(e)
            return turn, []
        state.score += reply.score
        state.branch.earned.append((state.branch.end, reply.score))
        return turn, [] if reply.done or is_last else [{"role": "user", "content": reply.text}]

    async def talk(ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        state = _State(prompt, as_messages(prompt.messages))
        room = len(prompt.ids) + sampling.max_tokens
        ids = state.begin(chat, await state.open(begin), room)
        while ids:
            turn_sampling = dataclasses.replace(sampling, max_tokens=room - len(ids))
            turn_seed = seed if state.turns == 0 else sample_seed(seed, state.turns, 0)
            answer = await ask(ids, sampling=turn_sampling, seed=turn_seed, near=near)
            state.add_answer(answer)
            turn, replies = await get_replies(state, answer.tokens, len(ids)) if answer.finish == "stop" else ({}, [])
            ids = state.follow(chat, turn, replies, room)
        return state.trajectory(decode, branches)

    return talk
