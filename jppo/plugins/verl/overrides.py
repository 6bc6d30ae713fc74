"""Overrides of a trainer of verl's: the arguments that a shell script gives it, and Hydra's rules for them.

The script runs, confined (`sandbox/shell.py`). Hydra's rules are values, deletions, interpolations, and the YAML files
of the checkout (`compose.py`). Where these are not there, verl's defaults are those of the tables of `names.py`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jppo.errors import UserError
from jppo.plugins.sandbox import shell
from jppo.plugins.sandbox.launcher import NoSandbox
from jppo.plugins.verl.compose import Config, flatten

_BY_HAND = (
    'to do it by hand: mkdir stand-in; printf \'#!/bin/sh\\nprintf "%%s\\\\0" "$@" > /tmp/words\\n\' >'
    " stand-in/python3; chmod +x stand-in/python3; PATH=$PWD/stand-in:$PATH bash SCRIPT; python -m jppo.from_verl"
    " /tmp/words"
)


@dataclasses.dataclass(frozen=True)
class Script:
    """The main module of a trainer and its arguments, and the folder in which it starts."""

    main: str
    words: tuple[str, ...]
    folder: str
    root: str  # its checkout
    notes: tuple[str, ...]  # why the script may act otherwise outside the sandbox
    torchrun: tuple[str, ...] = ()  # torchrun's processes and hosts, as verl's keys
    text: str = ""


_MAIN = re.compile(r"(^|[._/])(\w*main\w*|\w*trainer\w*|launch)$")
_QUOTED = re.compile(r"\s-m\s+\S+|main_\w+\.py\s")
_NOISE = re.compile(r"\+|.*: line \d+: `")  # of set -x and of syntax errors
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_OTHER_MAINS = ("main_eval", "main_generation", "main_generation_server", "generate_proxy")
OVERRIDE = re.compile(r"([+~]{0,2}[\w@/]+[.@/][\w.@/-]+|model_engine)=|--config|~\w+\.")


def find_trainer(call: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Returns the trainer's main module that a command starts, and its arguments; None for other commands."""
    for i, word in enumerate(call):
        name = call[i + 1] if word == "-m" and i + 1 < len(call) else word if word.endswith(".py") else ""
        if name in _LAUNCHERS:
            continue
        arguments = tuple(call[i + (2 if word == "-m" else 1) :])
        main = name.removesuffix(".py").removeprefix("./").replace("/", ".").strip(".")
        if (
            name
            and _MAIN.search(main)
            and (any(map(OVERRIDE.match, arguments)) or main.startswith(("verl.trainer", "recipe.")))
        ):
            return main, arguments
        if name:
            return None
    return None


def _torchrun(call: Sequence[str]) -> tuple[str, ...]:
    """Returns the hosts and the processes of a host that torchrun is given, as verl's keys."""
    text = " ".join(call).replace("-", "_")
    options = {"trainer.n_gpus_per_node": "nproc_per_node", "trainer.nnodes": "nnodes"}
    matches = {key: re.search(rf"(?<= )__{name}[ =](\d+)(?= )", text) for key, name in options.items()}
    return tuple(f"{key}={match[1]}" for key, match in matches.items() if match)


