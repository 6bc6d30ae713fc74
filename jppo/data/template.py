"""Renders chat messages as text with the tokenizer's chat template.

transformers renders undefined names in templates as empty text. Here, printing, iterating or computing with one is an
error, because it stands for text of the model's training format. A template may still test whether a name is defined.
Messages are never rendered as templates. Templates run in a process with limits on time and memory.
"""

import atexit
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jppo.data.rows import Row
from jppo.interpreter import python_path
from jppo.settings import UserError


class _Ended(Exception):
    """The process ended without a reply; the message has the reason."""


class _Worker:
    """The process of `template_worker.py`, started with the first request and again after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, what: str, *arguments: Any) -> tuple[list[str], str]:
        """Returns the answers to a request, and the error after them or ''; raises _Ended."""
        body = pickle.dumps((what, arguments))
        with self._lock:
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
            try:
                self._process.stdin.write(body)
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except OSError:
                line = b""
            if not line:
                raise _Ended(self._end())
        reply = json.loads(line)
        return reply["found"], reply["error"]

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._process is not None:
                self._end()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jppo.data.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        atexit.register(self.close)

    def _end(self) -> str:
        """Returns why the process ended."""
        assert self._process is not None
        with self._process as process:
            self._process = None
        atexit.unregister(self.close)
        late = process.returncode == -signal.SIGPROF
        return "it takes too long" if late else f"its process ended with code {process.returncode}"


_Messages = Sequence[Mapping[str, Any]]
_WORKER = _Worker()


class Renderer:
    """Renders conversations with the tokenizer's template; rows are their places for errors.

    `tools` are schemas that the template shows to the model; `arguments` are further names that it reads.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]):
        self._template, self._unknown = None, []
        self._tools = [dict(tool) for tool in tools] or None
        if tokenizer.chat_template is not None:
            self._template = tokenizer.get_chat_template(tools=self._tools)
            try:
                found, error = _WORKER.ask("unknown_names", self._template)
            except _Ended as e:
                error = str(e)
            if error:
                raise UserError(f"the chat template is invalid: {error}; fix it")
            taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
            self._unknown = [name for name in found if name not in taken]
        _check_arguments(arguments, self._unknown)
        self._names = {**tokenizer.special_tokens_map, **arguments}

    def __call__(self, messages: _Messages, row: Row, opened: bool = True) -> str:
        """Returns the text, with the start of the assistant's turn if `opened`."""
        return self.all([messages], [row], opened)[0]

    def all(self, conversations: Sequence[_Messages], rows: Sequence[Row], opened: bool = True) -> list[str]:
        """Returns the texts of several conversations, in a part of the time."""
        if self._template is None and rows:
            raise UserError(
                f"{rows[0].place}: the prompt is chat messages, but the tokenizer has no chat template; add one in "
                "tokenizer_config.json or chat_template.jinja, or prompts as text"
            )
        how = (self._tools, opened, self._unknown, self._names)
        try:
            found, error = _WORKER.ask("render_all", self._template, list(map(list, conversations)), *how)
        except _Ended as e:
            if len(rows) > 1:  # one of them
                return [self(one, row, opened) for one, row in zip(conversations, rows, strict=True)]
            found, error = [], str(e)
        if error:
            raise UserError(f"{rows[len(found)].place}: the chat template refuses the prompt: {error}")
        return found


def make_renderer(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] = types.MappingProxyType({}),
) -> Renderer:
    """Makes the renderer; an invalid template is a UserError."""
    return Renderer(tokenizer, tools, arguments)


def _check_arguments(arguments: Mapping[str, Any], read: Iterable[str]) -> None:
    """UserError for an argument that would change nothing."""
    for name in arguments:
        if name not in read:
            raise UserError(
                f"data.apply_chat_template_kwargs has {name!r}, which the tokenizer's chat template does not read; it"
                f" reads {', '.join(read) or 'no arguments'}; leave {name} out"
            )
