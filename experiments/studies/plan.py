"""The runs of a study: checked experiments of every cell, the runs of searches, and short timed runs.

A cell is one combination of labels, one from each axis, with its runs over seeds. Every cell becomes a checked
experiment before anything is run. The timed runs measure the time of a step. If cells train for equal seconds, these
times determine their numbers of steps.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from eigengraft.component import validated
from eigengraft.errors import RecipeError, counted, first_lines, name_some

from ..files import files_named, make_directory, short_name
from ..provenance import provenance_changes
from ..reports.records import MANIFEST, METRICS, TUNING, Metric, Run, TunedCell, cell_name
from ..tasks import Fingerprint, Task
from ..training.callbacks import Limits, StopAfter, may_provide
from ..training.environment import describe_provenance
from ..training.experiment import Experiment, load_experiment
from ..training.rundir import RunDirectory, config_changes
from ..training.train import require_startable
from .study import Setting, Study, combinations, inside
from .tuning import Trial, Tuning, Values, trial_name

Phase = Literal["timing", "tuning", "study"]
PHASES = tuple(map(Path, ("", "timing", TUNING)))
"""Directories of a study that contain directories of cells: runs of the study itself, of timing and of searches."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study.

    labels: label by axis.
    seed: seed of the run.
    experiment: complete experiment, with the seed.
    directory: directory of the run, relative to that of the study.
    """

    labels: Mapping[str, str]
    seed: int
    experiment: Experiment
    directory: str

    @property
    def cell(self) -> str:
        """Name of the directory with the runs of this combination of labels, one for each seed."""
        phase, *rest = Path(self.directory).parts
        return rest[0] if Path(phase) in PHASES else phase

    @property
    def title(self) -> str:
        """Short name of the run, for displays of progress."""
        return "/".join([*self.labels.values(), f"seed-{self.seed}"])


@dataclass(frozen=True)
class Cell:
    """One combination of labels, one from each axis. It is run once with each seed of the study.

    labels: label by axis.
    changes: values by dotted path in which the cell differs from the base experiment.
    """

    labels: Mapping[str, str]
    changes: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Labels of all axes as `axis=label`, separated by commas."""
        return cell_name(self.labels)

    @property
    def directory(self) -> str:
        """Name of the directory that contains the runs of the cell."""
        return short_name(self.name)


def cells(study: Study) -> Iterator[Cell]:
    """Yield every cell of the study.

    The labels of a cell set values, axis by axis. The items of the field `settings` that apply to the cell come after
    them. If a path is set several times, the last value is used.
    """
    for labels in combinations(study.axes, study.exclude):
        changes = {path: v for axis, label in labels.items() for path, v in study.axes[axis][label].items()}
        for setting in study.settings:
            changes |= setting.set if inside(setting.when, labels) else {}
        yield Cell(labels, changes)


def plan_runs(study: Study, tuned: Mapping[str, TunedCell] | None = None) -> list[PlannedRun]:
    """Return all runs of the study, cell by cell. Seeds vary fastest.

    Raises RecipeError that names every invalid cell.

    tuned: result of the search in a cell, by name of the cell. Its best values are set in the cell. None: no searches.
    """
    planned, faults = list[PlannedRun](), dict[str, list[str]]()
    for cell in cells(study):
        found = (tuned or {}).get(cell.name)
        try:
            experiment = changed(study.base, {**cell.changes, **({} if found is None else found.values)})
        except RecipeError as error:
            for line in str(error).splitlines():
                faults.setdefault(line, []).append(cell.name)
            continue
        if study.metric == "val_accuracy" and not experiment.task.reports_accuracy:
            fault = f"metric: the task {experiment.task!r} reports no accuracy; use val_loss"
            faults.setdefault(fault, []).append(cell.name)
        planned += [
            PlannedRun(cell.labels, s, experiment.replace(seed=s), f"{cell.directory}/seed-{s}") for s in study.seeds
        ]
    if faults:
        raise RecipeError("\n".join(_located(study, fault, names) for fault, names in faults.items()))
    return planned


