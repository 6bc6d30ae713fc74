"""Simulated users and environments, which answer turns without a tool call. Both are user-defined classes.

`rollout.multi_turn.interaction='path.py:Class'`, created once per run:

    async def respond(self, messages, context) -> (text, done, score)     # score: a number, or None

`rollout.multi_turn.environment='path.py:Class'`, created for every conversation:

    async def reset(self, prompt) -> text                                 # '': no opening message
    async def step(self, text) -> (text, reward, done)

Plain functions run in their own threads. An exception, or a result of another form, ends the conversation, whose
response then has no reward.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from jppo.agent.tools import Context
from jppo.agent.user_code import UserCodeRunner
from jppo.registry import resolve, said
from jppo.rewards.earned import finite, short
from jppo.settings import UserError


@dataclasses.dataclass(frozen=True)
class Reply:
    """The reply to a turn of the policy."""

    text: str
    done: bool  # the conversation ends, and the text is dropped
    score: float


class PartnerError(Exception):
    """A user's class failed; the message has the reason."""


Respond = Callable[[list[dict[str, str]]], Awaitable[Reply]]  # gets the conversation, the policy's turn last
Begin = Callable[[Context], Awaitable[tuple[str, Respond]]]  # the opening message, and the function for further turns


def make_interaction(spec: str, *, user_code: UserCodeRunner, timeout_s: float) -> Begin:
    """Returns the simulated user of a run."""
    user = _made(spec, "rollout.multi_turn.interaction", ("respond",))()

    async def begin(context: Context) -> tuple[str, Respond]:
        async def respond(messages: list[dict[str, str]]) -> Reply:
            found = await _asked(user_code, user.respond, messages, context, timeout_s=timeout_s)
            text, done, score = _three(found, "respond", "(text, done, score)")
            return _reply(text, done, 0.0 if score is None else score, "respond")

        return "", respond

    return begin


def make_environment(spec: str, *, user_code: UserCodeRunner, timeout_s: float) -> Begin:
    """Returns a function that creates an environment for every conversation."""
    cls = _made(spec, "rollout.multi_turn.environment", ("reset", "step"))

    async def begin(context: Context) -> tuple[str, Respond]:
        try:
            world = cls()
        except Exception as e:
            raise PartnerError(f"{spec} cannot be created: {said(e)}") from e

        async def respond(messages: list[dict[str, str]]) -> Reply:
            found = await _asked(user_code, world.step, messages[-1]["content"], timeout_s=timeout_s)
            text, reward, done = _three(found, "step", "(text, reward, done)")
            return _reply(text, done, reward, "step")

        first = await _asked(user_code, world.reset, context.prompt, timeout_s=timeout_s)
        if not isinstance(first, str):
            raise PartnerError(f"reset returned {type(first).__name__}; it must be text")
        return _whole(first, "reset"), respond

    return begin


def _made(spec: str, setting: str, methods: tuple[str, ...]) -> Callable[[], Any]:
    """Returns the class after checking its constructor and methods."""
    cls: Callable[[], Any] = resolve(spec, setting)
    try:
        one = cls()
    except Exception as e:
        raise UserError(f"{setting}={spec}: the class cannot be created without arguments ({said(e)}); fix it") from e
    for method in methods:
        if not callable(getattr(one, method, None)):
            raise UserError(f"{setting}={spec}: the class has no method {method!r}; add it")
    return cls


async def _asked(user_code: UserCodeRunner, method: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    name = getattr(method, "__name__", "it")
    try:
        return await user_code.run(method, *arguments, timeout_s=timeout_s)
    except TimeoutError as e:
        raise PartnerError(f"{name} took longer than {timeout_s:g} s") from e
    except Exception as e:  # a user's class may raise anything
        why = said(e).encode("utf-8", "backslashreplace").decode()  # it may have half a surrogate pair
        raise PartnerError(f"{name} raised {why}") from e


def _three(found: Any, method: str, form: str) -> tuple[Any, Any, Any]:
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise PartnerError(f"{method} returned {type(found).__name__}; it must be {form}")
    return found[0], found[1], found[2]


def _reply(text: Any, done: Any, score: Any, method: str) -> Reply:
    number = finite(score)
    if not isinstance(text, str) or number is None:
        raise PartnerError(f"{method} returned {short(text)} and {short(score)}; they must be text and a finite number")
    return Reply(_whole(text, method), bool(done), number)


def _whole(text: str, method: str) -> str:
    """Returns a text that a tokenizer can encode."""
    half = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
    if half is not None:
        raise PartnerError(f"{method} returned text with {half!a}, half a surrogate pair; it must be valid Unicode")
    return text
