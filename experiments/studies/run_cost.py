"""The expected time of the runs of a study, and the planned memory of their optimizers. Nothing is run.

The time is guessed from the number of floating-point operations, for an idle core of a common desktop. The speed of the
machine and its other load may make the guess wrong by a factor of 10. Measured times of finished runs correct it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from eigengraft.optimizers.plan.plan import plan
from eigengraft.optimizers.recipe.routing import describe_model

from ..files import files_named
from ..tasks.base import training_batch, validation_batches
from ..training.callbacks import StopAfter
from ..training.experiment import Experiment
from ..training.rundir import RunDirectory
from .plan import PHASES, PlannedRun

OPERATIONS = 5e10
"""Assumed operations per second of one core. A core with AVX-512 multiplies float32 matrices of order 64 to 512 at 7e10
to 1e11 per second; other operations of a step are slower. Times of finished runs correct the guess."""
STEP_SECONDS, TENSOR_SECONDS, EVALUATION_SECONDS, RUN_SECONDS = 2e-3, 1e-4, 1e-3, 0.1
"""Assumed seconds that do not depend on the size of the model: of a step, of each parameter in a step, of each batch of
an evaluation, and of a run for its files. Steps of small models of 4 to 25 parameters took 1.8 to 5 ms (CPU time)."""


@dataclass(frozen=True)
class RunCost:
    """The guessed seconds of a run, and the planned size of its optimizer.

    step: seconds of a step.
    fixed: the part of `step` that does not depend on the size of the model.
    evaluation: seconds of an evaluation.
    state_bytes: bytes of optimizer state.
    parameters: number of trainable entries of the model.
    """

    step: float
    fixed: float
    evaluation: float
    state_bytes: int
    parameters: int


@dataclass(frozen=True)
class StudyCost:
    """The expected time and memory of runs.

    seconds: expected seconds of each run, by its directory, corrected by the times of finished runs.
    costs: seconds of a step and bytes of state of each run, by its directory, as guessed without finished runs.
    measured: number of finished runs whose times corrected `seconds`.
    """

    seconds: Mapping[str, float]
    costs: Mapping[str, RunCost]
    measured: int


def study_cost(planned: Iterable[PlannedRun], directory: Path) -> StudyCost:
    """Return the expected cost of runs. The seconds are guessed and, if `directory` has finished runs, corrected.

    A cell is one combination of labels, with its runs over seeds. The guessed seconds of its runs are multiplied by a
    factor: the measured time of a step divided by the guessed time. The measured time is the median over finished runs
    of the cell, including runs of searches and timed runs.

    For a cell without finished runs, the factor is the median of the factors of cells with the same task. Without such
    cells, it is a weighted mean of two medians of factors. One is over all cells whose guessed step is mostly `fixed`
    (see `RunCost`), and its weight is the fixed part of the guessed step of the run. The other is over all other cells,
    and its weight is the rest of the step. A median over no cells counts as 1.
    """
    runs, measured, known = list(planned), dict[str, list[float]](), dict[str, RunCost]()
    tasks, costs = dict[str, str](), dict[str, RunCost]()
    of_cells, of_tasks = dict[str, float](), defaultdict[str, list[float]](list)
    of_kinds = defaultdict[bool, list[float]](list)  # by whether most of a step is fixed
    for run in runs:
        task = tasks[run.directory] = run.experiment.task.model_dump_json()
        key = task + run.experiment.run_recipe.model_dump_json(exclude={"lr"})
        if key not in known:
            known[key] = _guessed(run.experiment)
        cost = costs[run.directory] = known[key]
        if run.cell not in measured:
            measured[run.cell] = _step_seconds(directory, run.cell)
        if measured[run.cell]:
            factor = of_cells.setdefault(run.cell, median(measured[run.cell]) / cost.step)
            of_tasks[task].append(factor)
            of_kinds[2 * cost.fixed > cost.step].append(factor)
    fixed, sized = (median(of_kinds[kind] or [1.0]) for kind in (True, False))
    seconds = dict[str, float]()
    for run in runs:
        cost = costs[run.directory]
        mixed = (cost.fixed * fixed + (cost.step - cost.fixed) * sized) / cost.step
        ends = (one.step for one in run.experiment.callbacks if isinstance(one, StopAfter))
        steps = min([run.experiment.steps, *ends])
        guess = RUN_SECONDS + steps * cost.step + math.ceil(steps / run.experiment.eval_every) * cost.evaluation
        expected = median(of_tasks[tasks[run.directory]] or [mixed])
        seconds[run.directory] = guess * of_cells.get(run.cell, expected)
    return StudyCost(seconds, costs, sum(map(len, measured.values())))


def _guessed(experiment: Experiment) -> RunCost:
    """Return the guessed cost of a run. No state is allocated.

    Each weight costs 6 floating-point operations for each target of the batch in a step, and 2 for each validation
    target in an evaluation. The data of the task are loaded, so that missing data are found before the first run.
    """
    model, data = experiment.task.new_model(0), experiment.task.new_data()
    infos = describe_model(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    recipe, dtypes = experiment.run_recipe, [parameter.dtype for parameter in trained]
    planned = plan(recipe, [infos[id(parameter)] for parameter in trained], (1,), "ddp", dtypes)
    weights = sum(parameter.numel() for parameter in trained)
    targets = training_batch(experiment.task, data, 0, 0).targets.numel()
    batches = [batch.targets.numel() for batch in validation_batches(experiment.task, data)]
    optimizer = float(planned.work[0]) * (1e-3 if recipe.distribution.work else 1 / OPERATIONS)
    fixed = STEP_SECONDS + TENSOR_SECONDS * len(trained)
    return RunCost(
        fixed + 6 * weights * targets / OPERATIONS + optimizer,
        fixed,
        EVALUATION_SECONDS * len(batches) + 2 * weights * sum(batches) / OPERATIONS,
        int(planned.state.max()),
        weights,
    )


def _step_seconds(directory: Path, cell: str) -> list[float]:
    """Return the measured training seconds per step of each finished run of a cell."""
    paths = [path for phase in PHASES for path in files_named("result.json", directory / phase / cell)]
    found = (RunDirectory(path.parent).read("result") or {} for path in paths)
    return [one["seconds"] / one["steps"] for one in found if one.get("seconds") and one.get("steps")]
