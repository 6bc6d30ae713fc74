"""The runs of a sweep, by lists of values or by `sweep(add)` of a config file, each checked as in training."""

import dataclasses
import hashlib
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jppo.errors import UserError
from jppo.settings import configfile, table, texts
from jppo.settings.options import PREFIX
from jppo.settings.setting import explain_unknown_setting
from jppo.settings.table import default

FOLDER = "trainer.run_dir"
LONGEST_NAME = 120
ADD = "add(**{'actor.lr': 1e-5, 'trainer.seed': 2})"


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    name: str  # of its folder: from its overrides only, so other runs do not change it
    folder: pathlib.Path
    overrides: dict[str, Any]  # by setting
    arguments: tuple[str, ...]  # of jppo.train
    values: dict[str, Any]  # all settings, resolved


def plan(argv: Sequence[str], out: pathlib.Path | None) -> tuple[list[PlannedRun], pathlib.Path]:
    """Returns all runs of the sweep that --config names, and their folder; raises a UserError at the first invalid one.

    `argv` is --config with the overrides of every run; lists of values, --config.NAME=A,B, replace the `sweep(add)` of
    the file. Without `out` the folder is named after the file.
    """
    lists = configfile.value_lists(argv)
    argv = [word for word in argv if word not in lists]
    config, switches = configfile.parse(list(argv), "", default())
    if switches["dry_run"]:
        raise UserError("--dry_run starts nothing, and a sweep starts runs; --print shows them")
    file = next(configfile.locate(a) for a in argv if a.startswith("--config=")).split("=", 1)[1].split(":")[0]
    if out is None:
        out = pathlib.Path("runs") / f"sweep-{pathlib.Path(file).stem}"
    values, fixed_names = table.by_name(config), {a[len("--config.") :].split("=")[0] for a in argv}
    if FOLDER in fixed_names:
        raise UserError(f"--config.{FOLDER} is given, but each run of a sweep has a separate folder; use --out")
    runs = []
    for overrides in _combine(argv, lists) if lists else _read_sweep(file):
        for name in overrides:
            _check_name(name, values, fixed_names)
        runs.append(_resolve(overrides, argv, out, values))
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if _comparable_values(other) == _comparable_values(run):
                raise UserError(f"sweep: {other.name} and {run.name} have the same settings; leave one of them out")
    return runs, out


def _combine(argv: Sequence[str], lists: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    """Yields the overrides of each combination of listed values."""
    names = sorted(word.removeprefix("--config.").partition("=")[0] for word in lists)
    for words in itertools.product(*lists.values()):
        values = table.by_name(configfile.parse([*argv, *words], "", default())[0])
        yield {name: values[name] for name in names}


def _read_sweep(file: str) -> list[dict[str, Any]]:
    """Returns the overrides of each run that the `sweep(add)` of a config file adds."""
    sweep = configfile.functions(file).get("sweep")
    if not callable(sweep):
        raise UserError(
            f"{file} has no sweep(add); list values, as in --config.actor.lr=1e-5,2e-5, or write one that calls {ADD}"
        )
    runs: list[dict[str, Any]] = []

    def add(*unnamed: Any, **overrides: Any) -> None:
        if unnamed:
            raise UserError(f"sweep: add({unnamed[0]!r}) gives no names; settings are named, as in {ADD}")
        runs.append({name: _to_python(value) for name, value in sorted(overrides.items())})

    configfile.call_user_code(file, sweep, add)
    if not runs:
        raise UserError(f"sweep(add) of {file} adds no run; call {ADD} for each")
    return runs


def _check_name(name: str, values: dict[str, Any], fixed_names: set[str]) -> None:
    """Raises UserError for a setting that a sweep cannot set: unknown, or fixed for all runs."""
    if name == FOLDER:
        raise UserError(f"sweep: {FOLDER} cannot be swept, because each run has a separate folder; use --out")
    if name not in values and not name.startswith(PREFIX):  # which the extension of each run knows
        raise UserError(f"sweep: {explain_unknown_setting(name, values, values)}")
    if name in fixed_names:
        raise UserError(f"--config.{name} is given, and the sweep sets it too; leave one of them out")


def _resolve(overrides: dict[str, Any], argv: Sequence[str], out: pathlib.Path, base: dict[str, Any]) -> PlannedRun:
    """Makes the run of some overrides: parses and checks its arguments as its own command line does."""
    name = run_name(overrides)
    folder = out / name
    unset = [setting for setting, value in overrides.items() if value is None]
    if lost := [setting for setting in unset if base.get(setting) is not None]:
        raise UserError(f"sweep, run {name}: {lost[0]} cannot become None, it is {base[lost[0]]!r} by get_config")
    changes = [f"--config.{setting}={value}" for setting, value in overrides.items() if setting not in unset]
    arguments = (*argv, *changes, f"--config.{FOLDER}={folder}")
    try:
        config, _ = configfile.parse(list(arguments), "", default())
        configfile.check(config)
    except UserError as e:
        raise UserError(f"sweep, run {name}: {e}") from e
    values = table.by_name(config)
    for setting, value in overrides.items():
        parsed = values.get(setting)
        if parsed != value or isinstance(parsed, str) != isinstance(value, str):
            raise UserError(f"sweep, run {name}: {setting}={value!r} must be of type {type(parsed).__name__}")
    return PlannedRun(name, folder, overrides, arguments, values)


def run_name(overrides: dict[str, Any]) -> str:
    """Returns a folder's name: SETTING=VALUE of each override, and a hash where that is shortened or changed."""
    exact = "_".join(f"{name}={value}" for name, value in sorted(overrides.items()))
    clean = "_".join(f"{n}={re.sub(r'[^A-Za-z0-9_.+-]', '-', str(v))}" for n, v in sorted(overrides.items()))
    if not clean:
        return "base"
    if clean == exact and len(clean) <= LONGEST_NAME:
        return clean
    return f"{clean[:LONGEST_NAME]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def check_apart(runs: Sequence[PlannedRun]) -> None:
    """Raises a UserError where concurrent runs would share a server, or its port."""
    owners: dict[str, str] = {}
    for run in runs:
        for claim in _list_addresses(run.values):
            if claim in owners:
                raise UserError(
                    f"{claim} belongs to the runs {owners[claim]} and {run.name}, which may run together; take"
                    " --jobs=1, or leave rollout.port at 0 and rollout.urls empty"
                )
            owners[claim] = run.name


def _list_addresses(values: dict[str, Any]) -> Iterator[str]:
    """Yields the ports and servers that a run with these settings uses, as texts."""
    port = values["rollout.port"]
    yield from (f"port {p}" for p in range(port, port + max(values["rollout.servers"], 1)) if port)
    yield from (f"the server {url}" for url in texts.entries(values["rollout.urls"]))


def find_differing(runs: Sequence[PlannedRun]) -> list[str]:
    """Returns the settings of the sweep that differ between its runs."""
    names = dict.fromkeys(name for run in runs for name in run.overrides)
    return [name for name in names if len({repr(run.values.get(name)) for run in runs}) > 1]


def _comparable_values(run: PlannedRun) -> dict[str, Any]:
    return {name: repr(value) for name, value in run.values.items() if name != FOLDER}


def _to_python(value: Any) -> Any:
    """Converts numpy's numbers to Python's, and lists to tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(_to_python, value))
    return value.item() if hasattr(value, "item") and callable(value.item) else value
