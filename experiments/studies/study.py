"""A study: one base experiment, axes along which it varies, seeds and a metric."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError
from eigengraft.optimizers.recipe.loading import read_yaml
from eigengraft.optimizers.recipe.overrides import apply_overrides

from ..reports.run import MetricName
from ..reports.seed_statistics import Target
from ..training.imports import resolve_paths
from ..training.loading import read_experiment
from .axes import (
    Changes,
    Label,
    Setting,
    Where,
    as_label,
    axis_choices,
    changed_paths,
    combinations,
    located_axis,
    located_setting,
    read_where,
    require_baselines,
    require_known,
)
from .tuning.base import Tuning, distinct
from .tuning.descent import CoordinateDescent

_SHIPPED = Path(__file__).parent


class Study(Component):
    """Every combination of one label from each axis is a cell; every cell is run once with each seed.

    A cell is the base experiment, changed by its labels axis by axis, then by the settings that hold for it. Excluded
    combinations are no cells.
    """

    name: str = Field(default="study", pattern=r"^\w[\w.+=-]*$", description="names the directory of the study")
    description: str = Field("", description="what the study asks, in a sentence or two")
    base: dict[str, Any] = Field(
        description="what all runs share, as in an experiment file; or, in a study file, the path of one"
    )
    axes: dict[str, dict[str, Changes]] = Field(
        min_length=1,
        description="dotted path -> list of values, or any name -> {label -> {dotted path -> value}}, or any name -> "
        "{dotted path -> list of values}, in which values at the same place belong together",
    )
    exclude: tuple[Where, ...] = Field(
        (), strict=False, description="cells that are not run: axis -> label or list of labels"
    )
    settings: tuple[Setting, ...] = Field((), strict=False, description="values that belong to combinations of labels")
    seeds: tuple[int, ...] = Field((0,), strict=False, min_length=1, description="one run of every cell for each")
    equal: Literal["steps", "seconds"] = Field(
        "steps",
        description="what cells have alike: the steps that they say; or training seconds: `steps` are those of the "
        "baseline, of other cells as many as take its time, by timed runs of each",
    )
    tune: Tuning | None = Field(
        None,
        description="search of values in every cell before its runs, a coordinate_descent if no kind is given",
    )
    metric: MetricName = Field("val_loss", description="final metric to compare")
    target: Target | None = Field(None, description="value of the metric whose steps are compared too, of one task")
    baseline: dict[str, str] = Field(
        default={}, max_length=1, description="axis compared: its label to compare with; none: last axis, first label"
    )

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

    @field_validator("exclude", mode="before", json_schema_input_type=list[dict[str, Label | list[Label]]])
    @classmethod
    def _where(cls, exclude: Any) -> Any:
        return tuple(map(read_where, exclude)) if isinstance(exclude, (list, tuple)) else exclude

    @field_validator("baseline", mode="before", json_schema_input_type=dict[str, Label])
    @classmethod
    def _text(cls, baseline: Any) -> Any:
        return {k: as_label(v) for k, v in baseline.items()} if isinstance(baseline, Mapping) else baseline

    @field_validator("tune", mode="before", json_schema_input_type=Tuning | CoordinateDescent | None)
    @classmethod
    def _kind(cls, tune: Any) -> Any:
        return {"kind": "coordinate_descent", **tune} if isinstance(tune, Mapping) else tune

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return distinct(seeds)

    @model_validator(mode="after")
    def _consistent(self) -> Study:
        changed = set().union(*map(changed_paths, self.axes.values()), *(setting.set for setting in self.settings))
        if "seed" in changed or self.base.get("seed", 0) not in (0, *self.seeds):
            raise ValueError("seeds: the list `seeds` of the study is required for every cell, got `seed`")
        for first, second in itertools.combinations(self.axes, 2):
            shared = changed_paths(self.axes[first]) & changed_paths(self.axes[second])
            if shared:
                raise ValueError(f"axes: each path on one axis only, '{min(shared)}' is on '{first}' and '{second}'")
        if self.target is not None and changed & {"task", "task.kind"}:
            raise ValueError("target: one task in all cells is required, got axes or settings that change it")
        if self.tune is not None:
            self.tune.require_apart(self.seeds, self.axes)
            if self.equal == "seconds" and "steps" in self.tune.fields:
                raise ValueError("tune.space: other paths than steps are required with `equal: seconds`, got 'steps'")
        self._require_labels()
        return self

    def _require_labels(self) -> None:
        """Raise ValueError where an axis or a label is named that there is not, or no cell is the baseline."""
        wanted = [("baseline", axis, label) for axis, label in self.baseline.items()]
        wheres = [("settings.when", setting.when) for setting in self.settings]
        wheres += [("exclude", where) for where in self.exclude]
        wanted += [(name, axis, v) for name, where in wheres for axis, some in where.items() for v in some]
        for where, axis, label in wanted:
            require_known(where, axis, self.axes)
            require_known(f"{where}.{axis}", label, self.axes[axis])
        kept = list(combinations(self.axes, self.exclude))
        compared, baseline = self.compared
        if not any(labels[compared] == baseline for labels in kept):
            raise ValueError(f"exclude: a cell with {compared}={baseline}, the baseline, is required, got none")
        if self.equal == "seconds":
            require_baselines(self.axes, self.settings, self.exclude, self.compared)

    @property
    def compared(self) -> tuple[str, str]:
        """The axis along which cells are compared, and the label of the cells they are compared with."""
        axis = next(iter(self.baseline), list(self.axes)[-1])
        return axis, self.baseline.get(axis, next(iter(self.axes[axis])))


def load_study(source: str | Path | Mapping[str, Any] | Study, overrides: Iterable[str] = ()) -> Study:
    """The study in a YAML file, a shipped study's name, a mapping or a `Study`, with `dotted.path=value` overrides.

    Paths inside a file are relative to it. Raises RecipeError, one line for each fault.
    """
    if isinstance(source, (str, Path)):
        path = _existing(source)
        try:
            return validated(Study, apply_overrides(_read(path), overrides))
        except RecipeError as error:
            raise RecipeError(f"{path} does not describe a study:\n{error}") from error
    raw = source.model_dump(mode="json") if isinstance(source, Study) else dict(source)
    return validated(Study, apply_overrides(raw, overrides))


def shipped_studies() -> dict[str, Path]:
    """The studies that come with the package, by name."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.yaml"))}


def _existing(source: str | Path) -> Path:
    path = shipped_studies().get(str(source), Path(source))
    if not path.is_file():
        raise RecipeError(
            f"study: an existing file or a shipped study ({', '.join(shipped_studies())}) is required, got '{source}'"
        )
    return path


def _read(path: Path) -> dict[str, Any]:
    data = read_yaml(path)
    if isinstance(data, Mapping) and "task" in data and "axes" not in data:
        raise RecipeError(f"a study is required, got an experiment; run it with `eigengraft train {path}`")
    if not isinstance(data, Mapping):
        raise RecipeError(f"a mapping with 'base' and 'axes' is required, got {type(data).__name__}")
    home, data = path.parent, dict(data)
    base = data.get("base")
    if isinstance(base, (str, Mapping)):
        data["base"] = read_experiment(home / base) if isinstance(base, str) else resolve_paths(base, home)
    if isinstance(data.get("axes"), Mapping):
        data["axes"] = {axis: located_axis(str(axis), choices, home) for axis, choices in data["axes"].items()}
    if isinstance(data.get("settings"), list):
        data["settings"] = [located_setting(setting, home) for setting in data["settings"]]
    return {"name": path.stem, **data}
