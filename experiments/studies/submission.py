"""Workers of a study as jobs of a cluster, through submitit. All jobs share the directory of the study."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eigengraft.errors import RecipeError, import_optional
from eigengraft.optimizers.recipe.overrides import json_value

from .running import complete_study, prepare_study
from .study import Study, load_study


@dataclass(frozen=True)
class StudyJob:
    """A job that does runs until the study has ended. submitit calls it again after preemption or a time-out.

    study: the study as plain data.
    directory: directory of the study, which all jobs see.
    workers: number of processes of the job.
    """

    study: Mapping[str, Any]
    directory: str
    workers: int

    def __call__(self) -> dict[str, str]:
        """Do runs until the study has ended. Return the reason of each failed run by its directory."""
        return complete_study(load_study(self.study), Path(self.directory), self.workers)

    def checkpoint(self) -> Any:
        """Return a new submission of this job. Its runs continue from their last checkpoints."""
        return import_optional("submitit", "--submit").helpers.DelayedSubmission(self)


def submit_study(
    study: Study, directory: Path, cluster: str, jobs: int, workers: int, options: Sequence[str] = ()
) -> list[Any]:
    """Check the study, submit its jobs, and return submitit's job objects.

    cluster: "slurm", "local" for processes of this machine, or another name that submitit accepts.
    jobs: number of jobs.
    workers: number of processes of each job.
    options: `name=value` arguments of `submitit.AutoExecutor.update_parameters`, such as slurm_partition=gpu.
    """
    submitit = import_optional("submitit", "--submit")
    pairs = [_option(option) for option in options]
    prepare_study(study, directory)
    logs = (directory / "jobs").absolute()
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        executor.update_parameters(name=study.name, cpus_per_task=workers, **dict(pairs))
    except (ValueError, NameError, RuntimeError, TypeError) as error:
        raise RecipeError(f"--submit, --option: submitit refuses '{cluster}' or {list(options)}: {error}") from None
    job = StudyJob(study.model_dump(mode="json"), str(directory.absolute()), workers)
    with executor.batch():
        submitted = [executor.submit(job) for _ in range(jobs)]
    return submitted


def _option(option: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise RecipeError(f"--option: name=value is required, got '{option}'")
    return name, json_value(value)
