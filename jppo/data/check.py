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
class Looked:
    """One set of data, read and checked row by row."""

    sources: list[Source]
    rows: list[Row]
    prompts: list[Messages]
    ids: list[list[int]] | None  # None without a tokenizer


def look(
    files: str,
    setting: str,
    *,
    tokenizer: Any,
    system_prompt: str,
    custom_cls: str,
    columns: Mapping[str, str] = types.MappingProxyType({}),
    template_arguments: Mapping[str, Any] = types.MappingProxyType({}),
) -> Looked:
    """Reads a set, with the errors that training would raise."""
    sources = read_sources(files, setting, custom_cls=custom_cls, tokenizer=tokenizer, columns=columns)
    rows = [row for source in sources for row in source.rows]
    prompts = [with_system_prompt(prompt_of(row), system_prompt, row) for row in rows]
    for source in sources:
        check_one_schema(source.rows)
    ids = None if tokenizer is None else tokenise(prompts, rows, tokenizer, template_arguments=template_arguments)
    return Looked(sources, rows, prompts, ids)


def data_findings(
    seen: Looked,
    *,
    max_prompt_length: int | None,
    graders: dict[str, str],
    refuse: Callable[[str, str], str],
    needed: Collection[str] = NEEDED,
) -> list[DataNote]:
    """Returns the findings about one set; `graders` maps known data sources to graders, `needed` as in training.

    `refuse` returns why a row of a source with a ground truth cannot be graded, or ''.
    """
    out = []
    for source in seen.sources:
        columns = collections.Counter(column for row in source.rows for column in row.columns)
        partly = [column for column, count in columns.items() if count < len(source.rows)]
        summary = f"{source.name}: {len(source.rows)}; columns {', '.join(map(str, columns))}"
        out.append(
            DataNote(not partly, "rows", f"{summary}; not every row has {', '.join(partly)}" if partly else summary)
        )
    for name, count in collections.Counter(map(data_source, seen.rows)).most_common():
        grader = f"graded by {graders[name]}" if name in graders else "no grader: set reward.grader or reward.function"
        out.append(DataNote(name in graders, "source", f"{name}: {count} rows, {grader}"))
    empty = [row for row in seen.rows if not _has_answer(row)]
    if "ground_truth" in needed:
        out.append(_counted("answers", "without an answer", empty, len(seen.rows)))
    reasons = {id(row): refuse(data_source(row), ground_truth(row)) for row in seen.rows if _has_answer(row)}
    if refused := [row for row in seen.rows if reasons.get(id(row))]:
        why = reasons[id(refused[0])]
        out.append(_counted("asserts", f"with asserts that are left out ({why})", refused, len(seen.rows)))
    first: dict[str, Row] = {}
    again = [
        row
        for row, key in zip(seen.rows, map(_key, seen.prompts), strict=True)
        if first.setdefault(key, row) is not row
    ]
    out.append(_counted("duplicates", "with the prompt of an earlier row", again, len(seen.rows)))
    if seen.ids is not None and max_prompt_length is not None:
        long = [row for row, ids in zip(seen.rows, seen.ids, strict=True) if len(ids) > max_prompt_length]
        out.append(
            _counted("over-long", f"with a prompt of more than {max_prompt_length} tokens", long, len(seen.rows))
        )
    return out


def overlap(train: Looked, val: Looked) -> DataNote:
    """Counts rows of the second set whose prompt is in the first."""
    known = set(map(_key, train.prompts))
    both = [row for row, prompt in zip(val.rows, val.prompts, strict=True) if _key(prompt) in known]
    return _counted("overlap", "of the test set with a prompt of the training set", both, len(val.rows))


def lengths(seen: Looked) -> tuple[np.ndarray, str]:
    """Returns the length of each prompt [n] i64, and its unit."""
    if seen.ids is not None:
        return np.array([len(ids) for ids in seen.ids]), "tokens"
    texts = (p if isinstance(p, str) else "".join(message["content"] for message in p) for p in seen.prompts)
    return np.array([len(text) for text in texts]), "characters"


