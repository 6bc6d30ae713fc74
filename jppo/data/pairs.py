"""Makes preference pairs of scored samples.

    python -m jppo.data.pairs --samples=runs/judged/samples/test.jsonl --out=pairs

A samples file is written by a test (`samples/test.jsonl` of `jppo.evaluate` with several responses per prompt) or by
training (`samples/step_N.jsonl`). For each prompt, responses with a higher score are paired with lower ones, each
response at most once. Prompts with equal scores give no pair; responses without a score are left out. The output is
train.jsonl and test.jsonl; all pairs of a prompt are in one of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jppo.data.rows import Row, brief, checked_prompt, checked_text, is_finite, make_directory, read_rows, write_jsonl
from jppo.errors import UserError, escaped, expanded
from jppo.settings import Parser, exit_on_user_error, natural


def has_score(row: Row) -> bool:
    """Whether a row of a samples file has a response and a score; UserError for a missing or wrong column."""
    missing = [name for name in ("uid", "prompt", "response", "score") if name not in row.columns]
    if missing:
        raise UserError(f"{row.place} has no {missing[0]!r}; use a file of a run's samples/")
    checked_text(row, "uid", row.columns["uid"])
    checked_prompt(row, "prompt", row.columns["prompt"])
    score = row.columns["score"]
    if score is not None and not is_finite(score):
        raise UserError(f"{row.place}: score is {brief(score)}; it must be a finite number")
    return score is not None and bool(checked_text(row, "response", row.columns["response"] or "", blank=True).strip())


def _pairs_of_samples(samples: Sequence[Row], *, seed: int) -> list[list[dict[str, Any]]]:
    """Makes the pairs of each prompt whose responses differ in score, in the order of the file."""
    rows_by_prompt: dict[str, list[Row]] = {}
    for row in samples:
        if has_score(row):
            rows_by_prompt.setdefault(row.columns["uid"], []).append(row)
    rng = np.random.default_rng(seed)
    pairs = [_pair_by_score([group[i] for i in rng.permutation(len(group))]) for group in rows_by_prompt.values()]
    return [group for group in pairs if group]


def _pair_by_score(shuffled: Sequence[Row]) -> list[dict[str, Any]]:
    """Pairs the best with the worst, the second best with the second worst, and so on while scores differ."""
    by_score = sorted(shuffled, key=lambda row: -row.columns["score"])
    candidates = zip(by_score, reversed(by_score), strict=True)
    pairs = [(a.columns, b.columns) for a, b in candidates if a.columns["score"] > b.columns["score"]]
    return [
        {
            "prompt": better["prompt"],
            "chosen": better["response"],
            "rejected": worse["response"],
            "margin": better["score"] - worse["score"],
        }
        for better, worse in pairs
    ]


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Pairs scored samples and writes train.jsonl and test.jsonl."""
    parser = Parser("jppo.data.pairs", __doc__)
    parser.add_argument("--samples", type=expanded, required=True, help="a samples file with scores")
    parser.add_argument("--out", type=expanded, required=True, help="directory to write to")
    parser.add_argument("--test", type=float, default=0.1, help="share of the prompts whose pairs are held out")
    parser.add_argument("--seed", type=natural, default=1, help="random seed")
    args = parser.parse_args(argv)
    if not 0 < args.test < 1:
        raise UserError(f"--test={args.test} is a share: it must be between 0 and 1")
    pairs = _pairs_of_samples(read_rows(args.samples), seed=args.seed)
    held_out = round(args.test * len(pairs))
    if not 1 <= held_out < len(pairs):
        raise UserError(
            f"{args.samples}: {len(pairs)} prompts have responses of different scores, and --test={args.test} of them"
            " must leave some on both sides; sample more responses to a prompt"
        )
    order = np.random.default_rng(args.seed).permutation(len(pairs))
    splits = {"train": order[held_out:], "test": order[:held_out]}
    make_directory(args.out)
    for name, indices in splits.items():
        rows = [pair for i in indices for pair in pairs[i]]
        write_jsonl(args.out / f"{name}.jsonl", rows)
        print(escaped(f"{args.out / f'{name}.jsonl'}: {len(rows)} pairs of {len(indices)} prompts"))


if __name__ == "__main__":
    main()
