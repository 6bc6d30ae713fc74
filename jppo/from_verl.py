"""Converts a verl command line to jppo: python -m jppo.from_verl run_qwen2-7b.sh

    python -m jppo.from_verl run_qwen2-7b.sh actor_rollout_ref.rollout.n=8 > run.sh
    python -m jppo.from_verl run_grpo.sh --verl=0.2
    python -m jppo.from_verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 data.train_batch_size=256
    python -m jppo.from_verl --config=jppo://gsm8k actor_rollout_ref.model.lora_rank=8

Reads a shell script that starts a trainer of verl's, a file of its arguments, or arguments themselves. The script runs
under bash, confined and with stand-ins for its programs, and gets the arguments behind it. Nothing is trained,
downloaded or written. The YAML of its checkout gives the defaults, and the sources there tell what names mean in forks
and older versions; --verl=VERSION tells it for a script alone. Overrides behind the script take precedence. Prints the
command, validated as a run would, then the result of every override as comments. docs/verl.md has the table of names,
--names prints it.

Exit code 0: the command is the script's run. 3: settings that change results or the use of hardware were left out;
stderr lists them. 2: jppo rejects the script or its settings.

With a jppo --config, and --config.SECTION.NAME=VALUE, only the settings that the overrides change are printed; an
unknown key is an error.
"""

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from jppo import settings
from jppo.errors import UserError, escaped, expanded
from jppo.plugins.verl import names, older
from jppo.plugins.verl.compose import MAINS, TUNING, main_of, read_file
from jppo.plugins.verl.overrides import OVERRIDE, Script, find_trainer, read_script
from jppo.plugins.verl.translate import PATHS, Translation, translate, translate_tuning
from jppo.settings import table

BASE, TUNING_BASE = "jppo://gsm8k", "jppo://quickstart_sft"
OWN = ("--config=", "--config.")  # arguments of jppo
KINDS = {
    "same": "jppo's settings",
    "needless": "no meaning in jppo",
    "missing": "not supported",
    "unknown": "unknown",
}
LEFT_OUT = 3  # exit code


def read_arguments(argv: list[str]) -> Script:
    """Reads the command line: a script, a list of arguments, or overrides; returns the trainer with its arguments."""
    if not argv:
        raise UserError(
            "nothing is given; name a script of verl's or its overrides, as in python -m jppo.from_verl run.sh"
        )
    here = os.getcwd()
    if "=" in argv[0] or OVERRIDE.match(argv[0]):
        return Script("", tuple(argv), here, here, ())
    path = expanded(argv[0])
    try:
        text = read_file(path)
    except UserError as e:
        raise UserError(f"{e}; give a shell script that starts verl, or overrides KEY=VALUE") from e
    if (arguments := _read_list(text)) is not None:
        main, words = find_trainer(arguments) or ("", tuple(arguments))
        return Script(main, (*words, *argv[1:]), here, here, ())
    script = read_script(argv[0], argv[1:], os.environ)
    extra = [word for word in argv[1:] if OVERRIDE.match(word)]
    words = script.words if script.words[len(script.words) - len(extra) :] == tuple(extra) else (*script.words, *extra)
    return dataclasses.replace(script, words=tuple(words))


def _read_list(text: str) -> list[str] | None:
    """Returns the arguments that a file lists, by NUL as a stand-in writes them or as in a shell; None for a script."""
    if "\0" in text:
        return text.split("\0")[:-1]
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return None
    return words if words and (OVERRIDE.match(words[0]) or words[0] == "-m") else None


def translated_command(script: Script, verl: str = "") -> tuple[str, Translation]:
    """Returns jppo's command for a trainer of verl's, checked as a run does, and the account of its arguments."""
    is_sft = bool(script.main) and main_of(script.main) in TUNING
    if script.main and not is_sft and main_of(script.main) not in MAINS:
        raise UserError(
            f"{script.main}: not supported: another trainer than verl's PPO and fine-tuning; to translate what it"
            " shares with them, give its overrides alone"
        )
    convert = translate_tuning if is_sft else translate
    words = (*script.torchrun, *script.words) if is_sft else script.words
    version = older.find_version(verl, script.main, words, script.root, script.folder)
    base = TUNING_BASE if is_sft else BASE
    try:
        translation = convert(words, main=script.main, root=script.root, folder=script.folder, version=version)
    except UserError as e:
        raise UserError(f"{e}{_empty_variables(script)}") from e
    try:
        changes = command_arguments(translation, base, settings.sft_default() if is_sft else settings.default())
    except UserError as e:
        advice = "give verl's key with another value behind the file"
        if "ppo_mini_batch_size" in str(e):
            advice += ", in prompts, which jppo counts times rollout.n"
        raise UserError(f"jppo refuses the settings: {e}; {advice}{_empty_variables(script)}") from e
    return jppo_command("jppo.sft" if is_sft else "jppo.train", [f"--config={base}", *changes]), translation


def _empty_variables(script: Script, words: Sequence[str] | None = None) -> str:
    """Returns the variables that leave a value of the trainer, or of `words`, empty, as the end of an error."""
    empty = [word[:-1] for word in (script.words if words is None else words) if word.endswith("=")]
    variable = r"""=["']*\$\{?(\w+)""" + ("" if words is None else r"(?![\w:-])")  # not ${NAME:-}
    found = [re.search(re.escape(key) + variable, script.text) for key in empty]
    names = dict.fromkeys(match[1] for match in found if match)
    return f"; empty in the script: {', '.join(names)}; give them before the command, as in NAME=VALUE" if names else ""


