"""Candidates of benches: their declarations, defaults read from the families, and their names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from eigengraft.component import Component

Candidate = TypeVar("Candidate")
Declaration = Mapping[str, Any]


def defaults(family: type[Component], preferred: Iterable[Declaration]) -> tuple[Declaration, ...]:
    """The preferred declarations whose kind is registered, then every other member that needs no field."""
    chosen = [declared for declared in preferred if declared["kind"] in family.members]
    kinds = {declared["kind"] for declared in chosen}
    others = [kind for kind in sorted(family.members) if kind not in kinds and _needs_no_field(family.members[kind])]
    return (*chosen, *({"kind": kind} for kind in others))


def _needs_no_field(member: type[BaseModel]) -> bool:
    try:
        member()
    except ValidationError:
        return False
    return True


def listed(value: Any) -> Any:
    """The value as a list: a single declaration stands for a list of one; an empty list is refused."""
    if isinstance(value, (list, tuple)) and not value:
        raise PydanticCustomError("empty", "at least one is required")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def require_distinct(candidates: Iterable[Candidate], name: Callable[[Candidate], str]) -> None:
    """Refuse candidates with the same name, which figures and tables could not tell apart."""
    names = [name(candidate) for candidate in candidates]
    twice = sorted({text for text in names if names.count(text) > 1})
    if twice:
        raise ValueError(f"different declarations are required, got '{twice[0]}' more than once")


def kind_alone(kind: str) -> Declaration:
    """The declaration that a bare kind stands for."""
    return {"kind": kind}


def label(component: Component, usual: Callable[[str], Declaration] = kind_alone, always: Collection[str] = ()) -> str:
    """`kind field=value ...` with the fields that differ from those of `usual(kind)`, nested components included.

    always: names of fields that are shown in any case.
    """
    kind = str(getattr(component, "kind"))  # noqa: B009  every member has a kind, the family has none
    try:
        like = type(component).model_validate(dict(usual(kind)))
    except ValidationError:  # the component has fields without default: those always belong to its name
        like = None
    fields = type(component).model_fields
    own = {name: getattr(component, name) for name in fields if name != "kind"}
    same = {n: fields[n].get_default(call_default_factory=True) if like is None else getattr(like, n) for n in own}
    different = [f"{fields[n].alias or n}={_short(own[n], usual)}" for n in own if n in always or own[n] != same[n]]
    return " ".join([kind, *different])


def _short(value: Any, usual: Callable[[str], Declaration]) -> str:
    if isinstance(value, Component):
        text = label(value, usual)
        return f"({text})" if " " in text else text
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, Component) for item in value):
            return " > ".join(_short(item, usual) for item in value)
        return f"[{len(value)}]" if len(value) > 2 else "[" + ", ".join(_short(item, usual) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
