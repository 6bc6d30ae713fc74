"""The console of a run: a live table with a progress bar on a terminal, one plain line a step elsewhere."""

import collections
import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import rich.box
import rich.console
import rich.live
import rich.markup
import rich.progress
import rich.table

ROWS = 12  # steps that the live table shows

Columns = Sequence[tuple[str, str, str]]

# Heading, metric, format. A step without the metric shows a dash.
PPO_COLUMNS: Columns = (
    ("reward", "critic/score/mean", ".3f"),
    ("val acc", "val/score", ".3f"),
    ("KL", "actor/ppo_kl", ".1e"),
    ("entropy", "actor/entropy", ".3f"),
    ("clipped", "actor/pg_clipfrac", ".3f"),
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


class Screen(Protocol):
    """Where the steps are shown."""

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step."""

    def note(self, text: str) -> None:
        """Say something between the steps."""

    def close(self) -> None:
        """Stop drawing."""


def make_screen(total_steps: int, done: int, columns: Columns, console: rich.console.Console) -> Screen:
    """The screen that fits the console; `done` steps lie behind a resumed run."""
    if console.is_terminal:
        return Live(total_steps, done, columns, console)
    return Lines(total_steps, columns, console)


class Pace:
    """Seconds to the end, by the pace of the steps so far."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None

    def left(self, step: int) -> str:
        """The time to the end after `step` as h:mm:ss; unknown until two steps are done."""
        now = time.monotonic()
        if self._first is None:
            if step > 0:  # step 0 is the test before training
                self._first = (step, now)
            return "-:--:--"
        first, start = self._first
        if step <= first:
            return "-:--:--"
        seconds = round((now - start) / (step - first) * max(self._total - step, 0))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class Lines:
    """One plain line a step, for logs."""

    def __init__(self, total_steps: int, columns: Columns, console: rich.console.Console) -> None:
        self._total = total_steps
        self._columns = columns
        self._console = console
        self._pace = Pace(total_steps)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step."""
        shown = [f"{heading} {_text(metrics, name, form)}" for heading, name, form in self._columns if name in metrics]
        self.note("  ".join([f"step {step}/{self._total}", *shown, f"ETA {self._pace.left(step)}"]))

    def note(self, text: str) -> None:
        """Print the text."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is left open."""


class Live:
    """The last steps in a table that is redrawn in place, over a progress bar."""

    def __init__(self, total_steps: int, done: int, columns: Columns, console: rich.console.Console) -> None:
        self._columns = columns
        self._console = console
        self._steps: collections.deque[list[str]] = collections.deque(maxlen=ROWS)
        self._pace = Pace(total_steps)
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
        """Add the step to the table and move the bar."""
        self._steps.append([str(step), *(_text(metrics, name, form) for _, name, form in self._columns)])
        self._progress.update(self._task, completed=step, left=self._pace.left(step))
        self._live.update(self._draw(), refresh=True)

    def note(self, text: str) -> None:
        """Print the text above the table."""
        self._console.print(rich.markup.escape(text), highlight=False)

    def close(self) -> None:
        """Leave the last table on the screen."""
        self._live.stop()

    def _draw(self) -> rich.console.Group:
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, expand=True, padding=(0, 0, 0, 1), header_style="bold cyan")
        table.add_column("step", justify="right", style="bold")
        for heading, _, _ in self._columns:
            style = "green" if heading in ("reward", "val acc") else ""
            table.add_column(heading, justify="right", style=style, no_wrap=True)
        for cells in self._steps:
            table.add_row(*cells)
        return rich.console.Group(table, self._progress)


def _text(metrics: Mapping[str, float], name: str, form: str) -> str:
    if name not in metrics:
        return "-"
    value = metrics[name]
    return format(value, form) if math.isfinite(value) else str(value)
