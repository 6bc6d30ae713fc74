"""Trains several times with different settings: python -m jppo.sweep --config=configs/quickstart.py --jobs=2

A config file may define `sweep(add)` next to get_config. It calls add once per run with the settings that differ:
add(**{'actor.lr': 1e-5, 'trainer.seed': 2}). Each run is a `python -m jppo.train` with its own folder under --out,
named after these settings. A failed run does not affect the others; --resume skips finished runs and resumes the rest.
sweep.md and sweep.csv are updated after each run, the best first; report.html at the end covers all runs.
--config.SECTION.NAME=VALUE changes a setting in every run.

Exit code 0 if all runs have finished, 1 if one has failed.
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

from jppo import settings
from jppo.errors import escaped, expanded
from jppo.report import write_report
from jppo.rollout.servers.launch import die_with_parent
from jppo.runlog import sweep_record
from jppo.runlog.logger import FILE as METRICS
from jppo.settings import UserError
from jppo.settings.plan import PlannedRun, check_apart, differing, plan

GRACE_S = 30.0  # for a run to end its servers and close its files
POLL_S = 0.2
LOG, PROMPT = "train.log", "$ "

Command = Callable[[PlannedRun], list[str]]


def train_command(run: PlannedRun) -> list[str]:
    """Returns the command of the run."""
    return [sys.executable, "-m", "jppo.train", *run.arguments]


def sweep(
    runs: Sequence[PlannedRun], out: pathlib.Path, command: Command, *, jobs: int, resume: bool, metric: str
) -> bool:
    """Runs unfinished runs, `jobs` at a time, and updates record and table; whether all have finished."""
    names, arguments = differing(runs), {run.name: run.arguments for run in runs}
    with sweep_record.opened(out, arguments, resume=resume) as states:
        left = [run for run in runs if states[run.name].status != "finished"]
        of = {run.name: f"[{i}/{len(runs)}] {run.name}" for i, run in enumerate(runs, 1)}
        print_line(f"{len(runs)} runs in {out}, {len(runs) - len(left)} finished already; {jobs} at a time")

        def rows() -> list[sweep_record.SweepRow]:
            return sweep_record.ranked([row(run, states[run.name], names, metric) for run in runs])

        def keep(run: PlannedRun, state: sweep_record.State) -> None:
            states[run.name] = state
            sweep_record.write_states(out, states)
            sweep_record.write_table(out, rows(), metric)

        def began(run: PlannedRun) -> None:
            print_line(f"{of[run.name]}: started, log in {run.folder / LOG}")
            keep(run, dataclasses.replace(states[run.name], status="running"))

        def ended(run: PlannedRun, code: int | None, seconds: float) -> None:
            status = "interrupted" if code is None else "failed" if code else "finished"
            why = f" with exit code {code}: {last_words(run.folder / LOG)}" if code else ""
            print_line(f"{of[run.name]}: {status} after {seconds:.0f} s{why}")
            keep(run, sweep_record.State(status, states[run.name].seconds + seconds, code, run.arguments))

        run_all(left, command, jobs=jobs, began=began, ended=ended)
        found = rows()
        sweep_record.write_table(out, found, metric)
    print_line(f"\n{sweep_record.markdown(found, metric)}\ntable             {out / 'sweep.md'}, {out / 'sweep.csv'}")
    if begun := [run.folder for run in runs if (run.folder / METRICS).is_file()]:
        print_line(f"report            {write_report(begun, out / 'report.html')}")
    if all(row.last is None for row in found):
        known = sweep_record.metric_names([run.folder for run in runs])
        others = f"--metric takes one of {', '.join(known)}" if known else "there are no metrics yet"
        print_line(f"no run has the metric {metric!r}; {others}")
    return all(states[run.name].status == "finished" for run in runs)


def row(run: PlannedRun, state: sweep_record.State, names: Sequence[str], metric: str) -> sweep_record.SweepRow:
    """Returns the run's row; `names` are the settings in which the runs differ."""
    differs = {name: run.values[name] for name in names}
    return sweep_record.make_row(run.folder, metric, settings=differs, status=state.status, seconds=state.seconds)


def run_all(
    runs: Sequence[PlannedRun],
    command: Command,
    *,
    jobs: int,
    began: Callable[[PlannedRun], None],
    ended: Callable[[PlannedRun, int | None, float], None],
) -> None:
    """Runs every command in order, `jobs` at a time; on an interruption it ends running ones first."""
    waiting, active = list(runs), dict[subprocess.Popen[bytes], tuple[PlannedRun, float]]()
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


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the runs with their servers; one that takes too long is killed."""
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
    """Returns the last error in the log of the last start, otherwise its last line."""
    text = f"\n{log.read_text(encoding='utf-8', errors='replace')}".rpartition(f"\n{PROMPT}")[2]
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:300]


def print_line(text: str) -> None:
    """Prints a line and flushes."""
    print(escaped(text), flush=True)


def _terminate(number: int, _: Any) -> None:
    raise SystemExit(128 + number)  # unwinds, so that the runs are ended


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    usage = "%(prog)s --config=FILE[:ARGUMENT] [--config.SECTION.NAME=VALUE ...] [options]"
    parser = settings.Parser("jppo.sweep", __doc__, usage=usage, allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--resume", action="store_true", help="continue a sweep: skip finished runs")
    parser.add_argument("--print", action="store_true", help="print the commands and stop")
    parser.add_argument("--metric", default="val/score", help="metric by which the table is sorted, largest first")
    parser.add_argument("--out", type=pathlib.Path, help="the folder of all runs (default runs/sweep-CONFIG)")
    args, rest = parser.parse_known_args(argv)
    if args.jobs < 1:
        raise UserError(f"--jobs={args.jobs} must be 1 or more")
    runs, out = plan(rest, None if args.out is None else expanded(args.out))
    if args.jobs > 1:
        check_apart(runs)
    if args.print:
        print_line("\n".join(shlex.join(train_command(run)) for run in runs))
        return
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
        signal.signal(signal.SIGHUP, _terminate)
    try:
        done = sweep(runs, out, train_command, jobs=args.jobs, resume=args.resume, metric=args.metric)
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume continues", file=sys.stderr)
        sys.exit(130)
    if not done:
        sys.exit(1)


if __name__ == "__main__":
    main()
