"""Samples that runs have logged, in the layout of sampled responses, with the rewards of their tokens.

A token record (`samples/tokens_N.jsonl`) has the token ids, which of them were trained on, and the reward of each. A
sample without one is text, which is tokenised again. That is possible only of a single turn.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jppo.data.prompts import UNKNOWN, tokenise
from jppo.data.rows import Row, checked_prompt, checked_text, is_finite, read_rows
from jppo.data.tokenizer import encode_all, end_token_ids
from jppo.errors import UserError
from jppo.settings import Settings, template_arguments
from jppo.types import Reward, Trajectory, given_text

Encode = Callable[[Sequence[Row]], list[tuple[list[int], list[int]]]]  # samples -> ids of prompt and response


@dataclasses.dataclass(frozen=True)
class Logged:
    """A logged sample with its reward."""

    prompt: str  # text or messages, as JSON
    source: str  # data_source
    trajectory: Trajectory
    reward: Reward
    recorded: bool  # its tokens are those that were sampled


def read_run(run: pathlib.Path, encode: Encode | None, last_step: int) -> list[Logged | None]:
    """Reads the graded samples of a run up to `last_step` (-1: all), or those of an evaluation.

    `encode` tokenises samples without a token record; without it they are None.
    """
    folder = run / "samples"
    numbers = sorted(int(found[1]) for path in folder.glob("*") if (found := re.fullmatch(r"step_(\d+)", path.stem)))
    steps = [n for n in numbers if n <= last_step or last_step < 0]
    names = [(f"step_{n}.jsonl", f"tokens_{n}.jsonl") for n in steps] or [("test.jsonl", "none")]
    if not (folder / names[0][0]).is_file():
        raise UserError(
            f"{run} has neither samples/step_N.jsonl, up to --last_step={last_step}, nor samples/test.jsonl; name the"
            " folder of a training or of an evaluation"
        )
    return [one for samples, records in names for one in _read_step(folder / samples, folder / records, encode)]


def _read_step(samples: pathlib.Path, records: pathlib.Path, encode: Encode | None) -> Iterator[Logged | None]:
    """Yields the graded samples of a file; `records` may have token records of some."""
    rows = list(map(_check, read_rows(samples)))
    record_of = {row.columns["sample"]: row for row in read_rows(records)} if records.is_file() else {}
    graded = [i for i, row in enumerate(rows) if row.columns["score"] is not None and not row.columns.get("unusable")]
    yield from (_of_record(rows[i], record_of[i]) for i in graded if i in record_of)
    texts = [rows[i] for i in graded if i not in record_of and rows[i].columns["response"]]
    for row, ids in zip(texts, encode(texts) if encode and texts else [None] * len(texts), strict=True):
        yield None if ids is None else _of_text(row, *ids)


def _check(row: Row) -> Row:
    """Returns a row of a samples file; UserError for a missing or wrong column."""
    if missing := [name for name in ("uid", "prompt", "response", "score") if name not in row.columns]:
        raise UserError(f"{row.place} has no {missing[0]!r}; use the folder of a run, with its samples/")
    checked_prompt(row, "prompt", row.columns["prompt"])
    checked_text(row, "response", row.columns["response"] or "", blank=True)
    if (score := row.columns["score"]) is not None and not is_finite(score):
        raise UserError(f"{row.place}: score is {score!r}; it must be a finite number")
    return row


def _of_record(row: Row, record: Row) -> Logged:
    """Makes a sample of its token record; places of amounts are counted from the first token to learn from."""
    fields = record.columns
    if missing := [name for name in ("prompt_tokens", "tokens", "trained", "reward") if name not in fields]:
        raise UserError(f"{record.place} has no {missing[0]!r}; remove the file: its samples are read as text then")
    trained = np.flatnonzero(fields["trained"])
    earned = tuple((int(k - trained[0]), float(fields["reward"][k])) for k in trained)
    sampled = np.array([False] * len(fields["prompt_tokens"]) + fields["trained"])
    reward = Reward(sum(amount for _, amount in earned), {}, None, earned=earned)
    return _join(row, fields["prompt_tokens"] + fields["tokens"], sampled, reward, recorded=True)


def _of_text(row: Row, prompt: list[int], response: list[int]) -> Logged:
    # Tokens that are not the sampled ones may have moved the places of amounts, but not beyond the end.
    earned = tuple((min(k, len(response) - 1), amount) for k, amount in row.columns.get("earned") or ())
    sampled = np.arange(len(prompt) + len(response)) >= len(prompt)
    return _join(row, prompt + response, sampled, Reward(row.columns["score"], {}, None, earned=earned), recorded=False)


def _join(row: Row, tokens: list[int], sampled: np.ndarray, reward: Reward, *, recorded: bool) -> Logged:
    trajectory = given_text(np.array(tokens), sampled, row.columns["uid"])
    prompt = json.dumps(row.columns["prompt"], sort_keys=True)
    return Logged(prompt, row.columns.get("data_source", UNKNOWN), trajectory, reward, recorded)


def make_encode(c: Settings, tokenizer: Any) -> Encode | None:
    """Makes the tokenisation of samples of a single turn; None for conversations, whose log does not name the turns."""
    if c.rollout.multi_turn.enable or c.rollout.agent:
        return None
    end, arguments = end_token_ids(c.model.path, tokenizer)[0], template_arguments(c.data.apply_chat_template_kwargs)

    def is_ended(row: Row) -> bool:
        return row.columns.get("finish") == "stop" and not row.columns["response"].endswith(c.rollout.stop_texts)

    def encode(rows: Sequence[Row]) -> list[tuple[list[int], list[int]]]:
        prompts = tokenise([row.columns["prompt"] for row in rows], list(rows), tokenizer, (), arguments)
        responses = encode_all(tokenizer, [row.columns["response"] for row in rows], add_special_tokens=False)
        ends = [[end] if is_ended(row) else [] for row in rows]
        return [(prompt, ids + last) for prompt, ids, last in zip(prompts, responses, ends, strict=True)]

    return encode


def fits(logged: Logged, max_prompt_length: int, max_response_length: int) -> bool:
    """Whether a sample has a token to learn from, and is not too long."""
    first, count = int(np.argmax(logged.trajectory.sampled)), len(logged.trajectory.tokens)
    return bool(logged.trajectory.sampled.any() and first <= max_prompt_length and count - first <= max_response_length)


def split(samples: Sequence[Logged], *, share: float, seed: int) -> tuple[list[Logged], list[Logged]]:
    """Returns samples to learn from, and held-out ones: all of about a `share` of the prompts, by a hash of these."""

    def is_held_out(prompt: str) -> bool:
        digest = hashlib.sha256(f"{seed} {prompt}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < share * 2**64

    held_out = {prompt: is_held_out(prompt) for prompt in {sample.prompt for sample in samples}}
    if len({*held_out.values()}) < 2:
        raise UserError(
            f"--held_out={share} of {len(held_out)} prompts, by their hash, leaves one side empty; use samples of more"
            " prompts, another share, or another --seed"
        )
    return [x for x in samples if not held_out[x.prompt]], [x for x in samples if held_out[x.prompt]]
