"""The console of a run: a live table with a progress bar on a terminal, one plain line per step elsewhere.

Green is within the range of `diagnosis.py`, yellow and red are outside; without colour, a ! marks red alone. Between
steps, a spinner or a line every 30 s, the first after 5 s, shows what a command is doing.
"""

import collections
import contextlib
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import rich.box
import rich.console
import rich.live
import rich.progress
import rich.status
import rich.table
import rich.text

from jppo.errors import escaped
from jppo.runlog import diagnosis
from jppo.runlog.timers import STAGES, Timers

ROWS = 12  # steps in the live table

Columns = Sequence[tuple[str, str, str]]

# Heading, metric, format. A missing metric is a dash.
PPO_COLUMNS: Columns = (
    ("reward", diagnosis.REWARD, ".3f"),
    ("test", "val/score", ".3f"),
    ("KL", "actor/ppo_kl", ".1e"),
    ("entropy", "actor/entropy", ".3f"),
    ("clipped", "actor/pg_clipfrac", ".3f"),
    ("ratio", "actor/ratio_mean", ".3f"),
    ("vf expl", "critic/vf_explained_var", ".2f"),
    ("length", "response_length/mean", ".1f"),
    ("tok/s", "perf/throughput", ",.0f"),
    ("s/step", "timing_s/step", ".1f"),
)
SFT_COLUMNS: Columns = (
    ("loss", "sft/loss", ".4f"),
    ("grad norm", "sft/grad_norm", ".3f"),
    ("lr", "sft/lr", ".1e"),
    ("tok/s", "perf/throughput", ",.0f"),
    ("s/step", "timing_s/step", ".2f"),
)


def _pair_columns(name: str) -> Columns:
    """Returns the columns of a training on pairs, whose metrics are named NAME/loss and the like."""
    return (
        ("loss", f"{name}/loss", ".4f"),
        ("accuracy", f"{name}/accuracy", ".3f"),
        ("held out", f"{name}/val_accuracy", ".3f"),
        ("margin", f"{name}/margin", ".2f"),
        ("grad norm", f"{name}/grad_norm", ".3f"),
        ("lr", f"{name}/lr", ".1e"),
        ("tok/s", "perf/throughput", ",.0f"),
        ("s/step", "timing_s/step", ".2f"),
    )


REWARD_MODEL_COLUMNS, DPO_COLUMNS = _pair_columns("rm"), _pair_columns("dpo")
LEFT_OUT_FIRST = ("s/step", "ratio", "test")  # if the table is too wide
STAGE_NAMES = {"old_log_prob": "logp", "update_critic": "critic", "update_actor": "actor", "update_weights": "publish"}
MEMORY = {"device": "perf/max_memory_allocated_gb", "host": "perf/cpu_memory_used_gb"}
COLOURS: Mapping[diagnosis.Verdict, str] = {"good": "green", "weak": "yellow", "bad": "bold red"}


class Terminal(rich.console.Console):
    """Standard output; if its reader has gone, further output is dropped and the run continues."""

    def on_broken_pipe(self) -> None:
        """Keeps the program alive: rich would end it after silencing the console."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


def make_screen(
    total_steps: int,
    done: int,
    columns: Columns,
    console: rich.console.Console,
    doing: rich.console.RenderableType = "",
) -> "Lines | Live":
    """Makes the display of steps: on a terminal a live table above what the run is `doing`, elsewhere lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        return Live(total_steps, done, columns, console, doing)
    return Lines(total_steps, columns, console)


class Pace:
    """Estimates the remaining time from the pace of the steps so far."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None

    def left(self, step: int, metrics: Mapping[str, float]) -> str:
        """Returns the remaining time after `step` as h:mm:ss; after the first step by that step's own time."""
        now = time.monotonic()
        if self._first is None and step > 0:  # step 0 is the test before training
            self._first = (step, now)
        first, start = self._first or (step, now)
        pace = (now - start) / (step - first) if step > first else metrics.get("timing_s/step")
        if pace is None:
            return "-:--:--"
        seconds = round(pace * max(self._total - step, 0))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class Steps:
    """The columns of a display, and the pace and rewards of the last steps."""

    def __init__(self, total_steps: int, columns: Columns, console: rich.console.Console) -> None:
        self._total, self._columns, self._console = total_steps, columns, console
        self._pace = Pace(total_steps)
        self._rewards: collections.deque[float] = collections.deque(maxlen=diagnosis.TREND_STEPS)

    def _verdicts(self, metrics: Mapping[str, float]) -> dict[str, diagnosis.Verdict]:
        """Adds a step's reward and returns the verdicts on its metrics by name."""
        if diagnosis.REWARD in metrics:
            self._rewards.append(metrics[diagnosis.REWARD])
        return diagnosis.verdicts(metrics, tuple(self._rewards))


