"""Converts a verl command line to jppo: python -m jppo.from_verl run_qwen2-7b.sh

    python -m jppo.from_verl run_qwen2-7b.sh actor_rollout_ref.rollout.n=8 > run.sh
    python -m jppo.from_verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 data.train_batch_size=256
    python -m jppo.from_verl --config=jppo://gsm8k actor_rollout_ref.model.lora_rank=8

Reads a shell script that starts a trainer of verl's, a file of its arguments, or arguments themselves. The script runs
under bash, confined and with stand-ins for its programs, and gets the arguments behind it. Nothing is trained,
downloaded or written. Overrides behind it take precedence. Prints the command, validated as a run would, then the
result of every override as comments. docs/verl.md has the table of names, --names prints it.

Exit code 0: the command is the script's run. 3: settings that change results or the use of hardware were left out;
stderr lists them. 2: jppo rejects the script or its settings.

With a jppo --config, and --config.SECTION.NAME=VALUE, only the settings that the overrides change are printed; an
unknown key is an error.
"""

import dataclasses
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from jppo import settings
from jppo.errors import UserError, escaped, expanded
from jppo.settings import table
from jppo.verl import names
from jppo.verl.overrides import MAINS, OVERRIDE, TUNING, Script, main_of, read_script, started
from jppo.verl.translate import PATHS, Translation, translate, translate_tuning

BASE, TUNING_BASE = "configs/gsm8k.py", "configs/quickstart_sft.py"
OWN = ("--config=", "--config.")  # arguments of jppo
KINDS = {
    "same": "jppo's settings",
    "needless": "no meaning in jppo",
    "missing": "not supported",
    "unknown": "unknown",
}
LEFT_OUT = 3  # exit code


def read_arguments(argv: list[str]) -> Script:
    """Returns the trainer and its arguments that the command line names."""
    if not argv:
        raise UserError(
            "nothing is given; name a script of verl's or its overrides, as in python -m jppo.from_verl run.sh"
        )
    here = os.getcwd()
    if "=" in argv[0] or OVERRIDE.match(argv[0]):
        return Script("", tuple(argv), here, here, ())
    path = expanded(argv[0])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise UserError(f"{argv[0]}: {why}; give a shell script that starts verl, or overrides KEY=VALUE") from e
    if (listed := _listed(text)) is not None:
        main, words = started(listed) or ("", tuple(listed))
        return Script(main, (*words, *argv[1:]), here, here, ())
    script = read_script(argv[0], argv[1:], os.environ)
    behind = [word for word in argv[1:] if OVERRIDE.match(word)]
    words = (
        script.words if script.words[len(script.words) - len(behind) :] == tuple(behind) else (*script.words, *behind)
    )
    return dataclasses.replace(script, words=tuple(words))


def _listed(text: str) -> list[str] | None:
    """Returns the arguments that a file lists, by NUL as a stand-in writes them or as in a shell; None for a script."""
    if "\0" in text:
        return text.split("\0")[:-1]
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return None
    return words if words and (OVERRIDE.match(words[0]) or words[0] == "-m") else None


def translated_command(script: Script) -> tuple[str, Translation]:
    """Returns jppo's command for a trainer of verl's, checked as a run does, and the account of its arguments."""
    tunes = bool(script.main) and main_of(script.main) in TUNING
    if script.main and not tunes and main_of(script.main) not in MAINS:
        raise UserError(
            f"{script.main}: not supported: another trainer than verl's PPO and fine-tuning; to translate what it"
            " shares with them, give its overrides alone"
        )
    convert = translate_tuning if tunes else translate
    words = (*script.launched, *script.words) if tunes else script.words
    translation = convert(words, main=script.main, root=script.root, folder=script.folder)
    base = TUNING_BASE if tunes else BASE
    try:
        changes = arguments(translation, base, settings.sft_default() if tunes else settings.default())
    except UserError as e:
        raise UserError(f"jppo refuses the settings: {e}; give verl's key with another value behind the file") from e
    return jppo_command("jppo.sft" if tunes else "jppo.train", [f"--config={base}", *changes]), translation


