"""Overrides, changes of declarations by dotted path: `update.eigenbasis.refresh.steps=1`.

Stages are addressed by name, never by position.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from eigengraft.component import Component, families, plain, stage_name
from eigengraft.errors import RecipeError, counted, did_you_mean, first_lines
from eigengraft.slots import dotted

Overrides = Mapping[str, Any] | Iterable[str] | None
"""Changes of a declaration, applied in order: a mapping {dotted path: value}, or strings "dotted.path=value"; None: no
change.

The string "~dotted.path" removes a stage from its chain, or resets a field to its default."""
_CHAINS = ("update.", "after_decay.", "routes.")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def json_value(text: str) -> Any:
    """Return the JSON value of a text (a number, true, null, a list), or the text itself if it is not JSON.

    Decimal numbers that JSON does not allow, such as "+1", "1." and ".5", are converted too.

    Raises:
        RecipeError: the text begins as a JSON list or mapping, and is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if text.startswith(("{", "[")):
            raise RecipeError(
                f"the list or mapping {text} is not JSON ({error}); write names in double quotes, or give "
                "overrides as a mapping {path: value}"
            ) from None
        return float(text) if _NUMBER.fullmatch(text) else text


def apply_overrides(
    data: Mapping[str, Any], overrides: Overrides, parse: Callable[[str], Any] = json_value
) -> dict[str, Any]:
    """Return a copy of raw `data` with every override applied in order. Setting a `kind` drops the old kind's fields.

    Raises:
        RecipeError: a path does not exist. The message names the part that is missing and a similar name.
    """
    return assign_paths(data, override_pairs(overrides, parse))


def override_pairs(overrides: Overrides, parse: Callable[[str], Any] = json_value) -> list[tuple[str, Any]]:
    """Return (dotted path, value) of every override. For a removal the path begins with ~ and the value is None.

    overrides: a mapping {path: value}, texts `path=value` or `~path`, or one such text. None: no overrides.
    parse: function that converts the text after "=" into a value.

    Raises RecipeError if an override has another form.
    """
    if overrides is None:
        return []
    if isinstance(overrides, Mapping):
        for path in overrides:
            if not str(path).strip():
                raise RecipeError(f"overrides: every value needs the path of a field, got {path!r}")
        return [(str(path).strip(), _written(plain(value))) for path, value in overrides.items()]
    if not isinstance(overrides, Iterable):
        required = "must be a mapping {path: value} or strings path.to.field=value"
        raise RecipeError(f"overrides: {required}, got {type(overrides).__name__}")
    pairs = []
    for override in [overrides] if isinstance(overrides, str) else overrides:
        if isinstance(override, (tuple, list)):
            raise RecipeError(
                f"overrides: {override!r:.60} is not text; pass a mapping {{path: value}}, as dict(overrides) makes of "
                "pairs, or strings path.to.field=value"
            )
        path, equals, text = str(override).partition("=")
        removes = path.startswith("~")
        if removes is bool(equals) or not all(part.strip() for part in path.removeprefix("~").split(".")):
            raise RecipeError(
                f"override '{override}': the form is dotted.path=value, as in lr=0.1, or ~dotted.path to remove it"
            )
        refuse_empty(str(override))
        try:
            pairs.append((path.strip(), None if removes else parse(text.strip())))
        except RecipeError as error:
            raise RecipeError(f"override '{override}': {error}") from None
    return pairs


def refuse_empty(override: str) -> None:
    """Raise RecipeError for an override with an empty value, such as `lr=`.

    A shell makes `lr=` of `lr=$LR` if the variable is not set.
    """
    path, equals, text = override.partition("=")
    if equals and not text.strip():
        path = path.strip()
        raise RecipeError(
            f"override '{override}': the value is empty (is a shell variable not set?); write ~{path} to remove what "
            f"is set there, or {path}=null to set no value"
        )


def _written(value: Any) -> Any:
    """Return a value with its components converted to plain data, so that later overrides can change their fields."""
    if isinstance(value, Component):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _written(item) for key, item in value.items()}
    return [_written(item) for item in value] if isinstance(value, (list, tuple)) else value


