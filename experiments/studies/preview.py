"""A preview of a study: its runs, their expected time and memory. Nothing is run or written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..reports.comparison import describe_comparisons, method_axis
from ..reports.records import Records, Run, group_by
from .plan import cells as cells_of
from .plan import largest_search, plan_study, plan_timing, unfinished
from .run_cost import study_cost
from .study import Study


@dataclass(frozen=True)
class CellPreview:
    """The runs of one cell of a study. A cell is one combination of labels, with its runs over seeds.

    labels: label by axis.
    runs: number of runs, one for each seed.
    complete: number of runs that have a result.
    tuning: largest number of runs that the search in the cell still needs; 0 without a search.
    timing: number of runs that only measure the time of a step and are not done yet.
    seconds: expected seconds of one run, see `study_cost`.
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
    """The runs of all cells of a study, and the configurations of the cells. Cells are described in `CellPreview`.

    seconds: expected seconds of all runs that are not done yet, if they run one after the other. Runs of searches and
        timed runs are included.
    configs: configurations of the cells, in nested mappings. The first key is the name of a compared axis. The second
        has the labels of the cell on all other axes, separated by commas. The third is its label on the compared axis.
    comparisons: a sentence for each comparison in the report of the study.
    measured: number of finished runs whose time has corrected the expected seconds; 0: the seconds are only guessed.
    """

    name: str
    cells: tuple[CellPreview, ...]
    seconds: float
    configs: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
    comparisons: tuple[str, ...]
    measured: int

    @property
    def runs(self) -> int:
        """Number of runs that are not done yet. For a search it is the largest number that it may need."""
        return sum(cell.runs - cell.complete + cell.tuning + cell.timing for cell in self.cells)


def preview_study(study: Study, directory: Path) -> StudyPreview:
    """Check a study by `plan_study`, which raises RecipeError, and return a preview of its runs. Nothing is written.

    directory: directory of the study. Runs that it already has count as complete.
    """
    checked = plan_study(study, directory)
    timing, study = plan_timing(study, directory)
    planned = checked.own
    searches = {} if study.tune is None else {c.directory: largest_search(study, c, directory) for c in cells_of(study)}
    cost = study_cost([*timing, *planned], directory)
    seconds = cost.seconds
    left = [run.directory for run in unfinished(planned, directory)]
    total = sum(seconds[place] for place in [*(run.directory for run in timing), *left])
    cells = group_by(planned, lambda run: run.cell)
    of_report = tuple(Run(dict(run.labels), run.seed, directory / run.directory) for run in planned)
    records = Records(study.name, study.description, study.measured, *study.compared, of_report)
    axes = dict.fromkeys(axis for axis in (records.compare, method_axis(records)) if axis is not None)
    found, configs = [], {axis: dict[str, dict[str, dict[str, Any]]]() for axis in axes}
    for name, runs in cells.items():
        first = runs[0]
        complete = len({run.directory for run in runs}.difference(left))
        tuning = searches.get(name, 0)
        total += tuning * seconds[first.directory]
        timed = sum(first.labels.items() <= run.labels.items() for run in timing)
        counts, own = (len(runs), complete, tuning, timed), cost.costs[first.directory]
        found.append(CellPreview(first.labels, *counts, seconds[first.directory], own.state_bytes, own.parameters))
        for axis, panels in configs.items():
            panel = ", ".join(label for other, label in first.labels.items() if other != axis)
            panels.setdefault(panel, {})[first.labels[axis]] = first.experiment.model_dump(mode="json")
    described = tuple(describe_comparisons(records))
    return StudyPreview(study.name, tuple(found), total, configs, described, cost.measured)
