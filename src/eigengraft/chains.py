"""Chains: components of one family in order, each of which paths can name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from .component import FAMILY_MARK, stage_name


@dataclass(frozen=True)
class ChainOf:
    """Annotation of a field `tuple[Family, ...]`: in YAML a list, or a single component; names must be distinct.

    family: name of the family.
    members: what errors call the components, in plural.
    """

    family: str
    members: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        distinct = core_schema.no_info_after_validator_function(self._distinct, handler(source))
        return core_schema.no_info_before_validator_function(_as_tuple, distinct)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        component = {FAMILY_MARK: self.family}
        return {"anyOf": [{"type": "array", "items": component}, component]}

    def _distinct(self, components: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [stage_name(component) for component in components]
        twice = sorted({name for name in names if name is not None and names.count(name) > 1})
        if twice:
            raise ValueError(f"{self.members} need distinct names: give each '{twice[0]}' its own `name`")
        return components


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
