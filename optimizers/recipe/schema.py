"""JSON schema of a declaration, generated from the registry of components, third-party components included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eigengraft.component import Component, families
from eigengraft.reference import FAMILY_MARK
from eigengraft.schedules import Schedulable, Segment

ELSEWHERE = {
    "storage": "it goes to the top level of a recipe: `storage: {second_moment: int8}`, by role or by stage path",
    "lr": "`lr_multiplier` multiplies the learning rate of the recipe",
    "recipe": "give the stages of that recipe as `update`",
    "overrides": "`set: {dotted.path: value}` changes single values of a `base`",
    ".": "dotted paths go under `set`, beside a `base`",
    "imports": "it belongs to an experiment; for a recipe give `--import FILE.py` on the command line, or import the "
    "file in Python before",
    **dict.fromkeys(
        (
            "schedule",
            "warmup_steps",
            "steps",
            "epochs",
            "seed",
            "grad_clip",
            "task",
            "precision",
            "accumulate",
            "callbacks",
        ),
        "it belongs to an experiment, or to the training loop",
    ),
    **dict.fromkeys(
        ("betas", "beta", "beta1", "beta2", "momentum", "eps", "nesterov"),
        "it is a field of a stage, given by its path, such as `update.momentum.beta` of the recipe adamw; "
        "`eigengraft show RECIPE` prints all paths",
    ),
    **dict.fromkeys(("foreach", "fused", "capturable", "maximize"), "no recipe has this option of torch's"),
}
"""Advice for names that users try as fields of a recipe or a route: where to write the setting instead."""


def json_schema(cls: type[Component]) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a component. Each family is one definition with all its members."""
    segment = Segment.model_json_schema()
    schedule = {"anyOf": [segment, {"type": "array", "items": segment, "minItems": 1}]}
    definitions: dict[str, Any] = {"scheduled_number": schedule}
    for name, family in sorted(families().items()):
        members = []
        bare = []
        for kind, member in sorted(family.members.items()):
            reference = f"{name}.{kind}"
            definitions[reference] = _own_schema(member, definitions)
            required = definitions[reference].setdefault("required", [])
            bare += [kind] if not required else []
            definitions[reference]["required"] = ["kind", *required]
            members.append({"$ref": f"#/$defs/{reference}"})
        definitions[name] = {"anyOf": [*members, {"enum": bare}]} if bare else {"anyOf": members}
    schema = _own_schema(cls, definitions)
    needed = {key: definitions[key] for key in sorted(_needed(schema, definitions))}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": needed}


def _needed(node: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Return the names of all definitions that a schema refers to, directly or through other definitions."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        inside = waiting.pop()
        if isinstance(inside, dict):
            name = str(inside.get("$ref", "")).removeprefix("#/$defs/")
            if name in definitions and name not in found:
                found.add(name)
                waiting.append(definitions[name])
        if isinstance(inside, (dict, list)):
            waiting.extend(inside.values() if isinstance(inside, dict) else inside)
    return found


def _own_schema(cls: type[Component], definitions: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = _linked(cls.model_json_schema())
    parts = {part.__name__: part for part in Schedulable.__subclasses__()}
    for key, value in schema.pop("$defs", {}).items():
        if key not in definitions:
            definitions[key] = _with_schedules(parts[key], value) if key in parts else value
    return _with_schedules(cls, schema)


def _with_schedules(cls: type[Component], schema: dict[str, Any]) -> dict[str, Any]:
    """Allow a schedule in place of each number of a component's schema that may be scheduled."""
    for name in [name for name in schema.get("properties", {}) if _takes_schedules(cls, name)]:
        own = schema["properties"][name]
        moved = {key: own.pop(key) for key in ("default", "description", "title") if key in own}
        kinds = own.get("anyOf", [own])
        schema["properties"][name] = {"anyOf": [*kinds, {"$ref": "#/$defs/scheduled_number"}], **moved}
    return schema


def _takes_schedules(cls: type[Component], name: str) -> bool:
    """Return True if a field may be a schedule in place of a number."""
    field = cls.model_fields.get(name)
    number = field is not None and field.annotation in (float, float | None)
    return number and issubclass(cls, Schedulable) and name not in cls.constants


def _linked(node: Any) -> Any:
    """Replace the placeholders of component families in a JSON schema by `$ref`s to the definition of the family.

    Placeholders are needed because pydantic refuses a `$ref` to a definition that it did not make.
    """
    if isinstance(node, list):
        return [_linked(item) for item in node]
    if not isinstance(node, dict):
        return node
    linked = {key: _linked(value) for key, value in node.items() if key != FAMILY_MARK}
    return {"$ref": f"#/$defs/{node[FAMILY_MARK]}", **linked} if FAMILY_MARK in node else linked


def with_base(schema: dict[str, Any]) -> None:
    """Add `base` and `set` to the JSON schema of a recipe.

    The class `Recipe` has no fields of these names, because `loading` resolves both before validation.
    """
    schema["properties"]["base"] = {
        "anyOf": [{"type": "string"}, {"type": "object"}],
        "description": "the recipe whose fields these replace: a shipped name, the path of a YAML file, or a recipe",
    }
    schema["properties"]["set"] = {
        "type": "object",
        "description": "values inside fields of the base, by dotted path: {update.eigenbasis.refresh.steps: 1}",
    }
    schema["required"].remove("update")
    schema["anyOf"] = [{"required": ["update"]}, {"required": ["base"]}]