def arguments(translation: Translation, base: str, default: ConfigDict) -> list[str]:
    """Returns a command's arguments: given overrides, and what differs from the defaults or the base; checks them."""
    file = pathlib.Path(__file__).resolve().parents[1] / base
    based = table.by_name(settings.parse([f"--config={file}"], "", default.copy_and_resolve_references())[0])
    usual = table.by_name(default)
    asked = {**usual, **{name: based[name] for name in PATHS if name in based}, **translation.settings}
    kept = [
        name for name in usual if name in translation.given or asked[name] != based[name] or asked[name] != usual[name]
    ]
    kept = [name for name in kept if name not in PATHS or name in translation.given]
    out = [f"--config.{name}={asked[name]}" for name in kept]
    config, _ = settings.parse([f"--config={file}", *out], "", default)
    settings.check(config)
    _check_model(config)
    return out


def _check_model(config: ConfigDict) -> None:
    """Raises a UserError for a model that a run would refuse, if its config.json is on this machine."""
    if (expanded(config.model.path) / "config.json").is_file():
        from jppo.models import hf  # imports JAX
        from jppo.run.inputs import require_publishable

        _, policy = hf.read_config(config.model.path)
        if "rollout" in config:
            require_publishable(settings.typed(config), policy)


def on_top(argv: list[str]) -> tuple[list[str], Translation]:
    """Returns the arguments that overrides add to those of a jppo command, and their account."""
    own = [word for word in argv if word.startswith(OWN)]
    config, _ = settings.parse(own, "", settings.default())
    translation = translate([word for word in argv if word not in own], table.by_name(config))
    if unknown := [line.said for line in translation.lines if line.kind == "unknown"]:
        raise UserError(f"{unknown[0]}: verl 0.9.1 has no such key; python -m jppo.from_verl --names lists them")
    return [f"--config.{name}={value}" for name, value in translation.settings.items()], translation


def jppo_command(module: str, changes: Sequence[str]) -> str:
    """Formats the command, one setting per line."""
    first, *rest = map(shlex.quote, changes)
    return " \\\n    ".join([f"python -m {module} {first}", *rest])


def left_out(translation: Translation, notes: Sequence[str]) -> list[str]:
    """Returns a line for each setting that is left out and changes results or the use of hardware."""
    return [*notes, *(f"{line.said}: {line.why}" for line in translation.lines if line.kind in ("missing", "unknown"))]


def override_lines(translation: Translation) -> Iterator[str]:
    """Yields the result of each override as text."""
    for kind, title in KINDS.items():
        lines = [line for line in translation.lines if line.kind == kind]
        if lines:
            yield f"\n{title} ({len(lines)}):"
        for line in lines:
            yield f"  {line.said}{' -> ' if kind == 'same' else ': '}{line.why}"
    if translation.notes:
        yield "\nto know:"
        yield from (f"  {note}" for note in translation.notes)


def commented(lines: Iterator[str]) -> str:
    """Formats each line as a shell comment."""
    return "\n".join(f"# {part}".rstrip() if part else "" for line in lines for part in line.split("\n"))


def output_of(script: Script) -> tuple[str, list[str]]:
    """Returns the command with the account of its arguments, and the lines of what is left out."""
    command, translation = translated_command(script)
    return f"{command}\n{commented(override_lines(translation))}", left_out(translation, script.notes)


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
        changes, translation = on_top(argv)
        out, lacking = "\n".join([*changes, commented(override_lines(translation))]), left_out(translation, ())
    else:
        out, lacking = output_of(read_arguments(argv))
    for line in lacking:
        print(escaped(f"left out: {line}").replace("\n", "\\n"), file=sys.stderr)
    print(escaped(out))
    if lacking:
        sys.exit(LEFT_OUT)


if __name__ == "__main__":
    main()
