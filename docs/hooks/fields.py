"""One table row for each field of a component, from its JSON schema: type and range, default, meaning."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticUndefined

from eigengraft.component import FAMILY_MARK, Component
from markup import inline, table

Links = dict[str, str]
"""Where a component that is not in a family is described, by class name."""


def field_table(cls: type[Component], links: Links, here: str = "") -> str:
    """The fields of a component; `here` is the way from the page to the folder of the family pages."""
    schema = cls.model_json_schema(by_alias=True)
    rows = []
    for name, field in cls.model_fields.items():
        shown = schema["properties"][field.alias or name]
        if name != "kind":
            default = "required" if field.is_required() else default_text(field.default)
            kind = type_text(shown, links, here)
            rows.append([f"`{field.alias or name}`", kind, default, inline(field.description or "")])
    return table(["field", "values", "default", "meaning"], rows) if rows else "No fields."


def default_text(value: Any) -> str:
    """A default as one would write it in YAML."""
    return "none" if value is None or value is PydanticUndefined else f"`{flow(value)}`"


def flow(value: Any) -> str:
    """Plain data or a component in YAML's flow style; of a component what differs from its own defaults."""
    if isinstance(value, Component):
        changed = {n: getattr(value, n) for n, f in type(value).model_fields.items() if getattr(value, n) != f.default}
        kind = getattr(value, "kind", None)
        return kind if kind and not changed else flow(({"kind": kind} if kind else {}) | changed)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def type_text(schema: dict[str, Any], links: Links, here: str) -> str:
    """What a field takes: words, ranges, and links to the families."""
    if FAMILY_MARK in schema:
        family = schema[FAMILY_MARK]
        return f"[{family}]({here}{family}.md)"
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}]({here}{links[name]})" if name in links else name
    if "anyOf" in schema or "oneOf" in schema:
        options = [type_text(option, links, here) for option in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(options))
    if "allOf" in schema:
        return type_text(schema["allOf"][0], links, here)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{flow(value)}`" for value in schema.get("enum", [schema.get("const")]))
    return _plain(schema, links, here)


def _plain(schema: dict[str, Any], links: Links, here: str) -> str:
    kind = schema.get("type")
    if kind == "array":
        items = [schema["items"]] if schema.get("items") else schema.get("prefixItems", [])
        return "list of " + " and ".join(type_text(item, links, here) for item in items) if items else "list"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"mapping to {type_text(values, links, here)}" if isinstance(values, dict) else "mapping"
    words = {"null": "none", "string": "text", "boolean": "`true`, `false`"}
    return words[kind] if kind in words else f"{kind or 'anything'}{interval(schema)}"


def interval(schema: dict[str, Any]) -> str:
    """The range of a number as an interval, empty without bounds."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is high is above is below is None:
        return ""
    start = f"[{low:g}" if low is not None else f"({above:g}" if above is not None else "(-∞"
    end = f"{high:g}]" if high is not None else f"{below:g})" if below is not None else "∞)"
    return f" in {start}, {end}".replace("[", "&#91;").replace("]", "&#93;")
