"""Makes the TinyStories example's data: `python -m examples.stories --out=runs/tinystories/data`

Writes train.jsonl and test.jsonl: openings such as `Once upon a time, there was a little girl named Lily`, which end in
a name without a full stop, so the story continues for any tokenizer. Their ground truth is a word, `--word`; the rule
`mentions` scores a story that mentions it, in singular or plural.

With `--samples FILE`, a samples file for these openings, it writes demo.jsonl instead: a (prompt, response) pair for
each sample that ended within its length limit, for fine-tuning. An end mark that the model wrote as text, such as
`<|end_story|>`, is removed.
"""

import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jppo.data.rows import Row, checked_prompt, checked_text, read_rows, write_sets
from jppo.errors import UserError
from jppo.settings import Parser, exit_on_user_error, natural

GIRLS = ("Lily", "Sue", "Mia", "Anna", "Lucy", "Sara", "Amy", "Emma", "Jane", "Molly")
BOYS = ("Tim", "Tom", "Max", "Ben", "Sam", "Jack", "Bob", "Leo", "John", "Billy")
KINDS = ("little", "happy", "kind", "shy", "brave", "clever", "sad", "funny")
BEGINNINGS = ("Once upon a time, there was a", "One day, there was a")
_MARK = re.compile(r"\s*<\|[^|<>]*\|>\s*$")


def openings() -> list[str]:
    """Returns every beginning with every child."""
    children = [("girl", name) for name in GIRLS] + [("boy", name) for name in BOYS]
    return [
        f"{beginning} {kind} {child} named {name}"
        for beginning, kind, (child, name) in itertools.product(BEGINNINGS, KINDS, children)
    ]


def make(*, seed: int, test: int, word: str) -> dict[str, list[dict[str, str]]]:
    """Returns the rows of train and test, as a function of the arguments only."""
    everything = openings()
    if not 1 <= test < len(everything):
        raise UserError(f"--test={test} must be from 1 to {len(everything) - 1}, so that both sets have openings")
    if not re.fullmatch(r"[A-Za-z]+", word):
        raise UserError(f"--word={word!r} must be one word of letters")
    order = np.random.default_rng(seed).permutation(len(everything))
    rows = [{"prompt": everything[i], "ground_truth": word, "data_source": "mentions"} for i in order]
    return {"train": rows[test:], "test": rows[:test]}


def demonstrations(samples: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the samples that ended by themselves, as pairs for fine-tuning."""
    pairs = []
    for row in samples:
        if row.columns.get("finish") is None:
            raise UserError(f"{row.place} has no 'finish'; use a file of a run's samples/")
        story = _MARK.sub("", checked_text(row, "response", row.columns.get("response") or "", blank=True))
        if row.columns["finish"] == "stop" and story.strip():
            pairs.append({"prompt": checked_prompt(row, "prompt", row.columns.get("prompt")), "response": story})
    if not pairs:
        raise UserError(
            f"{samples[0].source}: none of {len(samples)} samples was ended by its model; raise"
            " data.max_response_length of the sampling"
        )
    return pairs


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = Parser("examples.stories", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--samples", type=pathlib.Path, help="samples to make demonstrations of")
    parser.add_argument("--seed", type=natural, default=1, help="random seed")
    parser.add_argument("--test", type=int, default=64, help="openings to hold out")
    parser.add_argument("--word", default="cat", help="word that a story should mention")
    args = parser.parse_args(argv)
    if args.samples is None:
        sets: dict[str, list[dict[str, Any]]] = dict(make(seed=args.seed, test=args.test, word=args.word))
    else:
        sets = {"demo": demonstrations(read_rows(args.samples))}
    write_sets(args.out, sets)


if __name__ == "__main__":
    main()
