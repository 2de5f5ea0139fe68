"""Progress bars on standard error: of one training run, and of a study with its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from ..studies.running import StudyEvent
    from ..training.outcome import Result, Tick


@contextmanager
def training_progress(name: str) -> Iterator[Callable[[Tick], None]]:
    """Show a bar with loss, step time and time left; yields the callback for `train`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(name, total=None, figures="")
    validation = ""

    def on_tick(tick: Tick) -> None:
        nonlocal validation
        validation = f"  val {tick.val_loss:.4f}" if tick.val_loss is not None else validation
        figures = f"loss {tick.loss:.4f}{validation}  {tick.step_ms:.1f} ms"
        bar.update(task, completed=tick.step, total=tick.steps, figures=figures)
        bar.start()  # only now, so that a refused experiment has no bar

    try:
        yield on_tick
    finally:
        bar.stop()


class StudyProgress:
    """Show a bar for a study, one for each run in progress, and a line for each finished run; a context manager.

    runs: number of runs of the study.
    left: number of runs still to be done.
    """

    def __init__(self, console: Console, runs: int, left: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[figures]}"))
        self.progress = Progress(*columns, console=console, transient=True)
        self.runs, self.done = runs, runs - left
        self.began = monotonic()
        self.start_fraction: float | None = None
        self.study_bar = self.progress.add_task("study", total=1.0, figures="")
        self.run_bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        if self.done:
            self.progress.console.print(f"{self.done} of {self.runs} runs are already complete")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def on_event(self, event: StudyEvent) -> None:
        """Show one event of the study."""
        key = event.run.directory
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
            self.progress.update(self.run_bars[key], completed=event.value.step, figures=_describe_tick(event.value))
        else:
            if key in self.run_bars:  # not of another worker
                self.progress.remove_task(self.run_bars.pop(key))
            self.done += 1
            text = _describe_result(event.value) if event.kind == "done" else "[red]failed[/red]"
            self.progress.console.print(f"{escape(event.run.title)}: {text}", highlight=False, soft_wrap=True)
        self.progress.update(self.study_bar, completed=event.fraction, figures=self._figures(event.fraction))

    def _figures(self, fraction: float) -> str:
        """Runs done, and the time left at the speed since the start."""
        self.start_fraction = fraction if self.start_fraction is None else self.start_fraction
        gained, spent = fraction - self.start_fraction, monotonic() - self.began
        text = f"{self.done} of {self.runs} runs"
        if gained <= 0 or spent < 5 or fraction >= 1:
            return text
        minutes, seconds = divmod(round(spent * (1 - fraction) / gained), 60)
        return f"{text}, about {minutes}:{seconds:02d} left"


def _describe_tick(tick: Tick) -> str:
    return f"step {tick.step}/{tick.steps}  loss {tick.loss:.3f}  {tick.step_ms:.1f} ms"


def _describe_result(result: Result) -> str:
    if result.val_loss is None:
        return f"[red]diverged[/red] at step {result.steps}"
    accuracy = f", accuracy {result.val_accuracy:.3f}" if result.val_accuracy is not None else ""
    return f"validation loss {result.val_loss:.3f}{accuracy} in {result.seconds:.1f} s of training"