def _located(study: Study, fault: str, names: Sequence[str]) -> str:
    """Return the text of a fault with its place before it.

    The place is "axes." if the text begins with the name of an axis and all cells have the fault. Otherwise, the place
    is the names of up to four cells that have the fault.

    names: names of the cells that have the fault.
    """
    is_axis = fault.partition(":")[0] in study.axes and len(names) == sum(1 for _ in cells(study))
    return f"axes.{fault}" if is_axis else f"{name_some(names, 4)}: {fault}"


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Experiment:
    """Return the experiment `base` with values set by dotted path. Raises RecipeError if the result is invalid.

    changes: values by dotted path.
    """
    # Whole fields, such as `recipe`, are set before paths into them, because a path such as `recipe.update.rms.beta`
    # then changes the recipe of the cell, not that of the base.
    complete = {path: value for path, value in changes.items() if path in Experiment.model_fields}
    deep = [f"{path}={json.dumps(value)}" for path, value in changes.items() if path not in complete]
    return load_experiment({**base, **complete}, deep)


def unfinished(planned: Iterable[PlannedRun], directory: Path) -> list[PlannedRun]:
    """Return the runs that have no result in `directory`. Raises RecipeError for a result file that is cut short."""
    return [run for run in planned if RunDirectory(directory / run.directory).read("result") is None]


def require_metric(study: Study, planned: Iterable[PlannedRun]) -> None:
    """Raise RecipeError if the metric of the study is `val.NAME` and a task does not report it.

    To find the metrics of a task, a new model is evaluated once.
    """
    if study.metric in METRICS:
        return
    for task in dict.fromkeys(run.experiment.task for run in planned):
        reported = task.evaluate(task.new_model(0), task.new_data(), torch.device("cpu")).columns
        if study.metric not in reported:
            accuracy = ["val_accuracy"] if task.reports_accuracy else []
            raise RecipeError(
                f"metric: the task {getattr(task, 'kind', '?')} does not report {study.metric}. It reports "
                f"{', '.join(['val_loss', *accuracy, *reported])}. Choose one of these, or let the method `metrics` of "
                f"the task return {study.metric.removeprefix('val.')!r}"
            )


def require_startable_cells(study: Study, planned: Iterable[PlannedRun]) -> None:
    """Raise RecipeError that names every cell whose runs would end before their first step."""
    known, faults = dict[str, str](), dict[str, dict[str, None]]()
    for run in planned:
        key = run.experiment.model_dump_json(exclude={"name", "seed", "lr", "schedule"})
        if key not in known:
            known[key] = ""
            try:
                require_startable(run.experiment)
            except RecipeError as error:
                known[key] = str(error)
        if known[key]:
            faults.setdefault(known[key], {})[cell_name(run.labels)] = None
    if faults:
        raise RecipeError("\n".join(_located(study, fault, list(names)) for fault, names in faults.items()))


_REMEDY = "Choose another `name` for the study or another directory with --out (in Python: `directory`)"
"""Advice for a study whose directory has runs that it cannot continue."""


@dataclass(frozen=True)
class StudyPlan:
    """The checked runs of a study. Nothing has been run or written.

    phase: "timing" if `next` only measures the time of a step, "tuning" if it has the next runs of searches, "study" if
        it has the runs that the study compares.
    next: all runs of the phase.
    left: runs of the phase without a result.
    own: the runs that the study compares. Their experiments have the steps and values that timed runs and searches have
        determined so far.
    tuned: results of completed searches, by name of the cell.
    """

    phase: Phase
    next: tuple[PlannedRun, ...]
    left: tuple[PlannedRun, ...]
    own: tuple[PlannedRun, ...]
    tuned: Mapping[str, TunedCell]