def histogram(values: np.ndarray) -> list[str]:
    """Returns a histogram as text lines."""
    low, high = int(values.min()), int(values.max())
    step = max(1, -(-(high - low + 1) // _BINS))  # integers, so that bins are equal
    counts = np.bincount((values - low) // step)
    wide = len(str(high + step))
    lines = []
    for i, n in enumerate(map(int, counts)):
        first = low + i * step
        bar = "#" * -(-n * BAR // int(counts.max()))
        lines.append(f"      {first:>{wide}} to {first + step - 1:>{wide}}  {bar} {n}")
    return lines


def _report(seen: Looked, findings: Sequence[DataNote], title: str, tokenizer: Any) -> list[str]:
    """Returns the printed lines of one set."""
    values, unit = lengths(seen)
    spread = f"{values.min()} to {values.max()} {unit}, mean {values.mean():.1f}"
    shown = seen.prompts[0] if seen.ids is None else tokenizer.decode(seen.ids[0])
    note = "" if seen.ids is not None else ", raw: use --tokenizer to see it as the model reads it"
    text = shown if isinstance(shown, str) else "\n".join(f"[{m['role']}] {m['content']}" for m in shown)
    return [
        f"{title}: {len(seen.rows)} rows",
        *map(str, findings),
        str(DataNote(True, "lengths", spread)),
        *histogram(values),
        f"      the first prompt{note}",
        *(f"      | {line}" for line in text.split("\n")),
    ]


def _counted(about: str, condition: str, rows: list[Row], of: int) -> DataNote:
    summary = f"{len(rows)} of {of} rows {condition}"
    return DataNote(not rows, about, f"{summary}, the first is {rows[0].place}" if rows else summary)


def _has_answer(row: Row) -> bool:
    nested = row.columns.get("reward_model")
    answers = [row.columns.get("ground_truth"), nested.get("ground_truth") if isinstance(nested, dict) else None]
    if all(answer is None or (isinstance(answer, str) and not answer.strip()) for answer in answers):
        return False
    ground_truth(row)  # checks its type
    return True


def _key(prompt: Messages) -> str:
    return prompt if isinstance(prompt, str) else repr([(m["role"], m["content"]) for m in prompt])


def _graders(*sets: Looked | None) -> dict[str, str]:
    from jppo.rewards.graders import grader_of  # a command may look beyond data/

    sources = {data_source(row) for seen in sets if seen is not None for row in seen.rows}
    graders = {source: grader_of(source) for source in sources}
    return {source: getattr(grader, "__name__", source) for source, grader in graders.items() if grader is not None}


@exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = Parser("jppo.data.check", __doc__)
    parser.add_argument("files", nargs="+", help="parquet, jsonl, json, hub:NAME/SPLIT or tfds:NAME/SPLIT@DIR")
    parser.add_argument("--val", default="", help="the test set, in the same forms, separated by commas")
    parser.add_argument(
        "--tokenizer", default="", help="the model's HF directory; without it lengths are in characters"
    )
    parser.add_argument("--max-prompt-length", type=int, help="tokens; counts the prompts that are longer")
    parser.add_argument("--system-prompt", default="", help="as data.system_prompt")
    parser.add_argument("--custom-cls", default="", help="as data.custom_cls")
    args = parser.parse_args(argv)
    from jppo.rewards.graders import refusal

    if args.max_prompt_length is not None and not args.tokenizer:
        raise UserError(f"--max-prompt-length={args.max_prompt_length} is in tokens; give --tokenizer to count them")
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    read = dict(tokenizer=tokenizer, system_prompt=args.system_prompt, custom_cls=args.custom_cls)
    train = look(",".join(args.files), "FILES", **read)
    val = look(args.val, "--val", **read) if args.val else None
    options = dict[str, Any](max_prompt_length=args.max_prompt_length, graders=_graders(train, val), refuse=refusal)
    lines = _report(train, data_findings(train, **options), "training set", tokenizer)
    if val is not None:
        lines += _report(val, [*data_findings(val, **options), overlap(train, val)], "test set", tokenizer)
    print(escaped("\n".join(lines)))


if __name__ == "__main__":
    main()
