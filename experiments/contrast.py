"""Which fields of the resolved configurations distinguish the things compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eigengraft.component import stage_name

# Resolved configurations repeat these inside the recipe, or they differ from run to run by intent.
_IGNORED = {"name", "seed", "overrides"}


@dataclass(frozen=True)
class Contrast:
    """One field: its dotted path and one text for each thing compared, empty where that thing has no such field."""

    path: str
    values: tuple[str, ...]


def contrast(configs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Contrast]:
    """Rows for `configs[panel][label]`: fields in which the labels of some panel differ, in order of first appearance.

    A value that is not the same in every panel is given with the name of its panel.
    """
    flat = {panel: {label: dict(_flatten(c)) for label, c in cells.items()} for panel, cells in configs.items()}
    labels = list(dict.fromkeys(label for cells in flat.values() for label in cells))
    paths = dict.fromkeys(path for cells in flat.values() for fields in cells.values() for path in fields)
    rows = []
    for path in sorted(paths, key=lambda path: path.startswith("recipe.")):
        if any(len({fields.get(path, "") for fields in cells.values()}) > 1 for cells in flat.values()):
            rows.append(Contrast(path, tuple(_text(path, label, flat) for label in labels)))
    return rows


def _text(path: str, label: str, flat: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    values = {panel: cells[label].get(path, "") for panel, cells in flat.items() if label in cells}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return ", ".join(f"{value or 'none'} ({panel})" for panel, value in values.items())


def _flatten(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted paths of all leaves; stages in lists go by their names, and the list itself shows the chain they form."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            # The path of a stage already ends in its kind.
            if (path or key not in _IGNORED) and not (key == "kind" and path.endswith(f".{value}")):
                yield from _flatten(value, f"{path}.{key}".lstrip("."))
    elif isinstance(data, (list, tuple)) and data and all(isinstance(item, Mapping) for item in data):
        names = [stage_name(item) or str(index) for index, item in enumerate(data)]
        yield path, " \u2192 ".join(names)
        for name, item in zip(_distinct(names), data, strict=True):
            yield from _flatten(item, f"{path}.{name}")
    else:
        yield path, _plain(data)


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}-{names[:i].count(name) + 1}" for i, name in enumerate(names)]


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
