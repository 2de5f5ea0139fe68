"""The progress display of a study: a bar for all of it, one for each run under way, a line left behind by each run."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..studies.running import News
from ..training.outcome import Result, Tick


class Board:
    """Context manager; `hear` every News of a study of `runs` runs of which `left` are still to be done."""

    def __init__(self, console: Console, runs: int, left: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[figures]}"))
        self.progress = Progress(*columns, console=console, transient=True)
        self.runs, self.done = runs, runs - left
        self.began = monotonic()
        self.start_fraction: float | None = None
        self.all = self.progress.add_task("study", total=1.0, figures="")
        self.active: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        if self.done:
            self.progress.console.print(f"{self.done} of {self.runs} runs are already complete")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def hear(self, news: News) -> None:
        key = news.run.directory
        if news.kind == "started":
            self.active[key] = self.progress.add_task(
                escape(news.run.title), total=news.run.experiment.steps, figures=""
            )
        elif news.kind == "progress":
            self.progress.update(self.active[key], completed=news.value.step, figures=_tick(news.value))
        else:
            self.progress.remove_task(self.active.pop(key))
            self.done += 1
            text = _result(news.value) if news.kind == "done" else "[red]failed[/red]"
            self.progress.console.print(f"{escape(news.run.title)}: {text}", highlight=False, soft_wrap=True)
        self.progress.update(self.all, completed=news.fraction, figures=self._figures(news.fraction))

    def _figures(self, fraction: float) -> str:
        """Runs done and the time left, at the pace seen since the start."""
        self.start_fraction = fraction if self.start_fraction is None else self.start_fraction
        gained, spent = fraction - self.start_fraction, monotonic() - self.began
        text = f"{self.done} of {self.runs} runs"
        if gained <= 0 or spent < 5 or fraction >= 1:
            return text
        minutes, seconds = divmod(round(spent * (1 - fraction) / gained), 60)
        return f"{text}, about {minutes}:{seconds:02d} left"


def _tick(tick: Tick) -> str:
    return f"step {tick.step}/{tick.steps}  loss {tick.loss:.3f}  {tick.step_ms:.1f} ms"


def _result(result: Result) -> str:
    if result.val_loss is None:
        return f"[red]diverged[/red] at step {result.steps}"
    accuracy = f", accuracy {result.val_accuracy:.3f}" if result.val_accuracy is not None else ""
    return f"validation loss {result.val_loss:.3f}{accuracy} in {result.seconds:.1f} s of training"
