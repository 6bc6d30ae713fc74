"""The tokenizer of an HF directory, the end tokens of a response, decoding, and the chat template.

transformers renders undefined names in templates as empty text. Here, printing, iterating or computing with one is an
error, because it stands for text of the model's training format. A template may still test whether a name is defined.
Messages are never rendered as templates. Templates run in a process with limits on time and memory.
"""

import atexit
import contextlib
import functools
import inspect
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library, whichever that is

from jppo.child_process import python_path
from jppo.data.rows import Row
from jppo.errors import UserError, expanded, first_line

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch, once for each process
LONG = 1_000_000  # characters of one text
CUT_FROM = 100_000  # characters; shorter texts are always tokenised quickly
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoding of an incomplete character
_MAX_TOKENS_OF_CHARACTER = 32  # tokens of one character; bytes that are no text would make later ones wait for ever

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "spm.model", "tekken.json")


def load_tokenizer(path: str) -> Any:
    """Loads the tokenizer of a local directory or a hub name."""
    if not path:
        raise UserError("model.path is empty; set it to an HF directory or a hub name")
    local = expanded(path)
    if not local.is_dir():
        return _load_from_hub(path)
    # transformers creates an empty tokenizer for a directory without one.
    if not any((local / name).is_file() for name in FILES):
        raise UserError(f"no tokenizer.json in {local}; copy the model's tokenizer files there")
    try:
        tokenizer = _read_tokenizer(str(local))
        tokenizer("")  # some errors in its files appear only here
        return tokenizer
    except Exception as e:  # tokenizers raises a plain Exception, transformers various errors
        raise UserError(f"the tokenizer in {local} cannot be read: {first_line(e)}") from e


