"""The trainer that a shell script starts, and its arguments: the script runs, confined (`sandbox/shell.py`)."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jppo.sandbox import shell
from jppo.sandbox.launcher import NoSandbox
from jppo.settings import UserError

BY_HAND = (
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
    notes: tuple[str, ...]  # what may be otherwise outside of the sandbox
    launched: tuple[str, ...] = ()  # torchrun's processes and hosts, as verl's keys


_MAIN = re.compile(r"(^|[._/])(\w*main\w*|\w*trainer\w*|launch)$")
_NOISE = re.compile(r"\+|.*: line \d+: `")  # of set -x and of syntax errors
_ELSE = ("main_eval", "main_generation", "main_generation_server", "generate_proxy")
OVERRIDE = re.compile(r"([+~]{0,2}[\w@/]+[.@/][\w.@/-]+|model_engine)=|--config|~\w+\.")


def started(call: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Returns the main module of a trainer that a command starts, and its arguments."""
    for i, word in enumerate(call):
        name = call[i + 1] if word == "-m" and i + 1 < len(call) else word if word.endswith(".py") else ""
        rest = tuple(call[i + (2 if word == "-m" else 1) :])
        main = name.removesuffix(".py").removeprefix("./").replace("/", ".").strip(".")
        if (
            name
            and _MAIN.search(main)
            and (any(map(OVERRIDE.match, rest)) or main.startswith(("verl.trainer", "recipe.")))
        ):
            return main, rest
        if name:
            return None
    return None


def _launched(call: Sequence[str]) -> tuple[str, ...]:
    """Returns the processes of a host and the hosts that torchrun is given, as overrides of verl's."""
    text = " ".join(call).replace("-", "_")
    options = {"trainer.n_gpus_per_node": "nproc_per_node", "trainer.nnodes": "nnodes"}
    found = {key: re.search(rf"(?<= )__{name}[ =](\d+)(?= )", text) for key, name in options.items()}
    return tuple(f"{key}={match[1]}" for key, match in found.items() if match)


def read_script(path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Script:
    """Runs the script with these arguments and returns its only trainer; raises UserError without one."""
    try:
        ran = shell.run_script(path, arguments, environment)
    except (NoSandbox, OSError) as e:
        raise UserError(f"{path}: this machine cannot confine a script ({e}); {BY_HAND}") from e
    found = [(*one, call[0], _launched(call[1:])) for call in ran.calls if (one := started(call[1:]))]
    trainers = [one for one in found if not one[0].endswith(_ELSE)] or found
    trainers = list(dict.fromkeys(trainers))
    if ran.asks:
        raise UserError(f"{path}: it asks for input; write the answers in the script")
    if not trainers:
        said = [line.strip() for line in ran.printed.splitlines() if line.strip() and not _NOISE.match(line)]
        ended = f", {ran.why}" if ran.why else f" and ends with exit code {ran.status}" if ran.status else ""
        raise UserError(f"{path}: under bash it starts no trainer of verl's{ended}{f': {said[-1]}' if said else ''}")
    if len(trainers) > 1:
        mains = ", ".join(one[0] for one in trainers[:4])
        raise UserError(f"{path}: it starts {len(trainers)} trainers ({mains}); leave one of them")
    ((main, words, folder, launched),) = trainers
    modules = {call[2] for call in ran.calls if call[1] == "import"} - {"torch_npu"}
    notes = [f"{path} asks Python for {name}, which the sandbox does not have" for name in sorted(modules)]
    if ran.why:
        notes.append(f"{path} {ran.why} after its trainer was started")
    return Script(main, words, folder, ran.root, tuple(notes), launched)
