"""Matches requests to the turns that the policy sampled before, so that no sampled token is encoded again. Pure.

The turns of an episode are a tree: a turn's parent is the last earlier turn that its request repeats. Messages after
the parent are appended as tokens. A request that repeats no turn begins anew. Every leaf of the tree is a branch, and
every branch a trajectory. A turn that several branches contain is trained on in one of them, the latest.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jppo.agent.gateway.request import Choice, Message, Request
from jppo.agent.turn_tokens import Chat, Spoken
from jppo.rollout.protocol import Answer, joined, of_tokens
from jppo.types import Exchange, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """An answer of the policy with all tokens before it."""

    parent: "Turn | None"
    ids: list[int]  # up to the end of the answer
    answer: Answer
    key: bytes  # of the conversation up to the answer, as the agent has it
    text: str | None  # the same of a text without messages; None without text in the answer
    room: int  # most tokens of the branch
    choice: Choice  # the answer as the agent has it
    reply: str  # id of the reply that has it

    @property
    def begin(self) -> int:
        """Returns the index of the first sampled token."""
        return len(self.ids) - len(self.answer.tokens)


@functools.lru_cache(maxsize=64)
def _of_tools(schemas: str) -> Any:
    return hashlib.sha256(json.dumps(json.loads(schemas), sort_keys=True).encode())


def length(message: Message) -> int:
    """Returns the number of characters of a message, with its tool calls."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return len(message["content"]) + (len(json.dumps(calls, ensure_ascii=False)) if calls else 0)


def states(messages: Sequence[Message], schemas: str) -> list[Any]:
    """Returns the hash of the conversation before each message, and of all of it; `schemas` of the tools is JSON."""
    found = [_of_tools(schemas)]
    for message in messages:
        found.append(extended(found[-1], message))
    return found


def extended(state: Any, message: Message) -> Any:
    """Returns the hash with one more message, without ids of calls and outer spaces of answers."""
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    text = content.encode("utf-8", "surrogatepass")
    calls = [call["function"] for call in message.get("tool_calls", [])]
    said = json.dumps(json.loads(json.dumps(calls), parse_float=_number), sort_keys=True) if calls else "[]"
    state = state.copy()
    state.update(f"\n{message['role']} {said} {len(text)} ".encode())
    state.update(text)
    return state


def _number(text: str) -> float:
    """Returns a whole number as int: JavaScript writes 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


def context(
    turns: Sequence[Turn], request: Request, chat: Chat, before: Sequence[Any]
) -> tuple[list[int], Turn | None]:
    """Returns the tokens to answer, and the turn that they continue; `before` are the request's `states`."""
    if request.text is not None:
        text = request.text
        earlier = [turn for turn in turns if turn.text is not None and text.startswith(turn.text)]
        parent = max(reversed(earlier), key=lambda turn: len(turn.text or ""), default=None)
        if parent is None:
            return chat.text(text, True), None
        rest, choice = text[len(parent.text or "") :], parent.choice
        # the ids end with the stop text, which the agent may repeat
        rest = rest.removeprefix(choice.tail if rest.startswith(choice.tail) else choice.stopped_by or "")
        return parent.ids + chat.text(rest, False), parent
    by_key = {turn.key: turn for turn in turns}
    for i in range(len(request.messages) - 1, 0, -1):
        if request.messages[i - 1]["role"] == "assistant" and (key := before[i].digest()) in by_key:
            parent = by_key[key]
            choice, asked, sampled = parent.choice, request.messages[: i - 1], len(parent.answer.tokens)
            turn = Spoken(asked, choice.message, choice.raw, parent.ids, sampled)
            ids, same = chat.follow(turn, request.messages[i:])
            return ids, parent if same else None
    return chat.whole(request.messages), None


def branches(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Returns the path from the root to each leaf, the latest leaf first."""
    inner = {id(turn.parent) for turn in turns}
    paths = []
    for leaf in (turn for turn in reversed(turns) if id(turn) not in inner):
        path = [leaf]
        while path[0].parent is not None:
            path.insert(0, path[0].parent)
        paths.append(path)
    return paths


def trajectory(uid: str, path: Sequence[Turn], trained: set[int], decode: Callable[[list[int]], str]) -> Trajectory:
    """Returns a branch as a trajectory. `trained` has the ids of turns in earlier ones, and gets those of this one."""
    leaf = path[-1]
    n = len(leaf.ids)
    sampled, logprob, version = np.zeros(n, np.bool_), np.zeros(n, np.float32), np.full(n, -1, np.int32)
    own = [turn for turn in path if id(turn) not in trained]
    for turn in own:
        here = slice(turn.begin, len(turn.ids))
        sampled[here], logprob[here], version[here] = True, turn.answer.logprob, turn.answer.version
    trained |= {id(turn) for turn in own}
    return Trajectory(
        uid=uid,
        tokens=np.asarray(leaf.ids, np.int32),
        sampled=sampled,
        logprob=logprob,
        version=version,
        text=decode(leaf.ids[path[0].begin :]),
        turns=len(own),
        server=leaf.answer.server,
        finish=leaf.answer.finish,
        experts=of_tokens(functools.reduce(joined, (turn.answer.experts for turn in path)), n),
    )


def earned(path: Sequence[Turn], t: Trajectory, amounts: Sequence[tuple[Turn, float]]) -> tuple[tuple[int, float], ...]:
    """Returns the amounts of the branch's trained turns, each at its turn's last token in the response."""
    first = int(np.argmax(t.sampled))
    there = {id(turn) for turn in path if t.sampled[turn.begin]}
    return tuple((len(turn.ids) - 1 - first, amount) for turn, amount in amounts if id(turn) in there)


def nothing_said(uid: str, ids: np.ndarray, exchange: Exchange) -> Trajectory:
    """Returns the trajectory of an episode without a turn: its prompt, nothing sampled."""
    n = len(ids)
    nothing = np.zeros(n, np.float32)
    return Trajectory(
        uid, ids.astype(np.int32), np.zeros(n, np.bool_), nothing, np.full(n, -1, np.int32), "", "abort", 0, exchange
    )
