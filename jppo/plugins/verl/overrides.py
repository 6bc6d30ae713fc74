"""Overrides of a trainer of verl's: the arguments that a shell script gives it, and Hydra's rules for them.

The script runs, confined (`sandbox/shell.py`). Hydra's rules are values, deletions, interpolations, and the YAML files
that a trainer reads. verl's own YAML files are not read: their defaults are in the tables of `names.py`, and in OWN.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from jppo.errors import UserError
from jppo.plugins.sandbox import shell
from jppo.plugins.sandbox.launcher import NoSandbox

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


_MAIN = re.compile(r"(^|[._/])(\w*main\w*|\w*trainer\w*|launch)$")
_NOISE = re.compile(r"\+|.*: line \d+: `")  # of set -x and of syntax errors
_OTHER_MAINS = ("main_eval", "main_generation", "main_generation_server", "generate_proxy")
OVERRIDE = re.compile(r"([+~]{0,2}[\w@/]+[.@/][\w.@/-]+|model_engine)=|--config|~\w+\.")


def find_trainer(call: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Returns the trainer's main module that a command starts, and its arguments; None for other commands."""
    for i, word in enumerate(call):
        name = call[i + 1] if word == "-m" and i + 1 < len(call) else word if word.endswith(".py") else ""
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
        lines = [line.strip() for line in run.printed.splitlines() if line.strip() and not _NOISE.match(line)]
        ending = f", {run.why}" if run.why else f" and ends with exit code {run.status}" if run.status else ""
        raise UserError(f"{path}: under bash it starts no trainer of verl's{ending}{f': {lines[-1]}' if lines else ''}")
    if len(trainers) > 1:
        mains = ", ".join(trainer[0] for trainer in trainers[:4])
        raise UserError(f"{path}: it starts {len(trainers)} trainers ({mains}); leave one of them")
    ((main, words, folder, torchrun),) = trainers
    modules = {call[2] for call in run.calls if call[1] == "import"} - {"torch_npu"}
    notes = [f"{path} asks Python for {name}, which the sandbox does not have" for name in sorted(modules)]
    if run.why:
        notes.append(f"{path} {run.why} after its trainer was started")
    return Script(main, words, folder, run.root, tuple(notes), torchrun)