def end_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end a response, by generation_config.json, config.json and the tokenizer."""
    ends: list[int] = []
    config = _read_config(path, "config.json")
    if isinstance(text := config.get("text_config"), dict):  # of a model that reads pictures, too
        config = text | {key: value for key, value in config.items() if value is not None}
    vocab_size = config.get("vocab_size")
    for name in ("generation_config.json", "config.json"):
        fields = config if name == "config.json" else _read_config(path, name)
        ids = fields.get("eos_token_id")
        id_list = [] if ids is None else ids if isinstance(ids, list) else [ids]
        for token in id_list:
            is_id = isinstance(token, int) and not isinstance(token, bool) and token >= 0
            if not is_id or (isinstance(vocab_size, int) and token >= vocab_size):
                raise UserError(
                    f"{path}: eos_token_id={ids!r} of {name} must be token ids, from 0 to below vocab_size={vocab_size}"
                )
        ends += id_list
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    if not ends:
        raise UserError(f"{path} names no end token: set eos_token_id in generation_config.json")
    return tuple(dict.fromkeys(ends))


def announce_long(where: str, *texts: str) -> None:
    """Prints a warning before a long text is tokenised: without spaces that takes minutes."""
    if (longest := max(map(len, texts), default=0)) > LONG:
        warning = f"a text of {longest:,} characters is tokenised, which can take minutes; shorten or remove it"
        print(f"{where}: {warning}", file=sys.stderr, flush=True)


def character_limit(tokenizer: Any, max_length: int) -> int:
    """Returns the length in characters above which a text has more than `max_length` tokens, by the longest token."""
    return max(CUT_FROM, max_length * max(map(len, tokenizer.get_vocab())) + 1)


def encode_all(
    tokenizer: Any, texts: Sequence[str], *, max_length: int | None = None, **options: Any
) -> list[list[int]]:
    """Tokenises texts; of one with more than `max_length` tokens (None: no limit) perhaps only the first ones.

    A word of millions of characters takes minutes to tokenise, and a text that is too long is dropped anyway.
    """
    if max_length is None or max(map(len, texts), default=0) <= CUT_FROM:
        ids: list[list[int]] = tokenizer(list(texts), verbose=False, **options)["input_ids"]
        return ids
    max_characters = character_limit(tokenizer, max_length)
    ids = tokenizer([text[:max_characters] for text in texts], verbose=False, **options)["input_ids"]
    for i, text in enumerate(texts):
        if len(text) > max_characters and len(ids[i]) <= max_length:  # as where a normalizer removes blanks
            ids[i] = tokenizer(text, verbose=False, **options)["input_ids"]
    return ids


def tokenize(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Returns the token ids of a text, never truncated, with the special tokens around it if `special`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation is not None or backend.padding is not None:
        ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    else:
        ids = backend.encode(text, add_special_tokens=special).ids  # in half the time
    return ids


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decodes token ids without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def spell(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decodes token ids with special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def make_decoders(tokenizer: Any) -> tuple[Callable[[Sequence[int]], str], Callable[[Sequence[int]], str]]:
    """Makes `decode` and `spell` for the tokenizer; of a byte-level one faster, by a table of its tokens' bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return functools.partial(decode, tokenizer), functools.partial(spell, tokenizer)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    count = 1 + max(tokenizer.get_vocab().values())

    def token_bytes(token: str) -> bytes:
        try:
            return bytes(map(bytes_of.__getitem__, token))
        except KeyError:  # an added token in characters of its own
            return token.encode()

    def join_bytes(table: list[bytes], ids: Sequence[int]) -> str:
        return b"".join([table[i] for i in ids if i < count]).decode(errors="replace")

    spelled = [token_bytes(backend.id_to_token(i) or "") for i in range(count)]
    decoded = [b"" if i in special else text for i, text in enumerate(spelled)]
    return functools.partial(join_bytes, decoded), functools.partial(join_bytes, spelled)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Splits the text of `spell` by token; a character of several tokens belongs to the last, the others have ''."""
    texts = []
    context = begin = 0  # tokens from `begin` have no text yet; those from `context` are decoded with them
    for end in range(1, len(ids) + 1):
        text = spell(tokenizer, ids[context:end])
        is_incomplete = text.endswith(_REPLACEMENT) and end < len(ids) and end - begin < _MAX_TOKENS_OF_CHARACTER
        texts.append("" if is_incomplete else text[len(spell(tokenizer, ids[context:begin])) :])
        if not is_incomplete:
            context, begin = begin, end
    return texts


def decode_stream(
    answer: Iterable[Sequence[int]], decode: Callable[[list[int]], str], *, before: Sequence[int] = ()
) -> Iterator[str]:
    """Yields the text of an answer piece by piece, continuing the tokens `before`, without incomplete characters."""
    ids = list(before)
    yielded = decode(ids) if ids else ""
    for new_ids in answer:
        ids += new_ids
        text = decode(ids).rstrip(_REPLACEMENT)
        if text.startswith(yielded) and text != yielded:  # otherwise later tokens will change its end
            yield text[len(yielded) :]
            yielded = text
    full_text = decode(ids)
    differing = (i for i, (a, b) in enumerate(zip(full_text, yielded, strict=False)) if a != b)
    if remainder := full_text[next(differing, min(len(full_text), len(yielded))) :]:
        yield remainder


def check_stop_texts(tokenizer: Any, texts: Sequence[str]) -> None:
    """UserError if a text can never match in a response, because it has a special token."""
    for text in texts:
        special = next((token for token in tokenizer.all_special_tokens if token in text), None)
        if special is not None:
            raise UserError(
                f"rollout.stop: {text!r} has the special token {special}, which a response's text leaves out; add its"
                " id to eos_token_id of the model's generation_config.json, or remove it"
            )


def ends_with_eos(tokenizer: Any, ids: Sequence[int]) -> bool:
    return tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id


def _read_tokenizer(source: str, **options: Any) -> Any:
    import transformers  # importing takes seconds

    return transformers.AutoTokenizer.from_pretrained(source, **options)


def _load_from_hub(name: str) -> Any:
    """Loads a tokenizer of the hub, from the local cache if it is there; UserError if it cannot be fetched."""
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise UserError(f"no directory {name}; give the path of an HF directory with tokenizer.json, or a hub name")
    with contextlib.suppress(OSError, ValueError):  # not in the cache, or only in part: it is fetched below
        return _read_tokenizer(name, local_files_only=True)
    problem = f"tokenizer.json of {name!r} was not found: neither a local directory nor in the cache"
    remedy = "download the model on a machine with a network and use its path"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{problem}, and HF_HUB_OFFLINE is set; unset it, or {remedy}")
    try:
        httpx.head(constants.ENDPOINT, timeout=15.0)  # transformers itself would retry for a minute
        return _read_tokenizer(name)
    except (httpx.HTTPError, HTTPError, OSError, ValueError) as e:
        raise UserError(f"{problem}, and {constants.ENDPOINT} did not provide it ({first_line(e)}); {remedy}") from e


def _read_config(path: str, name: str) -> dict[str, Any]:
    """Reads a JSON file of a model directory or hub name; {} if it is missing."""
    import transformers

    local = expanded(path)
    file = (
        str(local / name)
        if local.is_dir()
        else transformers.utils.hub.cached_file(
            path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    )
    if file is None or not pathlib.Path(file).is_file():
        return {}
    try:
        config = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not valid JSON: {first_line(e)}; fetch it again") from e
    if not isinstance(config, dict):
        raise UserError(f"{file} must be a JSON object, not {type(config).__name__}")
    return config


class _WorkerEnded(Exception):
    """The process ended without a reply; the message has the reason."""


class _Worker:
    """The process of `template_worker.py`, started with the first request and again after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: str, *arguments: Any) -> tuple[list[str], str]:
        """Sends a request; returns the worker's texts, and the error after them or ''. Raises _WorkerEnded."""
        body = pickle.dumps((request, arguments))
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
                raise _WorkerEnded(self._end())
        reply = json.loads(line)
        return reply["found"], reply["error"]

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._end()

    def _start(self) -> None:
        """Starts the process that renders untrusted chat templates."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jppo.data.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        atexit.register(self.close)

    def _end(self) -> str:
        """Waits for the process's end and returns why it ended."""
        assert self._process is not None
        with self._process as process:
            self._process = None
        atexit.unregister(self.close)
        timed_out = process.returncode == -signal.SIGPROF
        return "it takes too long" if timed_out else f"its process ended with code {process.returncode}"