def command_arguments(translation: Translation, base: str, default: ConfigDict) -> list[str]:
    """Returns the arguments of jppo's command, checked: overrides, and settings that differ from defaults or base."""
    base_of = table.by_name(settings.parse([f"--config={base}"], "", default.copy_and_resolve_references())[0])
    default_of = table.by_name(default)
    paths = {name: base_of[name] for name in PATHS if name in base_of}
    values, overridden = {**default_of, **paths, **translation.settings}, translation.overridden
    changed = {name for name in default_of if not values[name] == base_of[name] == default_of[name]}
    names = [name for name in default_of if name in overridden or (name in changed and name not in PATHS)]
    changes = [f"--config.{name}={values[name]}" for name in names]
    config, _ = settings.parse([f"--config={base}", *changes], "", default)
    settings.check(config)
    _check_model(config)
    return changes


def _check_model(config: ConfigDict) -> None:
    """Raises a UserError for a model that a run would refuse, if its config.json is on this machine."""
    if (expanded(config.model.path) / "config.json").is_file():
        from jppo.models import hf  # imports JAX
        from jppo.run.inputs import require_publishable

        _, policy = hf.read_config(config.model.path)
        if "rollout" in config:
            require_publishable(settings.typed(config), policy)


def on_top(argv: list[str]) -> tuple[list[str], Translation]:
    """Translates overrides of verl behind a jppo command; returns the arguments that they add, and their account."""
    own_arguments = [word for word in argv if word.startswith(OWN)]
    config, _ = settings.parse(own_arguments, "", settings.default())
    translation = translate([word for word in argv if word not in own_arguments], table.by_name(config))
    if grouped := [line.text for line in translation.lines if line.text.lstrip("+").partition("=")[0] in older.GROUPS]:
        raise UserError(f"{grouped[0]}: with a jppo --config, give actor_rollout_ref.rollout.n")
    if unknown := [line.text for line in translation.lines if line.kind == "unknown"]:
        raise UserError(f"{unknown[0]}: verl 0.9.1 has no such key; python -m jppo.from_verl --names lists them")
    return [f"--config.{name}={value}" for name, value in translation.settings.items()], translation


def jppo_command(module: str, changes: Sequence[str]) -> str:
    """Formats the command, one setting per line."""
    first_setting, *other_settings = map(shlex.quote, changes)
    return " \\\n    ".join([f"python -m {module} {first_setting}", *other_settings])


def left_out(translation: Translation, notes: Sequence[str]) -> list[str]:
    """Returns a line for each setting that is left out and changes results or the use of hardware."""
    return [*notes, *(f"{line.text}: {line.why}" for line in translation.lines if line.kind in ("missing", "unknown"))]


def account_of(translation: Translation) -> str:
    """Formats the result of each override as comments of a shell."""
    lines = [part for line in _override_lines(translation) for part in line.split("\n")]
    return "\n".join(f"# {line}".rstrip() if line else "" for line in lines)


def _override_lines(translation: Translation) -> Iterator[str]:
    for kind, title in KINDS.items():
        lines = [line for line in translation.lines if line.kind == kind]
        if lines:
            yield f"\n{title} ({len(lines)}):"
        for line in lines:
            yield f"  {line.text}{' -> ' if kind == 'same' else ': '}{line.why}"
    if translation.notes:
        yield "\nto know:"
        yield from (f"  {note}" for note in translation.notes)


@dataclasses.dataclass(frozen=True)
class Output:
    """What the command prints; `missing` and `changes` on stderr."""

    text: str  # jppo's command, and the account of the arguments
    missing: Sequence[str]  # a line for each argument that is left out and matters
    changes: Sequence[str] = ()  # a line for each name that means something else in verl 0.9.1


def translate_script(script: Script, verl: str = "") -> Output:
    """Translates the arguments of a script's trainer, for a version of verl or for the one found."""
    command, translation = translated_command(script, verl)
    empty = _empty_variables(script, [line.text for line in translation.lines if line.kind == "same"])
    notes = (*script.notes, *([empty.removeprefix("; ")] if empty else []))
    return Output(f"{command}\n{account_of(translation)}", left_out(translation, notes), translation.changes)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> Any:
    """Translates a script, or overrides behind jppo's own arguments, and prints jppo's command."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return
    if argv == ["--names"]:
        print(names.page(), end="")
        return
    if any(word.startswith(OWN) for word in argv):
        own, translation = on_top(argv)
        output = Output("\n".join([*own, account_of(translation)]), left_out(translation, ()))
    else:
        given = [word.removeprefix("--verl=") for word in argv if word.startswith("--verl=")]
        argv = [word for word in argv if not word.startswith("--verl=")]
        output = translate_script(read_arguments(argv), "".join(given[-1:]))
    for change in output.changes:
        print(escaped(f"note: {change}"), file=sys.stderr)
    for line in output.missing:
        print(escaped(f"left out: {line}").replace("\n", "\\n"), file=sys.stderr)
    print(escaped(output.text))
    if output.missing:
        sys.exit(LEFT_OUT)


if __name__ == "__main__":
    main()
