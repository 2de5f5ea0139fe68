"""The parts a recipe is made of: frozen, validated models in open families.

A *family* is an abstract component (`class Stage(Component, family="stage")`); a *member* is a final
component that names itself inside its family by `kind`. Defining the class registers it, wherever it is defined. A
field annotated with a family accepts an instance, a mapping with `kind`, or the bare kind of a member that has no
required field.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

FAMILY_MARK = "x-family"
"""Stands in a generated JSON schema where any member of a family may stand."""
_FAMILIES: dict[str, type[Component]] = {}


class Component(BaseModel):
    """Frozen model: unknown fields, non-finite numbers and silent conversions are refused; `replace` validates."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        polymorphic_serialization=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )
    family_name: ClassVar[str | None] = None
    members: ClassVar[dict[str, type[Component]]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """What to do about fields that are looked for here, but are elsewhere; "." stands for every dotted path."""

    def __new__(cls, *values: object, **fields: object) -> Self:
        """Raises TypeError for values without names, which pydantic's own error would not say how to give."""
        if values:
            example = f"{cls.__name__}({next((k for k in cls.model_fields if k not in ('kind', 'name')), 'name')}=...)"
            raise TypeError(f"{cls.__name__}: fields are given by name, e.g. {example}, got {_short(values[0])}")
        return super().__new__(cls)

    def __init_subclass__(cls, *, family: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

    @classmethod
    def __pydantic_init_subclass__(cls, *, family: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if family is not None:
            cls.family_name, cls.members = family, {}
            _FAMILIES[family] = cls
        elif cls.family_name is not None and ("kind" in cls.model_fields or not inspect.isabstract(cls)):
            _register(cls)

    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))  # fields may be mappings

    @classmethod
    def is_family(cls) -> bool:
        """Whether this class is a family itself, not a member of one."""
        return cls.family_name is not None and _FAMILIES.get(cls.family_name) is cls

    @model_validator(mode="wrap")
    @classmethod
    def _open_family(cls, value: Any, handler: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not cls.is_family():
            try:
                return handler(value)
            except ValidationError as error:
                raise _with_nearest(cls, error) from None
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping) or "kind" not in value:
            keyed = [key for key in value if key in cls.members] if isinstance(value, Mapping) else []
            raise PydanticCustomError(
                "missing_kind",
                "a {family} is required: an instance, a mapping with 'kind'{hint}, or one of the kinds {kinds}",
                {
                    "family": cls.family_name,
                    "hint": f" ({{kind: {keyed[0]}, ...}})" if keyed else "",
                    "kinds": ", ".join(sorted(cls.members)),
                },
            )
        return cls.member(value["kind"]).model_validate(dict(value))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if cls.is_family():
            return {FAMILY_MARK: cls.family_name}
        return super().__get_pydantic_json_schema__(core_schema, handler)

    @classmethod
    def member(cls, kind: object) -> type[Component]:
        """The member of this family called `kind`; an unknown one names the nearest kind and all of them."""
        found = cls.members.get(kind) if isinstance(kind, str) else None
        if found is None:
            name = kind if isinstance(kind, str) else ""
            near = difflib.get_close_matches(name.lower(), cls.members, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            others = sorted(str(other) for other, family in _FAMILIES.items() if name in family.members)
            hint = f", which is a {' and a '.join(others)}" if others else hint
            raise PydanticCustomError(
                "unknown_kind",
                "unknown {family} kind {kind}{hint} (the kinds are {kinds}; --import FILE.py adds those of a file)",
                {
                    "family": cls.family_name,
                    "kind": repr(kind),
                    "hint": hint,
                    "kinds": ", ".join(sorted(cls.members)),
                },
            )
        return found

    def replace(self, **changes: Any) -> Self:
        """A copy with fields changed, validated as at construction (pydantic's `model_copy` does not validate)."""
        fields = type(self).model_fields
        own = {field.alias or name: getattr(self, name) for name, field in fields.items()}
        aliased = {(fields[name].alias or name) if name in fields else name: value for name, value in changes.items()}
        return type(self).model_validate({**own, **aliased})

    def declaration(self) -> dict[str, Any]:
        """The fields as plain data in the order one would write them, without those that are None by default."""
        data, written = self.model_dump(mode="json"), dict[str, Any]()
        for name in sorted(type(self).model_fields, key=lambda name: (name != "kind", name != "name")):
            field, value = type(self).model_fields[name], getattr(self, name)
            key = field.alias or name
            if key in data and (value is not None or field.default is not None):
                written[key] = _declared(value, data[key])
        return written


def _declared(value: Any, data: Any) -> Any:
    if isinstance(value, Component):
        return value.declaration()
    if isinstance(value, (list, tuple)):
        return [_declared(item, plain) for item, plain in zip(value, data, strict=True)]
    if isinstance(value, Mapping):
        return {str(key): _declared(item, data[str(key)]) for key, item in value.items()}
    return data


def _register(cls: type[Component]) -> None:
    for base in cls.__mro__[1:]:
        for name in vars(cls):
            if getattr(vars(base).get(name), "__final__", False):
                raise TypeError(f"{cls.__name__}: `{name}` of {base.__name__} is final, got an override")
    kind = cls.model_fields["kind"].default if "kind" in cls.model_fields else None
    if not isinstance(kind, str):
        raise TypeError(f"{cls.__name__}: `kind: Literal['name'] = 'name'` is required, got default {kind!r}")
    parents = [base for base in cls.__mro__[1:] if base in cls.members.values()]
    if parents:
        raise TypeError(f"{cls.__name__}: a member is final, wrap {parents[0].__name__} or add a field to it instead")
    known = cls.members.get(kind)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(
            f"{cls.__name__}: kind '{kind}' of family '{cls.family_name}' already belongs to "
            f"{known.__module__}.{known.__qualname__}"
        )
    cls.members[kind] = cls


OTHER_NAMES = {"learning_rate": "lr", "betas": "beta", "epsilon": "eps", "wd": "weight_decay", "optimizer": "recipe"}
"""What others call a field, and its name here."""


def _with_nearest(cls: type[Component], error: ValidationError) -> ValidationError:
    """Say about each unknown field where it belongs, or which known one is meant."""
    details: list[InitErrorDetails] = []
    for fault in error.errors(include_url=False):
        kind, message = fault["type"], fault["msg"]
        if kind == "extra_forbidden" and len(fault["loc"]) == 1:
            kind, message = "unknown_field", f"unknown field{_advice(cls, str(fault['loc'][0]))}"
        details.append({"type": PydanticCustomError(kind, message), "loc": fault["loc"], "input": fault["input"]})
    return ValidationError.from_exception_data(error.title, details)


def _advice(cls: type[Component], name: str) -> str:
    known = [field.alias or name for name, field in cls.model_fields.items()]
    if where := cls.elsewhere.get("." if "." in name else name):
        return f"; {where}"
    near = [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in known else []
    near = near or [*_inside(cls, name), *difflib.get_close_matches(name.lower(), known, n=1)]
    return f" (did you mean '{near[0]}'?)" if near else f" (there are: {', '.join(known)})"


def _inside(cls: type[Component], name: str) -> Iterator[str]:
    """Paths of a field in the components that the fields of a component hold by default."""
    for field, info in cls.model_fields.items():
        if isinstance(info.default, Component):
            own = type(info.default)
            yield from [f"{field}.{name}"] if name in own.model_fields else (f"{field}.{p}" for p in _inside(own, name))


def families() -> dict[str, type[Component]]:
    """Every family defined so far, by name."""
    return dict(_FAMILIES)


C = TypeVar("C", bound=Component)


class RecipeError(ValueError):
    """A declaration that cannot be used: one line for each fault, with its path, what was required and what was got."""


class ContractError(ValueError):
    """A stage that breaks its contract: `<path of the stage>: <what was required>, got <what was got>`."""


def checked(cls: type[C], data: Any, where: str = "") -> C:
    """`data` as a `cls`; faults are raised as one `RecipeError` whose paths name stages by their names."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        # a tuple without its wrong items is then also too short
        inside = {fault["loc"][:depth] for fault in faults for depth in range(len(fault["loc"]))}
        faults = [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in inside]
        lines = [_fault(detail, data, where) for detail in faults]
        raise RecipeError("\n".join(dict.fromkeys(lines))) from None


_REQUIRED = {
    "dict_type": "a mapping is required",
    "model_type": "a mapping of fields is required",
    "tuple_type": "a list is required",
    "too_short": "at least 1 item is required",
}
"""What is required, in the words of a file, where pydantic names types of Python."""


def _fault(detail: Any, data: Any, where: str) -> str:
    path, got = ".".join([where] * bool(where) + list(_names(detail["loc"], data))), detail["input"]
    if detail["type"] == "missing":
        return f"{path}: required, got nothing"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in _REQUIRED:
        message = _REQUIRED[detail["type"]]
    field = message.partition(": ")[0]
    if isinstance(got, Mapping) and field in got:
        got = got[field]
    told = ", got " in message  # by who knows which part of a whole stage is meant
    return located(path, f"{message[:1].lower()}{message[1:]}") + ("" if told else f", got {_short(got)}")


def located(path: str, message: str) -> str:
    """The message under a path; where it names a field of what is there (`beta: ...`), that is part of the path."""
    field = message.partition(": ")[0]
    if ": " in message and re.fullmatch(r"[a-z_]+(\.[\w/]+)*", field):
        return message if path == field or not path else f"{path}.{message}"
    return f"{path or 'recipe'}: {message}"


def _names(location: tuple[int | str, ...], data: Any) -> Iterator[str]:
    """The parts of a pydantic location, with list positions replaced by the name or kind found there."""
    for part in location:
        alone = isinstance(part, int) and not isinstance(data, (list, tuple))  # a single stage stands for a list of one
        try:
            if not alone:
                data = data[part] if hasattr(data, "__getitem__") else getattr(data, str(part))
        except (KeyError, IndexError, TypeError, AttributeError):
            data = None
        if not alone or stage_name(data):
            yield stage_name(data) or str(part) if isinstance(part, int) else str(part)


def stage_name(data: Any) -> str | None:
    """The name of a stage in raw data: its `name`, else its `kind`; a bare string is its kind."""
    if isinstance(data, str):
        return data
    if isinstance(data, Mapping):
        name = data.get("name") or data.get("kind")
        return name if isinstance(name, str) else None
    name = getattr(data, "name", None) or getattr(data, "kind", None)
    return name if isinstance(name, str) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
