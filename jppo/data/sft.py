"""Demonstrations from rows: (prompt, response) pairs as token ids, for supervised fine-tuning.

Rows hold `prompt` (text or chat messages) and `response`, or `messages`, a chat whose last turn is the
assistant's and is the response. Prompts are tokenised exactly as for PPO; a response is its text's tokens and
then the end token. A response of several turns is a list of {text, learn}: what is learned from is a turn of the
assistant, with an end token behind it; the rest, such as what a tool said, is read only.
"""

import dataclasses
from typing import Any

import numpy as np

from jppo.config import UserError
from jppo.data.prompts import Messages, prompt_of, tokenise, with_system_prompt
from jppo.data.rows import Row, brief, checked_messages, checked_text, text_column
from jppo.data.sources import read_sources


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One prompt and the response to imitate."""

    prompt: np.ndarray  # [P] i32
    response: np.ndarray  # [n] i32, its end token included
    learn: np.ndarray  # [n] bool, whether the token is to be imitated


@dataclasses.dataclass(frozen=True)
class DemonstrationSet:
    """The demonstrations of a set of files, in file order."""

    demonstrations: list[Demonstration]
    overlong: int  # rows that were left out because prompt and response together are too long


def read_demonstrations(
    files: str,
    *,
    tokenizer: Any,
    max_length: int,
    system_prompt: str = "",
    custom_cls: str = "",
    setting: str = "data.train_files",
) -> DemonstrationSet:
    """Read, check and tokenise comma-separated sources; pairs over `max_length` tokens are left out."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token to end responses with; set eos_token in tokenizer_config.json")
    sources = read_sources(files, setting, custom_cls=custom_cls, tokenizer=tokenizer)
    rows = [row for source in sources for row in source.rows]
    pairs = [_pair(row, system_prompt) for row in rows]
    prompts = tokenise([prompt for prompt, _ in pairs], rows, tokenizer)
    texts = [text for _, segments in pairs for text, _ in segments]
    ids = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
    whole = []
    for prompt, (_, segments) in zip(prompts, pairs, strict=True):
        parts = [(next(ids) + [tokenizer.eos_token_id] * learn, learn) for _, learn in segments]
        whole.append(
            Demonstration(
                np.asarray(prompt, np.int32),
                np.concatenate([np.asarray(part, np.int32) for part, _ in parts]),
                np.repeat([learn for _, learn in parts], [len(part) for part, _ in parts]),
            )
        )
    fitting = [d for d in whole if len(d.prompt) + len(d.response) <= max_length]
    if not fitting:
        shortest = min(len(d.prompt) + len(d.response) for d in whole)
        raise UserError(
            f"{setting}={files}: all {len(rows)} demonstrations are longer than {max_length} tokens, prompt and "
            f"response together (the shortest has {shortest}); raise data.max_prompt_length or max_response_length"
        )
    return DemonstrationSet(fitting, overlong=len(rows) - len(fitting))


def _pair(row: Row, system_prompt: str) -> tuple[Messages, list[tuple[str, bool]]]:
    """The prompt, and the response as texts that are learned from or not."""
    if "messages" not in row.columns:
        return with_system_prompt(prompt_of(row), system_prompt, row), _segments(row)
    if "prompt" in row.columns or "response" in row.columns:
        raise UserError(f"{row.place} has 'messages' and 'prompt' or 'response'; keep one of the two forms")
    messages = checked_messages(row, "messages", row.columns["messages"])
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        raise UserError(f"{row.place}: messages must end with a turn of the assistant that answers an earlier one")
    return with_system_prompt(messages[:-1], system_prompt, row), [(messages[-1]["content"], True)]


def _segments(row: Row) -> list[tuple[str, bool]]:
    value = row.columns.get("response")
    if not isinstance(value, list):
        return [(text_column(row, "response"), True)]
    for one in value:
        if not isinstance(one, dict) or set(one) != {"text", "learn"} or not isinstance(one["learn"], bool):
            raise UserError(f"{row.place}: {brief(one)} in response must be {{text, learn}}, learn true or false")
        checked_text(row, "text in response", one["text"])
    if not value or not value[-1]["learn"]:
        raise UserError(f"{row.place}: response must end with a text that is learned from; add learn: true to it")
    return [(one["text"], one["learn"]) for one in value]
