"""Axes of a study: labels with the values that they set, and settings for some combinations of labels."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from eigengraft.component import Component
from eigengraft.errors import did_you_mean

from ..training.imports import resolve_paths

Changes = dict[str, Any]
"""Values by dotted path, as overrides have them: `steps`, `task.width`, `update.eigenbasis.refresh.steps`."""

Label = str | int | float | bool
"""A label of an axis as a study file may contain it. A number or bool stands for its text."""

LABEL = re.compile(r"[\w.+-]+")
"""Pattern of a label. A label is part of a directory's name."""


def _lists(where: Any) -> Any:
    """Return a `Where` in its long form. A file may contain a single label in place of a list of one label."""
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
    """Return True if the selection `where` contains the cell with these labels."""
    return all(labels[axis] in some for axis, some in where.items())


class Setting(Component):
    """Values for the cells that `when` selects."""

    when: Where = Field(min_length=1, examples=[{"method": "soap"}], description="axis -> label or list of labels")
    set: dict[str, Any] = Field(min_length=1, examples=[{"lr": 0.01}], description="dotted path -> value")


def combinations(axes: Mapping[str, Mapping[str, Any]], exclude: Iterable[Where]) -> Iterator[dict[str, str]]:
    """Yield every combination of one label from each axis, except the combinations that `exclude` selects.

    The last axis varies fastest.
    """
    for labels in itertools.product(*axes.values()):
        combination = dict(zip(axes, labels, strict=True))
        if not any(inside(where, combination) for where in exclude):
            yield combination


def axis_choices(axis: str, choices: Any) -> Any:
    """Return an axis in its long form, label -> {path -> value}. Raises ValueError for a malformed axis."""
    if isinstance(choices, Mapping) and choices and all(isinstance(some, (list, tuple)) for some in choices.values()):
        return _zipped(axis, choices)
    if isinstance(choices, Mapping):
        return {as_label(label): changes for label, changes in choices.items()}
    if not isinstance(choices, (list, tuple)) or not choices:
        raise ValueError(f"{axis}: must be a list of values or a mapping label -> {{path: value}}, got {choices!r}")
    labels = [as_label(value) for value in choices]
    if len(set(labels)) < len(labels):
        raise ValueError(f"{axis}: values must be distinct, got {', '.join(labels)}")
    return {label: {axis: value} for label, value in zip(labels, choices, strict=True)}


def _zipped(axis: str, lists: Mapping[str, Any]) -> dict[str, Changes]:
    """Return an axis given as path -> list of values. The k-th values of all lists belong to the k-th label.

    The values of the first list are the labels.
    """
    lengths = {path: len(some) for path, some in lists.items()}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{count} of {path}" for path, count in lengths.items())
        raise ValueError(f"{axis}: the lists of an axis must have equal lengths, got {got} values")
    labels = axis_choices(axis, next(iter(lists.values())))
    return {label: {path: some[place] for path, some in lists.items()} for place, label in enumerate(labels)}


def located_axis(axis: str, choices: Any, home: Path) -> Any:
    """Return an axis with paths of files resolved against the folder `home`.

    An axis that names no file, or is malformed, is returned unchanged.
    """
    try:
        long = axis_choices(axis, choices)
    except ValueError:
        return choices  # validation of the study reports it together with all other faults
    found = {k: resolve_paths(v, home) if isinstance(v, Mapping) else v for k, v in long.items()}
    return choices if found == long else found


def located_setting(setting: Any, home: Path) -> Any:
    """Return an entry of `settings` with paths of files resolved against the folder `home`."""
    if isinstance(setting, Mapping) and isinstance(setting.get("set"), Mapping):
        return {**setting, "set": resolve_paths(setting["set"], home)}
    return setting


def as_label(value: Any) -> str:
    """Return the label of a value. Raises ValueError if its text cannot be part of a directory's name."""
    text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    if not LABEL.fullmatch(text):
        raise ValueError(
            f"{text!r} cannot be a label, which has only letters, digits and . _ + -; give the axis as a mapping "
            "label -> {path: value}"
        )
    return text


def changed_paths(choices: Mapping[str, Changes]) -> set[str]:
    return {path for changes in choices.values() for path in changes}


def require_known(where: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: unknown '{name}'{did_you_mean(name, known, 0.5)} (there are: {', '.join(known)})")