_ASYNC = {
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "algorithm.rollout_correction.bypass_mode": True,
}
_DAPO = {"reward.reward_manager.name": "dapo", "trainer.project_name": "verl-dapo"}
_FULLY = {
    **_ASYNC,
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "async_training.partial_rollout": True,
}
# verl's own configs by name: what they change of ppo_trainer's.
_PPO: dict[str, dict[str, Any]] = {
    "ppo_trainer": {},
    "dapo_trainer": _DAPO,
    "one_step_off_ppo_trainer": _ASYNC | {"actor_rollout_ref.rollout.free_cache_engine": False},
    "fully_async_ppo_trainer": _FULLY,
    "transfer_queue_ppo_trainer": {},
    "dapo_transfer_queue_trainer": _DAPO,
}
OWN = _PPO | {
    re.sub("(ppo|dapo)_", r"\1_megatron_", name, count=1): values | {"model_engine": "megatron"}
    for name, values in _PPO.items()
}
OWN |= {name: {} for name in ("sft_trainer", "sft_trainer_engine", "partial_rollout_trainer")}
# The main modules that are translated, by their last two words, and the config that each reads by default.
MAINS = {
    "trainer.main_ppo": "ppo_trainer",
    "trainer.main_ppo_sync": "ppo_trainer",
    "transfer_queue.main_ppo": "transfer_queue_ppo_trainer",
    "dapo.main_dapo": "dapo_trainer",
    "dapo_transfer_queue.main_dapo": "dapo_transfer_queue_trainer",
    "one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
TUNING = {
    "trainer.sft_trainer": "sft_trainer_engine",
    "trainer.sft_trainer_ray": "sft_trainer_engine",
    "trainer.fsdp_sft_trainer": "sft_trainer",
}
_GROUPS = (
    "actor algorithm critic data distillation engine model model_engine npu_profile optim profiler ref reward"
    " reward_model rollout transfer_queue"
)  # of verl's YAML


@dataclasses.dataclass(frozen=True)
class Override:
    """One setting of verl's, and how it was given: '' by a config of verl's own."""

    value: Any
    text: str


_Setting = tuple[str, Any, bool]  # key, value, whether a config of verl's own has it


def main_of(module: str) -> str:
    """Returns the last two words of a main module, by which it is known."""
    return ".".join(module.split(".")[-2:])


def read_overrides(
    words: Iterable[str], main: str = "", root: str = "", folder: str = ""
) -> tuple[dict[str, Override], dict[str, str]]:
    """Returns the overrides by key, those of the config first, and the reason for each word that is none."""
    options, arguments = _options(list(words))
    overrides: dict[str, Override] = {}
    rejected: dict[str, str] = {}
    for key, value, is_own in _config_settings(options, main, pathlib.Path(root or "."), pathlib.Path(folder or ".")):
        overrides.pop(key, None)
        overrides[key] = Override(value, "" if is_own else f"{key}={value}")
    for word in arguments:
        key, equals, text = word.partition("=")
        plain_key = key.lstrip("+~")
        if word.startswith("~"):
            for part in [name for name in overrides if name == plain_key or name.startswith(f"{plain_key}.")]:
                del overrides[part]
            overrides[plain_key] = Override(None, word)
        elif not equals or not plain_key or word.startswith("-"):
            rejected[word] = "it is no KEY=VALUE"
        elif "@" in plain_key or "/" in plain_key:
            rejected[word] = "it chooses one of verl's YAML files, which are not read; give its settings as overrides"
        else:
            for name, value in flatten(plain_key, read_value(text)).items():
                for part in [k for k in overrides if k == name or k.startswith(f"{name}.")]:
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


def _config_settings(
    options: Mapping[str, str], main: str, root: pathlib.Path, folder: pathlib.Path
) -> Iterator[_Setting]:
    """Yields the settings of the config that the options or the main module name."""
    name = options.get("--config-name", "").removesuffix(".yaml").removesuffix(".yml")
    name = name or (MAINS | TUNING).get(main_of(main), "ppo_trainer")
    if name in OWN:
        yield from ((key, value, True) for key, value in OWN[name].items())
        return
    parts = main.split(".")[:-1]
    homes = [pathlib.Path(root, *parts), pathlib.Path(root, *parts[1:])] if parts else [folder]
    path = options.get("--config-path", "config")
    folders = [folder / options["--config-dir"]] if "--config-dir" in options else []
    folders += [pathlib.Path(path)] if path.startswith("/") else [home / path for home in (*homes, folder)]
    # verl's recipes are a repository of their own, which is recipe/ in one of verl
    folders += [pathlib.Path(str(f).replace("/recipe/", "/")) for f in folders if "/recipe/" in str(f)]
    yield from _yaml(name, folders, folder, ())


def _yaml(name: str, folders: list[pathlib.Path], folder: pathlib.Path, parents: tuple[str, ...]) -> Iterator[_Setting]:
    """Yields the settings of a YAML file of Hydra and of the files in its `defaults`."""
    file = next((path / f"{name}.yaml" for path in folders if (path / f"{name}.yaml").is_file()), None)
    if file is None:
        raise UserError(
            f"{name}.yaml, which the trainer reads, is not in {folders[0]}; put it there, or give its settings"
        )
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.safe_load(text) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UserError(f"{file}: not YAML that can be read: {str(e).partition(chr(10))[0]}") from e
    if not isinstance(tree, dict) or name in parents:
        raise UserError(f"{file}: not a config of Hydra's: it must be a mapping that does not include itself")
    hydra = tree.pop("hydra", None)
    for group_path in (hydra.get("searchpath") or []) if isinstance(hydra, dict) else []:
        if str(group_path).startswith("file://"):
            folders = [*folders, folder / str(group_path).removeprefix("file://")]
    defaults = tree.pop("defaults", None) or []
    if "_self_" not in defaults:
        defaults = [*defaults, "_self_"]
    for entry in defaults:
        if entry == "_self_":
            for key, value in tree.items():
                yield from ((leaf, one, False) for leaf, one in flatten(str(key), value).items())
            continue
        group, choice = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        words = str(group).split()
        group_path, _, package = (words[-1] if words else "").partition("@")
        group_path = group_path.strip("/")
        if choice is None or "override" in words or words[:1] == ["optional"]:
            continue
        if str(choice) in OWN:
            yield from ((key, value, True) for key, value in OWN[str(choice)].items())
        elif group_path.split("/")[0] not in _GROUPS.split() or any(
            (one / group_path / f"{choice}.yaml").is_file() for one in folders[:1]
        ):
            prefix = package if package else group_path.replace("/", ".")
            included = f"{group_path}/{choice}" if group_path else str(choice)
            for key, value, is_default in _yaml(included, folders, folder, (*parents, name)):
                yield (f"{prefix}.{key}" if prefix and prefix != "_global_" else key), value, is_default


def interpolate(values: dict[str, Any], get: Any) -> None:
    """Replaces ${KEY} in values by the other key's, in place; `get` returns it."""
    for key, value in values.items():
        for mark, kind, other_key in (
            re.findall(r"(\$\{(?:(oc\.select|oc\.env):)?([\w.]+)[^}]*\})", value) if isinstance(value, str) else ()
        ):
            replacement = None if kind == "oc.env" or other_key == key else get(other_key)
            if replacement is not None and isinstance(values[key], str):
                values[key] = replacement if values[key] == mark else values[key].replace(mark, str(replacement))


_INT, _DIGITS = "(0|[1-9](_?[0-9])*)", "[0-9](_?[0-9])*"
_INTEGER = re.compile(f"[+-]?{_INT}")
_FLOAT = re.compile(rf"[+-]?({_INT}?\.{_DIGITS}|{_INT}\.|{_INT}(?=[eE]))([eE][+-]?{_DIGITS})?")


def read_value(text: str) -> Any:
    """Parses a value by Hydra's grammar: null, numbers, booleans, quoted or bare text, lists and dicts."""
    text = text.strip()
    if text in ("null", "None"):
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


def flatten(key: str, value: Any) -> dict[str, Any]:
    """Flattens a dict to dotted keys."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {k: v for name, inner in value.items() for k, v in flatten(f"{key}.{name}", inner).items()}


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
