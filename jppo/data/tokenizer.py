"""The tokenizer of an HF directory, the end tokens of a response, and decoding."""

import contextlib
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import httpx
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library, whichever that is

from jppo.errors import expanded, first_line
from jppo.settings import UserError

LONG = 1_000_000  # characters of one text
CUT_FROM = 100_000  # characters; shorter texts are always tokenised quickly
_HALF = "\N{REPLACEMENT CHARACTER}"  # decoding of an incomplete character
_LONGEST = 32  # tokens of one character; bytes that are no text would make later ones wait for ever

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "spm.model", "tekken.json")


def load_tokenizer(path: str) -> Any:
    """Loads the tokenizer of a local directory or a hub name."""
    if not path:
        raise UserError("model.path is empty; set it to an HF directory or a hub name")
    local = expanded(path)
    if not local.is_dir():
        return _from_hub(path)
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
    """Returns the ids that end a response: of generation_config.json, config.json and the tokenizer."""
    found: list[int] = []
    vocab_size = _read_config(path, "config.json").get("vocab_size")
    for name in ("generation_config.json", "config.json"):
        ids = _read_config(path, name).get("eos_token_id")
        several = [] if ids is None else ids if isinstance(ids, list) else [ids]
        for one in several:
            whole = isinstance(one, int) and not isinstance(one, bool) and one >= 0
            if not whole or (isinstance(vocab_size, int) and one >= vocab_size):
                raise UserError(
                    f"{path}: eos_token_id={ids!r} of {name} must be token ids, from 0 to below vocab_size={vocab_size}"
                )
        found += several
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    if not found:
        raise UserError(f"{path} names no end token: set eos_token_id in generation_config.json")
    return tuple(dict.fromkeys(found))


def announce_long(place: str, *texts: str) -> None:
    """Warns before tokenising a long text: without spaces a tokenizer needs minutes."""
    if (most := max(map(len, texts), default=0)) > LONG:
        said = f"a text of {most:,} characters is tokenised, which can take minutes; shorten or remove it"
        print(f"{place}: {said}", file=sys.stderr, flush=True)


def enough(tokenizer: Any, max_length: int) -> int:
    """Length in characters above which a text has more than `max_length` tokens, by the longest token."""
    return max(CUT_FROM, max_length * max(map(len, tokenizer.get_vocab())) + 1)


def encode_all(tokenizer: Any, texts: Sequence[str], *, max_length: int | None = None, **how: Any) -> list[list[int]]:
    """Token ids of texts; of a text with more than `max_length` tokens (None: no limit) perhaps only the first ones.

    A word of millions of characters takes minutes to tokenise, and a text that is too long is dropped anyway.
    """
    if max_length is None or max(map(len, texts), default=0) <= CUT_FROM:
        ids: list[list[int]] = tokenizer(list(texts), verbose=False, **how)["input_ids"]
        return ids
    most = enough(tokenizer, max_length)
    ids = tokenizer([text[:most] for text in texts], verbose=False, **how)["input_ids"]
    for i, text in enumerate(texts):
        if len(text) > most and len(ids[i]) <= max_length:  # as where a normalizer removes blanks
            ids[i] = tokenizer(text, verbose=False, **how)["input_ids"]
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
    """Returns `decode` and `spell`; those of a byte-level tokenizer are faster, from a table of its tokens' bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return functools.partial(decode, tokenizer), functools.partial(spell, tokenizer)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    count = 1 + max(tokenizer.get_vocab().values())

    def one(token: str) -> bytes:
        try:
            return bytes(map(bytes_of.__getitem__, token))
        except KeyError:  # an added token in characters of its own
            return token.encode()

    def joined(table: list[bytes], ids: Sequence[int]) -> str:
        return b"".join([table[i] for i in ids if i < count]).decode(errors="replace")

    spelled = [one(backend.id_to_token(i) or "") for i in range(count)]
    decoded = [b"" if i in special else text for i, text in enumerate(spelled)]
    return functools.partial(joined, decoded), functools.partial(joined, spelled)


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Splits the text of `spell` by token; a character of several tokens belongs to the last, the others have ''."""
    found = []
    context = begin = 0  # tokens from `begin` have no text yet; those from `context` are decoded with them
    for end in range(1, len(ids) + 1):
        text = spell(tokenizer, ids[context:end])
        waits = text.endswith(_HALF) and end < len(ids) and end - begin < _LONGEST
        found.append("" if waits else text[len(spell(tokenizer, ids[context:begin])) :])
        if not waits:
            context, begin = begin, end
    return found


def decode_stream(
    answer: Iterable[Sequence[int]], decode: Callable[[list[int]], str], *, before: Sequence[int] = ()
) -> Iterator[str]:
    """Yields the text of an answer piece by piece, continuing the tokens `before`, without incomplete characters."""
    ids = list(before)
    said = decode(ids) if ids else ""
    for new in answer:
        ids += new
        text = decode(ids).rstrip(_HALF)
        if text.startswith(said) and text != said:  # otherwise later tokens will change its end
            yield text[len(said) :]
            said = text
    whole = decode(ids)
    same = next((i for i, (a, b) in enumerate(zip(whole, said, strict=False)) if a != b), min(len(whole), len(said)))
    if rest := whole[same:]:
        yield rest


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
    """Whether the last token is the tokenizer's end token."""
    return tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id


def _read_tokenizer(source: str, **how: Any) -> Any:
    import transformers  # importing takes seconds

    return transformers.AutoTokenizer.from_pretrained(source, **how)


def _from_hub(name: str) -> Any:
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise UserError(f"no directory {name}; give the path of an HF directory with tokenizer.json, or a hub name")
    with contextlib.suppress(OSError, ValueError):  # not in the cache, or only in part: it is fetched below
        return _read_tokenizer(name, local_files_only=True)
    sought = f"tokenizer.json of {name!r} was not found: neither a local directory nor in the cache"
    remedy = "download the model on a machine with a network and use its path"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{sought}, and HF_HUB_OFFLINE is set; unset it, or {remedy}")
    try:
        httpx.head(constants.ENDPOINT, timeout=15.0)  # transformers itself would retry for a minute
        return _read_tokenizer(name)
    except (httpx.HTTPError, HTTPError, OSError, ValueError) as e:
        raise UserError(f"{sought}, and {constants.ENDPOINT} did not provide it ({first_line(e)}); {remedy}") from e


def _read_config(path: str, name: str) -> dict[str, Any]:
    import transformers

    local = expanded(path)
    found = (
        str(local / name)
        if local.is_dir()
        else transformers.utils.hub.cached_file(
            path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    )
    if found is None or not pathlib.Path(found).is_file():
        return {}
    try:
        config = json.loads(pathlib.Path(found).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{found} is not valid JSON: {first_line(e)}; fetch it again") from e
    if not isinstance(config, dict):
        raise UserError(f"{found} must be a JSON object, not {type(config).__name__}")
    return config
