"""Matches requests to the turns that the policy sampled before, so that no sampled token is encoded again. Pure.

The turns of an episode are a tree: a turn's parent is the last earlier turn that its request repeats. Messages after
the parent are appended as tokens. A request that repeats no turn begins anew. Every leaf of the tree is a branch, and
every branch a trajectory. A turn that several branches contain is trained on in one of them, the first.
"""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jppo.plugins.agents.gateway.request import Choice, Message, Request
from jppo.plugins.agents.turn_tokens import Chat, SampledTurn
from jppo.rollout.protocol import Answer, pad_experts, pad_kept
from jppo.types import Exchange, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """An answer of the policy to a request."""

    parent: "Turn | None"
    given: list[int]  # between the parent's answer and this one
    answer: Answer  # without the experts of tokens that the parent has read
    end: int  # tokens up to the end of the answer
    read: int  # of these, with known experts
    state: Any  # hash of the conversation up to the answer, as the agent has it
    answers: bytes  # hash of the conversation before the answer; b'' of a text without messages
    text: tuple[int, bytes] | None  # of a text without messages, up to the answer: characters and hash
    room: int  # most tokens of the branch
    choice: Choice  # the answer as the agent has it
    index: int  # among the answers to its request
    reply: str  # id of the reply that has it
    asked: int  # when the request came, in requests and replies of the episode
    answered: int  # when it was answered
    of_task: bool  # its conversation begins with the task

    @property
    def begin(self) -> int:
        """Returns the index of the first sampled token."""
        return self.end - len(self.answer.tokens)

    @property
    def path(self) -> "list[Turn]":
        """Returns the turns from the root to this one."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent  # type: ignore[assignment]
        return turns[::-1]

    @property
    def ids(self) -> list[int]:
        """Returns all tokens up to the end of the answer."""
        return [token for turn in self.path for part in (turn.given, turn.answer.tokens) for token in part]


def make_turn(
    parent: Turn | None, new_ids: list[int], answer: Answer, choice: Choice, request: Request, state: Any, **fields: Any
) -> Turn:
    """Returns the turn of an answer to a request; `state` is the hash of its messages."""
    before, read = (0, 0) if parent is None else (parent.end, parent.read)
    if answer.experts is not None:
        new_experts = answer.experts[read:].copy()  # not a view, which would keep the experts of all tokens
        answer, read = dataclasses.replace(answer, experts=new_experts), read + len(new_experts)
    end, text = before + len(new_ids) + len(answer.tokens), None
    if request.text is not None and choice.text:
        full_text = request.text + choice.text
        text = len(full_text), _update_hash(hashlib.sha256(), full_text).digest()
    answers = b"" if request.text is not None else state.digest()
    state_after = extend_hash(state, choice.message)
    return Turn(parent, new_ids, answer, end, read, state_after, answers, text, choice=choice, **fields)


def _update_hash(state: Any, text: str) -> Any:
    state.update(text.encode("utf-8", "surrogatepass"))
    return state


@functools.lru_cache(maxsize=64)
def _hash_tools(schemas: str) -> Any:
    """Returns the hash that a conversation with these tools begins with."""
    return hashlib.sha256(json.dumps(json.loads(schemas), sort_keys=True).encode())


def length(message: Message) -> int:
    """Returns the number of characters of a message, with its tool calls."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return len(message["content"]) + (len(json.dumps(calls, ensure_ascii=False)) if calls else 0)


def find_parent(turns: Sequence[Turn], messages: Sequence[Message], schemas: str) -> tuple[Any, Turn | None, int]:
    """Returns the hash of a conversation, the last turn that it repeats, and the number of messages up to that.

    `schemas` of the tools is JSON.
    """
    by_hash: dict[bytes, list[Turn]] = {}
    for turn in turns:
        by_hash.setdefault(turn.answers, []).append(turn)
    state, parent, count = _hash_tools(schemas), None, 0
    for i, message in enumerate(messages, 1):
        after = extend_hash(state, message)
        if message["role"] == "assistant" and (repeated := _repeated(by_hash.get(state.digest(), []), message, after)):
            parent, count = repeated, i
            after = repeated.state
        state = after
    return state, parent, count