def read_script(path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Script:
    """Runs the script with these arguments and returns its only trainer; raises UserError without one."""
    try:
        run = shell.run_script(path, arguments, environment)
    except (NoSandbox, OSError) as e:
        raise UserError(f"{path}: this machine cannot confine a script ({e}); {_BY_HAND}") from e
    starts = [(*start, call[0], _torchrun(call[1:])) for call in run.calls if (start := find_trainer(call[1:]))]
    trainers = [start for start in starts if not start[0].endswith(_OTHER_MAINS)] or starts
    trainers = list(dict.fromkeys(trainers))
    if run.asks:
        raise UserError(f"{path}: it asks for input; write the answers in the script")
    if not trainers:
        if quoted := [call[1] for call in run.calls if any(map(_QUOTED.search, call[2:]))]:
            raise UserError(
                f"{path}: the trainer is in a quoted command of {quoted[0]}, which does not run here; give a script"
                " with that command alone"
            )
        lines = [line.strip() for line in run.printed.splitlines() if line.strip() and not _NOISE.match(line)]
        ending = f", {run.why}" if run.why else f" and ends with exit code {run.status}" if run.status else ""
        raise UserError(f"{path}: under bash it starts no trainer of verl's{ending}{f': {lines[-1]}' if lines else ''}")
    if len(trainers) > 1:
        mains = ", ".join(trainer[0] for trainer in trainers[:4])
        raise UserError(f"{path}: it starts {len(trainers)} trainers ({mains}); leave one of them")
    ((main, words, folder, torchrun),) = trainers
    modules = {call[2] for call in run.calls if call[1] == "import"} - {"torch_npu"}
    notes = [f"{path} asks Python for {name}, which the sandbox does not have" for name in sorted(modules)]
    unknown = "prints or returns, which does not run here; write it in the script"
    notes += [f"{path} uses what {name} {unknown}" for name in _used(run)]
    if run.why:
        notes.append(f"{path} {run.why} after its trainer was started")
    return Script(main, words, folder, run.root, tuple(notes), torchrun, run.text)


def _used(run: shell.ScriptRun) -> list[str]:
    """Returns the Python files and modules, but trainers, whose output a script takes or whose success it tests."""
    text, names = run.text.replace("\\\n", " "), dict[str, None]()
    for call in run.calls:
        if call[1].rpartition("/")[2].startswith("python") and not find_trainer(call[1:]):
            name = rf"(?<![\w.]){re.escape(_file_or_module(call[2:]))}(?![\w.])"
            piped = rf"\bpython[\d.]* [^|;\n]{{0,300}}{name}[^|;\n]{{0,300}}\|(?!\||&? *tee\b)"
            tested = rf"\b(if|elif|while|until)\s[^;\n]{{0,300}}\bpython[\d.]* [^;\n]{{0,300}}{name}"
            if re.search(rf"(\$\(|`)[^)`]{{0,300}}\bpython[\d.]* [^)`]{{0,300}}{name}|{piped}|{tested}", text):
                names[_file_or_module(call[2:])] = None
    return list(names)


def _file_or_module(words: Sequence[str]) -> str:
    """Returns the name of the file or the module that Python runs, '-' for other code."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if word == "-c":
            return "-"
        if word == "-m" or word.endswith(".py"):
            return following if word == "-m" else word.rpartition("/")[2]
    return "-"


@dataclasses.dataclass(frozen=True)
class Override:
    """One setting of verl's, and how it was given: '' by a config of verl's own."""

    value: Any
    text: str
    file: bool = False  # by a YAML file of the checkout


def read_overrides(
    words: Iterable[str], main: str = "", root: str = "", folder: str = ""
) -> tuple[dict[str, Override], dict[str, str]]:
    """Returns the overrides by key, those of the config first, and the reason for each word that is none."""
    options, arguments = _options(list(words))
    overrides: dict[str, Override] = {}
    rejected: dict[str, str] = {}
    pairs = dict(word.lstrip("+").split("=", 1) for word in arguments if "=" in word)
    chosen = {key: value for key, value in pairs.items() if "." not in key.partition("@")[0]}
    config = Config(options, chosen, main, root, folder)
    for key, value, is_own in config.settings():
        overrides.pop(key, None)
        overrides[key] = Override(value, "" if is_own else f"{key}={value}", not is_own)
    for word in arguments:
        key, equals, text = word.partition("=")
        plain_key = key.lstrip("+~")
        if word.startswith("~"):
            for part in [name for name in overrides if name == plain_key or name.startswith(f"{plain_key}.")]:
                del overrides[part]
            overrides[plain_key] = Override(None, word)
        elif not equals or not plain_key or word.startswith("-"):
            rejected[word] = "it is no KEY=VALUE"
        elif plain_key in config.found:
            overrides[plain_key] = Override(text, word)
        elif "@" in plain_key or "/" in plain_key:
            rejected[word] = "it chooses a YAML file of verl's, which is not here; give its settings as overrides"
        else:
            for name, value in flatten(plain_key, read_value(text)).items():
                for part in [k for k in overrides if k == name or ("." in name and k.startswith(f"{name}."))]:
                    del overrides[part]
                overrides[name] = Override(value, f"{key}={text}" if name == plain_key else f"{name}={value}")
    return overrides, rejected


def _options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Splits a command line into Hydra's options and the overrides."""
    names = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
    options: dict[str, Any] = {}
    arguments, i = [], 0
    while i < len(words):
        name, equals, value = words[i].partition("=")
        name = names.get(name, name)
        if name in ("--config-name", "--config-path", "--config-dir"):
            if not equals:
                i += 1
                if i == len(words):
                    raise UserError(f"{name} is not followed by a name or a folder; give {name}=VALUE")
                value = words[i]
            options[name] = value.strip("'\"")
        elif name in ("--multirun", "-m"):
            raise UserError(f"{name} starts several trainings; give the arguments of one")
        else:
            arguments.append(words[i])
        i += 1
    return options, arguments


_REFERENCE = re.compile(r"\$\{(?:(oc\.select|oc\.env):)?([\w.]+) *(?:, *([^{}]*|\{\}))?\}")


_CHAIN = 8  # references in a row, at most


def interpolate(values: dict[str, Any], get: Callable[[str], Any]) -> None:
    """Replaces ${KEY} in values by the other key's, in place; `get` returns it, and may return another reference."""
    before: dict[str, Any] = {}
    for _ in range(_CHAIN):
        if before == values:
            return
        before = dict(values)
        _interpolate_once(values, get)


def _interpolate_once(values: dict[str, Any], get: Callable[[str], Any]) -> None:
    for key, value in values.items():
        for match in _REFERENCE.finditer(value) if isinstance(value, str) else ():
            kind, name, default = match.groups()
            dots = len(name) - len(name.lstrip("."))  # of a name relative to the key
            other = ".".join((*key.split(".")[:-dots], name[dots:])) if dots else name
            replacement = None if kind == "oc.env" or other == key else get(other)
            if kind == "oc.env" or (replacement is None and kind == "oc.select" and other not in values):
                replacement = read_value(default or "null")  # of a variable that the script does not have
            is_known = replacement is not None or (kind != "oc.env" and other in values) or default is not None
            if is_known and isinstance(values[key], str):
                whole = values[key] == match[0]
                values[key] = replacement if whole else values[key].replace(match[0], str(replacement))


_INT, _DIGITS = "(0|[1-9](_?[0-9])*)", "[0-9](_?[0-9])*"
_INTEGER = re.compile(f"[+-]?{_INT}")
_FLOAT = re.compile(rf"[+-]?(({_INT}?\.{_DIGITS}|{_INT}\.|{_INT}(?=[eE]))([eE][+-]?{_DIGITS})?|(?i:inf|nan))")


def read_value(text: str) -> Any:
    """Parses a value by Hydra's grammar: null, numbers, booleans, quoted or bare text, lists and dicts."""
    text = text.strip()
    if text.lower() == "null" or text == "None":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if text.startswith("[") and text.endswith("]"):
        return [read_value(part) for part in _split_at_commas(text[1:-1])]
    if text.startswith("{") and text.endswith("}"):
        pairs = (part.partition(":") for part in _split_at_commas(text[1:-1]))
        return {str(read_value(key)): read_value(value) for key, _, value in pairs}
    return text


def _split_at_commas(text: str) -> list[str]:
    """Splits at commas outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += 0 if quote else (character in "[{") - (character in "]}")
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]