def plan_study(study: Study, directory: Path, failed: Collection[str] = ()) -> StudyPlan:
    """Check every cell of the study, and every run that `directory` has already. Return the runs.

    Raises RecipeError if a cell is invalid or its runs cannot start, if a task does not report the metric, or if
    `directory` has runs with other settings, code or data.

    failed: directories of runs that failed. In a search, the values that such a run has tried count as diverged.
    """
    if study.tune is not None or study.equal == "seconds":
        plan_runs(study)  # reports every invalid cell, where a search would stop at the first
    timing, timed = plan_timing(study, directory, failed)
    tuning, tuned = ([], {}) if timing else plan_tuning(timed, directory, failed)
    own = plan_runs(timed, tuned)
    planned = timing or tuning or own
    refuse_changed(planned, directory)
    refuse_other_provenance(own, directory)
    left = unfinished(planned, directory)
    require_metric(study, left)
    require_startable_cells(study, unfinished(own, directory))
    phase: Phase = "timing" if timing else "tuning" if tuning else "study"
    return StudyPlan(phase, tuple(planned), tuple(left), tuple(own), tuned)


def refuse_changed(planned: Iterable[PlannedRun], directory: Path) -> None:
    """Raise RecipeError if the directory of a planned run has a run with other settings.

    The error has a line for each setting that differs, with the number of runs in which it differs.
    """
    affected: dict[str, list[str]] = {}
    for run in planned:
        known = RunDirectory(directory / run.directory).read("config")
        if known is not None:
            for line in config_changes(known, run.experiment.model_dump(mode="json")):
                affected.setdefault(line, []).append(run.directory)
    if affected:
        count = len({name for names in affected.values() for name in names})
        lines = [f"{line} ({name_some(names, 1)})" for line, names in affected.items()]
        raise RecipeError(
            f"{directory}: {counted(count, 'run')} there had other settings than this study (recorded -> given):\n"
            + "\n".join([*first_lines(lines), f"{_REMEDY}."])
        )


def refuse_other_provenance(planned: Iterable[PlannedRun], directory: Path) -> None:
    """Raise RecipeError if runs in `directory` had other code or data than the present code and data.

    The runs of all cells of `planned` are checked, runs of searches too. All runs of a study must have the same
    provenance, because finished runs and later runs are averaged. A run without a result and without a checkpoint
    starts anew, so it is not compared.
    """
    experiments = {Path(run.directory).parent: run.experiment for run in planned}
    data: dict[str, Fingerprint] = {}
    faults: dict[str, list[Path]] = {}
    for cell, folder, run in _begun_runs(experiments, directory):
        experiment, task = experiments[cell], (run.read("config") or {}).get("task")
        if task and isinstance(data_path := getattr(experiment.task, "path", None), str):
            task = {**task, "path": data_path}  # another machine may have the data in another folder
        key = json.dumps(task)
        if key not in data:
            data[key] = validated(Task, task, "task").new_data().fingerprint  # type: ignore[type-abstract]
        for fault in provenance_changes(run.read("env") or {}, describe_provenance(data[key], experiment)):
            faults.setdefault(fault, []).append(folder)
    _refuse_faults(faults, directory)


def refuse_changed_study(config: Mapping[str, Any], environment: Mapping[str, Any], directory: Path) -> None:
    """Raise RecipeError if runs of the study in `directory` had other code or data than a run that is about to train.

    An imported file is compared only with runs in `directory` that import a file of the same name. Data are compared
    only with runs whose task has the same kind and the same data file. Such a run may have recorded other data because
    its task differs in another field. The data of its task are then loaded now, and compared with the recorded data.

    config, environment: configuration and environment of the run that is about to train.
    """
    runs = (RunDirectory(directory).read(MANIFEST) or {"runs": []})["runs"]
    own, faults = config["task"], dict[str, list[Path]]()
    present = {json.dumps(own): environment["data"]}
    for _, folder, run in _begun_runs(dict.fromkeys(Path(one["directory"]).parent for one in runs), directory):
        known = run.read("env") or {}
        shared = known.get("imports", {}).keys() & environment["imports"].keys()
        found = {**environment, "data": known.get("data", {})}
        task = (run.read("config") or {"task": {}})["task"]
        if _data_of(task) == _data_of(own) and known.get("data") != environment["data"]:
            task = {**task, "path": own["path"]} if "path" in own else task
            if (key := json.dumps(task)) not in present:
                present[key] = asdict(validated(Task, task, "task").new_data().fingerprint)  # type: ignore[type-abstract]
            found["data"] = present[key]
        pair = (
            {"data": {}, **one, "imports": {name: one["imports"][name] for name in shared}} for one in (known, found)
        )
        for fault in provenance_changes(*pair):
            faults.setdefault(fault, []).append(folder)
    _refuse_faults(faults, directory)


