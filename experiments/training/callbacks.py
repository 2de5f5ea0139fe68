"""Callbacks of a run: code that is called after steps, rules that end a run early, and trackers.

A tracker is a callback that passes the rows of metrics to another program.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Strict
from torch import nn

import eigengraft
from eigengraft.component import Component
from eigengraft.errors import RecipeError, import_optional, warn_user
from eigengraft.signals import known_signals

from ..files import read_object
from ..tasks import Batch
from ..tasks.base import MetricName
from .outcome import Result, Tick
from .parallel import Ranks


def no_batch() -> Batch:
    """Raise ValueError, because the run has made no step yet."""
    raise ValueError("batch: the run has made no step yet; call `run.batch()` in a signal or after a step")


@dataclass(frozen=True)
class RunView:
    """The part of a run that a callback can read.

    model: model in training; in `finished`, its weights are the iterate that is evaluated.
    optimizer: optimizer in training.
    directory: directory of the run, where a callback may write files.
    rows: rows of metrics.jsonl so far, with the row of the present step if it has one.
    batch: function that returns this rank's rows of the batch of the present or last step.
    """

    model: nn.Module
    optimizer: eigengraft.Optimizer
    directory: Path
    rows: Sequence[Mapping[str, Any]]
    batch: Callable[[], Batch] = no_batch


class Callback(Component, ABC, family="callback"):
    """Code that is called on rank 0 after steps that have a row of metrics, and at the end of a run.

    Only `started` is called on every rank. A callback keeps no state: everything that it needs is in the rows, so that
    a continued run behaves like an uninterrupted one.
    """

    def started(self, run: RunView) -> None:
        """Called before the first step of this process, on every rank, also when a run continues.

        Signals of your own are provided in this method. For example, after `run.optimizer.provide("sharpness",
        function)` the optimizer calls `function` before each step. At that time the gradients of the batch
        `run.batch()` have been computed.
        """

    def stepped(self, run: RunView, tick: Tick) -> bool:
        """Called after a step that has a row of metrics. Return True to end the run, as if this were its last step."""
        return False

    def finished(self, run: RunView, result: Result) -> None:
        """Called after the last step, before result.json is written. The model then holds the evaluated iterate.

        If the process is killed before result.json is written, the continued run calls this again.
        """


class Patience(Callback):
    """End the run when none of the last `evaluations` validation losses is lower, by at least `least`, than the best
    validation loss before them.
    """

    kind: Literal["patience"] = "patience"
    evaluations: int = Field(
        default=5, ge=1, description="number of evaluations in a row without a better loss after which the run ends"
    )
    least: float = Field(
        default=0.0, ge=0, description="smallest decrease of the validation loss that counts as better"
    )

    def stepped(self, run: RunView, tick: Tick) -> bool:
        if tick.val_loss is None:
            return False
        losses = [row["val_loss"] for row in run.rows if row.get("val_loss") is not None]
        before, last = losses[: -self.evaluations], losses[-self.evaluations :]
        best, latest = min(before, default=math.inf), min(last, default=math.inf)
        return bool(before) and not (latest < best and latest <= best - self.least)


class StopAfter(Callback):
    """End the run after `step` steps, at the first row of metrics from then on. The learning rate follows the schedule
    of the full length.
    """

    kind: Literal["stop_after"] = "stop_after"
    step: int = Field(
        ge=1, examples=[100], description="number of steps after which the run ends, at the next row of metrics"
    )

    def stepped(self, run: RunView, tick: Tick) -> bool:
        return tick.step >= self.step


class Limits(Callback):
    """End the run at a step whose metric is worse than the limit of this step. Used by successive halving."""

    kind: Literal["limits"] = "limits"
    metric: MetricName = Field(
        default="val_loss", description="metric that has limits: val_loss, val_accuracy, or val.NAME"
    )
    larger: bool = Field(
        default=False, description="true: larger values of a metric val.NAME are better; false: smaller ones"
    )
    limits: tuple[Annotated[tuple[int, float], Strict(False)], ...] = Field(
        strict=False,
        examples=[[[100, 2.5]]],
        description="pairs (step, limit): the run continues after this step if the metric is not worse than the limit",
    )

    def stepped(self, run: RunView, tick: Tick) -> bool:
        value = run.rows[-1].get(self.metric)
        return value is not None and self.exceeded(tick.step, value)

    def exceeded(self, step: int, value: float) -> bool:
        """Return True if a metric at a step is worse than the limit of that step."""
        larger = self.larger or self.metric == "val_accuracy"
        return any(step == at and (value < limit if larger else value > limit) for at, limit in self.limits)


WriteValues = Callable[[int, Mapping[str, float]], None]
"""Function that writes the values of a step to a log: values by name of a column."""


class Tracker(Callback, ABC):
    """A callback that passes on the numbers of every row of metrics: losses, rate, times, norms of layers and counts.

    A tracker of your own is a component with the method `open`, a context manager.

    needs: name of a package that `open` imports; a run ends before its first step if it is not installed. Empty: none.
    """

    needs: ClassVar[str] = ""

    def started(self, run: RunView) -> None:
        if self.needs:
            import_optional(self.needs, f"callbacks.{self.needs}")

    @abstractmethod
    def open(self, run: RunView, step: int) -> AbstractContextManager[WriteValues]:
        """Open the log of a run, and return a function that writes the values of a step. Steps are ascending.

        The log is closed at the end of the run.

        step: step of the next row. Rows of an existing log from this step on are dropped.
        """


class TensorBoard(Tracker):
    """Event files of TensorBoard in the folder `tensorboard` of the run: `tensorboard --logdir runs`.

    Needs TensorBoard: `pip install tensorboard`.
    """

    kind: Literal["tensorboard"] = "tensorboard"
    needs: ClassVar[str] = "tensorboard"

    @contextmanager
    def open(self, run: RunView, step: int) -> Iterator[WriteValues]:
        from torch.utils.tensorboard import SummaryWriter

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        # A continued run repeats the steps after its checkpoint, and writes their rows again.
        with SummaryWriter(run.directory / "tensorboard", purge_step=step) as writer:
            yield write


class WandB(Tracker):
    """A run of Weights & Biases. It is offline unless `mode` is online; `wandb sync` uploads it later.

    Each start of a continued run is a new run of wandb, in the group of the run's directory. Needs wandb: `pip install
    wandb`.
    """

    kind: Literal["wandb"] = "wandb"
    needs: ClassVar[str] = "wandb"
    project: str = Field("eigengraft", min_length=1, description="project of the runs")
    mode: Literal["offline", "online"] = Field(
        "offline", description="offline: runs are stored on this machine; online: they are also uploaded at once"
    )

    @contextmanager
    def open(self, run: RunView, step: int) -> Iterator[WriteValues]:
        import wandb

        directory = run.directory
        config = read_object(directory / "config.json")
        name = "/".join(directory.absolute().parts[-2:])
        named = {"project": self.project, "name": name, "group": name}
        with wandb.init(mode=self.mode, dir=directory, config=config, reinit="create_new", **named) as began:
            yield lambda step, values: began.log(dict(values), step=step)


def may_provide(callback: Callback) -> bool:
    """Return True if a callback has a `started` of its own, which may provide signals."""
    return type(callback).started not in (Callback.started, Tracker.started)


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run. Rank 0 calls them, and every rank obeys their decisions.

    logs: functions that write to the open logs of the trackers; none before the first row.
    closing: stack that closes the logs.
    """

    callbacks: tuple[Callback, ...]
    run: RunView
    ranks: Ranks
    logs: list[WriteValues] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Call `started` of every callback, and check that all signals of the recipe are provided.

        Raises RecipeError for a missing signal that the recipe needs, and warns about any other missing signal.
        """
        for one in self.callbacks:
            one.started(self.run)
        for signal, where, required in self.run.optimizer.unprovided_signals():
            fault = f"{where}: nothing in this run provides the signal '{signal}'"
            remedy = f"provide it in a callback: `def started(self, run): run.optimizer.provide('{signal}', function)`"
            if by := known_signals()[signal].by:
                remedy = f"{remedy}; the library provides it by {by}"
            if required:
                raise RecipeError(f"{fault}; {remedy}")
            warn_user(f"{fault}, so the recipe runs without this signal; {remedy}")

    def stop(self, tick: Tick, finite: bool) -> bool:
        """Pass the new row of metrics to all trackers and, if the run has not diverged, to all callbacks. Return True
        if a callback ends the run.
        """
        return bool(self.callbacks) and self.ranks.on_first(lambda: self._stop(tick, finite))

    def finished(self, result: Result) -> None:
        """Call `finished` of every callback, and close the logs. Only rank 0 calls this."""
        for one in self.callbacks:
            one.finished(self.run, result)
        self.closing.close()

    def _stop(self, tick: Tick, finite: bool) -> bool:
        values = {name: v for name, v in self.run.rows[-1].items() if name != "step" and isinstance(v, (int, float))}
        if not self.logs:
            opened = (one.open(self.run, tick.step) for one in self.callbacks if isinstance(one, Tracker))
            self.logs.extend(map(self.closing.enter_context, opened))
        for write in self.logs:
            write(tick.step, values)
        return finite and True in [one.stepped(self.run, tick) for one in self.callbacks]
