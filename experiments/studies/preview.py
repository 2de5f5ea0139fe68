"""A preview of a study: its runs, their expected time and memory. Nothing is run or written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.routing import describe_model

from ..reports.comparison import describe_comparisons, method_axis
from ..reports.records import Records, Run
from ..training.experiment import Experiment
from .plan import PlannedRun, expected_seconds, largest_search, plan_runs, plan_timing, unfinished
from .plan import cells as cells_of
from .study import Study


@dataclass(frozen=True)
class CellPreview:
    """The runs of one cell.

    labels: label by axis.
    runs: number of runs, one for each seed.
    complete: number of runs that have a result.
    tuning: largest number of runs that the search in the cell still needs; 0 without a search.
    timing: number of runs that only measure the time of a step and are not done yet.
    seconds: expected time of one run in seconds, accurate to a factor of a few.
    state_bytes: planned bytes of optimizer state.
    parameters: number of trainable entries of the model.
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
    """All cells of a study, and their configurations.

    seconds: expected seconds of all runs that are not done yet, if they run one after the other. Runs of searches and
        timed runs are included.
    configs: compared axis -> labels of all other axes, as one text -> label of the compared axis -> configuration of
        the cell.
    comparisons: a sentence for each comparison in the report of the study.
    """

    name: str
    cells: tuple[CellPreview, ...]
    seconds: float
    configs: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
    comparisons: tuple[str, ...]

    @property
    def runs(self) -> int:
        """Number of runs that are not done yet. For a search it is the largest number that it may need."""
        return sum(cell.runs - cell.complete + cell.tuning + cell.timing for cell in self.cells)


def preview_study(study: Study, directory: Path) -> StudyPreview:
    """Check every cell of a study and return the runs that `directory` lacks. Raises RecipeError; writes nothing."""
    plan_runs(study)  # reports every invalid cell
    timing, study = plan_timing(study, directory)
    planned = plan_runs(study)
    searches = {} if study.tune is None else {c.directory: largest_search(study, c, directory) for c in cells_of(study)}
    seconds = expected_seconds([*timing, *planned])
    left = [run.directory for run in unfinished(planned, directory)]
    total = sum(seconds[place] for place in [*(run.directory for run in timing), *left])
    sizes: dict[str, tuple[int, int]] = {}
    cells: dict[str, list[PlannedRun]] = {}
    for run in planned:
        cells.setdefault(Path(run.directory).parent.name, []).append(run)
    of_report = tuple(Run(dict(run.labels), run.seed, directory / run.directory) for run in planned)
    records = Records(study.name, study.description, study.measured, *study.compared, of_report)
    axes = dict.fromkeys(axis for axis in (records.compare, method_axis(records)) if axis is not None)
    found, configs = [], {axis: dict[str, dict[str, dict[str, Any]]]() for axis in axes}
    for name, runs in cells.items():
        first = runs[0]
        key = first.experiment.task.model_dump_json() + first.experiment.run_recipe.model_dump_json()
        if key not in sizes:
            sizes[key] = _sizes(first.experiment)
        complete = len({run.directory for run in runs}.difference(left))
        tuning = searches.get(name, 0)
        total += tuning * seconds[first.directory]
        timed = sum(first.labels.items() <= run.labels.items() for run in timing)
        found.append(
            CellPreview(first.labels, len(runs), complete, tuning, timed, seconds[first.directory], *sizes[key])
        )
        for axis, panels in configs.items():
            panel = ", ".join(label for other, label in first.labels.items() if other != axis)
            panels.setdefault(panel, {})[first.labels[axis]] = first.experiment.model_dump(mode="json")
    return StudyPreview(study.name, tuple(found), total, configs, tuple(describe_comparisons(records)))


def _sizes(experiment: Experiment) -> tuple[int, int]:
    """Return the planned bytes of optimizer state and the number of trainable entries. No state is allocated."""
    model = experiment.task.new_model(0)
    infos = describe_model(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtypes = [parameter.dtype for parameter in trained]
    planned = plan(experiment.run_recipe, [infos[id(parameter)] for parameter in trained], (1,), "ddp", dtypes)
    return int(planned.state.max()), sum(parameter.numel() for parameter in trained)
