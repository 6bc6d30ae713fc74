"""Prompts from rows: checked, rendered by the chat template, tokenised, filtered or truncated.

Two schemas are supported: the plain one (`prompt`, `ground_truth`, `data_source`) and verl's
(`reward_model.ground_truth` in place of `ground_truth`); a source has one of them. A prompt is text, tokenised with the
special tokens that the tokenizer adds (bos if it has one), or chat messages, which the chat template renders with all
special tokens. Other columns are passed to graders in `Prompt.extra`, including verl's `extra_info`.
"""

import dataclasses
import functools
import json
import re
import sys
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from rich import console, progress

from jppo.data.memory import Memory, Order
from jppo.data.rows import Row, brief, checked_messages, checked_text, is_finite, read_sources, text_column
from jppo.data.stream import MixPart, mix_parts, parse_mix
from jppo.data.tokenizer import Renderer, announce_long, encode_all, ends_with_eos
from jppo.errors import UserError
from jppo.types import Prompt

Messages = str | list[dict[str, str]]
SHOWN_FROM = 10_000  # rows, from which a progress bar is shown
EVERY_S = 30.0  # between lines where no bar is shown
_BLOCK = 2_000  # rows that are rendered and then tokenised at once, by the tokenizer's threads
_OWN_COLUMNS = ("prompt", "data_source", "ground_truth", "reward_model")
NEEDED = ("ground_truth", "data_source")  # columns, unless the reward does without
SOLUTIONS = ("answer", "solution", "rationale", "response")  # columns with worked solutions; verl's data has the first
UNKNOWN = "unknown"  # the source of rows without data_source, as in verl


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of a set of sources, in the order of the setting and of their rows."""

    prompts: list[Prompt]
    overlong: int  # rows left out because their prompt is too long
    truncated: int = 0  # prompts that were truncated
    refused: tuple[str, ...] = ()  # why rows were left out that the reward cannot grade
    parts: tuple[MixPart, ...] = ()  # the prompts of each source
    order_of: Order | Memory | None = None  # user-defined

    @functools.cached_property
    def _index_of(self) -> dict[str, int]:
        return {prompt.uid: i for i, prompt in enumerate(self.prompts)}

    def places(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Returns the places of these prompts in the set, [N] i64."""
        return np.array([self._index_of[prompt.uid] for prompt in prompts], np.int64)


def read_prompts(
    files: str,
    *,
    tokenizer: Any,
    max_prompt_length: int,
    filter_overlong: bool,
    truncation: str = "error",
    prompt_role: str = "",
    system_prompt: str = "",
    custom_cls: str = "",
    max_samples: int = -1,
    columns: Mapping[str, str] = types.MappingProxyType({}),
    template_arguments: Mapping[str, Any] = types.MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
    needed: Collection[str] = NEEDED,
    refuse: Callable[[str, str], str] = lambda source, ground_truth: "",
    setting: str = "data.train_files",
) -> PromptSet:
    """Reads, checks and tokenises the first `max_samples` rows (-1: all) of comma-separated sources.

    `columns` are the files' names for prompt and data_source; `needed` are those of `NEEDED` that every row must have.
    Chat templates get `template_arguments`, and show `tools` to the model, by their schemas. `refuse` returns why the
    reward cannot grade a row by its source and truth, or ''; such rows are left out.
    """
    if max_samples != -1 and max_samples < 1:
        raise UserError(f"{setting.replace('files', 'max_samples')}={max_samples} must be -1 (all rows) or 1 or more")
    if filter_overlong and truncation != "error":
        raise UserError(
            f"data.truncation={truncation!r} cuts over-long prompts, and data.filter_overlong_prompts=True leaves them "
            "out; set the one to error or the other to False"
        )
    sources = read_sources(files, setting, custom_cls=custom_cls, tokenizer=tokenizer, columns=columns)
    source_rows = [(source, row) for source in sources for row in source.rows]
    source_rows = source_rows if max_samples == -1 else source_rows[:max_samples]
    rows = [row for _, row in source_rows]
    messages = [with_system_prompt(prompt_of(row, prompt_role), system_prompt, row) for row in rows]
    for source in sources:
        check_one_schema(source.rows)
    length_limit = max_prompt_length if truncation == "error" else None
    ids = tokenise(messages, rows, tokenizer, tools, template_arguments, max_length=length_limit)
    prompts, indices_of, truncated = [], {source.name: [] for source in sources}, 0  # type: ignore[var-annotated]
    refused: list[str] = []
    for (source, row), message, tokens in zip(source_rows, messages, ids, strict=True):
        if len(tokens) > max_prompt_length:
            if filter_overlong:
                continue
            tokens, truncated = truncate(tokens, max_prompt_length, truncation, row), truncated + 1
        prompt = make_prompt(row, message, tokens, source.name, needed)
        if reason := refuse(prompt.data_source, prompt.ground_truth):
            refused.append(f"{row.place}: {reason}")
            continue
        indices_of[source.name].append(len(prompts))
        prompts.append(prompt)
    if refused and not prompts:
        raise UserError(
            f"{setting}={files}: no row is left: {len(refused)} have asserts that reward.code.tests=strict cannot"
            f" grade; the first, {refused[0]}; change them, or set reward.code.tests=native, where a program can cheat"
        )
    if not prompts:
        raise UserError(
            f"{setting}={files}: all {len(rows)} prompts are longer than data.max_prompt_length={max_prompt_length} "
            f"tokens (the shortest has {min(map(len, ids))}); raise it"
        )
    parts = tuple(MixPart(name, np.array(indices, np.int64)) for name, indices in indices_of.items())
    overlong = len(rows) - len(prompts) - len(refused)
    return PromptSet(prompts, overlong=overlong, truncated=truncated, refused=tuple(refused), parts=parts)


