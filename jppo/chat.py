"""Chats with a model in the terminal: python -m jppo.chat runs/quickstart/hf --temperature 0

MODEL_DIR is a Hugging Face directory of a supported family, as written by python -m jppo.export, or a hub name. The
tokenizer's chat template formats the conversation; without one, or with --raw, each line is continued on its own. A
pipe is read line by line, each a turn. /reset clears the history, /exit quits, /help lists these; Ctrl-C stops an
answer.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jppo.data.prompts import tokenise
from jppo.data.rows import Row, checked_text
from jppo.data.tokenizer import decode, decode_stream, end_token_ids, load_tokenizer
from jppo.errors import INTERRUPTED, UserError, escaped, one_line
from jppo.learner import sharding, state
from jppo.models import cache, hf
from jppo.models.config import ModelConfig
from jppo.rollout.inprocess import InprocessSettings, make_programs, stream
from jppo.rollout.protocol import RolloutError, greedy, sample_seed
from jppo.settings import Parser, exit_on_user_error
from jppo.types import Params

DTYPES = ("float32", "bfloat16", "float16")
CONTEXT = 4096  # tokens; a longer context costs time and memory
MAX_TOKENS = 256  # tokens of an answer
AT_ONCE = 4  # tokens per device call
PLACE = Row("the conversation", 1, {}, "line")
Message = dict[str, str]
HELP = "/reset clears the history, /exit quits, Ctrl-C stops an answer"


@dataclasses.dataclass(frozen=True)
class ChatModel:
    """A loaded model with its sampling function."""

    encode: Callable[[str | Sequence[Message]], list[int]]
    decode: Callable[[list[int]], str]
    answer: Callable[[Sequence[int], int], Iterator[list[int]]]  # (ids, turn number) -> tokens as they are sampled
    ends: tuple[int, ...]  # end tokens
    room: int  # tokens of the conversation without the answer
    longest: int  # tokens of an answer
    templated: bool
    cfg: ModelConfig


def load_model(args: argparse.Namespace) -> ChatModel:
    """Reads a model and makes its sampling functions, which compile on first use."""
    args.model = hf.final_model(args.model)
    if sys.stderr.isatty():
        tell(f"loading {args.model}")
    if (pathlib.Path(args.model) / "adapter_config.json").is_file():
        raise UserError(f"{args.model} has only adapters; export the run with --merge_lora, and use that directory")
    _, cfg = hf.read_config(args.model, longest=args.context)
    hf.check_weights(args.model, cfg, head="lm")
    tokenizer = load_tokenizer(args.model)
    ends = end_token_ids(args.model, tokenizer)
    templated = tokenizer.chat_template is not None and not args.raw
    if args.system is not None and not templated:
        raise UserError("--system: this model has no chat messages; put the text before each line instead")
    model_context = cfg.max_position_embeddings
    context = min(model_context, CONTEXT) if args.context is None else args.context
    longest = min(MAX_TOKENS, context // 2) if args.max_tokens is None else args.max_tokens
    if not 2 <= context <= model_context:
        raise UserError(f"--context={context} must be from 2 to the {model_context} tokens of the model")
    if not 1 <= longest < context:
        raise UserError(f"--max_tokens={longest} must be from 1 to {context - 1}, within the context of {context}")
    settings = engine_settings(cfg, args.dtype, context, context - longest)
    programs = make_programs(settings, ends, steps=AT_ONCE)
    model = programs.prepare(read_weights(args.model, cfg, args.dtype))
    seed = secrets.randbits(31) if args.seed is None else args.seed

    def answer(ids: Sequence[int], turn: int) -> Iterator[list[int]]:
        sampling = dataclasses.replace(
            greedy(longest), temperature=args.temperature, top_p=args.top_p, seed=sample_seed(seed, turn, 0)
        )
        return stream(programs, settings, model, ids, sampling)

    return ChatModel(
        encode=lambda prompt: tokenise([prompt if isinstance(prompt, str) else list(prompt)], [PLACE], tokenizer)[0],
        decode=lambda ids: decode(tokenizer, ids),
        answer=answer,
        ends=ends,
        room=context - longest,
        longest=longest,
        templated=templated,
        cfg=cfg,
    )


def engine_settings(cfg: ModelConfig, dtype: str, context: int, longest_prompt: int) -> InprocessSettings:
    """Returns the settings of the in-process engine for one row on one device."""
    mesh = sharding.mesh_of_shape((1,))
    return InprocessSettings(
        cfg=cfg,
        rows=1,
        row_multiple=1,
        max_prompt_length=longest_prompt,
        max_model_len=context,
        dtype=dtype,
        by_row=sharding.whole_rows_sharding(mesh),
        of_cache=sharding.cache_sharding(mesh, cache.cache_heads(cfg)),
        cut=False,  # compile only the programs in use
    )


def read_weights(path: str, cfg: ModelConfig, dtype: str) -> Params:
    """Loads the model's weights to one device."""
    layout = state.model_weights(cfg, sharding.mesh_of_shape((1,)), head="lm", param_dtype=dtype)
    return state.load_sharded(layout, path, init="pretrained", key=jax.random.key(0))


