"""A conversation as a `Talk`: the policy speaks, tools or a partner answer, and it speaks again.

The trajectory is the prompt, what was sampled and what was put between, token by token; nothing is encoded twice. What
the policy did not choose has `sampled` False, no log-prob and no version. A turn with calls is answered by the tools, any
other by the partner, where there is one; without an answer the conversation ends, as it does when no more turns are
allowed or the response has no room for the answer and one token more.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from jppo.agent.calls import Parser
from jppo.agent.chat import Chat
from jppo.agent.partners import Begin, PartnerError, Respond
from jppo.agent.tools import Context, Toolbox
from jppo.config import UserError
from jppo.rollout.sampler import Answer, Ask, Talk, sample_seed
from jppo.structs import Exchange, Prompt, Sampling, Trajectory


@dataclasses.dataclass(frozen=True)
class Turns:
    """How often each side may speak; -1: as often as the response has room for."""

    assistant: int
    user: int  # tools, users and environments


class _Record:
    """A trajectory that grows."""

    def __init__(self, prompt: list[int]):
        self.ids = prompt
        self.sampled = [False] * len(prompt)
        self.logprob = [0.0] * len(prompt)
        self.version = [-1] * len(prompt)

    def say(self, answer: Answer) -> None:
        self.ids = self.ids + answer.tokens  # a list of its own: an engine may still hold the one that it was given
        self.sampled += [True] * len(answer.tokens)
        self.logprob += answer.logprob
        self.version += answer.version

    def hear(self, ids: list[int]) -> None:
        self.ids = self.ids + ids
        self.sampled += [False] * len(ids)
        self.logprob += [0.0] * len(ids)
        self.version += [-1] * len(ids)


@dataclasses.dataclass
class _Tally:
    """What went on so far between the turns."""

    turns: int = 0
    heard: int = 0
    calls: int = 0
    errors: int = 0
    seconds: float = 0.0
    score: float = 0.0
    fault: str | None = None


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
    """Closes over the parts of a run: `decode` leaves special tokens out, `spell` does not."""

    def said(tokens: list[int]) -> str:
        return spell(tokens[:-1] if tokens[-1] in ends else tokens)

    async def answered(
        text: str, messages: list[dict[str, str]], prompt: Prompt, memory: dict[str, Any], respond: Respond | None, t: _Tally
    ) -> list[dict[str, str]]:
        """What is said to the policy after its turn; nothing where the conversation ends."""
        if found := parse(text, toolbox.schemas) if toolbox.schemas else []:
            told = await toolbox.call(found, prompt, memory)
            t.calls, t.errors, t.seconds = t.calls + len(found), t.errors + told.errors, t.seconds + told.seconds
            return told.messages
        if respond is None:
            return []
        try:
            reply = await respond(messages)
        except PartnerError as e:
            t.fault = str(e)
            return []
        t.score += reply.score
        return [] if reply.done else [{"role": "user", "content": reply.text}]

    async def talk(ask: Ask, prompt: Prompt, *, sampling: Sampling, seed: int, near: Hashable) -> Trajectory:
        ids, memory, t = prompt.ids.tolist(), dict[str, Any](), _Tally()
        before, first, respond = len(ids), "", None
        if begin is not None:
            try:
                first, respond = await begin(Context(prompt, {}, memory))
            except PartnerError as e:
                t.fault = str(e)
        record = _Record(opening(chat, prompt, ids, first, sampling.max_tokens))
        messages = [*_as_messages(prompt), *([{"role": "user", "content": first}] if first else [])]
        while True:
            left = before + sampling.max_tokens - len(record.ids)
            own = seed if t.turns == 0 else sample_seed(seed, t.turns, 0)
            answer = await ask(record.ids, sampling=dataclasses.replace(sampling, max_tokens=left), seed=own, near=near)
            record.say(answer)
            t.turns, finish = t.turns + 1, answer.finish
            if finish != "stop" or t.turns == turns.assistant or t.heard == turns.user:
                break
            text = said(answer.tokens)
            messages.append({"role": "assistant", "content": text})
            heard = await answered(text, messages, prompt, memory, respond, t)
            if not heard:
                break
            new = chat.between(heard, answer.tokens[-1])
            if len(record.ids) + len(new) >= before + sampling.max_tokens:
                finish = "length"
                break
            record.hear(new)
            messages += heard
            t.heard += 1
        return Trajectory(
            uid=prompt.uid,
            tokens=np.asarray(record.ids, np.int32),
            sampled=np.asarray(record.sampled),
            logprob=np.asarray(record.logprob, np.float32),
            version=np.asarray(record.version, np.int32),
            text=decode(record.ids[before:]),
            finish=finish,
            turns=t.turns,
            exchange=Exchange(t.calls, t.errors, t.seconds, t.score, t.fault),
        )

    return talk


def opening(chat: Chat, prompt: Prompt, ids: list[int], first: str, room: int) -> list[int]:
    """The prompt with the first text of an environment, which takes its room from the response's."""
    whole = chat.opening(prompt.messages, ids, first) if first else ids
    if len(whole) >= len(ids) + room:
        raise UserError(
            f"prompt {prompt.uid}: what the environment says first leaves no room for a response: {len(whole)} tokens"
            f" with the prompt's {len(ids)}, and data.max_response_length={room}; raise it, or say less"
        )
    return whole


def _as_messages(prompt: Prompt) -> list[dict[str, str]]:
    said = prompt.messages
    return [{"role": "user", "content": said}] if isinstance(said, str) else [dict(m) for m in said]
