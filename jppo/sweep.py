"""Trains several times with different settings: python -m jppo.sweep --config=configs/quickstart.py --jobs=2

--config.actor.lr=1e-4,2e-4 trains with each value, several lists with each combination. Without a list the config file
defines `sweep(add)` next to get_config. It calls add once per run with the settings that differ:
add(**{'actor.lr': 1e-5, 'trainer.seed': 2}). Each run is a `python -m jppo.train` with its own folder under --out,
named after these settings. A failed run does not affect the others; --resume skips finished runs and resumes the rest.
sweep.md and sweep.csv are updated after each run, the best first; report.html at the end covers all runs.
--config.SECTION.NAME=VALUE changes a setting in every run.

Exit code 0 if all runs have finished, 1 if one has failed.
"""

import contextlib
import csv
import dataclasses
import io
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jppo import child_process, settings
from jppo.errors import INTERRUPTED, UserError, escaped, expanded
from jppo.plugins.report import write_report
from jppo.rollout.servers.launch import die_with_parent
from jppo.runlog import durable_files
from jppo.runlog.durable_files import own
from jppo.runlog.logger import FILE as METRICS
from jppo.runlog.logger import read_metrics
from jppo.settings.plan import PlannedRun, check_apart, find_differing, plan
from jppo.settings.table import TABLE

FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class State:
    """The state of one run."""

    status: str = "waiting"  # then running; finished, failed or interrupted
    seconds: float = 0.0  # summed over all starts
    code: int | None = None  # the last exit code
    arguments: tuple[str, ...] = ()  # of the last finished start


@contextlib.contextmanager
def open_states(out: pathlib.Path, runs: Mapping[str, tuple[str, ...]], *, resume: bool) -> Iterator[dict[str, State]]:
    """Locks the folder and yields the state of each run, by name; `runs` are their arguments."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file; choose a folder")
    if not resume and out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out={out} is not empty; use --resume to continue, or another folder")
    with own(out, "--out"):
        saved = _read_states(out)
        yield {name: _restarted(saved.get(name, State()), out / name, arguments) for name, arguments in runs.items()}


def _restarted(state: State, folder: pathlib.Path, arguments: tuple[str, ...]) -> State:
    """Returns the state at a new start: a finished run stays finished if its folder and settings are the same."""
    if state.status == "finished" and not (folder.is_dir() and state.arguments == arguments):
        return dataclasses.replace(state, status="waiting")
    return dataclasses.replace(state, status="interrupted") if state.status == "running" else state


def _read_states(out: pathlib.Path) -> dict[str, State]:
    """Reads the states of an earlier start by run; {} without one, UserError for a damaged record."""
    path = out / FILE
    try:
        runs: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {name: State(**saved | {"arguments": tuple(saved["arguments"])}) for name, saved in runs.items()}
    except FileNotFoundError:
        return {}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        problem = f"{path} is damaged ({type(e).__name__}: {e})"
        raise UserError(f"{problem}; remove it: finished runs will detect that themselves") from e


@dataclasses.dataclass(frozen=True)
class SweepRow:
    """The table's row of one run; None for missing numbers."""

    name: str
    settings: Mapping[str, Any]  # in which the runs differ
    status: str
    step: int | None  # the last one
    last: float | None  # last value of the metric
    best: float | None  # largest value
    best_step: int | None
    seconds: float


def make_row(
    folder: pathlib.Path, metric: str, *, settings: Mapping[str, Any], status: str, seconds: float
) -> SweepRow:
    """Makes the table's row of the run in `folder`, from its metrics so far."""
    lines = read_metrics(folder)
    points = [(line[metric], line["step"]) for line in lines if line.get(metric) is not None]
    best, best_step = max(points, key=lambda pair: (pair[0], -pair[1]), default=(None, None))
    step = lines[-1]["step"] if lines else None
    last = points[-1][0] if points else None
    return SweepRow(folder.name, dict(settings), status, step, last, best, best_step, seconds)


def rank_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Sorts by the last value, largest first; runs without one last, ties in order."""
    return sorted(rows, key=lambda row: (row.last is None, -(row.last or 0.0)))


def table_cells(rows: Sequence[SweepRow], metric: str) -> list[list[str]]:
    """Returns the table's heading and rows as text; numbers in full."""
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    heading = ["run", *names, metric, f"best {metric}", "at step", "steps", "seconds", "status"]
    return [heading] + [
        [
            row.name,
            *("" if name not in row.settings else str(row.settings[name]) for name in names),
            *("" if value is None else repr(value) for value in (row.last, row.best, row.best_step, row.step)),
            f"{row.seconds:.0f}",
            row.status,
        ]
        for row in rows
    ]


