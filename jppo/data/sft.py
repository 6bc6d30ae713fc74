"""Demonstrations from files: (prompt, response) pairs as token ids, for supervised fine-tuning.

Rows hold `prompt` (text or chat messages) and `response`, or `messages`, a chat whose last turn is the
assistant's and is the response. Prompts are tokenised exactly as for PPO; a response is its text's tokens and
then the end token.
"""

import dataclasses
from typing import Any

import numpy as np

from jppo.config import UserError
from jppo.data.files import Row, checked_messages, read_rows, split_paths, text_column
from jppo.data.prompts import prompt_of, tokenise


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One prompt and the response to imitate."""

    prompt: np.ndarray  # [P] i32
    response: np.ndarray  # [n] i32, its end token included


@dataclasses.dataclass(frozen=True)
class DemonstrationSet:
    """The demonstrations of a set of files, in file order."""

    demonstrations: list[Demonstration]
    overlong: int  # rows that were left out because prompt and response together are too long


def read_demonstrations(
    files: str, *, tokenizer: Any, max_length: int, setting: str = "data.train_files"
) -> DemonstrationSet:
    """Read, check and tokenise comma-separated `files`; pairs over `max_length` tokens are left out."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token to end responses with; set eos_token in tokenizer_config.json")
    rows = [row for path in split_paths(files, setting) for row in read_rows(path)]
    pairs = [_pair(row) for row in rows]
    prompts = tokenise([prompt for prompt, _ in pairs], rows, tokenizer)
    responses = tokenizer([response for _, response in pairs], add_special_tokens=False, verbose=False)["input_ids"]
    whole = [
        Demonstration(np.asarray(prompt, np.int32), np.asarray([*response, tokenizer.eos_token_id], np.int32))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    fitting = [d for d in whole if len(d.prompt) + len(d.response) <= max_length]
    if not fitting:
        shortest = min(len(d.prompt) + len(d.response) for d in whole)
        raise UserError(
            f"{setting}={files}: all {len(rows)} demonstrations are longer than {max_length} tokens, prompt "
            "and "
            f"response together (the shortest has {shortest}); raise data.max_prompt_length or "
            "max_response_length"
        )
    return DemonstrationSet(fitting, overlong=len(rows) - len(fitting))


def _pair(row: Row) -> tuple[str | list[dict[str, str]], str]:
    if "messages" not in row.columns:
        return prompt_of(row), text_column(row, "response")
    if "prompt" in row.columns or "response" in row.columns:
        raise UserError(f"{row.place} has 'messages' and 'prompt' or 'response'; keep one of the two forms")
    messages = checked_messages(row, "messages", row.columns["messages"])
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        raise UserError(f"{row.place}: messages must end with a turn of the assistant that answers an earlier one")
    return messages[:-1], messages[-1]["content"]
