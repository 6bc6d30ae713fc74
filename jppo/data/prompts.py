"""Prompts from files: read, rendered by the chat template, tokenised, the over-long ones left out.

Files of rows go in, `Prompt`s come out; the rollout takes them from here. Two schemas are read: the plain one
(`prompt`, `ground_truth`, `data_source`) and verl's (`reward_model.ground_truth` in place of `ground_truth`).
A prompt is text, which is tokenised as it stands with the special tokens that the tokenizer adds by itself
(bos where it has one), or chat messages, which the chat template turns into text that holds all its special
tokens already.
"""

import dataclasses
import pathlib
from typing import Any

import jinja2
import numpy as np

from jppo.config import UserError
from jppo.data.files import Row, checked_messages, checked_text, read_rows, split_paths, text_column
from jppo.data.tokenizer import ends_with_eos
from jppo.structs import Prompt

_READ = ("prompt", "data_source", "ground_truth", "reward_model")


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of a set of files, in file order."""

    prompts: list[Prompt]
    overlong: int  # rows that were left out because their prompt is too long


def read_prompts(
    files: str,
    *,
    tokenizer: Any,
    max_prompt_length: int,
    filter_overlong: bool,
    max_samples: int = -1,
    setting: str = "data.train_files",
) -> PromptSet:
    """Read, check and tokenise the first `max_samples` rows (-1: all) of comma-separated `files`."""
    if max_samples != -1 and max_samples < 1:
        raise UserError(f"data.val_max_samples={max_samples} must be -1 (all rows) or 1 or more")
    paths = split_paths(files, setting)
    rows = [row for path in paths for row in read_rows(path)]
    if max_samples != -1:
        rows = rows[:max_samples]
    messages = [prompt_of(row) for row in rows]
    ids = tokenise(messages, rows, tokenizer)
    names = _names(paths)
    prompts = []
    for row, message, tokens in zip(rows, messages, ids, strict=True):
        if len(tokens) <= max_prompt_length:
            prompts.append(_prompt(row, message, tokens, names[row.path]))
        elif not filter_overlong:
            raise UserError(
                f"{row.place}: the prompt has {len(tokens)} tokens, more than data.max_prompt_length="
                f"{max_prompt_length}; raise it, or set data.filter_overlong_prompts=True to leave such "
                "rows out"
            )
    if not prompts:
        raise UserError(
            f"{setting}={files}: all {len(rows)} prompts are longer than "
            f"data.max_prompt_length={max_prompt_length} "
            f"tokens (the shortest has {min(map(len, ids))}); raise it"
        )
    return PromptSet(prompts, overlong=len(rows) - len(prompts))


def prompt_of(row: Row) -> str | list[dict[str, str]]:
    """The row's `prompt`, text or chat messages, checked."""
    value = row.columns.get("prompt")
    if value is None or isinstance(value, str):
        return text_column(row, "prompt")
    return checked_messages(row, "prompt", value)


def tokenise(messages: list[str | list[dict[str, str]]], rows: list[Row], tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts; `rows` are where they stand, for errors."""
    if not messages:
        return []
    chat = [not isinstance(message, str) for message in messages]
    texts = [_render(m, row, tokenizer) if c else m for m, c, row in zip(messages, chat, rows, strict=True)]
    ids: list[list[int]] = [[] for _ in texts]
    for is_chat in (False, True):
        indices = [i for i, c in enumerate(chat) if c == is_chat]
        if indices:
            batch = [texts[i] for i in indices]
            encoded = tokenizer(batch, add_special_tokens=not is_chat, verbose=False)["input_ids"]
            for i, tokens in zip(indices, encoded, strict=True):
                ids[i] = tokens
    for row, tokens, is_chat in zip(rows, ids, chat, strict=True):
        if not tokens:
            raise UserError(f"{row.place}: the tokenizer makes no token of the prompt; use a tokenizer that knows it")
        if not is_chat and ends_with_eos(tokenizer, tokens):
            raise UserError(
                f"{row.place}: the prompt ends with the end token {tokenizer.eos_token!r}, so that there is "
                "nothing "
                "to answer; remove it from the text, or set add_eos_token to false in tokenizer_config.json"
            )
    return ids


def _render(messages: Any, row: Row, tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            f"{row.place}: the prompt is chat messages, but the tokenizer has no chat template; give one in "
            "tokenizer_config.json or chat_template.jinja, or prompts as text"
        )
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError as e:
        raise UserError(f"{row.place}: the chat template refuses the prompt: {e}") from e


def _ground_truth(row: Row) -> str:
    nested = row.columns.get("reward_model")
    if nested is not None and not isinstance(nested, dict):
        raise UserError(f"{row.place}: reward_model is of type {type(nested).__name__}; it must be an object")
    inner = None if nested is None else nested.get("ground_truth")
    outer = row.columns.get("ground_truth")
    if outer is None and inner is None:
        raise UserError(
            f"{row.place} has no answer: neither 'ground_truth' nor 'reward_model.ground_truth' among its "
            "columns "
            f"{sorted(row.columns)}"
        )
    if outer is not None and inner is not None and outer != inner:
        raise UserError(f"{row.place}: ground_truth={outer!r} and reward_model.ground_truth={inner!r}; keep one")
    return checked_text(row, "ground_truth", inner if outer is None else outer)


def _prompt(row: Row, messages: str | list[dict[str, str]], ids: list[int], name: str) -> Prompt:
    return Prompt(
        uid=f"{name}:{row.number}",
        data_source=text_column(row, "data_source"),
        messages=messages,
        ids=np.asarray(ids, np.int32),
        ground_truth=_ground_truth(row),
        extra={column: value for column, value in row.columns.items() if column not in _READ},
    )


def _names(paths: list[pathlib.Path]) -> dict[pathlib.Path, str]:
    """What uids call each file: its stem, or the whole path where two stems are alike."""
    stems = [path.stem for path in paths]
    return {path: path.stem if stems.count(path.stem) == 1 else str(path) for path in paths}
