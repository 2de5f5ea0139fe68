"""One training run, which continues from its last checkpoint after any kill with the same trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .experiment import Experiment
from .outcome import Result, Tick
from .rundir import RunDirectory
from .trainer import Trainer


def train(experiment: Experiment, directory: str | Path, progress: Callable[[Tick], None] | None = None) -> Result:
    """Run `experiment` in `directory`, or continue it there, or return the result it already has.

    A non-finite loss ends the run with `diverged=True`. Raises RecipeError when the directory holds another experiment.
    """
    run = RunDirectory(directory)
    run.claim(experiment.model_dump(mode="json"))
    with run.locked():
        done = run.read("result")
        if done is not None:
            return Result(**done)
        with surroundings(experiment):
            return Trainer(experiment, run).run(progress)


@contextmanager
def surroundings(experiment: Experiment) -> Iterator[None]:
    """The run's own random state and thread count; the caller's are restored."""
    threads = torch.get_num_threads()
    on_device = experiment.device != "cpu" and torch.cuda.is_available()
    with torch.random.fork_rng(devices=[experiment.device] if on_device else []):
        torch.manual_seed(experiment.seed)
        torch.set_num_threads(experiment.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