_Messages = Sequence[Mapping[str, Any]]
_WORKER = _Worker()


class Renderer:
    """Renders conversations with the tokenizer's template; rows are their places for errors.

    `tools` are schemas that the template shows to the model; `arguments` are further names that it reads.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        """Reads the template's undefined names; UserError if it is invalid or does not read one of the `arguments`."""
        self._template, self._unknown = None, []
        self._tools = [dict(tool) for tool in tools] or None
        if tokenizer.chat_template is not None:
            self._template = tokenizer.get_chat_template(tools=self._tools)
            try:
                names, error = _WORKER.ask("unknown_names", self._template)
            except _WorkerEnded as e:
                error = str(e)
            if error:
                raise UserError(f"the chat template is invalid: {error}; fix it")
            passed_names = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
            self._unknown = [name for name in names if name not in passed_names]
        _check_arguments(arguments, self._unknown)
        self._names = {**tokenizer.special_tokens_map, **arguments}

    def __call__(self, messages: _Messages, row: Row, opened: bool = True) -> str:
        """Returns the text, with the start of the assistant's turn if `opened`."""
        return self.all([messages], [row], opened)[0]

    def all(self, conversations: Sequence[_Messages], rows: Sequence[Row], opened: bool = True) -> list[str]:
        """Renders several conversations in one request to the worker; UserError with the row's place if one fails."""
        if self._template is None and rows:
            raise UserError(
                f"{rows[0].place}: the prompt is chat messages, but the tokenizer has no chat template; add one in "
                "tokenizer_config.json or chat_template.jinja, or prompts as text"
            )
        options = (self._tools, opened, self._unknown, self._names)
        try:
            texts, error = _WORKER.ask("render_all", self._template, list(map(list, conversations)), *options)
        except _WorkerEnded as e:
            if len(rows) > 1:  # one of them
                return [self(messages, row, opened) for messages, row in zip(conversations, rows, strict=True)]
            texts, error = [], str(e)
        if error:
            raise UserError(
                f"{rows[len(texts)].place}: the chat template refuses the prompt: {error}; change the messages, or the"
                " template"
            )
        return texts


def _check_arguments(arguments: Mapping[str, Any], names_read: Iterable[str]) -> None:
    """UserError for an argument that the template does not read."""
    for name in arguments:
        if name not in names_read:
            raise UserError(
                f"data.apply_chat_template_kwargs has {name!r}, which the tokenizer's chat template does not read; it"
                f" reads {', '.join(names_read) or 'no arguments'}; leave {name} out"
            )