def _repeated(turns: Sequence[Turn], message: Message, state: Any) -> Turn | None:
    """Returns which of the turns at this place a message repeats: the one with its ids of calls, or the latest."""
    matching = [turn for turn in turns if turn.state.digest() == state.digest() or _is_shortened(turn.choice, message)]
    ids = _call_ids(message)
    return max(reversed(matching), key=lambda turn: _call_ids(turn.choice.message) == ids, default=None)


def _is_shortened(choice: Choice, message: Message) -> bool:
    """Whether a message is the answer with less text: calls with their ids, or a text without its thinking."""
    sent, content = choice.message, message["content"].strip()
    if _call_ids(sent) != _call_ids(message) or _calls_json(sent) != _calls_json(message):
        return False
    if choice.calls:
        characters = iter(sent["content"])
        return all(character in characters for character in content)  # in this order
    return bool(content) and content == sent["content"].rpartition("</think>")[2].strip()


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", [])]


def _calls_json(message: Message) -> str:
    """Returns the calls as JSON, however a client writes it."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return json.dumps(json.loads(json.dumps(calls), parse_float=_parse_number), sort_keys=True) if calls else "[]"


def extend_hash(state: Any, message: Message) -> Any:
    """Returns the hash with one more message, without ids of calls and outer spaces of answers."""
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    text = content.encode("utf-8", "surrogatepass")
    state = state.copy()
    state.update(f"\n{message['role']} {_calls_json(message)} {len(text)} ".encode())
    state.update(text)
    return state


def _parse_number(text: str) -> float:
    """Returns a whole number as int: JavaScript writes 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


def resolve(turns: Sequence[Turn], request: Request, chat: Chat, schemas: str) -> tuple[list[int], Turn | None, Any]:
    """Returns the tokens to answer, the turn that they continue, and the hash of the messages.

    The turn is None, and a branch begins, if the request repeats no turn or the template changes a repeated one.
    """
    state, parent, count = find_parent(turns, request.messages, schemas)
    if request.text is None:
        if parent is None:
            return chat.whole(request.messages), None, state
        choice, sampled = parent.choice, len(parent.answer.tokens)
        spoken = SampledTurn(request.messages[: count - 1], choice.message, choice.raw, parent.ids, sampled)
        ids, continues = chat.follow(spoken, request.messages[count:])
        return (ids[parent.end :], parent, state) if continues else (ids, None, state)
    text, turns_by_text = request.text, {turn.text: turn for turn in turns if turn.text is not None}
    prefix_hash, hashed_length = hashlib.sha256(), 0
    for length in sorted({length for length, _ in turns_by_text if length <= len(text)}):
        prefix_hash, hashed_length = _update_hash(prefix_hash, text[hashed_length:length]), length
        parent = turns_by_text.get((length, prefix_hash.digest()), parent)
    if parent is None or parent.text is None:
        return chat.text(text, True), None, state
    new_text, choice = text[parent.text[0] :], parent.choice
    # the ids end with the stop text, which the agent may repeat
    new_text = new_text.removeprefix(choice.tail if new_text.startswith(choice.tail) else choice.stopped_by or "")
    return chat.text(new_text, False), parent, state


def begins_with_task(turns: Sequence[Turn], request: Request, task: str) -> bool:
    """Whether a request that continues no turn has the task's text, or an answer of a conversation that had it."""
    answers = {(turn.choice.text.strip(), _calls_json(turn.choice.message)) for turn in turns if turn.of_task}
    repeats = any(
        message["role"] == "assistant" and (message["content"].strip(), _calls_json(message)) in answers
        for message in request.messages
    )
    return repeats or any(task in text for text in (request.text or "", *(m["content"] for m in request.messages)))


