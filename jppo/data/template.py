"""Renders chat messages as text with the tokenizer's chat template.

transformers renders undefined names in templates as empty text. Here, printing, iterating or computing with one is an
error, because it stands for text of the model's training format. A template may still test whether a name is defined.
Messages are never rendered as templates.
"""

import inspect
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from jppo.data.rows import Row
from jppo.settings import UserError

# Names that transformers passes to every template; special tokens missing in a tokenizer are empty.
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ITS_OWN_TAGS = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")


class _Unknown(jinja2.Undefined):
    """An undefined name: false in tests, an error when used."""

    __slots__ = ()
    __str__ = __iter__ = __len__ = jinja2.Undefined._fail_with_undefined_error


def unknown_names(template: str) -> dict[str, Any]:
    """Returns undefined names of a chat template, to be passed to it; an invalid template is a UserError."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        read = meta.find_undeclared_variables(environment.parse(_ITS_OWN_TAGS.sub("", template)))
    except jinja2.TemplateSyntaxError as e:
        raise UserError(f"the chat template is invalid: line {e.lineno}: {e.message}; fix it") from e
    return {name: _Unknown(name=name) for name in sorted(read - {*_GIVEN, *_TOKENS, *environment.globals})}


def make_renderer(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
    """Returns a function (messages, row) -> text with the start of the assistant's turn, if `opened`.

    `row` is the place for errors; `tools` are schemas that the template shows to the model; `arguments` are further
    names that it reads.
    """
    if tokenizer.chat_template is None:
        _check_arguments(arguments, ())
        return _no_template
    template = tokenizer.get_chat_template()
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    unknown = {name: value for name, value in unknown_names(template).items() if name not in taken}
    _check_arguments(arguments, unknown)

    told = [dict(tool) for tool in tools] or None

    def render(messages: Sequence[Mapping[str, str]], row: Row, opened: bool = True) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages, tools=told, add_generation_prompt=opened, tokenize=False, **(unknown | dict(arguments))
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
            said = str(e).strip().partition("\n")[0]
            raise UserError(f"{row.place}: the chat template refuses the prompt: {said}") from e

    return render


def _check_arguments(arguments: Mapping[str, Any], read: Iterable[str]) -> None:
    """UserError for an argument that would change nothing."""
    for name in arguments:
        if name not in read:
            raise UserError(
                f"data.apply_chat_template_kwargs has {name!r}, which the tokenizer's chat template does not read; it"
                f" reads {', '.join(read) or 'no arguments'}; leave {name} out"
            )


def _no_template(messages: Any, row: Row, opened: bool = True) -> str:
    raise UserError(
        f"{row.place}: the prompt is chat messages, but the tokenizer has no chat template; add one in "
        "tokenizer_config.json or chat_template.jinja, or prompts as text"
    )
