"""Preference pairs from rows, as token ids, for reward models and DPO.

Rows hold `prompt` (text or chat messages) with `chosen` and `rejected`, as text or as messages that continue the
prompt; or only the two as whole chats that end with the assistant's turn. A `prompt` next to whole chats must be their
beginning. `encode` is the tokenisation: of a reward model as it scores, of a policy as it samples.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jppo.data.prompts import Messages, prompt_of, with_system_prompt
from jppo.data.rows import Row, brief, checked_messages, is_finite, read_sources, text_column
from jppo.data.tokenizer import character_limit
from jppo.errors import UserError, first_line

Encode = Callable[[Messages, str], list[int]]  # prompt and response -> the tokens of both


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two responses, each with its prompt."""

    chosen: np.ndarray  # [n] i32
    rejected: np.ndarray  # [m] i32
    margin: float  # required score difference
    starts: tuple[int, int] = (0, 0)  # the first token of each response, where asked for


@dataclasses.dataclass(frozen=True)
class PairSet:
    """The pairs of a set of files, in file order."""

    pairs: list[Pair]
    overlong: int  # pairs left out because one half is too long
    alike: int  # pairs left out because both halves are equal


def read_pairs(
    files: str,
    *,
    encode: Encode,
    starts: Callable[[Messages], int] | None = None,
    max_length: int,
    margin: float = 0.0,
    margin_column: str = "",
    system_prompt: str = "",
    custom_cls: str = "",
    tokenizer: Any = None,
    setting: str = "data.train_files",
) -> PairSet:
    """Reads, checks and tokenises pairs of comma-separated sources; `starts`, if given, counts a prompt's tokens."""
    sources = read_sources(files, setting, custom_cls=custom_cls, tokenizer=tokenizer)
    pairs, overlong, alike = [], 0, 0
    max_characters = None if tokenizer is None else character_limit(tokenizer, max_length)
    for row in (row for source in sources for row in source.rows):
        halves = _read_halves(row, system_prompt)
        chosen, rejected = (_encode(row, half, encode, max_characters, max_length) for half in halves)
        pair = Pair(chosen, rejected, _read_margin(row, margin_column) if margin_column else margin)
        if starts is not None and max(len(chosen), len(rejected)) <= max_length:
            pair = dataclasses.replace(pair, starts=(starts(halves[0][0]), starts(halves[1][0])))
        if max(len(chosen), len(rejected)) > max_length:
            overlong += 1
        elif np.array_equal(chosen, rejected):
            alike += 1
        else:
            pairs.append(pair)
    if not pairs:
        raise UserError(
            f"{setting}={files}: no pair is left: {overlong} are longer than {max_length} tokens, prompt and response"
            f" together, and {alike} have equal halves; raise data.max_prompt_length or data.max_response_length, or"
            " check the data"
        )
    return PairSet(pairs, overlong, alike)


def _read_halves(row: Row, system_prompt: str) -> list[tuple[Messages, str]]:
    """Returns (prompt, response) of the chosen and of the rejected half of a row."""
    for column in ("chosen", "rejected"):
        if row.columns.get(column) is None:
            raise UserError(f"{row.place} has no {column!r}; its columns are {', '.join(map(str, row.columns))}")
    prompt = None if row.columns.get("prompt") is None else prompt_of(row)
    halves = [_read_half(row, column, prompt) for column in ("chosen", "rejected")]
    return [(with_system_prompt(context, system_prompt, row), response) for context, response in halves]


def _read_half(row: Row, column: str, prompt: Messages | None) -> tuple[Messages, str]:
    """Returns prompt and response of `chosen` or `rejected`, which may be a response, its turns or a whole chat."""
    value = row.columns[column]
    if not isinstance(value, list):
        response = text_column(row, column)
        return (prompt_of(row) if prompt is None else prompt), response  # without one, prompt_of raises
    turns = checked_messages(row, column, value)
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"].strip():
        raise UserError(f"{row.place}: {column} must end with a non-empty turn of the assistant")
    user_turns = [turn["content"] for turn in turns if turn["role"] == "user"]
    if prompt is None or user_turns:
        begins_alike = prompt in (None, user_turns[0] if user_turns else None) or turns[: len(prompt or [])] == prompt
        if not begins_alike:
            raise UserError(
                f"{row.place}: {column} is a whole chat that does not begin with prompt; remove the prompt from one"
            )
        context: Messages = turns[:-1]
    elif isinstance(prompt, str):
        raise UserError(f"{row.place}: prompt is text and {column} chat messages; make both the one or the other")
    else:
        context = [*prompt, *turns[:-1]]
    if not context:
        raise UserError(f"{row.place}: {column} answers nothing; put the turns before it there, or into 'prompt'")
    return context, turns[-1]["content"]


def _encode(row: Row, half: tuple[Messages, str], encode: Encode, limit: int | None, max_length: int) -> np.ndarray:
    """Tokenises a half, prompt and response; of one over `max_length` perhaps only the texts' first characters."""
    prompt, response = half
    cut_turns = () if isinstance(prompt, str) else (turn | {"content": turn["content"][:limit]} for turn in prompt)
    shortened = prompt[:limit] if isinstance(prompt, str) else [*cut_turns]
    try:
        ids = np.asarray(encode(shortened, response[:limit]), np.int32)
        if len(ids) <= max_length and (shortened, response[:limit]) != half:
            ids = np.asarray(encode(*half), np.int32)
        return ids
    except Exception as e:  # a chat template may raise anything
        reason = first_line(e)
        raise UserError(f"{row.place}: the tokenizer or its chat template refuses a half of the pair: {reason}") from e


def _read_margin(row: Row, column: str) -> float:
    """Returns the row's required score difference; UserError if it is missing or not finite."""
    if row.columns.get(column) is None:
        raise UserError(
            f"{row.place} has no {column!r}, which loss.margin_column names; its columns are "
            f"{', '.join(map(str, row.columns))}"
        )
    value = row.columns[column]
    if not is_finite(value):
        raise UserError(f"{row.place}: {column} is {brief(value)}; a margin must be a finite number")
    return float(value)
