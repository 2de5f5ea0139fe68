"""One table row for each field of a component, from its JSON schema: type and range, default, meaning."""

from __future__ import annotations

from eigengraft.component import Component, families
from eigengraft.reference import fields_of, type_text
from markup import inline, table

Links = dict[str, str]
"""Where a component that is not in a family is described, by class name."""


def field_table(cls: type[Component], links: Links, here: str = "") -> str:
    """The fields of a component; `here` is the way from the page to the folder of the family pages."""

    def link(name: str) -> str:
        target = f"{name}.md" if name in families() else links.get(name)
        return name if target is None else f"[{name}]({here}{target})"

    rows = []
    for field in fields_of(cls):
        default = "required" if field.required else "none" if field.default is None else f"`{field.default}`"
        kind = type_text(field.schema, link, "`{}`".format, _escaped)
        rows.append([f"`{field.name}`", kind, default, inline(field.meaning)])
    return table(["field", "values", "default", "meaning"], rows) if rows else "No fields."


def _escaped(interval: str) -> str:
    """A range whose brackets make no link."""
    return interval.replace("[", "&#91;").replace("]", "&#93;")