def markdown(rows: Sequence[SweepRow], metric: str) -> str:
    """Formats the table as Markdown; the metric with four digits."""
    rounded = [dataclasses.replace(row, last=_rounded(row.last), best=_rounded(row.best)) for row in rows]
    heading, *body = [[cell.replace("|", "\\|") for cell in line] for line in table_cells(rounded, metric)]
    rule = ["---", *["---:"] * (len(heading) - 2), "---"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *body)) + "\n"


def write_table(folder: pathlib.Path, rows: Sequence[SweepRow], metric: str) -> None:
    """Writes FOLDER/sweep.md and FOLDER/sweep.csv."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table_cells(rows, metric))
    for name, content in (("sweep.md", markdown(rows, metric)), ("sweep.csv", text.getvalue())):
        durable_files.write_text(folder / name, content)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


GRACE_S = 30.0  # for a run to close its files, after the time in which it saves
STOP_TIMEOUT = "trainer.stop_timeout_s"
POLL_S = 0.2
PROGRESS_S = 30.0  # between two lines on the steps of a run
LOG, PROMPT = "train.log", "$ "

Command = Callable[[PlannedRun], list[str]]


def train_command(run: PlannedRun) -> list[str]:
    return [sys.executable, "-m", "jppo.train", *run.arguments]


def sweep(
    runs: Sequence[PlannedRun], out: pathlib.Path, command: Command, *, jobs: int, resume: bool, metric: str
) -> bool:
    """Runs unfinished runs, `jobs` at a time, and updates record and table; whether all have finished."""
    names, arguments = find_differing(runs), {run.name: run.arguments for run in runs}
    with open_states(out, arguments, resume=resume) as states:
        unfinished = [run for run in runs if states[run.name].status != "finished"]
        label_of = {run.name: f"[{i}/{len(runs)}] {run.name}" for i, run in enumerate(runs, 1)}
        print_line(f"{len(runs)} runs in {out}, {len(runs) - len(unfinished)} finished already; {jobs} at a time")

        def row_of(run: PlannedRun) -> SweepRow:
            state, differs = states[run.name], {name: run.values.get(name) for name in names}
            return make_row(run.folder, metric, settings=differs, status=state.status, seconds=state.seconds)

        def ranked_rows() -> list[SweepRow]:
            return rank_rows(list(map(row_of, runs)))

        def write() -> None:
            content = {"runs": {name: dataclasses.asdict(state) for name, state in states.items()}}
            try:
                durable_files.write_text(out / FILE, json.dumps(content, indent=1) + "\n")
                write_table(out, ranked_rows(), metric)
            except OSError as e:  # such as a full disk: the next state is written with all others
                print_line(f"{out / FILE} cannot be written ({e.strerror}); make room there")

        def save_state(run: PlannedRun, state: State) -> None:
            states[run.name] = state
            write()

        def on_start(run: PlannedRun) -> None:
            print_line(f"{label_of[run.name]}: started, log in {run.folder / LOG}")
            save_state(run, dataclasses.replace(states[run.name], status="running"))

        def on_end(run: PlannedRun, code: int | None, seconds: float) -> None:
            status = "interrupted" if code is None else "failed" if code else "finished"
            reason = f" with exit code {code}: {last_error(run.folder / LOG)}" if code else ""
            print_line(f"{label_of[run.name]}: {status} after {seconds:.0f} s{reason}")
            save_state(run, State(status, states[run.name].seconds + seconds, code, run.arguments))

        def on_progress(run: PlannedRun) -> None:
            row, steps = row_of(run), run.values["trainer.total_training_steps"]
            score = "" if row.last is None else f", {metric} {row.last:.4g}"
            print_line(f"{label_of[run.name]}: step {row.step or 0}{f'/{steps}' * (steps > 0)}{score}")

        run_all(unfinished, command, jobs=jobs, on_start=on_start, on_end=on_end, on_progress=on_progress)
        table_rows = ranked_rows()
        write()
    print_line(f"\n{markdown(table_rows, metric)}\ntable             {out / 'sweep.md'}, {out / 'sweep.csv'}")
    if run_folders := [run.folder for run in runs if (run.folder / METRICS).is_file()]:
        print_line(f"report            {write_report(run_folders, out / 'report.html')}")
    if all(row.last is None for row in table_rows):
        metrics = {name for run in runs for line in read_metrics(run.folder) for name in line} - {"step", "nonfinite"}
        hint = f"--metric takes one of {', '.join(sorted(metrics))}" if metrics else "there are no metrics yet"
        print_line(f"no run has the metric {metric!r}; {hint}")
    return all(states[run.name].status == "finished" for run in runs)


def run_all(
    runs: Sequence[PlannedRun],
    command: Command,
    *,
    jobs: int,
    on_start: Callable[[PlannedRun], None],
    on_end: Callable[[PlannedRun, int | None, float], None],
    on_progress: Callable[[PlannedRun], None] = lambda _: None,
) -> None:
    """Runs every command in order, `jobs` at a time; an interruption ends the running ones first."""
    next_report = time.monotonic() + PROGRESS_S
    waiting, active = list(runs), dict[subprocess.Popen[bytes], tuple[PlannedRun, float]]()
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                on_start(run)
                active[start(command(run), run.folder)] = run, time.monotonic()
            for process in [process for process in active if process.poll() is not None]:
                run, start_time = active.pop(process)
                on_end(run, process.returncode, time.monotonic() - start_time)
            if time.monotonic() >= next_report:
                next_report += PROGRESS_S
                for run, _ in active.values():
                    on_progress(run)
            time.sleep(POLL_S if active else 0)
    finally:
        if active:
            print_line("the runs end with their checkpoints; a second Ctrl-C does not wait for them")
            stop(list(active), max(stop_timeout_s(run) for run, _ in active.values()))
        for run, start_time in active.values():
            on_end(run, None, time.monotonic() - start_time)


def start(command: list[str], folder: pathlib.Path) -> subprocess.Popen[bytes]:
    """Starts the command in its own session with output to its log; it does not outlive the sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOG, "ab") as log:
        log.write(f"{PROMPT}{shlex.join(command)}\n".encode())
        log.flush()
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def stop_timeout_s(run: PlannedRun) -> float:
    """Returns the seconds that a run takes to end at most."""
    values: dict[str, Any] = {STOP_TIMEOUT: TABLE[STOP_TIMEOUT].default, **run.values}
    return float(values[STOP_TIMEOUT]) + GRACE_S