def _data_of(task: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the kind of a task and the name of its file of data, without the folder."""
    return task.get("kind"), Path(str(task.get("path") or "")).name


def _begun_runs(cells: Iterable[Path], directory: Path) -> Iterator[tuple[Path, Path, RunDirectory]]:
    """Yield (cell, folder, run) for every run of these cells that has a result or a checkpoint.

    A cell has a folder for the runs that the study compares, one for timed runs and one for runs of its search.

    cells: directories of the cells, relative to that of the study.
    directory: directory of the study.
    """
    for cell in cells:
        for phase in PHASES:
            for path in files_named("env.json", directory / phase / cell):
                if (run := RunDirectory(path.parent)).begun:
                    yield cell, directory / phase / cell, run


def _refuse_faults(faults: Mapping[str, Sequence[Path]], directory: Path) -> None:
    """Raise RecipeError if there are faults. It lists the faults and the folders to remove.

    faults: for each difference of code or data, the runs that have it. A run is given by the folder of its cell.
    directory: directory of the study.
    """
    if faults:
        affected = dict.fromkeys(folder for folders in faults.values() for folder in folders)
        lines = [f"{fault} ({counted(len(folders), 'run')})" for fault, folders in faults.items()]
        raise RecipeError(
            f"{directory}: runs of this study had other code or data (recorded -> present):\n"
            + "\n".join(first_lines(lines))
            + f"\n{_REMEDY}, or remove these runs, so that they are repeated:\n"
            + f"rm -r {' '.join(shlex.quote(str(folder)) for folder in affected)}"
        )


def write_manifest(study: Study, planned: StudyPlan, directory: Path) -> None:
    """Write the manifest of the study, from which reports are made, with the results of searches so far."""
    axis, baseline = study.compared
    content = {
        "compare": axis,
        "baseline": baseline,
        "study": study.model_dump(mode="json"),
        "tuned": {name: {k: v for k, v in asdict(one).items() if k != "cell"} for name, one in planned.tuned.items()},
        "runs": [{"directory": run.directory, "labels": dict(run.labels), "seed": run.seed} for run in planned.own],
    }
    make_directory(directory)
    RunDirectory(directory).write(MANIFEST, content)


def plan_tuning(
    study: Study, directory: Path, failed: Collection[str] = ()
) -> tuple[list[PlannedRun], dict[str, TunedCell]]:
    """Return the runs that the searches of `study.tune` need next, and the results of completed searches by cell name.

    Runs and results depend on the runs in `directory` alone, so that a stopped search continues. Raises RecipeError if
    a run was made with other settings.

    failed: directories of runs that failed. The values that such a run has tried count as diverged.
    """
    planned: list[PlannedRun] = []
    tuned: dict[str, TunedCell] = {}
    for cell in cells(study) if study.tune is not None else ():
        assert study.tune is not None
        search = _CellSearch(study, study.tune, cell, directory, failed)
        left = search.left()
        planned += left
        if not left:
            tuned[cell.name] = study.tune.found(search.experiment, search.trials, study.measured, cell.name)
    return planned, tuned


def largest_search(study: Study, cell: Cell, directory: Path) -> int:
    """Return how many runs the search for the best values of a cell (combination of labels) still needs at most.

    The result is 0 if the search is complete.
    """
    assert study.tune is not None
    search = _CellSearch(study, study.tune, cell, directory, ())
    next_runs = search.left()
    if not next_runs:
        return 0
    done = len(next_runs) - len(unfinished(next_runs, directory))
    return (study.tune.trials - len(search.trials)) * len(study.tune.seeds) - done


class _CellSearch:
    """The search for the best values of the tuned fields in one cell of a study.

    trials: completed trials, as the last call of `left` has read them; empty before the first call.
    """

    def __init__(self, study: Study, tuning: Tuning, cell: Cell, directory: Path, failed: Collection[str]) -> None:
        self.study, self.tuning, self.cell = study, tuning, cell
        self.directory, self.failed = directory, failed
        self.metric: Metric = study.measured
        self.experiment = changed(study.base, cell.changes)
        self.trials: list[Trial] = []

    def left(self) -> list[PlannedRun]:
        """Read all completed trials and return the runs to do next. An empty list means that the search is complete."""
        # Each iteration appends the completed trials of the proposed values. The loop ends when a proposed value has
        # runs that are not done, or when no values are proposed.
        while wanted := self.tuning.next(self.experiment, self.trials):
            ended: dict[str, Trial | None] = {trial_name(trial.values): trial for trial in self.trials}
            new = {name: values for values in wanted if (name := trial_name(values)) not in ended}
            planned = {name: self.runs(values) for name, values in new.items()}
            refuse_changed([run for runs in planned.values() for run in runs], self.directory)
            ended |= {name: self._trial(values, planned[name]) for name, values in new.items()}
            if left := [run for name, runs in planned.items() if ended[name] is None for run in runs]:
                return left
            self.trials += [trial for values in wanted if (trial := ended[trial_name(values)]) is not None]
        return []

    def runs(self, values: Values) -> list[PlannedRun]:
        """Return the runs of a trial of these values, one for each seed of the search."""
        name, planned = trial_name(values), []
        own = changed(self.study.base, {**self.cell.changes, **values})
        for seed in self.tuning.seeds:
            experiment = own.replace(seed=seed)
            if (limits := self.tuning.limits(experiment, self.trials, self.metric)) is not None:
                experiment = experiment.replace(callbacks=(*experiment.callbacks, limits))
            directory = f"{TUNING}/{self.cell.directory}/{short_name(name)}/seed-{seed}"
            planned.append(PlannedRun({**self.cell.labels, "tuned": name}, seed, experiment, directory))
        return planned

    def _trial(self, values: Values, runs: Sequence[PlannedRun]) -> Trial | None:
        """Return the trial of `values`, computed from its runs. Return None while one of the runs has not ended. If a
        run failed, the trial counts as diverged: its score is infinite.

        Raises RecipeError if a run diverged because its data are at fault. Runs with other values would diverge too.
        """
        scores, seconds, stopped, curves = [], 0.0, [], {}
        for planned in runs:
            if planned.directory in self.failed:
                return Trial(values, math.inf)
            run = Run(dict(planned.labels), planned.seed, self.directory / planned.directory)
            if not run.result:
                return None
            scores.append(self.metric.sign * run.final(self.metric))
            if math.isinf(scores[-1]):
                self._require_sound_data(run.directory)
            seconds += run.result["seconds"]
            stopped += [run.result["steps"]] if _was_stopped(planned.experiment, run, self.metric) else []
            curves[planned.seed] = {k: self.metric.sign * v for k, v in run.evaluations(self.metric).items()}
        return Trial(values, sum(scores) / len(scores), min(stopped, default=None), seconds, curves)

    def _require_sound_data(self, run: Path) -> None:
        """Raise RecipeError if the record of a run's fault says that data are the cause."""
        fault = RunDirectory(run).read("fault")
        if fault is not None and fault["cause"] in ("data", "validation data"):
            raise RecipeError(
                f"{run}: {fault['text']}; the search ends here; repair the data, and remove "
                f"{self.directory / TUNING} before the same command is given again"
            )


def _was_stopped(experiment: Experiment, run: Run, metric: Metric) -> bool:
    """Return True if successive halving ended a run early, by the callback `Limits` of its experiment."""
    limits = next((one for one in experiment.callbacks if isinstance(one, Limits)), None)
    step = int(run.result["steps"])
    return limits is not None and step < experiment.steps and limits.exceeded(step, run.final(metric))


ROUNDS = 3
"""Number of timed runs of every cell. They are made in rounds: all cells are timed once before one is timed again, so
that other load of the machine affects all of them.
"""
TIMED_STEPS = 100
"""Largest number of steps of a timed run. The first 5 percent are not counted: they contain one-time setup."""


def plan_timing(study: Study, directory: Path, failed: Collection[str] = ()) -> tuple[list[PlannedRun], Study]:
    """Return the timed runs that are still to do, and the study. If none are left to do, the study is one in which the
    steps of every cell are set, so that all cells train for about equal seconds.

    Without `equal: seconds`, nothing is timed and the study is returned unchanged.

    A cell is one combination of labels, with its runs over seeds. Its baseline is the cell with the baseline's label on
    the compared axis and equal labels on all other axes. There are ROUNDS rounds, and in a round every cell has one
    timed run. Let s be the seconds per step of a cell in a round, and s_b those of its baseline in the same round. The
    cell then has N r steps, rounded to an integer, but at least 1. N is the number of steps of the baseline, and r is
    the median of s_b / s over rounds. Only training seconds count, without evaluation. The result depends on the runs
    in `directory` alone.

    Raises RecipeError if a timed run has failed, diverged at once, or had other settings.

    failed: directories of runs that failed.
    """
    if study.equal == "steps":
        return [], study
    own = list(cells(study))
    rounds = [{cell.name: _timed_run(study, cell, turn) for cell in own} for turn in range(ROUNDS)]
    timed = [run for runs in rounds for run in runs.values()]
    refuse_changed(timed, directory)
    for run in timed:
        if run.directory in failed:
            raise RecipeError(
                f"equal: a timed run failed, see {run.directory}.error.txt; without its time the steps of "
                "the cell cannot be chosen"
            )
    if left := unfinished(timed, directory):
        return left, study
    seconds = [{name: _step_seconds(directory / run.directory) for name, run in runs.items()} for runs in rounds]
    axis, baseline = study.compared
    lengths = []
    for cell in own:
        base = Cell({**cell.labels, axis: baseline}, {}).name
        ratio = median(one[base] / one[cell.name] for one in seconds)
        steps = max(1, round(rounds[0][base].experiment.steps * ratio))
        lengths.append(Setting(when={k: (label,) for k, label in cell.labels.items()}, set={"steps": steps}))
    # `model_copy` does not validate. A validation would refuse the computed steps in a study with an axis `steps`,
    # whose labels are the steps of the baseline alone.
    return [], study.model_copy(update={"equal": "steps", "settings": (*study.settings, *lengths)})


def _timed_run(study: Study, cell: Cell, turn: int) -> PlannedRun:
    """Return a run of only the first steps of the cell, without diagnostics and intermediate checkpoints.

    The run has only callbacks that may provide signals, because the recipe may need these signals.

    turn: number of the round, from 0.
    """
    experiment = changed(study.base, cell.changes)
    steps = min(TIMED_STEPS, experiment.steps)
    timed = experiment.replace(
        seed=study.seeds[0],
        eval_every=experiment.steps,
        log_every=max(1, steps // 20),
        checkpoint_every=experiment.steps,
        diagnostics=None,
        callbacks=(*filter(may_provide, experiment.callbacks), StopAfter(step=steps)),
    )
    labels = {**cell.labels, "timed": f"round {turn + 1}"}
    return PlannedRun(labels, study.seeds[0], timed, f"timing/{cell.directory}/round-{turn + 1}")


def _step_seconds(directory: Path) -> float:
    """Return the training seconds per step of a timed run, without the steps before its first row of metrics."""
    run = Run({}, 0, directory)
    steps, seconds = [int(row["step"]) for row in run.rows], run.seconds()
    if len(steps) < 2:
        raise RecipeError(f"equal: the timed run {directory} diverged at step {steps[-1]}; lower its learning rate")
    return (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])
