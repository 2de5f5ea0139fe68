"""The declaration of a study: a base experiment, axes along which it varies, seeds and a metric.

An axis has labels, and each label sets values of fields. A `Setting` sets further values for some combinations of
labels.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from eigengraft.component import Component, advice, validated
from eigengraft.errors import RecipeError, counted, did_you_mean, first_lines, near_path
from eigengraft.optimizers.recipe.loading import YAML_SUFFIXES, parse_yaml, read_yaml
from eigengraft.optimizers.recipe.overrides import assign_paths, override_pairs

from ..files import LABEL, short_name
from ..reports.records import METRICS, Metric, failure_lines, is_rate, metric_of
from ..reports.seed_statistics import Target
from ..tasks.base import MetricName
from ..training.experiment import (
    Experiment,
    FolderName,
    load_experiment,
    owner_of,
    read_experiment,
    with_imports,
    with_overrides,
)
from ..training.imports import resolve_paths
from .tuning import CoordinateDescent, Seeds, Tuning

Changes = dict[str, Any]
"""Values by dotted path, as overrides have them: `steps`, `task.width`, `update.eigenbasis.refresh.steps`."""

Label = str | int | float | bool
"""A label of an axis as a study file may contain it. A number or bool stands for its text."""


def _lists(where: Any) -> Any:
    """Return a selection of cells in the form {axis: tuple of labels}. A file may have a single label in place of a
    tuple. Other values than mappings are returned unchanged.
    """
    if not isinstance(where, Mapping):
        return where
    return {axis: tuple(map(as_label, v if isinstance(v, (list, tuple)) else [v])) for axis, v in where.items()}


Where = Annotated[
    dict[str, tuple[str, ...]], BeforeValidator(_lists, json_schema_input_type=dict[str, Label | list[Label]])
]
"""A selection of cells: axis -> labels. A cell is selected if its label on each named axis is among the labels."""


def _labels(labels: Any) -> Any:
    """Return the mapping axis -> label with all labels as texts. Return other values unchanged."""
    return {axis: as_label(v) for axis, v in labels.items()} if isinstance(labels, Mapping) else labels


Labels = Annotated[dict[str, str], BeforeValidator(_labels, json_schema_input_type=dict[str, Label])]
"""One label for each named axis."""


def inside(where: Where, labels: Mapping[str, str]) -> bool:
    """Return True if the selection `where`, a mapping from axes to labels, contains the cell with these labels."""
    return all(labels[axis] in some for axis, some in where.items())


class Setting(Component):
    """Values of fields in some cells of a study. A cell is a combination of one label from each axis."""

    when: Where = Field(
        min_length=1,
        examples=[{"method": "soap"}],
        description="cells in which the values are set: axis -> label or list of labels",
    )
    set: dict[str, Any] = Field(
        min_length=1, examples=[{"lr": 0.01}], description="values: dotted path of a field of the experiment -> value"
    )


def combinations(axes: Mapping[str, Mapping[str, Any]], exclude: Iterable[Where]) -> Iterator[dict[str, str]]:
    """Yield every combination of one label from each axis, except the combinations that `exclude` selects.

    The last axis varies fastest.
    """
    for labels in itertools.product(*axes.values()):
        combination = dict(zip(axes, labels, strict=True))
        if not any(inside(where, combination) for where in exclude):
            yield combination


def axis_choices(axis: str, choices: Any) -> Any:
    """Return an axis in its long form, label -> {path -> value}. Raises ValueError for a malformed axis.

    axis: name of the axis.
    choices: the axis as a study file has it: a list of values of the field `axis`, a mapping path -> list of values, or
        the long form.
    """
    if isinstance(choices, Mapping) and choices and all(isinstance(some, (list, tuple)) for some in choices.values()):
        return _zipped(axis, choices)
    if isinstance(choices, Mapping):
        for label, changes in choices.items():
            if not isinstance(changes, Mapping):
                raise ValueError(
                    f"{axis}.{label}: a mapping {{path: value}} is required, such as {{{axis}: {as_label(changes)}}}, "
                    f"got {changes!r}"
                )
        return {as_label(label): changes for label, changes in choices.items()}
    if not isinstance(choices, (list, tuple)) or not choices:
        raise ValueError(f"{axis}: must be a list of values or a mapping label -> {{path: value}}, got {choices!r}")
    labels = [as_label(value) for value in choices]
    if len(set(labels)) < len(labels):
        raise ValueError(f"{axis}: values must be distinct, got {', '.join(labels)}")
    return {label: {axis: value} for label, value in zip(labels, choices, strict=True)}


def _zipped(axis: str, lists: Mapping[str, Any]) -> dict[str, Changes]:
    """Return the long form, label -> {path -> value}, of an axis that is given as path -> list of values.

    The k-th values of all lists belong to the k-th label. The values of the first list are the labels.
    """
    lengths = {path: len(some) for path, some in lists.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{counted(count, 'value')} of {path}" for path, count in lengths.items())
        raise ValueError(f"{axis}: the lists of an axis must have equal lengths, got {got}")
    labels = axis_choices(axis, next(iter(lists.values())))
    return {label: {path: some[place] for path, some in lists.items()} for place, label in enumerate(labels)}


def located_axis(axis: str, choices: Any, home: Path) -> Any:
    """Return an axis with paths of files resolved against the folder `home`.

    An axis that names no file, or is malformed, is returned unchanged.
    """
    try:
        long = axis_choices(axis, choices)
    except ValueError:
        return choices  # the validation of the study reports a malformed axis together with all other faults
    found = {label: resolve_paths(changes, home) for label, changes in long.items()}
    return choices if found == long else found


def as_label(value: Any) -> str:
    """Return the label of a value. Raises ValueError if its text cannot be part of a directory's name."""
    text = _text_of(value)
    if not LABEL.fullmatch(text):
        raise ValueError(
            f"{text!r} cannot be a label, which has only letters, digits and . _ + -; give the axis as a mapping "
            "label -> {path: value}"
        )
    return text