def drop_oldest(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], room: int
) -> tuple[list[Message], list[int]]:
    """Drops the oldest turns, but no system message, until the rest has at most `room` tokens; returns both."""
    system_messages = [message for message in messages[:1] if message["role"] == "system"]
    turns = list(messages[len(system_messages) :])
    while len(ids := encode([*system_messages, *turns])) > room:
        next_user_turn = next((i for i, message in enumerate(turns) if i and message["role"] == "user"), None)
        if next_user_turn is None:
            with_system = " with the system message" if system_messages else ""
            raise UserError(
                f"the last message has {len(ids)} tokens{with_system}, but {room} fit with an answer; shorten it, or"
                " lower --max_tokens"
            )
        turns = turns[next_user_turn:]
    return [*system_messages, *turns], ids


class Conversation:
    """The history of a conversation."""

    def __init__(self, model: ChatModel, *, system: str | None) -> None:
        self._model, self._turn = model, 0
        self._system_messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._history: list[Message] = list(self._system_messages)

    def reset(self) -> None:
        self._history = list(self._system_messages)

    def say(self, text: str, *, show: Callable[[str], Any], tell: Callable[[str], Any]) -> None:
        """Answers a text: passes the answer to `show` as it comes, notices to `tell`; adds both to the history."""
        model, self._turn = self._model, self._turn + 1
        checked_text(PLACE, "what was said", text)
        if model.templated:
            messages, ids = drop_oldest([*self._history, {"role": "user", "content": text}], model.encode, model.room)
            if dropped := len(self._history) + 1 - len(messages):
                tell(f"the context is full: the oldest {dropped} messages were dropped")
        else:
            messages, ids = [], model.encode(text)
            if len(ids) > model.room:
                raise UserError(f"the text has {len(ids)} tokens, but {model.room} fit with an answer; shorten it")
        answer, last_token = "", model.ends[0]

        def answer_tokens() -> Iterator[list[int]]:
            nonlocal last_token
            for new_tokens in model.answer(ids, self._turn):
                last_token = new_tokens[-1]
                yield new_tokens[:-1] if last_token in model.ends else new_tokens

        try:
            for piece in decode_stream(answer_tokens(), model.decode, before=() if model.templated else ids):
                answer += piece
                show(piece)
            if last_token not in model.ends:
                tell(f"stopped at {model.longest} tokens: see --max_tokens")
        except KeyboardInterrupt:
            tell("stopped")
            raise
        finally:
            if model.templated:
                self._history = [*messages, {"role": "assistant", "content": answer}]


def show(piece: str) -> None:
    print(escaped(piece), end="", flush=True)


def tell(line: str) -> None:
    print(f"[{line}]", file=sys.stderr, flush=True)


def ask_once(conversation: Conversation, text: str) -> None:
    """Prints the model's answer to one text, and a newline."""
    conversation.say(text, show=show, tell=tell)
    print(flush=True)


def answer_lines(conversation: Conversation, lines: Iterator[str], *, terminal: bool) -> None:
    """Answers each line; on a terminal an error is printed and the next line is read."""
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text == "/help":
            tell(HELP)
        elif text:
            try:
                ask_once(conversation, text)
            except UserError as e:
                if not terminal:
                    raise
                tell(str(e))
            except KeyboardInterrupt:
                if not terminal:
                    raise
                print(flush=True)


def typed_lines() -> Iterator[str]:
    """Yields lines from a terminal, until its end or Ctrl-C at the prompt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")
    print(flush=True)


def piped_lines() -> Iterator[str]:
    """Yields lines from a pipe or a file."""
    try:
        yield from sys.stdin
    except UnicodeDecodeError as e:
        raise UserError(f"the input is not UTF-8: byte {e.start} of a block; convert it") from e


def chat_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command line and checks its numbers."""
    parser = Parser("jppo.chat", __doc__)
    parser.add_argument("model", metavar="MODEL_DIR", help="a run, a Hugging Face directory, or a hub name")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this text and exit")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--raw", action="store_true", help="continue text without the chat template")
    parser.add_argument("--temperature", type=float, default=0.7, help="0.0 is greedy (default 0.7)")
    parser.add_argument("--top_p", type=float, default=1.0, help="1.0 is off (default 1.0)")
    parser.add_argument("--max_tokens", type=int, help=f"per answer (default {MAX_TOKENS}, or half the context)")
    parser.add_argument("--context", type=int, help=f"tokens (default: the model's own, at most {CONTEXT})")
    parser.add_argument("--seed", type=int, help="sampling seed (default: random)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of matrix products (default float32)")
    args = parser.parse_args(argv)
    if not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1:
        raise UserError(
            f"--temperature={args.temperature} must be 0 or more, --top_p={args.top_p} above 0 and at most 1"
        )
    if args.seed is not None and args.seed < 0:
        raise UserError(f"--seed={args.seed} must be 0 or more")
    return args


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Loads the model and answers one text, typed lines or piped ones."""
    args = chat_arguments(sys.argv[1:] if argv is None else argv)
    try:
        conversation = Conversation(load_model(args), system=args.system)
        if args.prompt is not None:
            ask_once(conversation, args.prompt)
        elif sys.stdin.isatty():
            tell(HELP)
            answer_lines(conversation, typed_lines(), terminal=True)
        else:
            answer_lines(conversation, piped_lines(), terminal=False)
    except RolloutError as e:
        print(one_line(e), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