def assign_paths(data: Mapping[str, Any], pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a copy of raw `data` with every (dotted path, value) assigned in order.

    A path that begins with ~ names a stage or a field to remove; its value is ignored.
    """
    result = copy.deepcopy(dict(data))
    for path, value in pairs:
        if path.startswith("~"):
            _remove(result, _split(result, path[1:]), path[1:])
        else:
            _assign(result, _split(result, path), value, path)
    return result


def _split(data: Mapping[str, Any], path: str) -> list[str]:
    """Split a dotted path into names. A key of `storage` is one name, even if it is the path of a stage or slot."""
    first, _, rest = path.partition(".")
    if first != "storage" or not rest.startswith(_CHAINS):
        return path.split(".")
    held = [key for key in data.get(first) or () if rest == key or rest.startswith(f"{key}.")]
    key = max(held, key=len, default=rest)
    return [first, key, *rest[len(key) :].split(".")[1:]]


def _parent(node: Any, parts: list[str], path: str) -> Any:
    """Return the mapping or chain that contains the last name of a path. Raise RecipeError if there is none.

    node: the whole declaration. If the path leads into a component that is written as its kind alone, such as "rms",
        the component is replaced by a mapping, such as {"kind": "rms"}, in place.
    parts: the names in the path, in order.
    path: the path, for the error.
    """
    for depth, part in enumerate(parts[:-1]):
        inner = _child(node, part)
        if inner is None:
            raise RecipeError(f"{path}: {_missing(node, parts[depth:], '.'.join(parts[:depth]))}")
        if isinstance(inner, str) and any(inner in family.members for family in families().values()):
            inner = {"kind": inner}  # a bare kind becomes a mapping, so that its fields can be set
            node[_position(node, part) if isinstance(node, list) else part] = inner
        node = inner
    return node


def _remove(node: Any, parts: list[str], path: str) -> None:
    """Remove a stage from its chain, or a field from its mapping. The removed field gets its default.

    node, parts, path: as in `_parent`. The path leads to the stage or field.
    """
    node, last = _parent(node, parts, path), parts[-1]
    position = _position(node, last) if isinstance(node, list) else None
    if position is not None:
        del node[position]
    elif isinstance(node, dict) and last in node:
        del node[last]
    else:
        raise RecipeError(f"~{path}: {_missing(node, [last], '.'.join(parts[:-1]))}")


def _assign(node: Any, parts: list[str], value: Any, path: str) -> None:
    node = _parent(node, parts, path)
    last = parts[-1]
    if isinstance(node, list):
        position = _position(node, last)
        if position is None:
            raise RecipeError(f"{path}: {_missing(node, [last], '.'.join(parts[:-1]))}")
        node[position] = value
    elif not isinstance(node, dict):
        raise RecipeError(f"{path}: '{'.'.join(parts[:-1])}' is the value {node!r} and has no fields")
    elif last == "kind" and node.get("kind") != value:
        kept = {"name": node["name"]} if node.get("name") is not None else {}
        node.clear()
        node.update(kind=value, **kept)
    else:
        node[last] = value


def _child(node: Any, part: str) -> Any:
    if isinstance(node, list):
        position = _position(node, part)
        return None if position is None else node[position]
    if not isinstance(node, dict):
        return None
    # A declaration may have a single stage in place of a chain. Its name then selects the stage itself.
    return node.get(part, node if "kind" in node and stage_name(node) == part else None)


def _position(stages: list[Any], name: str) -> int | None:
    found = [i for i, stage in enumerate(stages) if stage_name(stage) == name]
    if len(found) > 1:
        raise RecipeError(
            f"'{name}' is ambiguous, because {len(found)} stages have that name; give each stage its own `name`"
        )
    return found[0] if found else None


def _missing(node: Any, parts: list[str], where: str) -> str:
    """Return the text of an error about a path that does not exist, because a node has no member `parts[0]`.

    The text suggests the first of these paths that exists:
    1. the only path below the node that contains all names of `parts` in a row,
    2. the only path below the node that contains `parts[0]`,
    3. if the node is the whole declaration, the first of several paths that contain `parts[0]`,
    4. the member of the node whose name is similar to `parts[0]`.

    node: the mapping, chain or value that was reached.
    parts: names in the path that were not found, in order.
    where: dotted path of the node; "" for the whole declaration.
    """
    part = parts[0]
    if isinstance(node, list):
        known = [name for name in map(stage_name, node) if name]
    elif isinstance(node, dict):
        if part in node:
            return f"'{part}' is not set here, so it has no fields; set all of it first"
        known = list(node)
    else:
        return f"'{where}' is the value {node!r} and has no fields"
    below = [path for path, _ in flatten(node, where)]
    first = next((found for names in (parts, [part]) if len(found := _with_names(below, names, where)) == 1), [])
    first = first or ([] if where else _with_names(below, [part], where))
    hint = did_you_mean(part, known, first=first, separator="; ")
    place = f"'{where}'" if where else "the top level"
    return f"there is no '{part}' in {place}, which has {', '.join(known) or 'nothing'}{hint}"


def _with_names(paths: Iterable[str], names: list[str], where: str) -> list[str]:
    """Return the beginnings of all paths that contain some names in a row, up to the last of the names.

    Equal beginnings are returned once.

    where: path with which all paths begin. The names are searched after it.
    """
    wanted, start = f".{'.'.join(names)}.", len(f".{where}") if where else 0
    places = ((path, f".{path}.".find(wanted, start)) for path in paths)
    return list(dict.fromkeys(path[: place + len(wanted) - 2] for path, place in places if place >= 0))


def flatten(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every leaf of a declaration, except leaves that are None or an empty list.

    In paths, stages appear by name. For a chain, (path of the chain, list of its stage names) is yielded too.

    path: path of `data`, with which all yielded paths begin; "" for a whole declaration.
    """
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from flatten(value, dotted(path, str(key)))
    elif isinstance(data, (list, tuple)) and any(stage_name(item) for item in data if not isinstance(item, str)):
        yield path, [stage_name(item) for item in data]  # the order is part of the declaration
        for item in data:
            yield from flatten(item, f"{path}.{stage_name(item)}")
    elif data is not None and data != () and data != []:
        yield path, list(data) if isinstance(data, tuple) else data


def changed_leaves(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, old value, new value) of every leaf in which two declarations differ.

    The text "absent" is the value in a declaration that lacks the leaf.
    """
    before, after = dict(flatten(old)), dict(flatten(new))
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            yield path, before.get(path, "absent"), after.get(path, "absent")


def differences(old: Any, new: Any) -> list[str]:
    """Return the differences of two declarations, as lines "path: old -> new"."""
    return [f"{path}: {before!s} -> {after!s}" for path, before, after in changed_leaves(old, new)]


def first_differences(lines: Sequence[str]) -> list[str]:
    """Return the lines of `differences` that an error shows.

    If there are too many lines, only lines about fields that both declarations have are shown. Lines about fields that
    one declaration lacks are counted, because they say little: if a chain lacks a stage, each field of the stage has
    such a line. The names of all stages in both chains are in one of the shown lines.
    """
    both = [line for line in lines if not re.search("(: absent -> | -> absent$)", line)]
    shown = first_lines(lines)
    if shown == lines or not both:
        return shown
    return [*first_lines(both), f"... and {counted(len(lines) - len(both), 'field')} that only one of them has"]
