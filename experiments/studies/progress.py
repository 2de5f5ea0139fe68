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


_TRUSTED = 0.1
"""Completed share of a progress bar from which its time left is computed from its progress alone. With a smaller share,
the expected time counts too, because the first runs of a study may be much faster or slower than the others."""


class Meter:
    """A context manager that shows progress: bars in a terminal, else lines of plain text.

    A line has the date, and names and texts of two bars: the first bar and the bar that was just updated. At least 10
    seconds pass between two such lines. A bar that is added with a text is printed at once.

    console: console for bars and lines. None: standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        name = TextColumn("{task.description}", markup=False)
        self._bars = Progress(
            name, BarColumn(bar_width=16), TextColumn("{task.fields[text]}"), console=self.console, transient=True
        )
        self._first: dict[TaskID, tuple[float, float]] = {}
        self._expected, self._texts, self._left = dict[TaskID, float](), dict[TaskID, str](), dict[TaskID, float]()
        self._began = self._next = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._bars.stop()

    def add(self, name: str, total: float, text: str = "", expected: float = 0.0) -> TaskID:
        """Add a bar that is complete at `total`, and return its number. `name` is printed before the bar, `text` after
        the bar.

        expected: expected seconds from 0 to `total`; 0: the time left follows from the progress alone.
        """
        if self.console.is_terminal:
            self._bars.start()
        bar = self._bars.add_task(name, total=total, text=text)
        self._expected[bar], self._texts[bar] = expected, text
        if text and not self.console.is_terminal:
            self._print(f"{name}: {text}")
        return bar

    def remove(self, bar: TaskID) -> None:
        """Remove a bar."""
        self._bars.remove_task(bar)
        self._left.pop(bar, None)

    def update(self, bar: TaskID, done: float, text: str) -> None:
        """Set the progress of a bar, `done` of its total, and its text. From 5 seconds after the first update on, the
        time left is added to the text.

        The time left follows from the speed since the first update of the bar. The start of processes and compilation
        come before this update and do not count. If the bar has expected seconds, the time left is a mean of two times,
        by the measured and by the expected speed. The weight of the measured speed rises from 0 to 1 over the first
        tenth of the bar. The time left of the first bar is at least that of every other bar.
        """
        now, total = monotonic(), next(task.total or 0.0 for task in self._bars.tasks if task.id == bar)
        began, first = self._first.setdefault(bar, (now, done))
        self._texts[bar] = text
        self._left.pop(bar, None)
        if first < done < total and now - began >= 5:
            share = min(1.0, (done - first) / total / _TRUSTED) if self._expected[bar] else 1.0
            left = share * (now - began) / (done - first) + (1 - share) * self._expected[bar] / total
            self._left[bar] = left * (total - done)
        self._bars.update(bar, completed=done, text=self._described(bar))
        whole = self._bars.tasks[0].id
        if bar != whole:
            self._bars.update(whole, text=self._described(whole))
        if not self.console.is_terminal and now >= self._next:
            shown = (task for place, task in enumerate(self._bars.tasks) if place == 0 or task.id == bar)
            self._print("; ".join(f"{task.description}: {task.fields['text']}" for task in shown))
            least, most = _LOG_SECONDS
            self._next = now + min(max(least, (now - self._began) / 20), most)

    def _print(self, line: str) -> None:
        typer.echo(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}", err=True)

    def _described(self, bar: TaskID) -> str:
        """Return the text of a bar, with its time left if that is known."""
        if bar not in self._left:
            return self._texts[bar]
        left = max(self._left.values()) if bar == self._bars.tasks[0].id else self._left[bar]
        minutes, seconds = divmod(round(left), 60)
        return f"{self._texts[bar]}, about {minutes}:{seconds:02d} left"

    def say(self, text: str) -> None:
        """Print a line of text, with the markup of rich, that stays above the bars."""
        self.console.print(text, highlight=False, soft_wrap=True)


@contextmanager
def study_progress(
    prepared: PreparedStudy, study: Study, console: Console | None = None, workers: int = 1
) -> Iterator[Callable[[StudyEvent], None]]:
    """Show the progress of a phase of a study: a bar for all runs, a bar for each run in progress, and a line for each
    finished run. Yield the function that receives the events of the runs.

    prepared: the phase with its runs.
    console: console for the bars and lines. None: standard error.
    workers: number of processes.
    """
    from ..training.rundir import RunDirectory

    runs, left = len(prepared.runs), len(prepared.left)
    bars, elsewhere = dict[str, TaskID](), set[str]()
    done = runs - left
    with Meter(console) as meter:
        if prepared.phase == "tuning" and study.tune is not None:
            meter.say(f"tuning {', '.join(study.tune.space)}: {counted(left, 'run')}")
        if prepared.phase == "timing":
            meter.say(f"timing every cell: {counted(left, 'run')}")
        if done:
            meter.say(f"{done} of {runs} runs are already complete")
        expected = sum(prepared.seconds[run.directory] for run in prepared.left) if prepared.measured else 0.0
        whole = meter.add("study", 1.0, f"{done} of {runs} runs", expected / max(1, min(workers, left)))

        def on_event(event: StudyEvent) -> None:
            nonlocal done
            run, title = event.run, escape(event.run.title)
            if event.kind == "started":
                bars[run.directory] = meter.add(run.title, run.experiment.steps)
            elif event.kind == "progress":
                tick = event.value
                shown = f"step {tick.step}/{tick.steps}  loss {format_loss(tick.loss)}  {tick.step_ms:.1f} ms"
                meter.update(bars[run.directory], tick.step, shown)
            elif run.directory in bars:  # runs that other workers do have no bar
                meter.remove(bars.pop(run.directory))
            if event.kind == "elsewhere" and run.directory not in elsewhere:
                elsewhere.add(run.directory)
                meter.say(f"{title}: another worker does this run")
            if event.kind == "died":
                step = max(RunDirectory(prepared.rendezvous.directory / run.directory).checkpoints(), default=0)
                again = f"it continues from step {step}" if step else "it starts again, as it has no checkpoint"
                meter.say(f"{title}: {escape(event.value)}; {again}")
            elif event.kind in ("done", "failed"):
                done += 1
                ended = _describe_result(event.value, study.metric) if event.kind == "done" else "[red]failed[/red]"
                meter.say(f"{title}: {ended}")
            if event.kind in ("progress", "done", "failed"):
                meter.update(whole, event.fraction, f"{done} of {runs} runs")

        yield on_event


def _describe_result(result: Result, metric: str) -> str:
    """Return one line about the result of a run. It begins with the metric by which the study compares runs."""
    if result.val_loss is None:
        return f"[red]diverged[/red] at step {result.steps}"
    own = result.metrics.get(metric)
    first = f"{escape(metric)} {own:.4g}, " if own is not None else ""
    accuracy = f", accuracy {result.val_accuracy:.3f}" if result.val_accuracy is not None else ""
    return f"{first}validation loss {format_loss(result.val_loss)}{accuracy} in {result.seconds:.1f} s of training"
