"""One training run, which continues from its last checkpoint after any kill with the same trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from . import sharded_checkpoint
from .environment import describe_provenance, require_provenance
from .experiment import Experiment
from .outcome import Result, Tick
from .parallel.process_group import process_group, report_lost_rank
from .parallel.ranks import Ranks
from .rundir import RunDirectory
from .trainer import Trainer


def train(
    experiment: Experiment,
    directory: str | Path,
    progress: Callable[[Tick], None] | None = None,
    checked: bool = False,
) -> Result:
    """Run `experiment` in `directory`, or continue it there, or return the result it already has.

    With `parallel`, every process that torchrun started calls this; rank 0 owns the directory and reports progress.
    A non-finite loss ends the run with `diverged=True`. Raises RecipeError when the directory holds another experiment,
    or one that other code or data made, and DistributedError when another rank is lost. With `checked` a stage that
    breaks its contract raises ContractError.
    """
    run = RunDirectory(directory)
    with (
        process_group(experiment.parallel, experiment.device) as ranks,
        report_lost_rank(ranks, lambda: _advice(run)),
        ExitStack() as stack,
    ):

        def claim() -> dict[str, Any] | None:
            run.claim(experiment.model_dump(mode="json"))
            stack.enter_context(run.locked())
            result = run.read("result")
            if result is not None:
                data = experiment.task.load().fingerprint
                require_provenance(run, describe_provenance(data, experiment.imports))
            return result

        done = ranks.on_first(claim)
        if done is not None:
            return Result(**done)
        with isolated_run(experiment, ranks):
            return Trainer(experiment, run, ranks, checked).run(progress if ranks.first else None)


def _advice(run: RunDirectory) -> str:
    last = sharded_checkpoint.newest_checkpoint(run)
    where = f"from step {last.name.rpartition('-')[2]}" if last is not None else "from the start"
    return f"Give the same command again to continue {where}, with any number of ranks."


@contextmanager
def isolated_run(experiment: Experiment, ranks: Ranks | None = None) -> Iterator[None]:
    """Give the run its own random state and thread count; those of the caller are restored at the end."""
    threads = torch.get_num_threads()
    device = experiment.device if ranks is None else str(ranks.device)
    on_device = device != "cpu" and torch.cuda.is_available()
    with torch.random.fork_rng(devices=[device] if on_device else []):
        torch.manual_seed(experiment.seed)
        torch.set_num_threads(experiment.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
