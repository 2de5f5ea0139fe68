"""A reader of JSON schemas, as far as ours go."""

import re
from typing import Any


def violations(schema: dict[str, Any], data: Any, node: Any = None, path: str = "") -> list[str]:
    """What JSON schema 2020-12 says about `data`, for the keywords that our schemas use."""
    node = schema if node is None else node
    if "$ref" in node:
        target = schema
        for part in node["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return violations(schema, data, target, path)
    faults = [f"{path}: {key}" for key, holds in KEYWORDS.items() if key in node and not holds(node[key], data)]
    if "anyOf" in node and all(violations(schema, data, option, path) for option in node["anyOf"]):
        faults.append(f"{path}: anyOf")
    if isinstance(data, dict):
        properties = node.get("properties", {})
        extra = sorted(data.keys() - properties.keys()) if node.get("additionalProperties") is False else []
        faults += [f"{path}.{key}: additionalProperties" for key in extra]
        others = node.get("additionalProperties")
        for key in data.keys() - properties.keys() if isinstance(others, dict) else ():
            faults += violations(schema, data[key], others, f"{path}.{key}")
        for key in data.keys() & properties.keys():
            faults += violations(schema, data[key], properties[key], f"{path}.{key}")
    if isinstance(data, list):
        prefix = node.get("prefixItems", [])
        for index, item in enumerate(data):
            rule = prefix[index] if index < len(prefix) else node.get("items")
            faults += violations(schema, item, rule, f"{path}.{index}") if rule is not None else []
    return faults


def number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


TYPES = {
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "string": lambda x: isinstance(x, str),
    "boolean": lambda x: isinstance(x, bool),
    "null": lambda x: x is None,
    "number": number,
    "integer": lambda x: number(x) and x == int(x),
}
KEYWORDS: dict[str, Any] = {
    "type": lambda rule, x: TYPES[rule](x),
    "const": lambda rule, x: x == rule,
    "enum": lambda rule, x: x in rule,
    "minimum": lambda rule, x: not number(x) or x >= rule,
    "maximum": lambda rule, x: not number(x) or x <= rule,
    "exclusiveMinimum": lambda rule, x: not number(x) or x > rule,
    "exclusiveMaximum": lambda rule, x: not number(x) or x < rule,
    "minProperties": lambda rule, x: not isinstance(x, dict) or len(x) >= rule,
    "minItems": lambda rule, x: not isinstance(x, list) or len(x) >= rule,
    "maxItems": lambda rule, x: not isinstance(x, list) or len(x) <= rule,
    "pattern": lambda rule, x: not isinstance(x, str) or re.search(rule, x) is not None,
    "required": lambda rule, x: not isinstance(x, dict) or x.keys() >= set(rule),
}
CHECKED = {*KEYWORDS, "$ref", "anyOf", "properties", "additionalProperties", "items", "prefixItems"}
NOTES = {"$schema", "$defs", "title", "description", "default", "examples"}


def keywords(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(keywords, node))
    if not isinstance(node, dict):
        return set()
    inner = [
        keywords(list(v.values()) if k in ("properties", "$defs") else v)
        for k, v in node.items()
        if k not in ("default", "examples")
    ]
    return set(node).union(*inner)
