"""Trains several times with other settings: python -m jppo.sweep --config=configs/quickstart.py --jobs=2

A config file may have a `sweep(add)` beside its get_config; it calls add once for each run, with the settings that
differ: add(**{'actor.lr': 1e-5, 'trainer.seed': 2}). Each run is a `python -m jppo.train` with a folder of its own,
whose name is made of these settings, under --out. A run that fails leaves the others alone; --resume skips what is
finished and goes on with the rest. After each run sweep.md and sweep.csv have the table of all of them, the best
first, and at the end report.html is about them all. --config.SECTION.NAME=VALUE changes a setting in every run.

Exit code 0 where all runs have finished, 1 where one has failed.
"""

import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jppo import config as settings
from jppo.config import UserError
from jppo.config.plan import Run, check_apart, differing, plan
from jppo.io import record, table
from jppo.io.metrics import FILE as METRICS
from jppo.report import write_report
from jppo.rollout.launch import die_with_parent

GRACE_S = 30.0  # for a run to end its servers and to close its files
POLL_S = 0.2
LOG, PROMPT = "train.log", "$ "

Command = Callable[[Run], list[str]]


def train_command(run: Run) -> list[str]:
    """The run as a command of its own."""
    return [sys.executable, "-m", "jppo.train", *run.arguments]


def sweep(runs: Sequence[Run], out: pathlib.Path, command: Command, *, jobs: int, resume: bool, metric: str) -> bool:
    """Runs what is not finished, `jobs` at a time, and keeps record and table; whether all runs have finished."""
    names, arguments = differing(runs), {run.name: run.arguments for run in runs}
    with record.opened(out, arguments, resume=resume) as states:
        left = [run for run in runs if states[run.name].status != "finished"]
        of = {run.name: f"[{i}/{len(runs)}] {run.name}" for i, run in enumerate(runs, 1)}
        say(f"{len(runs)} runs in {out}, {len(runs) - len(left)} finished already; {jobs} at a time")

        def rows() -> list[table.Row]:
            return table.ranked([row(run, states[run.name], names, metric) for run in runs])

        def keep(run: Run, state: record.State) -> None:
            states[run.name] = state
            record.write(out, states)
            table.write_table(out, rows(), metric)

        def began(run: Run) -> None:
            say(f"{of[run.name]}: started, log in {run.folder / LOG}")
            keep(run, dataclasses.replace(states[run.name], status="running"))

        def ended(run: Run, code: int | None, seconds: float) -> None:
            status = "interrupted" if code is None else "failed" if code else "finished"
            why = f" with exit code {code}: {last_words(run.folder / LOG)}" if code else ""
            say(f"{of[run.name]}: {status} after {seconds:.0f} s{why}")
            keep(run, record.State(status, states[run.name].seconds + seconds, code, run.arguments))

        execute(left, command, jobs=jobs, began=began, ended=ended)
        found = rows()
        table.write_table(out, found, metric)
    say(f"\n{table.markdown(found, metric)}\ntable             {out / 'sweep.md'}, {out / 'sweep.csv'}")
    if begun := [run.folder for run in runs if (run.folder / METRICS).is_file()]:
        say(f"report            {write_report(begun, out / 'report.html')}")
    if all(row.last is None for row in found):
        known = table.metric_names([run.folder for run in runs])
        others = f"--metric takes one of {', '.join(known)}" if known else "there are no metrics yet"
        say(f"no run has the metric {metric!r}; {others}")
    return all(states[run.name].status == "finished" for run in runs)


def row(run: Run, state: record.State, names: Sequence[str], metric: str) -> table.Row:
    """The run's line of the table; `names` are the settings in which the runs differ."""
    differs = {name: run.values[name] for name in names}
    return table.make_row(run.folder, metric, settings=differs, status=state.status, seconds=state.seconds)


def execute(
    runs: Sequence[Run],
    command: Command,
    *,
    jobs: int,
    began: Callable[[Run], None],
    ended: Callable[[Run, int | None, float], None],
) -> None:
    """Runs every command, `jobs` at a time, in order; when it is interrupted it ends those that are under way first."""
    waiting, active = list(runs), dict[subprocess.Popen, tuple[Run, float]]()
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                began(run)
                active[start(command(run), run.folder)] = run, time.monotonic()
            for process in [process for process in active if process.poll() is not None]:
                run, since = active.pop(process)
                ended(run, process.returncode, time.monotonic() - since)
            time.sleep(POLL_S if active else 0)
    finally:
        if active:
            stop(list(active))
        for run, since in active.values():
            ended(run, None, time.monotonic() - since)


def start(command: list[str], folder: pathlib.Path) -> subprocess.Popen:
    """The command in a session of its own, what it says at the end of its log; it does not outlive the sweep."""
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


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """Ends the runs: each may take its servers down; one that takes too long is killed, and they follow it."""
    deadline = time.monotonic() + GRACE_S
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


def last_words(log: pathlib.Path) -> str:
    """The error that the last start's part of a log ends with, else its last line."""
    text = f"\n{log.read_text(encoding='utf-8', errors='replace')}".rpartition(f"\n{PROMPT}")[2]
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def say(text: str) -> None:
    """A line of the console, also where that is a file."""
    print(text, flush=True)


def _terminate(number: int, _: Any) -> None:
    raise SystemExit(128 + number)  # unwinds, so that the runs are ended


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    usage = "%(prog)s --config=FILE[:ARGUMENT] [--config.SECTION.NAME=VALUE ...] [options]"
    parser = settings.Parser("jppo.sweep", __doc__, usage=usage, allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--resume", action="store_true", help="go on with a sweep: skip what is finished")
    parser.add_argument("--print", action="store_true", help="print the commands and stop")
    parser.add_argument("--metric", default="val/score", help="what the table is sorted by, largest first")
    parser.add_argument("--out", type=pathlib.Path, help="the folder of all runs; runs/sweep-NAME by the config's name")
    args, rest = parser.parse_known_args(argv)
    if args.jobs < 1:
        raise UserError(f"--jobs={args.jobs} must be 1 or more")
    runs, out = plan(rest, None if args.out is None else args.out.expanduser())
    if args.jobs > 1:
        check_apart(runs)
    if args.print:
        print("\n".join(shlex.join(train_command(run)) for run in runs))
        return
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _terminate)
    try:
        done = sweep(runs, out, train_command, jobs=args.jobs, resume=args.resume, metric=args.metric)
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on", file=sys.stderr)
        sys.exit(130)
    if not done:
        sys.exit(1)


if __name__ == "__main__":
    main()
