"""Converts a verl command line to jppo: python -m jppo.from_verl run_qwen2-7b.sh

    python -m jppo.from_verl run_qwen2-7b.sh actor_rollout_ref.rollout.n=8 > run.sh
    python -m jppo.from_verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 data.train_batch_size=256
    python -m jppo.from_verl --config=jppo://gsm8k actor_rollout_ref.model.lora_rank=8

Reads a shell script that starts verl.trainer.main_ppo, a file of overrides, or overrides themselves. Overrides after a
file take precedence, as its "$@" would. Nothing of a script is run: variables are those that it or the environment
sets. Prints the command, validated as a run would, then the result of every override as comments. Exit code 2 where
jppo rejects the settings. docs/verl.md has the table of names, --names prints it. With a jppo --config, and
--config.SECTION.NAME=VALUE, only the settings that the overrides change are printed; an unknown key is an error.
"""

import os
import pathlib
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from jppo import settings
from jppo.errors import escaped, expanded
from jppo.settings import UserError, table
from jppo.verl import names
from jppo.verl.script import read_script
from jppo.verl.translate import PATHS, Translation, translate

BASE = "configs/gsm8k.py"
OWN = ("--config=", "--config.")  # arguments of jppo
KINDS = {
    "same": "jppo's settings",
    "needless": "no meaning in jppo",
    "missing": "not supported",
    "unknown": "unknown",
}


def overrides_of(argv: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns the command line's verl overrides, and notes on unsupported syntax in a script."""
    if not argv:
        raise UserError(
            "nothing is given; name a script of verl's or its overrides, as in python -m jppo.from_verl run.sh"
        )
    if "=" in argv[0]:
        return argv, ()
    path = expanded(argv[0])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise UserError(f"{argv[0]}: {why}; give a shell script that starts verl, or overrides KEY=VALUE") from e
    script = read_script(text, argv[0], {"PWD": os.getcwd(), **os.environ})
    return [*script.words, *argv[1:]], script.notes


def train_arguments(found: Translation) -> list[str]:
    """Returns jppo.train's arguments: given overrides, and what differs from jppo's defaults or the base."""
    file = pathlib.Path(__file__).resolve().parents[1] / BASE
    base = table.values(settings.parse([f"--config={file}"], "", settings.default())[0])
    usual = table.values(settings.default())
    asked = {**usual, **{name: base[name] for name in PATHS}, **found.settings}
    kept = [name for name in usual if name in found.given or asked[name] != base[name] or asked[name] != usual[name]]
    kept = [name for name in kept if name not in PATHS or name in found.given]
    out = [f"--config.{name}={asked[name]}" for name in kept]
    config, _ = settings.parse([f"--config={file}", *out], "", settings.default())
    settings.check(config)
    return out


def on_top(argv: list[str]) -> tuple[list[str], Translation]:
    """Returns the arguments that overrides add to those of a jppo command, and their account."""
    own = [word for word in argv if word.startswith(OWN)]
    config, _ = settings.parse(own, "", settings.default())
    found = translate([word for word in argv if word not in own], table.values(config))
    if unknown := [line.said for line in found.lines if line.kind == "unknown"]:
        raise UserError(f"{unknown[0]}: verl 0.9.1 has no such key; python -m jppo.from_verl --names lists them")
    return [f"--config.{name}={value}" for name, value in found.settings.items()], found


def jppo_command(changes: list[str]) -> str:
    """Formats the command, one setting per line."""
    return " \\\n    ".join([f"python -m jppo.train --config={BASE}", *map(shlex.quote, changes)])


def override_lines(found: Translation, notes: tuple[str, ...]) -> Iterator[str]:
    """Yields the result of each override as text."""
    for kind, title in KINDS.items():
        lines = [line for line in found.lines if line.kind == kind]
        if lines:
            yield f"\n{title} ({len(lines)}):"
        for line in lines:
            yield f"  {line.said}{' -> ' if kind == 'same' else ': '}{line.why}"
    if all_notes := (*notes, *found.notes):
        yield "\nto know:"
        yield from (f"  {note}" for note in all_notes)


def commented(lines: Iterator[str]) -> str:
    """Formats each line as a shell comment."""
    return "\n".join(f"# {part}".rstrip() if part else "" for line in lines for part in line.split("\n"))


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> Any:
    """Runs the command line."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return
    if argv == ["--names"]:
        print(names.page(), end="")
        return
    if any(word.startswith(OWN) for word in argv):
        changes, found = on_top(argv)
        print(escaped("\n".join([*changes, commented(override_lines(found, ()))])))
        return
    words, notes = overrides_of(argv)
    found = translate(words)
    try:
        print(escaped(jppo_command(train_arguments(found))))
    except UserError as e:
        print(escaped(commented(override_lines(found, notes))))
        raise UserError(f"jppo refuses the settings: {e}; give verl's key with another value behind the file") from e
    print(escaped(commented(override_lines(found, notes))))


if __name__ == "__main__":
    main()
