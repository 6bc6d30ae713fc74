"""The state of a sweep's runs: OUT/sweep.json, which a resumed sweep reads."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jppo.runlog import atomic_file
from jppo.runlog.lock import own
from jppo.settings import UserError

FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class State:
    """The state of one run."""

    status: str = "waiting"  # then running; finished, failed or interrupted
    seconds: float = 0.0  # summed over all starts
    code: int | None = None  # the last exit code
    arguments: tuple[str, ...] = ()  # of the last finished start


@contextlib.contextmanager
def opened(out: pathlib.Path, runs: Mapping[str, tuple[str, ...]], *, resume: bool) -> Iterator[dict[str, State]]:
    """Yields the states of runs by name, given with their arguments; locks the folder."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file; choose a folder")
    if not resume and out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out={out} is not empty; use --resume to continue, or another folder")
    with own(out, "--out"):
        known = _read(out)
        yield {name: _now(known.get(name, State()), out / name, arguments) for name, arguments in runs.items()}


def write(out: pathlib.Path, states: Mapping[str, State]) -> None:
    """Writes the current record."""
    runs = {name: dataclasses.asdict(state) for name, state in states.items()}
    atomic_file.write_text(out / FILE, json.dumps({"runs": runs}, indent=1) + "\n")


def _now(state: State, folder: pathlib.Path, arguments: tuple[str, ...]) -> State:
    """Returns the state at a new start: a finished run stays finished if its folder and settings are the same."""
    if state.status == "finished" and not (folder.is_dir() and state.arguments == arguments):
        return dataclasses.replace(state, status="waiting")
    return dataclasses.replace(state, status="interrupted") if state.status == "running" else state


def _read(out: pathlib.Path) -> dict[str, State]:
    path = out / FILE
    try:
        found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {name: State(**known | {"arguments": tuple(known["arguments"])}) for name, known in found.items()}
    except FileNotFoundError:
        return {}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        said = f"{path} is damaged ({type(e).__name__}: {e})"
        raise UserError(f"{said}; remove it: finished runs will detect that themselves") from e
