"""Checks data before training: `python -m jppo.data.check FILES [--tokenizer DIR] [--val FILES]`.

    python -m jppo.data.check data/gsm8k/train.parquet --val data/gsm8k/test.parquet

FILES are several arguments or comma-separated, as in data.train_files. The report lists rows and columns, data sources
and their graders, prompt lengths, duplicates, rows without an answer, prompts in both sets, and the first prompt as the
model reads it. Exit code 0 with a line OK or WARN for each; 2 if the data cannot be read or training would refuse it.
"""

import collections
import dataclasses
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jppo.data.prompts import (
    NEEDED,
    Messages,
    check_one_schema,
    data_source,
    ground_truth,
    prompt_of,
    tokenise,
    with_system_prompt,
)
from jppo.data.rows import Row, Source, read_sources
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError, escaped
from jppo.settings import Parser, exit_on_user_error

ROLES = {"system", "developer", "user", "assistant", "tool"}
_BINS = 10
BAR = 40  # characters of the longest bar


@dataclasses.dataclass(frozen=True)
class DataNote:
    """One line of the report."""

    good: bool
    about: str
    found: str

    def __str__(self) -> str:
        return f"{'OK' if self.good else 'WARN':<5} {self.about:<11} {self.found}"


@dataclasses.dataclass(frozen=True)
class CheckedSet:
    """A training or test set, read and checked row by row."""

    sources: list[Source]
    rows: list[Row]
    prompts: list[Messages]
    ids: list[list[int]] | None  # None without a tokenizer


def read_set(
    files: str,
    setting: str,
    *,
    tokenizer: Any,
    prompt_role: str,
    system_prompt: str,
    custom_cls: str,
    columns: Mapping[str, str] = types.MappingProxyType({}),
    template_arguments: Mapping[str, Any] = types.MappingProxyType({}),
) -> CheckedSet:
    """Reads and tokenises a training or test set, with the errors that training would raise."""
    sources = read_sources(files, setting, custom_cls=custom_cls, tokenizer=tokenizer, columns=columns)
    rows = [row for source in sources for row in source.rows]
    prompts = [with_system_prompt(prompt_of(row, prompt_role), system_prompt, row) for row in rows]
    for source in sources:
        check_one_schema(source.rows)
    ids = None if tokenizer is None else tokenise(prompts, rows, tokenizer, template_arguments=template_arguments)
    return CheckedSet(sources, rows, prompts, ids)


def data_findings(
    data: CheckedSet,
    *,
    max_prompt_length: int | None,
    graders: dict[str, str],
    refuse: Callable[[str, str], str],
    needed: Collection[str] = NEEDED,
) -> list[DataNote]:
    """Returns the report's notes on one set: columns, sources, missing answers, duplicates, over-long prompts.

    `refuse` returns why a row of a source with a ground truth cannot be graded, or ''.
    """
    notes = []
    for source in data.sources:
        columns = collections.Counter(column for row in source.rows for column in row.columns)
        partial = [column for column, count in columns.items() if count < len(source.rows)]
        summary = f"{source.name}: {len(source.rows)}; columns {', '.join(map(str, columns))}"
        notes.append(
            DataNote(not partial, "rows", f"{summary}; not every row has {', '.join(partial)}" if partial else summary)
        )
    for name, count in collections.Counter(map(data_source, data.rows)).most_common():
        grader = f"graded by {graders[name]}" if name in graders else "no grader: set reward.grader or reward.function"
        notes.append(DataNote(name in graders, "source", f"{name}: {count} rows, {grader}"))
    unanswered = [row for row in data.rows if not _has_answer(row)]
    if "ground_truth" in needed:
        notes.append(_count_note("answers", "without an answer", unanswered, len(data.rows)))
    reasons = {id(row): refuse(data_source(row), ground_truth(row)) for row in data.rows if _has_answer(row)}
    if ungradable := [row for row in data.rows if reasons.get(id(row))]:
        reason = reasons[id(ungradable[0])]
        notes.append(_count_note("asserts", f"with asserts that are left out ({reason})", ungradable, len(data.rows)))
    first_rows: dict[str, Row] = {}
    duplicates = [
        row
        for row, key in zip(data.rows, map(_prompt_key, data.prompts), strict=True)
        if first_rows.setdefault(key, row) is not row
    ]
    notes.append(_count_note("duplicates", "with the prompt of an earlier row", duplicates, len(data.rows)))
    answered = [
        row
        for row, prompt in zip(data.rows, data.prompts, strict=True)
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
    ]
    if answered:
        notes.append(_count_note("messages", "that end with an assistant's message", answered, len(data.rows)))
    unknown = sorted({str(m["role"]) for p in data.prompts if not isinstance(p, str) for m in p} - ROLES)
    if unknown:
        notes.append(DataNote(False, "roles", f"{', '.join(unknown)}: a chat template may leave out their messages"))
    if data.ids is not None and max_prompt_length is not None:
        overlong = [row for row, ids in zip(data.rows, data.ids, strict=True) if len(ids) > max_prompt_length]
        notes.append(
            _count_note("over-long", f"with a prompt of more than {max_prompt_length} tokens", overlong, len(data.rows))
        )
    return notes


def overlap(train: CheckedSet, val: CheckedSet) -> DataNote:
    """Returns a note on rows of the test set whose prompt is in the training set."""
    train_keys = set(map(_prompt_key, train.prompts))
    shared = [row for row, prompt in zip(val.rows, val.prompts, strict=True) if _prompt_key(prompt) in train_keys]
    return _count_note("overlap", "of the test set with a prompt of the training set", shared, len(val.rows))


