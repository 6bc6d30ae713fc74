"""HH-RLHF as pairs and prompts: `python -m jppo.data.hh_rlhf --from downloads/hh --out data/hh_rlhf`

downloads/hh holds Anthropic/hh-rlhf (helpful-base/train.jsonl.gz, ...: whole transcripts as `chosen` and `rejected`) or
Dahoas/full-hh-rlhf (data/train-*.parquet: `prompt`, `chosen`, `rejected`). The command writes pairs/train.parquet and
pairs/test.parquet for jppo.reward_model, and prompts/train.parquet and prompts/test.parquet for PPO with that model.
Transcripts become chat messages. Rows are left out and counted if their turns do not alternate, their halves answer
different prompts, or a half is empty.
"""

import pathlib
import re
from typing import Any

from jppo.data import prepare
from jppo.data.rows import Row, text_column
from jppo.errors import UserError

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}

_Messages = list[dict[str, str]]


def _messages_of(transcript: str, row: Row) -> _Messages:
    """Parses a transcript to chat messages; UserError if it does not begin with a turn."""
    preamble, *turns = _TURN.split(transcript)
    if preamble.strip() or not turns:
        raise UserError(f"{row.place}: a transcript must begin with '\\n\\nHuman:'; it begins with {transcript[:40]!r}")
    return [{"role": _ROLES[role], "content": text.strip()} for role, text in zip(turns[::2], turns[1::2], strict=True)]


def _pair(row: Row) -> dict[str, Any] | None:
    """Returns prompt, chosen and rejected response of a row; None if it is no pair of answers to one prompt."""
    prompt = row.columns.get("prompt") or ""
    chosen, rejected = (_messages_of(prompt + text_column(row, half), row) for half in ("chosen", "rejected"))
    alternates = [turn["role"] for turn in chosen] == ["user", "assistant"] * (len(chosen) // 2)
    if not alternates or chosen[:-1] != rejected[:-1] or not all(t["content"] for t in (*chosen, rejected[-1])):
        return None
    return {"prompt": chosen[:-1], "chosen": chosen[-1]["content"], "rejected": rejected[-1]["content"]}


def _make(source: pathlib.Path) -> prepare.RowSets:
    """Makes the pairs and the prompts of both splits, by output file."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for split in ("train", "test"):
        rows = prepare.rows_of(source, split)
        pairs = [pair for pair in map(_pair, rows) if pair is not None]
        if not pairs:
            raise UserError(
                f"--from={source}: none of the {len(rows)} rows of {split} is a pair of answers to one prompt"
            )
        print(f"{split}: {len(rows) - len(pairs)} of {len(rows)} rows are no pair and left out")
        name = "Dahoas/full-hh-rlhf" if "prompt" in rows[0].columns else "Anthropic/hh-rlhf"
        sets[f"pairs/{split}"] = pairs
        sets[f"prompts/{split}"] = prepare.deduplicate(
            prepare.verl_row(
                pair["prompt"], pair["chosen"], source=name, ability="alignment", style="model", split=split, index=i
            )
            for i, pair in enumerate(pairs)
        )
    return sets


main = prepare.command("jppo.data.hh_rlhf", __doc__, _make)

if __name__ == "__main__":
    main()
