"""The runs of a sweep: those added by `sweep(add)` of a config file, each checked as in training."""

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jppo.errors import UserError
from jppo.settings import configfile, table, texts
from jppo.settings.options import PREFIX
from jppo.settings.setting import no_setting
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

    `argv` is --config with the overrides of every run. Without `out` the folder is named after the file.
    """
    config, switches = configfile.parse(list(argv), "", default())
    if switches["dry_run"]:
        raise UserError("--dry_run starts nothing, and a sweep starts runs; --print shows them")
    file = next(configfile.locate(a) for a in argv if a.startswith("--config=")).split("=", 1)[1].split(":")[0]
    if out is None:
        out = pathlib.Path("runs") / f"sweep-{pathlib.Path(file).stem}"
    known, given = table.by_name(config), {a[len("--config.") :].split("=")[0] for a in argv}
    if FOLDER in given:
        raise UserError(f"--config.{FOLDER} is given, but each run of a sweep has a separate folder; use --out")
    runs = []
    for overrides in _read_sweep(file):
        for name in overrides:
            _check_name(name, known, given)
        runs.append(_resolve(overrides, argv, out, known))
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if _compared(other) == _compared(run):
                raise UserError(f"sweep: {other.name} and {run.name} have the same settings; leave one of them out")
    return runs, out


def _read_sweep(file: str) -> list[dict[str, Any]]:
    """Returns the overrides of each run that the `sweep(add)` of a config file adds."""
    sweep = configfile.functions(file).get("sweep")
    if not callable(sweep):
        raise UserError(f"{file} has no sweep(add); write one next to get_config that calls {ADD} for each run")
    runs: list[dict[str, Any]] = []

    def add(*wrong: Any, **overrides: Any) -> None:
        if wrong:
            raise UserError(f"sweep: add({wrong[0]!r}) gives no names; settings are named, as in {ADD}")
        runs.append({name: _plain(value) for name, value in sorted(overrides.items())})

    configfile.explained(file, sweep, add)
    if not runs:
        raise UserError(f"sweep(add) of {file} adds no run; call {ADD} for each")
    return runs


def _check_name(name: str, known: dict[str, Any], given: set[str]) -> None:
    if name == FOLDER:
        raise UserError(f"sweep: {FOLDER} cannot be swept, because each run has a separate folder; use --out")
    if name not in known and not name.startswith(PREFIX):  # which the extension of each run knows
        raise UserError(f"sweep: {no_setting(name, known, known)}")
    if name in given:
        raise UserError(f"--config.{name} is given, and the sweep sets it too; leave one of them out")


def _resolve(overrides: dict[str, Any], argv: Sequence[str], out: pathlib.Path, known: dict[str, Any]) -> PlannedRun:
    """Returns the run, with its arguments parsed and checked as its own command line does."""
    name = run_name(overrides)
    folder = out / name
    unset = [setting for setting, value in overrides.items() if value is None]
    if lost := [setting for setting in unset if known.get(setting) is not None]:
        raise UserError(f"sweep, run {name}: {lost[0]} cannot become None, it is {known[lost[0]]!r} by get_config")
    changes = [f"--config.{setting}={value}" for setting, value in overrides.items() if setting not in unset]
    arguments = (*argv, *changes, f"--config.{FOLDER}={folder}")
    try:
        config, _ = configfile.parse(list(arguments), "", default())
        configfile.check(config)
    except UserError as e:
        raise UserError(f"sweep, run {name}: {e}") from e
    values = table.by_name(config)
    for setting, value in overrides.items():
        read = values.get(setting)
        if read != value or isinstance(read, str) != isinstance(value, str):
            raise UserError(f"sweep, run {name}: {setting}={value!r} must be of type {type(read).__name__}")
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
    taken: dict[str, str] = {}
    for run in runs:
        for claim in _claims(run.values):
            if claim in taken:
                raise UserError(
                    f"{claim} belongs to the runs {taken[claim]} and {run.name}, which may run together; take --jobs=1,"
                    " or leave rollout.port at 0 and rollout.urls empty"
                )
            taken[claim] = run.name


def _claims(values: dict[str, Any]) -> Iterator[str]:
    port = values["rollout.port"]
    yield from (f"port {p}" for p in range(port, port + max(values["rollout.servers"], 1)) if port)
    yield from (f"the server {url}" for url in texts.entries(values["rollout.urls"]))


def differing(runs: Sequence[PlannedRun]) -> list[str]:
    """Returns the settings of the sweep that differ between its runs."""
    names = dict.fromkeys(name for run in runs for name in run.overrides)
    return [name for name in names if len({repr(run.values.get(name)) for run in runs}) > 1]


def _compared(run: PlannedRun) -> dict[str, Any]:
    return {name: repr(value) for name, value in run.values.items() if name != FOLDER}


def _plain(value: Any) -> Any:
    """Converts numpy's numbers to Python's, and lists to tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if hasattr(value, "item") and callable(value.item) else value
