"""Parts that several benches share: default candidates of a family, names of candidates, and fields."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from eigengraft.component import Component, validated

Declaration = Mapping[str, Any]


def defaults(family: type[Component], preferred: Iterable[Declaration]) -> tuple[Declaration, ...]:
    """Return the declarations of a family's default candidates.

    These are the preferred declarations whose kind is registered, then every other member that has no required fields.
    """
    chosen = [declared for declared in preferred if declared["kind"] in family.members]
    kinds = {declared["kind"] for declared in chosen}
    others = [kind for kind in sorted(family.members) if kind not in kinds and _needs_no_field(family.members[kind])]
    return (*chosen, *({"kind": kind} for kind in others))


def kind_alone(kind: str) -> Declaration:
    """Return the declaration of a kind without further fields."""
    return {"kind": kind}


def default_members(
    family: type[Component],
    preferred: Iterable[Declaration],
    usual: Callable[[str], Declaration] = kind_alone,
    keep: Callable[[Any], bool] = bool,
) -> Callable[[], tuple[Any, ...]]:
    """Return a function that makes the candidates that `defaults` declares.

    usual: function from a kind to its usual declaration. Fields of `preferred` take precedence.
    keep: function that returns True for members that are candidates.
    """

    def make() -> tuple[Any, ...]:
        declared = ({**usual(item["kind"]), **item} for item in defaults(family, preferred))
        return tuple(member for item in declared if keep(member := validated(family, item)))

    return make


def kinds_as(usual: Callable[[str], Declaration]) -> BeforeValidator:
    """Return a validator that replaces the name of a kind by the declaration `usual(kind)`."""
    return BeforeValidator(
        lambda value: tuple(usual(item) if isinstance(item, str) else item for item in listed(value))
    )


def _needs_no_field(member: type[BaseModel]) -> bool:
    return not any(field.is_required() for field in member.model_fields.values())


def listed(value: Any) -> Any:
    """Return a list or tuple as a tuple, and a single value as a tuple of one. Raise an error for an empty list."""
    if isinstance(value, (list, tuple)) and not value:
        raise PydanticCustomError("empty", "an empty list is given; give at least one item")
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def label(component: Component, usual: Callable[[str], Declaration] = kind_alone, always: Collection[str] = ()) -> str:
    """Return `kind field=value ...` with the fields that differ from those of `usual(kind)`.

    usual: function from a kind to its usual declaration. Nested components are labelled in the same way.
    always: names of fields that are always shown.
    """
    kind = str(getattr(component, "kind"))  # noqa: B009  every member has a kind, the family has none
    try:
        like = type(component).model_validate(dict(usual(kind)))
    except ValidationError:  # fields without a default are always shown
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


DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""Dtypes of matrices by the names that declarations use."""


def parse_shapes(value: Any) -> Any:
    """Read `[m, n]` and `mxn` as shapes and a single number as a square. One shape becomes a list of one."""
    single = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(item, int) for item in value)
    return tuple(_parse_shape(item) for item in ([value] if single else listed(value)))


def _parse_shape(item: Any) -> Any:
    if isinstance(item, int) and not isinstance(item, bool):
        return (item, item)
    if isinstance(item, str):
        numbers = item.split("x")
        if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
            raise PydanticCustomError("shape", "this is not a shape; write 16x64 or [16, 64]")
        return tuple(map(int, numbers))
    return tuple(item) if isinstance(item, list) else item


_Item = TypeVar("_Item")
Listed = Annotated[tuple[_Item, ...], BeforeValidator(listed)]
"""A tuple of one or more items. A single item stands for a tuple of one."""
PositiveInt = Annotated[int, Field(ge=1)]
PositiveInts = Listed[PositiveInt]
MatrixShapes = Annotated[tuple[tuple[PositiveInt, PositiveInt], ...], BeforeValidator(parse_shapes)]
MatrixDtypes = Listed[Literal["float32", "float64"]]
