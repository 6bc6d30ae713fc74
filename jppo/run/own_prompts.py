"""Prompts of a custom loop, which are texts, chat messages, or token ids, and the options of their sampling."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.data.prompts import tokenise, with_system_prompt
from jppo.data.rows import Row, checked_messages, checked_text
from jppo.errors import UserError
from jppo.settings import Settings, template_arguments
from jppo.types import Prompt

MOST = 2**31 - 1
# Options of `sample` that are numbers: the least and the most.
RANGES: dict[str, tuple[float, float]] = {"n": (1, MOST), "max_tokens": (1, MOST), "temperature": (0.0, 100.0)}
RANGES |= {"top_p": (1e-9, 1.0), "top_k": (-1, MOST), "min_p": (0.0, 1.0), "seed": (0, 2**63 - 1)}
OPTIONS = (*RANGES, "stop", "stop_ids", "ignore_eos")
PromptLike = str | Sequence[Mapping[str, str]] | Sequence[int] | np.ndarray | Prompt


def require_sampling(given: Mapping[str, Any], most: Mapping[str, int], vocabulary: int) -> None:
    """Raises UserError for an option of `sample` that is unknown or outside its range; `most` lowers some limits."""
    for name, value in given.items():
        if name not in OPTIONS:
            raise UserError(f"sample({name}=...) is no option; use {', '.join(OPTIONS)}")
        if name in RANGES:
            low, high = RANGES[name][0], most.get(name, RANGES[name][1])
            integer = isinstance(low, int)
            if not _is_number(value, integer) or not low <= value <= high:
                whole = "a whole number " if integer else ""
                raise UserError(f"{name}={value} must be {whole}from {low} to {high}; correct it")
        elif name == "ignore_eos":
            if not isinstance(value, bool):
                raise UserError(f"ignore_eos={value!r} must be True or False")
        elif not isinstance(value, list | tuple):
            raise UserError(f"{name}={value!r} must be a list; write [{value!r}]")
        else:
            for one in value:
                text = name == "stop" and isinstance(one, str) and one
                token = name == "stop_ids" and _is_number(one, True) and 0 <= one < vocabulary
                if not text and not token:
                    raise UserError(
                        f"stop={str(one)[:60]!r} is neither a text nor a token from 0 to {vocabulary - 1}; correct it"
                    )


def _is_number(value: Any, integer: bool) -> bool:
    return isinstance(value, numbers.Integral if integer else numbers.Real) and not isinstance(value, bool)


def make_prompts(c: Settings, tokenizer: Any, given: Sequence[PromptLike], vocabulary: int) -> list[Prompt]:
    """Tokenises prompts as jppo.train does; prompts and token ids stay as they are."""
    if isinstance(given, str) or not len(given):
        raise UserError(f"prompts={given!r}; give a list of texts, of chat messages or of token ids")
    found: list[Prompt | None] = [one if isinstance(one, Prompt) else _of_ids(one, i) for i, one in enumerate(given)]
    texts = [i for i, one in enumerate(found) if one is None]
    rows = {i: Row("prompts", i + 1, {}, "prompt") for i in texts}
    messages = [_messages(c, rows[i], given[i]) for i in texts]
    arguments = template_arguments(c.data.apply_chat_template_kwargs)
    ids = tokenise(messages, [rows[i] for i in texts], tokenizer, (), arguments) if texts else []
    for i, said, tokens in zip(texts, messages, ids, strict=True):
        found[i] = Prompt(str(i), "unknown", said, np.asarray(tokens, np.int32), "", {})
    out = [one for one in found if one is not None]
    for i, one in enumerate(out):
        if not 1 <= len(one.ids) <= c.data.max_prompt_length:
            raise UserError(
                f"prompt {i + 1} has {len(one.ids)} tokens; it must have 1 to data.max_prompt_length="
                f"{c.data.max_prompt_length}: cut it, or open the model with data=dict(max_prompt_length=...)"
            )
        if min(one.ids) < 0 or max(one.ids) >= vocabulary:
            raise UserError(f"prompt {i + 1} has a token outside of 0 to {vocabulary - 1}; take the model's tokenizer")
    return out


def _of_ids(given: Any, number: int) -> Prompt | None:
    """Returns a prompt of token ids; None for a text or messages."""
    if isinstance(given, str) or (isinstance(given, Sequence) and given and isinstance(given[0], Mapping)):
        return None
    ids = np.asarray(given)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"prompt {number + 1} is {given!r:.60}; give a text, chat messages or token ids")
    return Prompt(str(number), "unknown", "", ids.astype(np.int32), "", {})


def _messages(c: Settings, row: Row, given: Any) -> str | list[dict[str, str]]:
    said = checked_text(row, "it", given) if isinstance(given, str) else checked_messages(row, "it", list(given))
    return with_system_prompt(said, c.data.system_prompt, row)