def prompt_of(row: Row, role: str = "") -> Messages:
    """Returns the row's checked `prompt`, text or chat messages; text is a message of `role`, if that is given."""
    value = row.columns.get("prompt")
    if value is None or isinstance(value, str):
        text = text_column(row, "prompt")
        if re.match(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""", text):
            raise UserError(
                f"{row.place}: prompt is the text of a list of chat messages, {brief(text)}; write the list itself, as"
                " json.loads returns it"
            )
        return [{"role": role, "content": text}] if role else text
    return checked_messages(row, "prompt", value)


def check_one_schema(rows: list[Row]) -> None:
    """UserError if the rows of a source do not all have the schema of its first."""

    def forms_of(row: Row) -> dict[str, str]:  # of prompt and answer
        is_verl = row.columns.get("ground_truth") is None and row.columns.get("reward_model") is not None
        return {
            "prompt": "text" if isinstance(row.columns.get("prompt"), str) else "chat messages",
            "answer": "reward_model.ground_truth" if is_verl else "ground_truth",
        }

    first_forms = forms_of(rows[0])
    for row in rows:
        for field, form in forms_of(row).items():
            is_missing = row.columns.get("prompt" if field == "prompt" else form.partition(".")[0]) is None
            if form != first_forms[field] and not is_missing:  # errors about the row itself come later
                raise UserError(
                    f"{row.place}: the {field} is in the form of {form}, but {rows[0].unit} {rows[0].number} in"
                    f" the form of {first_forms[field]}; a source has one form: make two files of it"
                )


def with_system_prompt(prompt: Messages, system_prompt: str, row: Row) -> Messages:
    """Inserts `system_prompt` ('': none) before a prompt without a system message."""
    if not system_prompt:
        return prompt
    if isinstance(prompt, str):
        raise UserError(
            f"{row.place}: the prompt is text, which has no place for data.system_prompt; make it chat messages, in"
            " jppo.train by data.prompt_role=user, or leave data.system_prompt empty"
        )
    if any(message["role"] == "system" for message in prompt):
        return prompt
    return [{"role": "system", "content": system_prompt}, *prompt]


def truncate(tokens: list[int], length: int, truncation: str, row: Row) -> list[int]:
    """Truncates a prompt to `length` tokens: left removes its beginning, right its end, middle its middle."""
    if truncation == "left":
        return tokens[-length:]
    if truncation == "right":
        return tokens[:length]
    if truncation == "middle":
        return tokens[: length // 2] + tokens[length // 2 - length :]
    raise UserError(
        f"{row.place}: the prompt has {len(tokens)} tokens or more, data.max_prompt_length={length}; raise it, set "
        "data.filter_overlong_prompts=True to leave such rows out, or cut them by data.truncation"
    )


def tokenise(
    messages: list[Messages],
    rows: list[Row],
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] = types.MappingProxyType({}),
    *,
    max_length: int | None = None,
) -> list[list[int]]:
    """Renders and tokenises prompts with a progress bar; `rows` are their places for errors."""
    render = Renderer(tokenizer, tools, template_arguments)
    ids: list[list[int]] = []
    terminal = console.Console(stderr=True)
    show_bar = len(messages) > SHOWN_FROM and sys.stderr.isatty()
    columns = (
        "tokenising prompts",
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=terminal, disable=not show_bar, transient=True) as bar:
        task, reported = bar.add_task("", total=len(messages)), time.monotonic()
        for start in range(0, len(messages), _BLOCK):
            block = slice(start, start + _BLOCK)
            ids += _tokenise_block(messages[block], rows[block], tokenizer, render, max_length)
            bar.update(task, completed=len(ids))
            if not terminal.is_terminal and time.monotonic() - reported >= EVERY_S:
                print(f"tokenising prompts, {len(ids):,} of {len(messages):,}", file=sys.stderr, flush=True)
                reported = time.monotonic()
    return ids


def _tokenise_block(
    messages: list[Messages], rows: list[Row], tokenizer: Any, render: Any, max_length: int | None
) -> list[list[int]]:
    """Returns the token ids of each prompt of a block; chats are rendered first."""
    is_chat_of = [not isinstance(message, str) for message in messages]
    chats = [(m, row) for m, c, row in zip(messages, is_chat_of, rows, strict=True) if c]
    rendered = iter(render.all([m for m, _ in chats], [row for _, row in chats]))
    texts: list[Any] = [next(rendered) if c else m for m, c in zip(messages, is_chat_of, strict=True)]
    for row, text in zip(rows, texts, strict=True) if max_length is None else ():
        announce_long(row.place, str(text))
    ids: list[list[int]] = [[] for _ in texts]
    for is_chat in (False, True):
        indices = [i for i, c in enumerate(is_chat_of) if c == is_chat]
        if indices:
            batch = [texts[i] for i in indices]
            encoded = encode_all(tokenizer, batch, max_length=max_length, add_special_tokens=not is_chat)
            for i, tokens in zip(indices, encoded, strict=True):
                ids[i] = tokens
    for row, tokens, is_chat in zip(rows, ids, is_chat_of, strict=True):
        if not tokens:
            raise UserError(f"{row.place}: the tokenizer returns no tokens for the prompt; use another tokenizer")
        if not is_chat and ends_with_eos(tokenizer, tokens):
            raise UserError(
                f"{row.place}: the prompt ends with the end token {tokenizer.eos_token!r}, so there is nothing "
                "to answer; remove it from the text, or set add_eos_token to false in tokenizer_config.json"
            )
    return ids


def ground_truth(row: Row, *, needed: bool = True) -> str:
    """Returns the row's answer, in either schema; a number, object or list becomes JSON text, a missing one ''."""
    nested = row.columns.get("reward_model")
    if nested is not None and not isinstance(nested, dict):
        raise UserError(f"{row.place}: reward_model is of type {type(nested).__name__}; it must be an object")
    nested_truth = None if nested is None else nested.get("ground_truth")
    outer = row.columns.get("ground_truth")
    if outer is None and nested_truth is None:
        if not needed:
            return ""
        raise UserError(
            f"{row.place} has no answer: neither 'ground_truth' nor 'reward_model.ground_truth' among its columns "
            f"{', '.join(map(str, row.columns))}; name its column by data.ground_truth_key, or score by"
            " reward.function=FILE.py, which needs none"
        )
    if outer is not None and nested_truth is not None and outer != nested_truth:
        raise UserError(f"{row.place}: ground_truth={outer!r} and reward_model.ground_truth={nested_truth!r}; keep one")
    value = nested_truth if outer is None else outer
    if (isinstance(value, dict | list) and value) or isinstance(value, bool) or is_finite(value):
        value = json.dumps(value, ensure_ascii=False)
    return checked_text(row, "ground_truth", value, blank=not needed)


def data_source(row: Row, *, needed: bool = False) -> str:
    """Returns the name of the row's source, `UNKNOWN` where it has none."""
    if row.columns.get("data_source") is not None:
        return text_column(row, "data_source")
    if not needed:
        return UNKNOWN
    raise UserError(
        f"{row.place} has no 'data_source', which names its rule; its columns are {', '.join(map(str, row.columns))};"
        " add it, name one rule for all rows by reward.grader, or score by reward.function=FILE.py, which needs none"
    )


def make_prompt(row: Row, messages: Messages, ids: list[int], name: str, needed: Collection[str] = NEEDED) -> Prompt:
    """Makes the prompt of a row of the source `name`; UserError if one of the `needed` columns is missing."""
    extra = {column: value for column, value in row.columns.items() if column not in _OWN_COLUMNS}
    if extra.get("extra_info") is None:
        extra.pop("extra_info", None)
    elif not isinstance(extra["extra_info"], dict):
        type_name = type(extra["extra_info"]).__name__
        raise UserError(f"{row.place}: extra_info is of type {type_name}; it must be an object")
    return Prompt(
        uid=f"{name}:{row.number}",
        data_source=data_source(row, needed="data_source" in needed),
        messages=messages,
        ids=np.asarray(ids, np.int32),
        ground_truth=ground_truth(row, needed="ground_truth" in needed),
        extra=extra,
    )


def mixture(prompts: PromptSet, mix: str, *, batch_size: int) -> PromptSet:
    """Returns the prompts with their sources weighted by data.mix ('': unchanged)."""
    weights = parse_mix(mix)
    if not weights:
        return prompts
    data_sources = [prompt.data_source for prompt in prompts.prompts]
    return dataclasses.replace(prompts, parts=mix_parts(weights, prompts.parts, data_sources, batch_size=batch_size))
