"""One run of a study in a worker process, which holds it meanwhile."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...files import write_text
from ...reports.run import fault_file
from ...training.loading import load_experiment
from ...training.outcome import Result, Tick
from ...training.train import train
from .rendezvous import Rendezvous

ATTEMPTS = 3
"""How often a run is begun whose process dies; one that raised an error is not begun again by the same command."""


def train_claimed(job: tuple[dict[str, Any], str, Rendezvous], report: Callable[[Tick], None]) -> Result | None:
    """Train one run in a worker, None if another worker does. The experiment is plain data: its imports come first.

    A job is the experiment, the run's directory relative to that of the study, and where the workers meet.
    """
    config, run, rendezvous = job
    directory = rendezvous.directory / run
    fault = fault_file(directory)
    with rendezvous.claims(run).hold() as number:
        if number == 0:
            return None
        rendezvous.fetch([run])  # another worker may have ended it just before
        fault.unlink(missing_ok=True)
        rendezvous.publish(run)
        try:
            if number > ATTEMPTS:
                raise RuntimeError(f"the processes of {number - 1} attempts died")
            return train(load_experiment(config), directory, _now_and_then(report))
        except Exception:
            with suppress(OSError):  # the disk may be full, which the error itself says
                write_text(fault, traceback.format_exc())  # before other workers see that the run is free
            raise
        finally:
            rendezvous.publish(run)


def _now_and_then(report: Callable[[Tick], None]) -> Callable[[Tick], None]:
    """`report`, called at most five times a second."""
    last = 0.0

    def progress(tick: Tick) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 0.2:
            last = now
            report(tick)

    return progress
