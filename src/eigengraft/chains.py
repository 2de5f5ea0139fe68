"""Chains: components of one family in order, each of which paths can name, and the signals that they ask for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from .component import FAMILY_MARK, stage_name
from .ramps import schedules
from .step_context import known_signals


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


class Asks(Protocol):
    """A stage or a constraint, as far as signals are concerned."""

    @property
    def accepts(self) -> frozenset[str]: ...

    def signals(self) -> frozenset[str]: ...

    def signals_at(self, step: int) -> frozenset[str]: ...


def require_signals(stages: Iterable[tuple[str, Asks]], constraints: Sequence[tuple[str, Asks]] = ()) -> None:
    """Raises ValueError for a signal that nobody has registered, or that is for others; each with its path."""
    known, stages = known_signals(), list(stages)
    for path, asks in stages:
        for name in sorted(name for name in asks.signals() | asks.accepts if name in known):
            if known[name].extent == "outputs":
                raise ValueError(f"{path}: a signal for stages is required, got '{name}', which constraints alone see")
    for path, asks in constraints:
        for name in sorted(name for name in asks.signals() | asks.accepts if name in known):
            if known[name].extent != "outputs":
                raise ValueError(f"{path}: a signal with outputs is required, got '{name}', which stages alone see")
    for path, stage in [*stages, *constraints]:
        for name in sorted((stage.signals() | stage.accepts) - known.keys()):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"{path}: requires the signal '{name}', which nobody provides ({', '.join(sorted(known))}){hint}"
            )


def asking(stages: Iterable[tuple[str, Asks]]) -> dict[str, str]:
    """The path of the first stage that asks for each signal, by the signal's name."""
    found: dict[str, str] = {}
    for path, stage in stages:
        for name in sorted(stage.signals() | stage.accepts):
            found.setdefault(name, path)
    return found


def entries(asked: Iterable[str]) -> int:
    """How many signals, by name, have a number for each entry of parameters."""
    return sum(known_signals()[name].extent == "entry" for name in asked)


def follows_run(updates: Mapping[str, Any]) -> str | None:
    """The path of what needs to know the length of the run, if anything does; updates of a recipe, by path."""
    fractions = [path for path, ramps in schedules(updates[""]) if any(ramp.fraction for ramp in ramps)]
    found = asking(pair for where, update in updates.items() for pair in update.stages(where))
    return next(iter(fractions), found.get("step_fraction"))