class Lines(Steps):
    """One plain line per step, for logs."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the step as one line: metrics, stages, memory, remaining time."""
        verdicts = self._verdicts(metrics)
        texts = [
            f"{heading} {_format_metric(metrics, name, spec)}{_mark(verdicts.get(name))}"
            for heading, name, spec in self._columns
            if name in metrics
        ]
        stages = _stage_texts(metrics)
        texts += [f"({' '.join(stages)})"] if stages else []
        texts += [*_memory_texts(metrics), f"ETA {self._pace.left(step, metrics)}"]
        self.note("  ".join([f"step {step}/{self._total}", *texts]))

    def note(self, text: str, style: str = "") -> None:
        self._console.print(escaped(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Does nothing."""


class Live(Steps):
    """A table of the last steps, redrawn in place above a progress bar."""

    def __init__(
        self,
        total_steps: int,
        done: int,
        columns: Columns,
        console: rich.console.Console,
        doing: rich.console.RenderableType,
    ) -> None:
        """Starts the live display, whose progress bar begins at `done` steps."""
        super().__init__(total_steps, columns, console)
        self._doing = doing
        self._steps: collections.deque[tuple[int, dict[str, rich.text.Text]]] = collections.deque(maxlen=ROWS)
        self._footer = ""
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.percentage:.0f}%"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("ETA {task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done, left="-:--:--")
        self._live = rich.live.Live(self._draw(), console=console, refresh_per_second=2)
        self._live.start()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the step to the table and moves the bar."""
        verdicts = self._verdicts(metrics)
        cells = {}
        for heading, name, spec in self._columns:
            verdict = verdicts.get(name)
            mark = _mark(verdict) if self._console.no_color else ""
            cells[heading] = rich.text.Text(
                _format_metric(metrics, name, spec) + mark, style="" if verdict is None else COLOURS[verdict]
            )
        self._steps.append((step, cells))
        step_time = [f"step {metrics['timing_s/step']:.1f} s:"] if "timing_s/step" in metrics else []
        self._footer = "  ".join([*step_time, *_stage_texts(metrics), *_memory_texts(metrics)])
        self._progress.update(self._task, completed=step, left=self._pace.left(step, metrics))
        self._live.update(self._draw(), refresh=True)

    def note(self, text: str, style: str = "") -> None:
        self._console.print(rich.text.Text(escaped(text), style=style))

    def close(self) -> None:
        """Leaves the last table on the screen."""
        self._live.stop()

    def _draw(self) -> rich.console.Group:
        """Builds the table of the last steps, the line of the last one below it, and the progress bar."""
        table = rich.table.Table(
            box=rich.box.SIMPLE_HEAD, show_edge=False, expand=True, padding=0, header_style="bold cyan"
        )
        headings = self._fitting_headings()
        for heading in ("step", *headings):
            table.add_column(heading, justify="right", style="bold" if heading == "step" else "", no_wrap=True)
        for step, cells in self._steps:
            table.add_row(str(step), *(cells[heading] for heading in headings))
        footer = rich.text.Text(self._footer, style="dim")
        return rich.console.Group(table, *([footer] if self._footer else []), self._progress, self._doing)

    def _fitting_headings(self) -> list[str]:
        """Returns the headings that fit the console's width."""
        headings = [heading for heading, _, _ in self._columns]
        width = {name: 1 + max(len(name), *(len(cells[name]) for _, cells in self._steps), 0) for name in headings}
        steps = max(len("step"), *(len(str(step)) for step, _ in self._steps), 0)
        for heading in LEFT_OUT_FIRST:
            if steps + sum(width[name] for name in headings) > self._console.width and heading in headings:
                headings.remove(heading)
        return headings


def _format_metric(metrics: Mapping[str, float], name: str, spec: str) -> str:
    if name not in metrics:
        return "-"
    value = metrics[name]
    return format(value, spec) if math.isfinite(value) else str(value)


def _mark(verdict: diagnosis.Verdict | None) -> str:
    return "!" if verdict == "bad" else ""


def _stage_texts(metrics: Mapping[str, float]) -> list[str]:
    """Formats the seconds of the step's stages, without negligible ones."""
    seconds = {stage: metrics.get(f"timing_s/{stage}", 0.0) for stage in STAGES if stage != "step"}
    return [f"{STAGE_NAMES.get(stage, stage)} {stage_s:.1f}" for stage, stage_s in seconds.items() if stage_s >= 0.05]


def _memory_texts(metrics: Mapping[str, float]) -> list[str]:
    """Returns the known memory in use."""
    return [f"{device} {metrics[name]:.1f} GB" for device, name in MEMORY.items() if name in metrics]


EVERY_S, FIRST_S, REDRAW_S = 30.0, 5.0, 0.25


class Doing:
    """The running stage of `timer`, as a renderable that is new at each drawing."""

    def __init__(self, timer: Timers):
        self._timer = timer

    def __rich__(self) -> rich.text.Text:
        return rich.text.Text(self._timer.line(), style="dim")


class Display:
    """Shows the running stage from a thread, on stderr; a context manager."""

    def __init__(self, timer: Timers, console: rich.console.Console | None = None, *, every_s: float = EVERY_S):
        self._timer = timer
        self._console = console or rich.console.Console(stderr=True)
        self._every_s = every_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._spinner: rich.status.Status | None = None

    def __enter__(self) -> Self:
        """Starts a spinner on a terminal, elsewhere a thread that prints lines."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._spinner = rich.status.Status(Doing(self._timer), console=self._console)
            self._spinner.start()
        else:
            self._thread = threading.Thread(target=self._print, name="jppo-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave_terminal()
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def leave_terminal(self) -> None:
        """Removes the spinner: the table of steps follows. Elsewhere than on a terminal the lines continue."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _print(self) -> None:
        """Prints the running stage in intervals, until the display ends; runs in a thread."""
        wait = min(FIRST_S, self._every_s)  # a command has been silent for its imports
        while not self._end.wait(wait):
            if self._timer.stage()[1] >= wait / 2 and (line := self._timer.line()):
                print(line, file=sys.stderr, flush=True)
            wait = self._every_s
