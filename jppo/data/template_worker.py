"""A process that renders chat templates with limits on time and memory; `tokenizer.py` starts it.

    python -m jppo.data.template_worker

A template is a program from a model's repository, and one loop or `'a' * 3000000000` would stop the trainer or exhaust
its memory. Requests are pickled over stdin; replies are lines of JSON. The kernel ends the process when a request takes
too long.
"""

import contextlib
import inspect
import json
import pathlib
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta
from transformers.utils.chat_template_utils import render_jinja_template

TIME_S = 5.0  # of the processor, for one conversation
MEMORY_BYTES = 2**30  # more than the process has before the first request
_MAX_CHARACTERS = 2**26  # characters of a text

# Names that transformers passes to every template; special tokens missing in a tokenizer are empty.
_STANDARD = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION_TAGS = re.compile(r"{%[-+]?\s*(?:end)?generation\s*[-+]?%}")


class _Unknown(jinja2.Undefined):
    """An undefined name: false in tests, an error when used."""

    __slots__ = ()
    __str__ = __iter__ = __len__ = jinja2.Undefined._fail_with_undefined_error


def unknown_names(template: str) -> list[str]:
    """Returns the undefined names of a chat template; ValueError if it is invalid."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        names_read = meta.find_undeclared_variables(environment.parse(_GENERATION_TAGS.sub("", template)))
    except jinja2.TemplateSyntaxError as e:
        raise ValueError(f"line {e.lineno}: {e.message}") from e
    return sorted(
        names_read - {*_STANDARD, *_TOKENS, *environment.globals, *inspect.signature(render_jinja_template).parameters}
    )


def _render(template: str, messages: Sequence[Any], tools: Any, opened: bool, names: Mapping[str, Any]) -> str:
    """Renders a conversation as transformers does; `opened` starts the assistant's turn."""
    if not messages:
        raise ValueError("the conversation is empty")
    rendered: Any = render_jinja_template(
        conversations=[list(messages)], tools=tools, chat_template=template, add_generation_prompt=opened, **names
    )
    text: str = rendered[0][0]
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"its text has more than {_MAX_CHARACTERS} characters")
    return text


def render_all(
    template: str,
    conversations: Sequence[Sequence[Any]],
    tools: Any,
    opened: bool,
    unknown: Iterable[str],
    names: Mapping[str, Any],
) -> Iterator[str]:
    """Yields the texts of conversations; `unknown` are names that the template may test, and not print."""
    names = {name: _Unknown(name=name) for name in unknown} | dict(names)
    for messages in conversations:
        yield _render(template, messages, tools, opened, names)


def main() -> None:
    """Answers requests until stdin ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _bound_memory()
    answers: dict[str, Callable[..., Iterable[str]]] = {"render_all": render_all, "unknown_names": unknown_names}
    with contextlib.suppress(EOFError):
        while True:
            request, arguments = pickle.load(sys.stdin.buffer)
            reply = _reply(answers[request], arguments)
            sys.stdout.write(reply + "\n")
            sys.stdout.flush()


def _reply(answer_all: Callable[..., Iterable[str]], arguments: tuple[Any, ...]) -> str:
    """Answers a request: returns the texts up to the first error, and the error, as JSON; each has its own time."""
    texts: list[str] = []
    try:
        signal.setitimer(signal.ITIMER_PROF, TIME_S)
        for answer in answer_all(*arguments):
            texts.append(answer)
            signal.setitimer(signal.ITIMER_PROF, TIME_S)
        return json.dumps({"found": texts, "error": ""})
    except MemoryError:
        error = f"it takes more than {MEMORY_BYTES} bytes of memory"
    except Exception as e:
        error = str(e).strip().partition("\n")[0][:500] or type(e).__name__
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return json.dumps({"found": texts, "error": error})


def _bound_memory() -> None:
    """Limits the process's address space to MEMORY_BYTES more than it has."""
    with contextlib.suppress(OSError, ValueError):  # without /proc only the time is bounded
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