def lengths(data: CheckedSet) -> tuple[np.ndarray, str]:
    """Returns the length of each prompt [n] i64, and its unit, tokens or characters."""
    if data.ids is not None:
        return np.array([len(ids) for ids in data.ids]), "tokens"
    texts = (p if isinstance(p, str) else "".join(message["content"] for message in p) for p in data.prompts)
    return np.array([len(text) for text in texts]), "characters"


def histogram(values: np.ndarray) -> list[str]:
    """Returns a histogram as text lines."""
    low, high = int(values.min()), int(values.max())
    step = max(1, -(-(high - low + 1) // _BINS))  # integers, so that bins are equal
    counts = np.bincount((values - low) // step)
    width = len(str(high + step))
    lines = []
    for bin_index, count in enumerate(map(int, counts)):
        start = low + bin_index * step
        bar = "#" * -(-count * BAR // int(counts.max()))
        lines.append(f"      {start:>{width}} to {start + step - 1:>{width}}  {bar} {count}")
    return lines


def _report(data: CheckedSet, findings: Sequence[DataNote], title: str, tokenizer: Any) -> list[str]:
    """Formats the report on one set: its notes, a histogram of lengths and the first prompt."""
    values, unit = lengths(data)
    summary = f"{values.min()} to {values.max()} {unit}, mean {values.mean():.1f}"
    prompt = data.prompts[0] if data.ids is None else tokenizer.decode(data.ids[0])
    note = "" if data.ids is not None else ", raw: use --tokenizer to see it as the model reads it"
    text = prompt if isinstance(prompt, str) else "\n".join(f"[{m['role']}] {m['content']}" for m in prompt)
    return [
        f"{title}: {len(data.rows)} rows",
        *map(str, findings),
        str(DataNote(True, "lengths", summary)),
        *histogram(values),
        f"      the first prompt{note}",
        *(f"      | {line}" for line in text.split("\n")),
    ]


def _count_note(about: str, condition: str, rows: list[Row], total: int) -> DataNote:
    summary = f"{len(rows)} of {total} rows {condition}"
    return DataNote(not rows, about, f"{summary}, the first is {rows[0].place}" if rows else summary)


def _has_answer(row: Row) -> bool:
    """Whether the row has a ground truth that is not blank, in either schema; UserError if it is of a wrong type."""
    nested = row.columns.get("reward_model")
    answers = [row.columns.get("ground_truth"), nested.get("ground_truth") if isinstance(nested, dict) else None]
    if all(answer is None or (isinstance(answer, str) and not answer.strip()) for answer in answers):
        return False
    ground_truth(row)  # checks its type
    return True


def _prompt_key(prompt: Messages) -> str:
    return prompt if isinstance(prompt, str) else repr([(m["role"], m["content"]) for m in prompt])


def _graders(*sets: CheckedSet | None) -> dict[str, str]:
    """Returns the name of each data source's grader; sources without one are left out."""
    from jppo.rewards.graders import grader_of  # a command may look beyond data/

    sources = {data_source(row) for s in sets if s is not None for row in s.rows}
    graders = {source: grader_of(source) for source in sources}
    return {source: getattr(grader, "__name__", source) for source, grader in graders.items() if grader is not None}


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Checks the training set and the test set, and prints the report."""
    parser = Parser("jppo.data.check", __doc__)
    parser.add_argument("files", nargs="+", help="parquet, jsonl, json, csv, hub:NAME/SPLIT or tfds:NAME/SPLIT@DIR")
    parser.add_argument("--val", default="", help="the test set, in the same forms, separated by commas")
    parser.add_argument(
        "--tokenizer", default="", help="the model's HF directory; without it lengths are in characters"
    )
    parser.add_argument("--max_prompt_length", type=int, help="tokens; counts the prompts that are longer")
    parser.add_argument("--prompt_key", default="prompt", help="column of the prompts")
    parser.add_argument("--truth_key", default="ground_truth", help="column of the ground truth")
    parser.add_argument("--prompt_role", default="", help="as data.prompt_role")
    parser.add_argument("--system_prompt", default="", help="as data.system_prompt")
    parser.add_argument("--custom_cls", default="", help="as data.custom_cls")
    args = parser.parse_args(argv)
    from jppo.rewards.graders import refusal

    if args.max_prompt_length is not None and not args.tokenizer:
        raise UserError(f"--max_prompt_length={args.max_prompt_length} is in tokens; give --tokenizer to count them")
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    names = ("prompt_role", "system_prompt", "custom_cls")
    columns = {"prompt": args.prompt_key, "ground_truth": args.truth_key}
    options = dict[str, Any](tokenizer=tokenizer, columns=columns) | {name: getattr(args, name) for name in names}
    train = read_set(",".join(args.files), "FILES", **options)
    val = read_set(args.val, "--val", **options) if args.val else None
    checks = dict[str, Any](max_prompt_length=args.max_prompt_length, graders=_graders(train, val), refuse=refusal)
    lines = _report(train, data_findings(train, **checks), "training set", tokenizer)
    if val is not None:
        lines += _report(val, [*data_findings(val, **checks), overlap(train, val)], "test set", tokenizer)
    print(escaped("\n".join(lines)))


if __name__ == "__main__":
    main()
