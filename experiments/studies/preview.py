"""What a study would run, and what that would take, without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.routing import describe_model

from ..training.experiment import Experiment
from .plan import PlannedRun, expected_seconds, plan_runs
from .study import Study
from .tuning.equal_seconds import plan_timing
from .tuning.rounds import plan_tuning


@dataclass(frozen=True)
class CellPreview:
    """The runs of one cell.

    labels: label by axis.
    runs: number of runs, one for each seed.
    complete: how many of them have a result.
    tuning: largest number of runs of its search; 0: there is none.
    timing: number of timed runs still to be done.
    seconds: expected time of one run, as in the order of a study; a guess to a factor of a few.
    state_bytes: bytes of the optimizer's state, as planned.
    parameters: trainable numbers of the model.
    """

    labels: Mapping[str, str]
    runs: int
    complete: int
    tuning: int
    timing: int
    seconds: float
    state_bytes: int
    parameters: int


@dataclass(frozen=True)
class StudyPreview:
    """All cells of a study, and the configurations to compare: panel -> label on the compared axis -> configuration."""

    name: str
    cells: tuple[CellPreview, ...]
    configs: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def runs(self) -> int:
        """The largest number of runs still to be done."""
        return sum(cell.runs - cell.complete + cell.tuning + cell.timing for cell in self.cells)

    @property
    def seconds(self) -> float:
        """The expected time of these runs, one after the other; timed ones are taken for whole ones."""
        runs = ((cell.runs - cell.complete + cell.tuning + cell.timing, cell.seconds) for cell in self.cells)
        return sum(count * seconds for count, seconds in runs)


def preview_study(study: Study, directory: Path) -> StudyPreview:
    """Check every cell of a study and tell what is to be done in `directory`. Raises RecipeError; writes nothing."""
    plan_runs(study)  # names every cell that is wrong
    timing, study = plan_timing(study, directory)
    planned = plan_runs(study)
    plan_tuning(study, directory)  # checks the fields that are tuned
    seconds = expected_seconds(planned)
    sizes: dict[str, tuple[int, int]] = {}
    cells: dict[str, list[PlannedRun]] = {}
    for run in planned:
        cells.setdefault(Path(run.directory).parent.name, []).append(run)
    found, configs = [], dict[str, dict[str, dict[str, Any]]]()
    axis, _ = study.compared
    for runs in cells.values():
        first = runs[0]
        key = first.experiment.task.model_dump_json() + first.experiment.run_recipe.model_dump_json()
        if key not in sizes:
            sizes[key] = _sizes(first.experiment)
        complete = sum((directory / run.directory / "result.json").exists() for run in runs)
        tuning = 0 if study.tune is None else study.tune.trials * len(study.tune.seeds)
        timed = sum(first.labels.items() <= run.labels.items() for run in timing)
        found.append(
            CellPreview(first.labels, len(runs), complete, tuning, timed, seconds[first.directory], *sizes[key])
        )
        panel = ", ".join(label for other, label in first.labels.items() if other != axis)
        configs.setdefault(panel, {})[first.labels[axis]] = first.experiment.model_dump(mode="json")
    return StudyPreview(study.name, tuple(found), configs)


def _sizes(experiment: Experiment) -> tuple[int, int]:
    """Bytes of state and trainable numbers; no state is made."""
    model = experiment.task.new_model(0)
    infos = describe_model(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtypes = [parameter.dtype for parameter in trained]
    planned = plan(experiment.run_recipe, [infos[id(parameter)] for parameter in trained], (1,), "ddp", dtypes)
    return int(planned.state.max()), sum(parameter.numel() for parameter in trained)
