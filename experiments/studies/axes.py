"""Axes of a study: labels with the changes that belong to them, and settings for some combinations of labels."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from eigengraft.component import Component

from ..training.imports import resolve_paths

Changes = dict[str, Any]
"""Values by dotted path, like overrides: `steps`, `task.width`, `update.eigenbasis.refresh.steps`."""

Label = str | int | float | bool
"""A label as it may be written; the text of a value is its label."""

LABEL = re.compile(r"[\w.+-]+")
"""What a label may be, as a part of a directory's name."""


Where = dict[str, tuple[str, ...]]
"""Axis -> some of its labels: the cells whose label on every axis named is among these."""


def read_where(where: Any) -> Any:
    """A `Where` as it may be written, a label alone for a list of one, in its long form."""
    if not isinstance(where, Mapping):
        return where
    return {axis: tuple(map(as_label, v if isinstance(v, (list, tuple)) else [v])) for axis, v in where.items()}


def inside(where: Where, labels: Mapping[str, str]) -> bool:
    """Whether the cell with these labels is among those that are meant."""
    return all(labels[axis] in some for axis, some in where.items())


class Setting(Component):
    """Values for the cells whose label on every axis in `when` is among those named there."""

    when: Where = Field(min_length=1, description="axis -> label or list of labels")
    set: dict[str, Any] = Field(min_length=1, description="dotted path -> value")

    @field_validator("when", mode="before", json_schema_input_type=dict[str, Label | list[Label]])
    @classmethod
    def _lists(cls, when: Any) -> Any:
        return read_where(when)


def combinations(axes: Mapping[str, Mapping[str, Any]], exclude: Iterable[Where]) -> Iterator[dict[str, str]]:
    """Every combination of one label from each axis that is not excluded, the last axis innermost."""
    for labels in itertools.product(*axes.values()):
        combination = dict(zip(axes, labels, strict=True))
        if not any(inside(where, combination) for where in exclude):
            yield combination


def require_baselines(
    axes: Mapping[str, Mapping[str, Changes]],
    settings: Iterable[Setting],
    exclude: Iterable[Where],
    compared: tuple[str, str],
) -> None:
    """Raises ValueError where a cell has no baseline whose seconds it could train for, or steps that go unused."""
    axis, baseline = compared
    if "steps" in changed_paths(axes[axis]) or any("steps" in one.set and axis in one.when for one in settings):
        required = f"the steps of {axis}={baseline} alone are required, those of others follow"
        raise ValueError(f"equal: {required}, got `steps` on axis '{axis}'")
    kept = list(combinations(axes, exclude))
    for labels in kept:
        if {**labels, axis: baseline} not in kept:
            got = ", ".join(f"{k}={label}" for k, label in labels.items())
            raise ValueError(f"equal: a cell with {axis}={baseline} is required for every cell, got none for {got}")


def axis_choices(axis: str, choices: Any) -> Any:
    """An axis in its long form, label -> {path -> value}."""
    if isinstance(choices, Mapping) and choices and all(isinstance(some, (list, tuple)) for some in choices.values()):
        return _zipped(axis, choices)
    if isinstance(choices, Mapping):
        return {as_label(label): changes for label, changes in choices.items()}
    if not isinstance(choices, (list, tuple)) or not choices:
        raise ValueError(f"{axis}: a list of values or a mapping label -> {{path: value}} is required, got {choices!r}")
    labels = [as_label(value) for value in choices]
    if len(set(labels)) < len(labels):
        raise ValueError(f"{axis}: distinct values are required, got {', '.join(labels)}")
    return {label: {axis: value} for label, value in zip(labels, choices, strict=True)}


def _zipped(axis: str, lists: Mapping[str, Any]) -> dict[str, Changes]:
    """An axis of lists by path: values at the same place belong together; those of the first path are the labels."""
    lengths = {path: len(some) for path, some in lists.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{count} of {path}" for path, count in lengths.items())
        raise ValueError(f"{axis}: as many values for each path are required, got {got}")
    labels = axis_choices(axis, next(iter(lists.values())))
    return {label: {path: some[place] for path, some in lists.items()} for place, label in enumerate(labels)}


def located_axis(axis: str, choices: Any, home: Path) -> Any:
    """An axis of a file with the files that it names looked up from `home`; one that names none is as it was."""
    try:
        long = axis_choices(axis, choices)
    except ValueError:
        return choices  # refused with all other faults of the study
    found = {k: resolve_paths(v, home) if isinstance(v, Mapping) else v for k, v in long.items()}
    return choices if found == long else found


def located_setting(setting: Any, home: Path) -> Any:
    """A setting of a file with the files that it names looked up from `home`."""
    if isinstance(setting, Mapping) and isinstance(setting.get("set"), Mapping):
        return {**setting, "set": resolve_paths(setting["set"], home)}
    return setting


def as_label(value: Any) -> str:
    """A value as a label: part of a directory's name."""
    text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    if not LABEL.fullmatch(text):
        remedy = "give the axis as a mapping label -> {path: value}"
        raise ValueError(f"a label of letters, digits and . _ + - is required, got {text!r}; {remedy}")
    return text


def changed_paths(choices: Mapping[str, Changes]) -> set[str]:
    return {path for changes in choices.values() for path in changes}


def require_known(where: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        hint = "".join(f"did you mean '{one}'? " for one in near)
        raise ValueError(f"{where}: unknown '{name}'; {hint}One of {', '.join(known)} is required")