def _text_of(value: Any) -> str:
    """Return the text of a value on an axis. For a mapping, it is the `kind` of the component or the `base` of the
    recipe.
    """
    if isinstance(value, Mapping):
        value = value.get("kind", value.get("base", value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def changed_paths(choices: Mapping[str, Changes]) -> set[str]:
    return {path for changes in choices.values() for path in changes}


def require_known(where: str, noun: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError if a name is unknown.

    where, noun: field and kind of the name, for the message.
    known: all known names.
    """
    if name not in known:
        near = did_you_mean(name, known, 0.5)
        raise ValueError(f"{where}: unknown {noun} '{name}'{near} (known are {', '.join(known)})")


if TYPE_CHECKING:
    from ..reports.report import Report


class Study(Component):
    """A set of runs: every combination of one label from each axis is a cell, and every cell is run with each seed.

    The experiment of a cell is the base experiment, with the values of the cell's labels, axis by axis. The values of
    each item of `settings` whose `when` selects the cell are set after these. Excluded combinations are not run.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        **Experiment.elsewhere,
        **{name: f"it belongs under `base`: `base: {{{name}: ...}}`" for name in Experiment.model_fields},
        "seed": "`seeds` is the list of seeds with which every cell is run",
    }
    name: FolderName = Field(default="study", description="names the directory of the study")
    description: str = Field("", description="question of the study in a sentence or two")
    base: dict[str, Any] = Field(
        examples=[{"task": "digits", "recipe": "adamw"}],
        description="base experiment: a mapping with the fields of an experiment file; in a study file it may also be "
        "the path of such a file",
    )
    axes: dict[str, dict[str, Changes]] = Field(
        min_length=1,
        examples=[{"lr": [0.001, 0.01]}],
        description="one of three forms for each axis: dotted path -> list of values; name -> {label -> {dotted path "
        "-> value}}; name -> {dotted path -> list of values}, where the k-th values of all lists belong to the k-th "
        "label",
    )
    exclude: tuple[Where, ...] = Field(
        (), strict=False, description="cells that are not run: axis -> label or list of labels"
    )
    settings: tuple[Setting, ...] = Field(
        (), strict=False, description="values of fields in the cells that have certain labels"
    )
    seeds: Seeds = Field((0,), strict=False, min_length=1, description="every cell has one run for each seed")
    equal: Literal["steps", "seconds"] = Field(
        "steps",
        description="steps: every cell trains for its field `steps`; seconds: the baseline trains for its `steps`, "
        "and all other cells for the same time; their numbers of steps follow from timed runs",
    )
    tune: Tuning | None = Field(
        None,
        description="search for the best values in every cell before its runs, a coordinate_descent if no kind is "
        "given; none: no search",
    )
    tuned_in: str = Field(
        "",
        examples=["tuning.yaml"],
        description="where the learning rates were tuned, if not in this study; reports name it, in place of a notice "
        "that learning rates were not tuned",
    )
    metric: MetricName = Field(
        "val_loss", description="final metric to compare: val_loss, val_accuracy, or val.NAME, one of the task's own"
    )
    larger: bool = Field(False, description="true: larger values of a metric val.NAME are better; false: smaller ones")
    target: Target | None = Field(
        None,
        description="value of the metric; reports also compare the steps at which runs reach it; none: no such "
        "comparison",
    )
    baseline: Labels = Field(
        default={},
        max_length=1,
        description="label with which the others are compared, or {axis to compare: label of its baseline}; default: "
        "the last axis with several labels, but an axis of learning rates only if no other axis has several labels, "
        "and the first label of this axis",
    )

    @field_validator("baseline", mode="before", json_schema_input_type=dict[str, Label] | Label)
    @classmethod
    def _on_its_axis(cls, baseline: Any, info: ValidationInfo) -> Any:
        """Return a label that is given alone with the axis that has it. Raises ValueError unless one axis has it."""
        axes: dict[str, dict[str, Changes]] | None = info.data.get("axes")
        if not isinstance(baseline, Label):
            return baseline
        if axes is None:
            return {}  # the axes are at fault, which is an error of its own
        label = as_label(baseline)
        found = [axis for axis, labels in axes.items() if label in labels]
        if len(found) > 1:
            raise ValueError(f"the axes {' and '.join(found)} have the label '{label}'; write {{{found[0]}: {label}}}")
        if not found:
            known = ", ".join(label for labels in axes.values() for label in labels)
            raise ValueError(f"no axis has the label '{label}' (labels are {known})")
        return {found[0]: label}

    @field_validator("base", mode="before", json_schema_input_type=dict[str, Any] | str)
    @classmethod
    def _plain(cls, base: Any) -> Any:
        return base.model_dump(mode="json") if isinstance(base, BaseModel) else base

    @field_validator(
        "axes", mode="before", json_schema_input_type=dict[str, list[Any] | dict[str, Changes | list[Any]]]
    )
    @classmethod
    def _choices(cls, axes: Any) -> Any:
        return (
            {axis: axis_choices(str(axis), some) for axis, some in axes.items()} if isinstance(axes, Mapping) else axes
        )

    @field_validator("tune", mode="before", json_schema_input_type=Tuning | CoordinateDescent | None)
    @classmethod
    def _kind(cls, tune: Any) -> Any:
        return {"kind": "coordinate_descent", **tune} if isinstance(tune, Mapping) else tune

    @model_validator(mode="after")
    def _consistent(self) -> Study:
        changed = set().union(*map(changed_paths, self.axes.values()), *(setting.set for setting in self.settings))
        if "seed" in changed or self.base.get("seed", 0) not in (0, *self.seeds):
            raise ValueError(
                "seeds: cells cannot set `seed`, because every cell is run with all `seeds` of the study; set `seeds`"
            )
        for first, second in itertools.combinations(self.axes, 2):
            shared = changed_paths(self.axes[first]) & changed_paths(self.axes[second])
            if shared:
                raise ValueError(
                    f"axes: '{min(shared)}' is set by '{first}' and by '{second}'; a path may be set by one axis only"
                )
        if self.larger and self.metric in METRICS:
            raise ValueError(
                f"larger: has no effect on the metric {self.metric}, whose better direction is known; remove larger"
            )
        if self.target is not None and changed & {"task", "task.kind"}:
            raise ValueError(
                "target: cannot be combined with axes or settings that change the task, because one target does not "
                "fit the metrics of different tasks; remove target, or these axes and settings"
            )
        if self.tune is not None:
            self.tune.require_apart(self.seeds, self.axes)
            if self.tuned_in and "lr" in self.tune.space:
                raise ValueError(
                    f"tuned_in: '{self.tuned_in}' cannot be combined with `tune`, which searches lr here; remove one"
                )
            if self.equal == "seconds" and "steps" in self.tune.space:
                raise ValueError(
                    "tune.space: 'steps' cannot be combined with `equal: seconds`, which chooses the steps; remove one "
                    "of the two"
                )
        self._require_fields()
        self._require_labels()
        self._require_true_labels()
        return self

    def _require_fields(self) -> None:
        """Raise ValueError if the base experiment has a field that no experiment has, or if an axis, an item of
        `settings` or the search changes one.

        Only the beginning of a dotted path is checked, because the fields behind it depend on the task and the recipe.
        """
        if unknown := [name for name in self.base if name not in Experiment.model_fields]:
            raise ValueError(f"base.{unknown[0]}: unknown field{advice(Experiment, unknown[0])}")
        places: dict[str, Iterable[str]] = {f"axes.{axis}": changed_paths(own) for axis, own in self.axes.items()}
        places |= {f"settings.{index}.set": setting.set for index, setting in enumerate(self.settings)}
        places |= {"tune.space": self.tune.space} if self.tune else {}
        for place, paths in places.items():
            for path in sorted(paths):
                try:
                    owner_of(path)
                except RecipeError as error:
                    # an axis has the name of its path, or has labels that set paths
                    where = "axes" if place == f"axes.{path}" else place
                    raise ValueError(f"{where}.{error}") from error

    def _require_labels(self) -> None:
        """Raise ValueError if a field of the study names an axis or a label that does not exist, if no cell has the
        label of the baseline, or if `equal: seconds` does not fit the study.
        """
        wanted = [("baseline", axis, label) for axis, label in self.baseline.items()]
        wheres = [("settings.when", setting.when) for setting in self.settings]
        wheres += [("exclude", where) for where in self.exclude]
        wanted += [(name, axis, v) for name, where in wheres for axis, some in where.items() for v in some]
        for where, axis, label in wanted:
            require_known(where, "axis", axis, self.axes)
            require_known(f"{where}.{axis}", "label", label, self.axes[axis])
        kept = list(combinations(self.axes, self.exclude))
        compared, baseline = self.compared
        if not any(labels[compared] == baseline for labels in kept):
            raise ValueError(
                f"exclude: all cells of the baseline {compared}={baseline} are excluded; keep at least one"
            )
        if self.equal == "steps":
            return
        # With `equal: seconds`, the baseline has the given steps, and steps of all other labels are computed from them.
        own = changed_paths(self.axes[compared])
        if "steps" in own or any("steps" in one.set and compared in one.when for one in self.settings):
            raise ValueError(
                f"equal: 'seconds' cannot be combined with `steps` on axis '{compared}', because the steps of all "
                f"cells other than those of the baseline {compared}={baseline} are computed, so that they take as long "
                "as the baseline; set `steps` in `base` or on another axis"
            )
        if alone := [labels for labels in kept if {**labels, compared: baseline} not in kept]:
            raise ValueError(
                f"equal: 'seconds' needs a baseline for the cell {', '.join(f'{k}={v}' for k, v in alone[0].items())}, "
                f"but the cell with {compared}={baseline} is excluded; exclude both cells"
            )

    def _require_true_labels(self) -> None:
        """Raise ValueError if an item of `settings` replaces a value of an axis whose labels are its values.

        A label such as `0.01` would then name another value than that of the trained runs. An axis whose labels are
        names, not values, is not checked.
        """
        for axis, labels in self.axes.items():
            if any(axis not in changes or _text_of(changes[axis]) != label for label, changes in labels.items()):
                continue  # the labels are names
            for setting in self.settings:
                for path in {axis, f"{axis}.kind"} & setting.set.keys():
                    text = _text_of(setting.set[path])
                    if other := [label for label in setting.when.get(axis, labels) if label != text]:
                        raise ValueError(
                            f"settings: '{path}' is set by the axis '{axis}', whose label {other[0]} would be trained "
                            f"with {text}; remove '{path}' from the settings, or give the axis as a mapping label -> "
                            "{path: value}"
                        )

    def run(self, directory: str | Path | None = None, workers: int | None = None, progress: bool = True) -> Report:
        """Do all searches and runs that are not done yet, and return the report.

        Processes are spawned, so that a script that calls this needs `if __name__ == "__main__"`.

        Args:
            directory: directory of the study, which is created if it does not exist. None: runs/NAME.
            workers: number of processes. None: one for each core.
            progress: if True, bars or lines about the runs are printed on standard error, as by `eigengraft ablate`.

        Raises:
            RecipeError: a cell is invalid, or `directory` contains runs with other settings, code or data, or the
                script that calls this lacks `if __name__ == "__main__"`.
            RuntimeError: runs failed. All other runs are done, and the next call repeats the failed runs.
        """
        from ..reports.report import Report

        # These are imported here, because they import this module.
        running, shown = (import_module(f"{__package__}.{name}") for name in ("running", "progress"))
        place = Path("runs") / short_name(self.name) if directory is None else Path(directory)
        count = workers or running.available_cores()
        failed = running.complete_study(
            self,
            place,
            workers,
            (lambda prepared: shown.study_progress(prepared, self, None, count)) if progress else None,
        )
        if failed:
            lines = first_lines(failure_lines(failed))
            raise RuntimeError("\n".join([f"{place}: {counted(len(failed), 'run')} failed", *lines]))
        return Report(place)

    @property
    def measured(self) -> Metric:
        """The metric by which cells are compared."""
        return metric_of(self.metric, self.larger)

    @property
    def compared(self) -> tuple[str, str]:
        """Axis along which cells are compared, and the label of the baseline on this axis."""
        several = [axis for axis, labels in self.axes.items() if len(labels) > 1]
        methods = [axis for axis in several if not is_rate(axis, self.axes[axis])]
        axis = next(iter(self.baseline), (methods or several or list(self.axes))[-1])
        return axis, self.baseline.get(axis, next(iter(self.axes[axis])))


def load_study(source: str | Path | Mapping[str, Any] | Study, overrides: Iterable[str] | None = None) -> Study:
    """Return a study from a YAML file, the name of a shipped study, a mapping or a `Study`.

    Args:
        source: path of a YAML file, name of a shipped study, mapping of fields, or study. Paths in a file are relative
            to the file.
        overrides: changes of the study as `dotted.path=value`. Several values, as in `lr=0.001,0.01`, are an axis. With
            an axis, or with an override of a field of studies, such as `seeds=0,1`, the file may also be an experiment
            file. The experiment then becomes the base of the study. None: no changes.

    Returns:
        The validated study.

    Raises:
        RecipeError: the study is invalid. The message has one line for each fault.
    """
    if isinstance(source, (str, Path)):
        path = _existing(source)
        changes = list(overrides or ())
        try:
            return validated(Study, _read_with(path, changes))
        except RecipeError as error:
            raise RecipeError(f"{with_overrides(path, changes)} does not describe a study:\n{error}") from error
    raw = source.model_dump(mode="json") if isinstance(source, Study) else dict(source)
    axes, own = split_axes(overrides or ())
    return validated(Study, _with_axes(_overridden(raw, own), axes))


def _overridden(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the raw data of a study with overrides applied.

    Overrides of `imports` are applied first, and the imports of the base experiment are executed. Then all other fields
    are changed.
    """
    pairs = override_pairs(overrides, parse_yaml)
    data = assign_paths(data, [pair for pair in pairs if pair[0] == "base.imports"])
    base = data.get("base")
    if isinstance(base, Mapping):
        data["base"] = with_imports(base)
    return assign_paths(data, [pair for pair in pairs if pair[0] != "base.imports"])


def split_axes(overrides: Iterable[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the axes that overrides with several values declare, and the list of all other overrides.

    `lr=0.001,0.01` and `base.lr=0.001,0.01` declare the axis `lr`. `seeds=0,1` is no axis, as `seeds` is a field of
    studies. A comma inside brackets, quotation marks or a text field of studies separates nothing.
    """
    axes: dict[str, list[Any]] = {}
    own = []
    for override in overrides:
        path, equals, text = override.partition("=")
        values = _values(text) if equals else []
        if path in _TEXTS and text.strip() and text.strip()[0] not in "'\"":
            own.append(f"{path}={json.dumps(text)}")  # a text is not parsed as YAML
        elif path == "seeds" and values and not isinstance(values[0], list):
            own.append(f"seeds=[{text}]")
        elif len(values) < 2 or path in _TEXTS:
            own.append(override)
        elif path in Study.model_fields:
            own.append(f"{path}=[{text}]")
        else:
            axes[path.removeprefix("base.")] = values
    return axes, own


_TEXTS = {name for name, field in Study.model_fields.items() if field.annotation is str}
"""Fields of studies that are texts, in which a comma is a part of the text."""


def _values(text: str) -> list[Any]:
    """Return the values that commas separate in `text`, read as YAML. Return [] if the text is not YAML."""
    try:
        return list(parse_yaml(f"[{text}]", "override"))
    except RecipeError:
        return []


def _with_axes(data: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the data of a study with `axes` added. An added axis replaces an axis of the study with the same name."""
    known = data.get("axes") or {}
    if not axes or not isinstance(known, Mapping):
        return dict(data)
    return {**data, "axes": {**{axis: some for axis, some in known.items() if axis not in axes}, **axes}}


def _read_with(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the data of a study file with overrides. If the file is an experiment, and an override is an axis or
    changes a field of studies, such as `seeds`, the experiment becomes the base of a study.

    Without an axis, the study has one cell, whose label is the recipe of the experiment.
    """
    axes, own = split_axes(overrides)
    raw = read_yaml(path)
    of_study = [one for one in own if re.split(r"[.=]", one)[0] in Study.model_fields.keys() - {"base"}]
    if not (axes or of_study) or not isinstance(raw, Mapping) or "task" not in raw or "axes" in raw:
        return _with_axes(_overridden(_read(path), own), axes)
    base = load_experiment(path, [one.removeprefix("base.") for one in own if one not in of_study])
    one_cell: dict[str, Any] = {"recipe": {base.recipe.name or path.stem: {}}}
    data = {"name": path.stem, "base": base.model_dump(mode="json"), "axes": axes or one_cell}
    return assign_paths(data, override_pairs(of_study, parse_yaml))


def shipped_studies() -> dict[str, Path]:
    """Return the paths of the studies that come with the package, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def _existing(source: str | Path) -> Path:
    path = shipped_studies().get(str(source), Path(source))
    if path.is_dir():
        raise RecipeError(f"study: '{source}' is a directory; give a study file")
    if not path.is_file():
        names = ", ".join(shipped_studies())
        hint = near_path(path, YAML_SUFFIXES) or f"; the shipped studies are {names}"
        raise RecipeError(f"study: there is no file and no shipped study '{source}'{hint}")
    return path


def _read(path: Path) -> dict[str, Any]:
    data = read_yaml(path)
    if isinstance(data, Mapping) and "task" in data and "axes" not in data:
        raise RecipeError(
            f"the file is an experiment, not a study; run it once with `eigengraft train {path}`, or add seeds or "
            "several values of a setting, such as seeds=0,1 or recipe=adamw,soap"
        )
    if not isinstance(data, Mapping):
        raise RecipeError(f"the file must contain a mapping with 'base' and 'axes', got {type(data).__name__}")
    home, data = path.parent, dict(data)
    if isinstance(base := data.get("base"), (str, Mapping)):
        data["base"] = read_experiment(home / base) if isinstance(base, str) else resolve_paths(base, home)
    if isinstance(data.get("axes"), Mapping):
        data["axes"] = {axis: located_axis(str(axis), choices, home) for axis, choices in data["axes"].items()}
    if isinstance(data.get("settings"), list):
        data["settings"] = [
            {**setting, "set": resolve_paths(setting["set"], home)}
            if isinstance(setting, Mapping) and "set" in setting
            else setting
            for setting in data["settings"]
        ]
    return {"name": path.stem, **data}
