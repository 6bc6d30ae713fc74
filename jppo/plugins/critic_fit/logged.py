"""Samples that runs have logged, in the layout of sampled responses, with the rewards of their tokens.

A token record (`samples/tokens_N.jsonl`) has the token ids, which of them were trained on, and the reward of each. A
sample without one is text, which is tokenised again. That is possible only of a single turn.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jppo.data.pairs import has_score
from jppo.data.prompts import UNKNOWN, tokenise
from jppo.data.rows import Row, read_rows
from jppo.data.tokenizer import encode_all, end_token_ids
from jppo.errors import UserError
from jppo.settings import Settings, template_arguments
from jppo.types import Reward, Trajectory, given_text

FIELDS = ("prompt_tokens", "tokens", "trained", "reward")  # of a token record
Encode = Callable[[Sequence[Row]], Sequence[Mapping[str, Any] | None]]  # samples -> these fields, or None


@dataclasses.dataclass(frozen=True)
class Logged:
    """A logged sample with its reward."""

    prompt: str  # text or messages, as JSON
    source: str  # data_source
    trajectory: Trajectory
    reward: Reward


def read_run(run: pathlib.Path, encode: Encode, last_step: int) -> list[Logged | None]:
    """Reads the graded samples of a run, up to `last_step` (-1: all), or of an evaluation.

    `encode` makes fields of samples without a token record; a sample for which it has None is None.
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


def _read_step(samples: pathlib.Path, records: pathlib.Path, encode: Encode) -> Iterator[Logged | None]:
    """Yields the graded samples of a file; `records` may have token records of some."""
    rows = read_rows(samples)
    record_of = {row.columns["sample"]: row for row in read_rows(records)} if records.is_file() else {}
    for record in record_of.values():
        if missing := [name for name in FIELDS if name not in record.columns]:
            raise UserError(f"{record.place} has no {missing[0]!r}; remove the file: its samples are read as text then")
    graded = [i for i, row in enumerate(rows) if has_score(row) and not row.columns.get("unusable")]
    yield from (_join(rows[i], record_of[i].columns) for i in graded if i in record_of)
    if texts := [rows[i] for i in graded if i not in record_of]:
        yield from map(_join, texts, encode(texts))


def _join(row: Row, fields: Mapping[str, Any] | None) -> Logged | None:
    """Joins a row of a samples file with its tokens; rewards are earned at a token, from the first trained one on."""
    if fields is None:
        return None
    trained = np.flatnonzero(fields["trained"])
    earned = tuple((int(k - trained[0]), float(fields["reward"][k])) for k in trained)
    sampled = np.array([False] * len(fields["prompt_tokens"]) + fields["trained"])
    trajectory = given_text(np.array(fields["prompt_tokens"] + fields["tokens"]), sampled, row.columns["uid"])
    reward = Reward(sum(amount for _, amount in earned), {}, None, earned=earned)
    prompt = json.dumps(row.columns["prompt"], sort_keys=True)
    return Logged(prompt, row.columns.get("data_source", UNKNOWN), trajectory, reward)


def make_encode(c: Settings, tokenizer: Any) -> Encode:
    """Makes the tokenisation of single turns; a conversation's text does not tell the policy's tokens from others."""
    if c.rollout.multi_turn.enable or c.rollout.agent:
        return lambda rows: [None] * len(rows)
    end, arguments = end_token_ids(c.model.path, tokenizer)[0], template_arguments(c.data.apply_chat_template_kwargs)

    def fields_of(row: Row, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        if row.columns.get("finish") == "stop" and not row.columns["response"].endswith(c.rollout.stop_texts):
            tokens = [*tokens, end]
        reward = np.zeros(len(tokens))
        for k, amount in row.columns.get("earned") or ():
            reward[min(k, len(tokens) - 1)] += amount  # there may be other tokens than were sampled, and fewer
        reward[-1] += row.columns["score"] - reward.sum()
        return dict(zip(FIELDS, (prompt, tokens, [True] * len(tokens), reward), strict=True))

    def encode(rows: Sequence[Row]) -> list[dict[str, Any]]:
        prompts = tokenise([row.columns["prompt"] for row in rows], list(rows), tokenizer, (), arguments)
        responses = encode_all(tokenizer, [row.columns["response"] for row in rows], add_special_tokens=False)
        return list(map(fields_of, rows, prompts, responses))

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
            " prompts, another share, or another --config.trainer.seed"
        )
    return [x for x in samples if not held_out[x.prompt]], [x for x in samples if held_out[x.prompt]]
