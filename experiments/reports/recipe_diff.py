"""Differences between the resolved configurations of the compared labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eigengraft.component import stage_name

from .records import learning_rate

# Names, seeds and descriptions do not distinguish methods.
_IGNORED = {"name", "about", "seed", "overrides", "imports"}

Tree = dict[str, "str | Tree"]
"""A configuration as nested mappings of texts. A list of stages becomes a mapping by name of the stage. The key "" of
this mapping has the whole chain as text.
"""

FieldPath = tuple[str, str]
"""(panel, label): the place of a configuration among those that are compared."""


@dataclass(frozen=True)
class DiffRow:
    """A difference in a field, or a component that only some labels have.

    path: dotted path.
    values: one text for each label, empty if the label has no such field.
    """

    path: str
    values: tuple[str, ...]


def diff_recipes(configs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[DiffRow]:
    """Return a row for each difference between the labels of a panel.

    A field with different values is a row. A component that only some labels have is one row with its fields. If the
    value of a label differs between panels, the name of the panel follows each value.

    configs: panel -> label -> configuration.
    """
    trees = {(panel, label): _tree(_effective(c)) for panel, cells in configs.items() for label, c in cells.items()}
    labels = list(dict.fromkeys(label for _, label in trees))
    return [DiffRow(path, tuple(_text(label, found) for label in labels)) for path, found in _rows("", trees)]


def _rows(path: str, nodes: Mapping[FieldPath, Tree]) -> Iterator[tuple[str, dict[FieldPath, str]]]:
    """Yield (path, texts by (panel, label)) for each row below one path.

    nodes: the part of each configuration below this path by (panel, label); empty if a configuration has none.
    """
    present = {place: node for place, node in nodes.items() if node}
    shared, rows = [], []
    for key in dict.fromkeys(key for node in present.values() for key in node):
        inner = f"{path}.{key}".strip(".")
        values = {place: node[key] for place, node in present.items() if key in node}
        leaves = {place: value for place, value in values.items() if isinstance(value, str)}
        if leaves and _differ(leaves, present):
            rows.append((inner, leaves))
        elif leaves:
            shared.append(key)
        subtrees = {place: value if isinstance(value := node.get(key), dict) else {} for place, node in nodes.items()}
        if any(subtrees.values()):
            rows += _rows(inner, subtrees)
    if shared and _differ(dict.fromkeys(present, ""), nodes):
        yield path, {place: _summary(node, shared) for place, node in present.items()}
    yield from rows


def _differ(found: Mapping[FieldPath, str], among: Mapping[FieldPath, object]) -> bool:
    """Return True if in some panel the values differ, or only some labels have a value."""
    panels = {panel for panel, _ in found}
    return any(len({found.get(place) for place in among if place[0] == panel}) > 1 for panel in panels)


def _summary(node: Tree, keys: list[str]) -> str:
    """Return the fields of a component as one text: its kind or chain, then names and values. `false` is left out."""
    texts = [(key, value) for key in keys if isinstance(value := node.get(key), str) and value != "false"]
    return ", ".join(value if key in ("", "kind") else f"{key} {value}" for key, value in texts)


def _text(label: str, found: Mapping[FieldPath, str]) -> str:
    values = {panel: text for (panel, owner), text in found.items() if owner == label}
    if len(set(values.values())) <= 1:
        return next(iter(values.values()), "")
    return ", ".join(f"{text} ({panel})" for panel, text in values.items())


def _effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the learning rate that the run uses. The field `lr` of the recipe is removed."""
    recipe = {key: value for key, value in config.get("recipe", {}).items() if key != "lr"}
    return {"lr": learning_rate(config), **{k: v for k, v in config.items() if k != "lr"}, "recipe": recipe}


def _tree(data: Mapping[str, Any]) -> Tree:
    return {key: node for key, value in data.items() if key not in _IGNORED for node in _node(value)}


def _node(value: Any) -> Iterator[str | Tree]:
    """Yield the value as a text or tree. Yields nothing for a field that is not set."""
    if isinstance(value, Mapping):
        yield _tree(value)
    elif isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
        names = [stage_name(item) or str(index) for index, item in enumerate(value)]
        distinct = [n if names.count(n) == 1 else f"{n}-{names[:i].count(n) + 1}" for i, n in enumerate(names)]
        inner = ({k: v for k, v in item.items() if k != "kind" or v != n} for n, item in zip(names, value, strict=True))
        yield {"": " \u2192 ".join(names), **dict(zip(distinct, map(_tree, inner), strict=True))}
    elif isinstance(value, (list, tuple)):
        yield from [", ".join(map(str, value))] if value else []
    elif value is not None:
        yield (
            str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
        )
