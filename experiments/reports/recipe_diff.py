"""Fields in which the runs compared in a report, such as those of two recipes, have different configurations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from eigengraft.component import stage_name

from .records import learning_rate
from .tables import TableCell, TextTable

# Names, seeds and descriptions do not distinguish methods.
_IGNORED = {"name", "about", "seed", "overrides", "imports"}

_Place = tuple[str, str]
"""(panel, label): the place of a configuration among those that are compared."""


def diff_recipes(configs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> TextTable:
    """Return a table of the fields in which the compared configurations differ: a column for each label, and a row for
    each field, headed by its dotted path.

    A cell is empty if the label does not have the field. A component that only some labels have is one row, whose cells
    list the component's fields. If a label has different values in several panels, its cell has each value, followed by
    the name of its panel.

    configs: configurations by panel of the report, then by label.
    """
    places = {(panel, label): config for panel, cells in configs.items() for label, config in cells.items()}
    components: dict[str, dict[str, dict[_Place, str]]] = {}
    for place, config in places.items():
        for path, field, text in _fields("", _effective(config)):
            components.setdefault(path, {}).setdefault(field, {})[place] = text
    rows: list[tuple[str, dict[_Place, str]]] = []
    for path, fields in components.items():
        present = list(dict.fromkeys(place for found in fields.values() for place in found))
        own = {field: found for field, found in fields.items() if _differ(found, present)}
        shared = {field: found for field, found in fields.items() if field not in own}
        summaries = {place: _summary(place, shared) for place in present}
        if any(summaries.values()) and _differ(dict.fromkeys(present, ""), places):
            rows.append((path, summaries))
        rows += [(f"{path}.{field}".strip("."), found) for field, found in own.items()]
    labels = list(dict.fromkeys(label for _, label in places))
    texts = [(path, *(_text(label, found) for label in labels)) for path, found in rows]
    return TextTable("", "", "", ["field", *labels], [list(map(TableCell, row)) for row in texts])


def _differ(found: Mapping[_Place, str], among: Collection[_Place]) -> bool:
    """Return True if runs that are compared have different values of a field, or if only some of them have the field.

    found: value of the field as text, by (panel, label). Only runs of one panel are compared with each other.
    among: (panel, label) of the runs to compare.
    """
    panels = {panel for panel, _ in found}
    return any(len({found.get(place) for place in among if place[0] == panel}) > 1 for panel in panels)


def _summary(place: _Place, fields: Mapping[str, Mapping[_Place, str]]) -> str:
    """Return the fields of a component as one text: its kind, or the stages of a chain, then the names and values of
    other fields. `false` is left out.

    place: (panel, label) of the configuration that has the component.
    fields: field -> (panel, label) -> value of the field as text.
    """
    texts = [(field, found[place]) for field, found in fields.items() if found.get(place, "false") != "false"]
    return ", ".join(text if field in ("", "kind") else f"{field} {text}" for field, text in texts)


def _text(label: str, found: Mapping[_Place, str]) -> str:
    values = {panel: text for (panel, owner), text in found.items() if owner == label}
    if len(set(values.values())) <= 1:
        return next(iter(values.values()), "")
    return ", ".join(f"{text} ({panel})" for panel, text in values.items())


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the learning rate that the run uses. The field `lr` of the recipe is removed."""
    recipe = {key: value for key, value in config.get("recipe", {}).items() if key != "lr"}
    return {"lr": learning_rate(config), **{k: v for k, v in config.items() if k != "lr"}, "recipe": recipe}


def _fields(path: str, data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (path of the component, field, text) for each field that is set, also in nested components.

    The stages of a chain, which is a list, are components too: their path ends with their name. The chain has one
    field, which is named "". Its text has the names of the stages in their order.
    """
    for key, value in data.items():
        inner = f"{path}.{key}".strip(".")
        if key in _IGNORED or value is None or value in ([], ()):
            continue
        if isinstance(value, Mapping):
            yield from _fields(inner, value)
        elif isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value):
            names = [stage_name(item) or str(index) for index, item in enumerate(value)]
            yield inner, "", " \u2192 ".join(names)
            for i, (n, item) in enumerate(zip(names, value, strict=True)):
                distinct = n if names.count(n) == 1 else f"{n}-{names[:i].count(n) + 1}"
                yield from _fields(f"{inner}.{distinct}", {k: v for k, v in item.items() if k != "kind" or v != n})
        elif isinstance(value, (list, tuple)):
            yield path, key, ", ".join(map(str, value))
        else:
            yield path, key, str(value).lower() if isinstance(value, bool) else _short(value)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
