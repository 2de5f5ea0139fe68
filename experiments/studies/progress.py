"""Progress of studies and runs: bars in a terminal, lines in a file or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from eigengraft.errors import counted

from ..reports.number_format import format_loss

if TYPE_CHECKING:
    from ..training.outcome import Result
    from .running import PreparedStudy, StudyEvent
    from .study import Study

_LOG_SECONDS = (10.0, 600.0)
"""Shortest and longest time in seconds between two lines of progress in a log file.

Within these limits the time between two lines is a twentieth of the time since the start: a run of a day then has a few
hundred lines.
"""


class LogLines:
    """Lines of progress in plain text, for a standard error that is a file or a pipe.

    now: function that returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now, self._began = now, now()
        self._next = self._began

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._now() - self._began

    def write(self, text: Callable[[], str]) -> None:
        """Write a line with the date if enough time has passed since the last line.

        text: function that returns the text of the line; it is called only if a line is written.
        """
        if self._now() >= self._next:
            typer.echo(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text()}", err=True)
            least, most = _LOG_SECONDS
            self._next = self._now() + min(max(least, self.seconds / 20), most)


def time_left(seconds: float) -> str:
    """Return the end of a line of progress, with the time left in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f", about {minutes}:{rest:02d} left"


@contextmanager
def study_progress(
    prepared: PreparedStudy, study: Study, console: Console | None = None
) -> Iterator[Callable[[StudyEvent], None]]:
    """Show the progress of a phase of a study. Yield the function that receives the events of its runs.

    console: console for the bars and lines. None: standard error.
    """
    console = console or Console(stderr=True)
    if prepared.phase == "tuning" and study.tune is not None:
        console.print(f"tuning {', '.join(study.tune.fields)}: {counted(len(prepared.left), 'run')}", highlight=False)
    if prepared.phase == "timing":
        console.print(f"timing every cell: {counted(len(prepared.left), 'run')}", highlight=False)
    with StudyProgress(console, len(prepared.runs), len(prepared.left), study.metric) as progress:
        yield progress.on_event


class StudyProgress:
    """A context manager with a progress bar for a study and for each run in progress, and a line for each finished run.

    Without a terminal there are no bars, but lines with the progress of the study and of one of its runs.

    runs: number of runs of the study.
    left: number of runs that are not done yet.
    metric: name of the metric by which the study compares runs, which is printed for each finished run.
    """

    def __init__(self, console: Console, runs: int, left: int, metric: str = "val_loss") -> None:
        self.metric = metric
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[figures]}"))
        self.progress = Progress(*columns, console=console, transient=True)
        self.lines = None if console.is_terminal else LogLines()
        self.runs, self.done = runs, runs - left
        self.began: tuple[float, float] | None = None  # time and fraction at the first progress of a run
        self.study_bar = self.progress.add_task("study", total=1.0, figures="")
        self.run_bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self.lines is None:
            self.progress.start()
        if self.done:
            self.progress.console.print(f"{self.done} of {self.runs} runs are already complete")
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def on_event(self, event: StudyEvent) -> None:
        """Display one event of the study."""
        key = event.run.directory
        if self.began is None and event.kind in ("progress", "done"):
            self.began = monotonic(), event.fraction
        if event.kind == "started":
            self.run_bars[key] = self.progress.add_task(
                escape(event.run.title), total=event.run.experiment.steps, figures=""
            )
        elif event.kind in ("elsewhere", "died"):
            self.progress.remove_task(self.run_bars.pop(key))
            if event.kind == "died":
                text = f"{escape(event.run.title)}: {escape(event.value)}; it is begun again"
                self.progress.console.print(text, highlight=False, soft_wrap=True)
        elif event.kind == "progress":
            tick = event.value
            shown = f"step {tick.step}/{tick.steps}  loss {format_loss(tick.loss)}  {tick.step_ms:.1f} ms"
            self.progress.update(self.run_bars[key], completed=event.value.step, figures=shown)
            if self.lines is not None:
                self.lines.write(lambda: f"{self._figures(event.fraction)}; {event.run.title}: {shown}")
        else:
            if key in self.run_bars:  # runs of other workers have no bar
                self.progress.remove_task(self.run_bars.pop(key))
            self.done += 1
            text = _describe_result(event.value, self.metric) if event.kind == "done" else "[red]failed[/red]"
            self.progress.console.print(f"{escape(event.run.title)}: {text}", highlight=False, soft_wrap=True)
        self.progress.update(self.study_bar, completed=event.fraction, figures=self._figures(event.fraction))

    def _figures(self, fraction: float) -> str:
        """Return a text with the number of finished runs, and the time left at the speed since the first progress of a
        run. The start of processes and compilation, which come before, do not count.
        """
        text, now = f"{self.done} of {self.runs} runs", monotonic()
        began, first = self.began or (now, fraction)
        spent, gained = now - began, fraction - first
        if gained <= 0 or spent < 5 or fraction >= 1:
            return text
        return f"{text}{time_left(spent * (1 - fraction) / gained)}"


def _describe_result(result: Result, metric: str) -> str:
    """Return one line about the result of a run. It begins with the metric by which the study compares runs."""
    if result.val_loss is None:
        return f"[red]diverged[/red] at step {result.steps}"
    own = result.metrics.get(metric)
    first = f"{escape(metric)} {own:.4g}, " if own is not None else ""
    accuracy = f", accuracy {result.val_accuracy:.3f}" if result.val_accuracy is not None else ""
    return f"{first}validation loss {format_loss(result.val_loss)}{accuracy} in {result.seconds:.1f} s of training"
