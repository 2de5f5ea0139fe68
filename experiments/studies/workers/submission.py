"""Workers of a study as jobs of a cluster, through submitit: each joins the others by the directory of the study."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.overrides import json_value

from ..running import complete_study, prepare_study
from ..study import Study, load_study


@dataclass(frozen=True)
class StudyJob:
    """One job: a worker that does runs until the study has ended; called again after it was preempted or timed out.

    study: the study as plain data.
    directory: that all jobs see.
    workers: processes of the job.
    """

    study: Mapping[str, Any]
    directory: str
    workers: int

    def __call__(self) -> dict[str, str]:
        """Do runs; return the reason of every run that failed, by its directory."""
        return complete_study(load_study(self.study), Path(self.directory), self.workers)

    def checkpoint(self) -> Any:
        """Submit this job again; its runs go on from their last checkpoints."""
        return _submitit().helpers.DelayedSubmission(self)


def submit_study(
    study: Study, directory: Path, cluster: str, jobs: int, workers: int, options: Sequence[str] = ()
) -> list[Any]:
    """Check the study and submit `jobs` jobs of `workers` processes; returns submitit's jobs.

    cluster: "slurm", "local" for processes of this machine, or another that submitit knows.
    options: name=value, for `submitit.AutoExecutor.update_parameters`, as slurm_partition=gpu and timeout_min=60.
    """
    submitit = _submitit()
    pairs = [_option(option) for option in options]
    prepare_study(study, directory)
    logs = (directory / "jobs").absolute()
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        executor.update_parameters(name=study.name, cpus_per_task=workers, **dict(pairs))
    except (ValueError, NameError, RuntimeError, TypeError) as error:
        raise RecipeError(f"--submit: a cluster and options that submitit knows are required ({error})") from None
    job = StudyJob(study.model_dump(mode="json"), str(directory.absolute()), workers)
    with executor.batch():
        submitted = [executor.submit(job) for _ in range(jobs)]
    return submitted


def _option(option: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise RecipeError(f"--option: the form name=value is required, got '{option}'")
    return name, json_value(value)


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise RecipeError("--submit: submitit is required (pip install eigengraft[slurm]), got none") from None
    return submitit