def list_branches(turns: Sequence[Turn], answer_turn: Turn | None) -> list[list[Turn]]:
    """Returns the path from the root to each leaf: first to the episode's answer, then by the latest leaf.

    The answer is the turn `answer_turn` by the agent, if any.
    """
    inner = {id(turn.parent) for turn in turns}
    paths = [leaf.path for leaf in reversed(turns) if id(leaf) not in inner]
    if not paths:
        return []
    if answer_turn is None:
        answer_path = _answer_path(paths)
    else:
        answer_path = min((path for path in paths if answer_turn in path), key=len)
    return [answer_path, *(path for path in paths if path is not answer_path)]


def _answer_path(paths: Sequence[list[Turn]]) -> list[Turn]:
    """Returns the path with the episode's answer, by a rule that does not depend on the speed of concurrent requests.

    Of the conversations that begin with the task, if any does, it is the last one that began. Of those that overlap in
    time, it is the one that began before the others; of those that began at once, the one with most turns.
    """
    shared = collections.Counter(id(turn) for path in paths for turn in path)
    task_paths = [path for path in paths if path[0].of_task] or paths
    starts = [next(turn for turn in path if shared[id(turn)] == 1) for path in task_paths]
    last_asked = max(turn.asked for turn in starts)
    late = [(path, turn) for path, turn in zip(task_paths, starts, strict=True) if path[-1].answered > last_asked]
    first_answered = min(turn.answered for _, turn in late)
    early = [path for path, turn in late if turn.asked < first_answered]
    return max(early, key=lambda path: (len(path), -path[-1].index, path[-1].state.digest()))


def to_trajectory(uid: str, path: Sequence[Turn], trained: set[int], decode: Callable[[list[int]], str]) -> Trajectory:
    """Returns a branch as a trajectory, and adds the ids of its turns to `trained`, the ids in earlier branches."""
    leaf = path[-1]
    ids, n = leaf.ids, leaf.end
    sampled, logprob, version = np.zeros(n, np.bool_), np.zeros(n, np.float32), np.full(n, -1, np.int32)
    experts = [turn.answer.experts for turn in path if turn.answer.experts is not None]
    own_turns = [turn for turn in path if id(turn) not in trained]
    for turn in own_turns:
        span = slice(turn.begin, turn.end)
        sampled[span], logprob[span], version[span] = (True, turn.answer.logprob, turn.answer.version)
    trained |= {id(turn) for turn in own_turns}
    has_kept = any(turn.answer.kept is not None for turn in own_turns)
    return Trajectory(
        uid=uid,
        tokens=np.asarray(ids, np.int32),
        sampled=sampled,
        logprob=logprob,
        version=version,
        text=decode(ids[path[0].begin :]),
        turns=len(own_turns),
        server=leaf.answer.server,
        finish=leaf.answer.finish if n >= leaf.room else "stop",  # the agent's own max_tokens truncates no branch
        experts=pad_experts(np.concatenate(experts) if experts else None, n),
        kept=pad_kept([ids for turn in own_turns for ids in turn.answer.kept or []] if has_kept else None, sampled),
    )


def branch_rewards(
    path: Sequence[Turn], trajectory: Trajectory, amounts: Sequence[tuple[Turn, float]]
) -> tuple[tuple[int, float], ...]:
    """Returns the amounts of the branch's trained turns, each at its turn's last token in the response."""
    first_sampled = int(np.argmax(trajectory.sampled))
    trained_turns = {id(turn) for turn in path if trajectory.sampled[turn.begin]}
    return tuple((turn.end - 1 - first_sampled, amount) for turn, amount in amounts if id(turn) in trained_turns)


def empty_trajectory(uid: str, ids: np.ndarray, exchange: Exchange) -> Trajectory:
    """Returns the trajectory of an episode without a turn: its prompt, nothing sampled."""
    n = len(ids)
    nothing = np.zeros(n, np.float32)
    return Trajectory(
        uid, ids.astype(np.int32), np.zeros(n, np.bool_), nothing, np.full(n, -1, np.int32), "", "abort", 0, exchange
    )