def stop(processes: Sequence[subprocess.Popen[bytes]], within_s: float) -> None:
    """Ends the runs with their servers; one that takes too long is killed."""
    deadline = time.monotonic() + within_s
    try:
        for process in processes:
            process.terminate()
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def last_error(log: pathlib.Path) -> str:
    """Returns the last error in the log of the last start, otherwise its last line."""
    text = f"\n{log.read_text(encoding='utf-8', errors='replace')}".rpartition(f"\n{PROMPT}")[2]
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:300]


def print_line(text: str) -> None:
    print(escaped(text), flush=True)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Runs all trainings of a sweep, or prints their commands."""
    usage = "%(prog)s --config=FILE[:ARGUMENT] [--config.SECTION.NAME=VALUE ...] [options]"
    parser = settings.Parser("jppo.sweep", __doc__, usage=usage, allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--resume", action="store_true", help="continue a sweep: skip finished runs")
    parser.add_argument("--print", action="store_true", help="print the commands and stop")
    parser.add_argument("--metric", default="val/score", help="metric by which the table is sorted, largest first")
    parser.add_argument("--out", type=expanded, help="the folder of all runs (default runs/sweep-CONFIG)")
    args, rest = parser.parse_known_args(argv)
    if args.jobs < 1:
        raise UserError(f"--jobs={args.jobs} must be 1 or more")
    runs, out = plan(rest, args.out)
    if args.jobs > 1:
        check_apart(runs)
    if args.print:
        print_line("\n".join(shlex.join(train_command(run)) for run in runs))
        return
    child_process.unwind_on_signals()
    try:
        all_finished = sweep(runs, out, train_command, jobs=args.jobs, resume=args.resume, metric=args.metric)
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume continues", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if not all_finished:
        sys.exit(1)


if __name__ == "__main__":
    main()
