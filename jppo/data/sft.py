"""Demonstrations from rows, as token ids, for supervised fine-tuning.

Rows hold `prompt` (text or chat messages) and `response`, or `messages`, a chat that ends with the assistant's turn,
the response. Prompts are tokenised exactly as for PPO; a response is its text's tokens and the end token. A response of
several turns is a list of {text, learn}: a text with `learn` is a turn of the assistant, trained on with an end token;
the others, such as tool answers, are context. In a chat, every turn of the assistant that answers an earlier one can be
trained on; the chat template gives the text between them.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jppo.data.prompts import Messages, prompt_of, tokenise, with_system_prompt
from jppo.data.rows import Row, brief, checked_messages, checked_text, read_sources, text_column
from jppo.data.tokenizer import Renderer, encode_all
from jppo.errors import UserError

Segments = list[tuple[str, bool]]  # texts, and whether each is trained on with an end token


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One prompt and its response."""

    prompt: np.ndarray  # [P] i32
    response: np.ndarray  # with its end token
    learn: np.ndarray  # [n] bool, whether the token is trained on


@dataclasses.dataclass(frozen=True)
class DemonstrationSet:
    """The demonstrations of a set of files, in file order."""

    demonstrations: list[Demonstration]
    overlong: int  # rows left out because prompt and response together are too long


def read_demonstrations(
    files: str,
    *,
    tokenizer: Any,
    max_length: int,
    system_prompt: str = "",
    custom_cls: str = "",
    learn_turns: str = "last",
    columns: Mapping[str, str] = types.MappingProxyType({}),
    prompt_role: str = "",
    setting: str = "data.train_files",
) -> DemonstrationSet:
    """Reads, checks and tokenises comma-separated sources; rows over `max_length` tokens are left out.

    `learn_turns`: train on the last turn of chats, or on all turns of the assistant. `columns` are the files' names
    for prompt, response and messages; a text prompt is a chat of one message of `prompt_role`, if that is given.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token to end responses with; set eos_token in tokenizer_config.json")
    sources = read_sources(files, setting, custom_cls=custom_cls, tokenizer=tokenizer, columns=columns)
    rows = [row for source in sources for row in source.rows]
    split_chat = make_chat_splitter(tokenizer) if learn_turns == "all" else None
    pairs = [_pair(row, system_prompt, split_chat, prompt_role) for row in rows]
    prompts = tokenise([prompt for prompt, _ in pairs], rows, tokenizer, max_length=max_length)
    texts = [text for _, segments in pairs for text, _ in segments]
    ids = iter(encode_all(tokenizer, texts, max_length=max_length, add_special_tokens=False))
    demonstrations = []
    for prompt, (_, segments) in zip(prompts, pairs, strict=True):
        parts = [(next(ids) + [tokenizer.eos_token_id] * learn, learn) for _, learn in segments]
        demonstrations.append(
            Demonstration(
                np.asarray(prompt, np.int32),
                np.concatenate([np.asarray(part, np.int32) for part, _ in parts]),
                np.repeat([learn for _, learn in parts], [len(part) for part, _ in parts]),
            )
        )
    fitting = [d for d in demonstrations if len(d.prompt) + len(d.response) <= max_length]
    if not fitting:
        shortest = min(len(d.prompt) + len(d.response) for d in demonstrations)
        raise UserError(
            f"{setting}={files}: all {len(rows)} demonstrations are longer than {max_length} tokens, prompt and "
            f"response together (the shortest has {shortest}); raise data.max_prompt_length or max_response_length"
        )
    return DemonstrationSet(fitting, overlong=len(rows) - len(fitting))


def _pair(
    row: Row, system_prompt: str, split_chat: Callable[[Messages, Row], tuple[Messages, Segments]] | None, role: str
) -> tuple[Messages, Segments]:
    """Returns a row's prompt, and its response as segments that are trained on or not."""
    if "messages" not in row.columns:
        return with_system_prompt(prompt_of(row, role), system_prompt, row), _response_segments(row)
    if "prompt" in row.columns or "response" in row.columns:
        raise UserError(f"{row.place} has 'messages' and 'prompt' or 'response'; keep one of the two forms")
    messages = checked_messages(row, "messages", row.columns["messages"])
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
        raise UserError(f"{row.place}: messages must end with a turn of the assistant that answers an earlier one")
    if split_chat is not None:
        return split_chat(with_system_prompt(messages, system_prompt, row), row)
    return with_system_prompt(messages[:-1], system_prompt, row), [(messages[-1]["content"], True)]


def make_chat_splitter(tokenizer: Any) -> Callable[[Messages, Row], tuple[Messages, Segments]]:
    """Makes the function that splits a chat into the messages before the first answer and segments of the rest.

    A turn extends from where the template starts the assistant's turn, after the earlier messages, to the next end
    token. It must occur in the text of the whole chat, because some templates drop parts of earlier turns.
    """
    render, end = Renderer(tokenizer), tokenizer.eos_token

    def split_chat(messages: Messages, row: Row) -> tuple[Messages, Segments]:
        """Returns the messages before the first answer, and segments of the rest, if the template keeps it as it is."""
        assert not isinstance(messages, str)
        answers = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
        with_question = (i for i in answers if any(message["role"] != "system" for message in messages[:i]))
        first_answer = next(with_question, answers[-1])  # a greeting is context
        text, position = render(messages, row, opened=False), 0
        segments: Segments = []
        for i in (i for i in answers if i >= first_answer):
            context = render(messages[:i], row)
            stop = text.find(end, len(context))
            turn = text[len(context) : stop]
            if not text.startswith(context) or stop == -1 or turn.strip() != messages[i]["content"].strip():
                raise UserError(
                    f"{row.place}: the chat template changes message {i + 1} of the chat, or drops its end"
                    f" token {end!r}; set data.learn_turns=last, or fix the template or eos_token in"
                    " tokenizer_config.json"
                )
            segments += [(text[position : len(context)], False)] if i > first_answer else []
            segments.append((turn, True))
            position = stop + len(end)
        return messages[:first_answer], segments

    return split_chat


def _response_segments(row: Row) -> Segments:
    """Returns the segments of the column `response`, which is a text or a list of {text, learn}."""
    value = row.columns.get("response")
    if not isinstance(value, list):
        return [(text_column(row, "response"), True)]
    for segment in value:
        if not isinstance(segment, dict) or set(segment) != {"text", "learn"} or not isinstance(segment["learn"], bool):
            raise UserError(f"{row.place}: {brief(segment)} in response must be {{text, learn}}, learn true or false")
        checked_text(row, "text in response", segment["text"])
    if not value or not value[-1]["learn"]:
        raise UserError(f"{row.place}: response must end with a text to train on; add learn: true to it")
    return [(segment["text"], segment["learn"]) for segment in value]
