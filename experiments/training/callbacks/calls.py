"""The callbacks of one run: when each is called, and the logs that trackers have open meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

import eigengraft
from eigengraft.errors import RecipeError, warn_user

from ...tasks import Batch
from ..outcome import Result, Tick
from ..parallel.ranks import Ranks
from ..rundir import RunDirectory
from .base import Callback, RunView
from .trackers import Log, Tracker


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run with what they see; rank 0 calls them, and every rank does what they decide.

    logs: what trackers have opened, by their place, with the step of the last row that was passed on.
    """

    callbacks: tuple[Callback, ...]
    model: nn.Module
    optimizer: eigengraft.Optimizer
    directory: RunDirectory
    ranks: Ranks
    batch: Callable[[], Batch]
    logs: dict[int, tuple[Log, int]] = field(default_factory=dict)

    def start(self) -> None:
        """Call `started` of every callback, and check that every signal that the recipe asks for can be provided."""
        view = self._view()
        for one in self.callbacks:
            one.started(view)
        for signal, where, required in self.optimizer.unprovided_signals():
            wanted = f"{where}: the signal '{signal}' is provided by nothing in this run"
            remedy = f"a callback provides it: `def started(self, run): run.optimizer.provide('{signal}', function)`"
            if required:
                raise RecipeError(f"{wanted}; {remedy}")
            warn_user(f"{wanted}, and the recipe runs without it; {remedy}")

    def stop(self, tick: Tick) -> bool:
        """Whether a callback ends the run after a step whose row of metrics is written; all of them are called."""
        if not self.callbacks:
            return False
        return self.ranks.on_first(lambda: self._stop(tick))

    def finished(self, result: Result) -> None:
        """Tell every callback the result, and trackers a last row that they have not seen."""
        if not self.callbacks or not self.ranks.first:
            return
        view = self._view()
        self._track(view)
        for one in self.callbacks:
            one.finished(view, result)
        for log, _ in self.logs.values():
            log.close()

    def _stop(self, tick: Tick) -> bool:
        view = self._view()
        self._track(view)
        return True in [one.stepped(view, tick) for one in self.callbacks]

    def _track(self, view: RunView) -> None:
        """Pass the last row on to every tracker that has not seen it."""
        row = view.rows[-1]
        step, values = row["step"], {name: v for name, v in row.items() if name != "step" and v is not None}
        for place, one in enumerate(self.callbacks):
            if isinstance(one, Tracker):
                log, last = self.logs.get(place) or (one.open(view, step), step - 1)
                if step > last:
                    log.log(step, values)
                self.logs[place] = log, step

    def _view(self) -> RunView:
        return RunView(self.model, self.optimizer, self.directory.path, self.directory.rows(), self.batch)
