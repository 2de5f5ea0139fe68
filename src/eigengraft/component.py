"""The parts a recipe is made of: frozen, validated models in open families.

A *family* is an abstract component (`class Stage(Component, family="stage")`); a *member* is a final
component that names itself inside its family by `kind`. Defining the class registers it, wherever it is defined. A
field annotated with a family accepts an instance, a mapping with `kind`, or the bare kind of a member that has no
required field.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, get_args, get_origin

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, PydanticUndefined, core_schema

from eigengraft.errors import RecipeError, did_you_mean, near_names
from eigengraft.reference import FAMILY_MARK, full_docstring, signature_of, summary

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

_FAMILIES: dict[str, type[Component]] = {}


def plain(value: Any) -> Any:
    """Convert data of other libraries, such as Hydra's nodes, to plain Python data.

    Mappings become dicts, sequences become lists (a tuple stays a tuple), and numbers and arrays of NumPy become
    numbers and lists. Any other value is returned unchanged.
    """
    kind = type(value)
    if kind in PLAIN_TYPES:
        return value
    if kind is dict:
        return {key: item if type(item) in PLAIN_TYPES else plain(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in PLAIN_TYPES else plain(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    return [plain(item) for item in value] if listed else value


PLAIN_TYPES = frozenset({NoneType, str, int, float, bool})
"""Types whose values `plain` returns at once. Each validation of a component calls `plain` for all values in it, and
without this shortcut, checks for abstract classes such as Mapping took most of the time to load a recipe."""


_IN_SCHEMA = ContextVar("in_schema", default=False)
"""True while a JSON schema is made from docstrings. `__doc__` then leaves out the list of fields, because this list is
itself made from the schema.
"""


class ComponentType(ModelMetaclass):
    # The metaclass of components. It defines calls of a component, and what `help`, `dir` and completion show.

    if not TYPE_CHECKING:  # without a signature of `__call__`, type checkers check calls against a component's fields

        def __call__(cls, *values: object, **fields: object) -> Any:
            """Return an instance.

            Raise RecipeError for invalid fields, and TypeError for positional arguments or if methods are missing.
            """
            if missing := _missing_methods(cls):
                raise TypeError(f"{cls.__name__}: the class must define {missing}")
            if values:
                named = next((name for name in cls.model_fields if name not in ("kind", "name")), "name")
                raise TypeError(
                    f"{cls.__name__}: fields must be given by name, as in {cls.__name__}({named}=...), got "
                    f"{short(values[0])}"
                )
            try:
                return super().__call__(**fields)
            except ValidationError as error:
                raise RecipeError("\n".join(fault_lines(error, fields, cls.__name__))) from None

        @property
        def __doc__(cls) -> str:
            """The docstring that the class declares, a list of its fields, and an example."""
            return summary(cls) if _IN_SCHEMA.get() else full_docstring(cls, cls.members if cls.is_family() else ())

        @property
        def __signature__(cls) -> inspect.Signature:
            """The fields by name, with their types and defaults."""
            return signature_of(cls._pydantic_signature, cls)

        @__signature__.setter
        def __signature__(cls, signature: object) -> None:
            super().__setattr__("_pydantic_signature", signature)

    def __dir__(cls) -> list[str]:
        """Return the names of the class's attributes, without the attributes of pydantic and of the registry."""
        return [name for name in super().__dir__() if name not in _HIDDEN and not name.startswith("__")]


_HIDDEN = frozenset(dir(BaseModel)) | {
    "members",
    "family_name",
    "elsewhere",
    "loader_fields",
    "if_missing",
    "kind_advice",
    "number",
    "_pydantic_signature",
}
"""Names that `dir` and `help` leave out: attributes of pydantic's models, and class variables of the registry."""
_VALIDATION = ConfigDict(
    strict=True,
    allow_inf_nan=False,
    validate_default=True,
    polymorphic_serialization=True,
    validate_by_name=True,
    validate_by_alias=True,
    serialize_by_alias=True,
)
"""Settings of validation that must be hidden from type checkers.

pydantic's plugin for mypy reads settings that are written as literals in a class. With `strict`, it would refuse kinds,
mappings, lists and schedules in calls. With `validate_by_name`, it would refuse aliases, which are the names in YAML.
"""


class Component(BaseModel, metaclass=ComponentType):
    """A frozen pydantic model, the base of all parts of a recipe.

    It refuses unknown fields, numbers that are not finite, and silent conversions. `replace` returns a changed and
    validated copy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", **_VALIDATION)
    family_name: ClassVar[str | None] = None
    members: ClassVar[dict[str, type[Component]]] = {}
    number: ClassVar[tuple[str, str] | None] = None
    """For errors about a number in place of a component: (kind of a member, name of its field). The error suggests this
    member, with the number as the value of the field."""
    kind_advice: ClassVar[list[Callable[[str], str]]] = []
    """Functions that receive a kind that the family does not have, and return advice for the error, or "" for none."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """For errors: {name of a field: advice} for fields that users look for in this component although they belong
    elsewhere. The key "." has the advice for any unknown field whose name is a dotted path."""
    loader_fields: ClassVar[tuple[str, ...]] = ()
    """For errors: keys that a mapping or file may have in addition to the fields. A loader replaces them by values of
    fields before it makes the component."""
    if_missing: ClassVar[Mapping[str, str]] = {}
    """For errors: {name of a required field: advice} for fields that users expect to be inherited."""

    def __init_subclass__(cls, *, family: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # checked before pydantic makes the fields, because pydantic's errors and warnings do not name the class
        try:
            own = inspect.get_annotations(cls)
        except NameError:  # Python 3.14 evaluates all annotations, also names that only type checkers import
            return
        _refuse_fields_without_type(cls, own.keys())
        if family is None and cls.family_name is not None:
            _refuse_hidden_methods(cls, {name for name, about in own.items() if "ClassVar" not in str(about)})

    @classmethod
    def __pydantic_init_subclass__(cls, *, family: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if family is not None:
            cls.family_name, cls.members, cls.kind_advice = family, {}, []
            _FAMILIES[family] = cls
        elif cls.family_name is not None:
            _refuse_hidden_methods(cls, cls.model_fields.keys())
            if "kind" in cls.model_fields or not inspect.isabstract(cls):
                _register(cls)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the fields that differ from their defaults, under the names by which the constructor accepts them."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if field.is_required() or value != field.default:
                yield field.alias or name, value

    def __dir__(self) -> list[str]:
        return [*dir(type(self)), *type(self).model_fields]

    if not TYPE_CHECKING:  # type checkers know that the model is frozen

        def __setattr__(self, name: str, value: object) -> None:
            """Set a private attribute. Raise RecipeError for any other attribute."""
            if not name.startswith("_"):
                instead = f"`replace({name}=...)` returns a changed copy"
                if name not in type(self).model_fields:
                    instead = f"a stage remembers tensors in slots: declare one in `slots` and set `state['{name}']`"
                elif name == "kind":
                    instead = "to use another kind, make a new component"
                raise RecipeError(
                    f"{type(self).__name__}.{name}: a component cannot be changed after it was made; {instead}"
                )
            super().__setattr__(name, value)

    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))  # fields may be mappings, which have no hash

    @classmethod
    def is_family(cls) -> bool:
        """Return True if this class is a family itself, not a member of one."""
        return cls.family_name is not None and _FAMILIES.get(cls.family_name) is cls

    @model_validator(mode="wrap")
    @classmethod
    def _open_family(cls, value: Any, handler: Any) -> Any:
        if isinstance(value, cls):
            return value
        if isinstance(value, type):
            raise PydanticCustomError(
                "class_given",
                "the class {name} is given in place of an instance; write {name}()",
                {"name": value.__name__},
            )
        value = plain(value)
        if not cls.is_family():
            if missing := _missing_methods(cls):
                raise PydanticCustomError(
                    "missing_methods",
                    "the class {name} must define {methods}",
                    {"name": cls.__name__, "methods": missing},
                )
            try:
                return handler(value)
            except ValidationError as error:
                raise with_nearest(cls, error) from None
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping) or "kind" not in value:
            keyed = [key for key in value if key in cls.members] if isinstance(value, Mapping) else []
            meant = f"kind: {keyed[0]}, ..." if keyed else ""
            if cls.number is not None and isinstance(value, (int, float)):
                meant = "kind: {}, {}: {}".format(*cls.number, value)
            if isinstance(value, Mapping) and not keyed and (likely := cls._kinds_with(value)):
                raise PydanticCustomError(
                    "missing_kind",
                    "a {family} needs a `kind`; {fields} {are} of the {kinds}",
                    {
                        "family": cls.family_name,
                        "fields": " and ".join(f"`{key}`" for key in value),
                        "are": "is a field" if len(value) == 1 else "are fields",
                        "kinds": f"kind{'s' if len(likely) > 1 else ''} {', '.join(likely)}",
                    },
                )
            raise PydanticCustomError(
                "missing_kind",
                "{article} {family} is required; give an instance, a mapping with 'kind'{hint}, or one of the kinds "
                "{kinds}",
                {
                    "article": "an" if str(cls.family_name)[0] in "aeiou" else "a",
                    "family": cls.family_name,
                    "hint": f" ({{{meant}}})" if meant else "",
                    "kinds": ", ".join(sorted(cls.members)),
                },
            )
        return cls.member(value["kind"]).model_validate(value)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if cls.is_family():
            return {FAMILY_MARK: cls.family_name}
        return super().__get_pydantic_json_schema__(core_schema, handler)

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return pydantic's JSON schema, in which a description is the docstring without the list of fields."""
        outer = _IN_SCHEMA.set(True)
        try:
            return super().model_json_schema(*args, **kwargs)
        finally:
            _IN_SCHEMA.reset(outer)

    @classmethod
    def member(cls, kind: object) -> type[Component]:
        """Return the class with the name `kind` in recipes, among the classes of this family.

        The family has all registered subclasses of this class, such as the stages of `Stage`. For an unknown kind,
        raises an error that names the nearest kind or, if no kind is near, all kinds.
        """
        kinds = ", ".join(sorted(cls.members))
        if not isinstance(kind, str):
            values = {"family": cls.family_name, "kind": repr(kind), "kinds": kinds}
            raise PydanticCustomError(
                "kind_type", "kind: the name of one {family} is required, got {kind}; the kinds are {kinds}", values
            )
        found = cls.members.get(kind)
        if found is None:
            others = sorted(str(other) for other, family in _FAMILIES.items() if kind in family.members)
            hint = f", which is a {' and a '.join(others)}" if others else "".join(own(kind) for own in cls.kind_advice)
            near = "" if hint else did_you_mean(kind.lower(), cls.members, 0.5)
            advice = "" if hint else "; import a file that defines others first"
            hint = near or f"{hint} (the kinds are {kinds}{advice})"
            values = {"family": cls.family_name, "kind": repr(kind), "hint": hint}
            raise PydanticCustomError(_UNKNOWN_KIND, "unknown {family} kind {kind}{hint}", values)
        return found

    @classmethod
    def _kinds_with(cls, fields: Mapping[str, Any]) -> list[str]:
        """Return the kinds (names in recipes) of the classes of this family that have all of the given fields.

        The list is empty if no field is given.
        """
        known = {
            kind: {name if own.alias is None else own.alias for name, own in member.model_fields.items()}
            for kind, member in sorted(cls.members.items())
        }
        return [kind for kind, names in known.items() if fields and fields.keys() <= names]

    def state_meaning(self) -> Mapping[str, Any]:
        """Return the fields on which the meaning of the numbers in the slots depends, by name.

        A checkpoint is refused if the value of such a field differs. Examples are a choice between a sum and a mean, or
        the tensor that a statistic observes. Other fields may differ: steps after the load use their new values.
        """
        return {}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed fields, validated as at construction.

        pydantic's `model_copy` does not validate.
        """
        fields = type(self).model_fields
        own = {field.alias or name: getattr(self, name) for name, field in fields.items()}
        aliased = {(fields[name].alias or name) if name in fields else name: value for name, value in changes.items()}
        return validated(type(self), {**own, **aliased}, type(self).__name__)

    def declaration(self, short: bool = False) -> dict[str, Any]:
        """Return the fields as plain data, with `kind` and `name` first.

        Fields that are None, and None by default, are left out.

        short: True to leave out every field that has its default, also in the components inside this one. A component
            inside may have only its `kind` left. The text of the kind is then written in place of the mapping, such as
            "eigh" in place of {"kind": "eigh"}.
        """
        data, written = self.model_dump(mode="json"), dict[str, Any]()
        for name in sorted(type(self).model_fields, key=lambda name: (name != "kind", name != "name")):
            field, value = type(self).model_fields[name], getattr(self, name)
            key = field.alias or name
            if key not in data or (value is None and field.default is None):
                continue
            if name == "kind" or field.is_required() or not short or not _same(value, data[key], field.default):
                written[key] = as_declared(value, data[key], short)
        return written


def components_in(
    component: Component, path: str = "", walked: Callable[[Component], Container[str]] | None = None
) -> Iterator[tuple[str, Component]]:
    """Yield (dotted path, component) for a component and for every component in its fields, the outer one first.

    Paths are those of overrides: a field has its alias if it has one, a stage of a chain its name, an item of another
    list its index, and a value of a mapping its key.

    path: path of the component itself.
    walked: function that returns which fields of a component to search, by name. None: all fields are searched.
    """
    yield path, component
    names = None if walked is None else walked(component)
    for name, field in type(component).model_fields.items():
        if names is None or name in names:
            yield from _components_of(getattr(component, name), [path, field.alias or name], walked)


def _components_of(
    value: Any, path: list[str], walked: Callable[[Component], Container[str]] | None
) -> Iterator[tuple[str, Component]]:
    """Yield (dotted path, component) for every component in the value of a field.

    path: the parts of the field's path. Empty parts are left out.
    walked: function of a component that returns the names of the fields to search. None: all fields are searched.
    """
    if isinstance(value, Component):
        yield from components_in(value, ".".join(filter(None, path)), walked)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _components_of(item, [*path, str(key)], walked)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _components_of(item, [*path, stage_name(item) or str(place)], walked)


def _same(value: Any, data: Any, default: Any) -> bool:
    """Return True if the value of a field is its default. The result is False for every field with a schedule.

    value: the value of the field, as the attribute has it. For a field with a schedule it is the first number of the
        schedule.
    data: the value as plain data. For a field with a schedule it is the schedule, a mapping or a list.
    default: the default of the field.
    """
    return bool(value == default) and not (isinstance(default, float) and isinstance(data, (dict, list)))


def as_declared(value: Any, data: Any, short: bool = False) -> Any:
    """Return the value of a field in the form that it has in a recipe.

    Components become their `declaration`. All other parts of the value are read from `data`.

    value: the value of the field, as the attribute has it: for example a component, or a tuple of components.
    data: the same value as plain data, as `model_dump` returns it.
    short: True to leave out fields of components that have their defaults, as in `declaration`.
    """
    if isinstance(value, Component):
        written = value.declaration(short)
        return written["kind"] if short and written.keys() == {"kind"} else written
    if isinstance(value, (list, tuple)):
        return [as_declared(item, plain, short) for item, plain in zip(value, data, strict=True)]
    if isinstance(value, Mapping):
        return {str(key): as_declared(item, data[str(key)], short) for key, item in value.items()}
    return data


def _missing_methods(cls: type[Component]) -> str:
    """Return the methods and properties that a class must define and does not, "" if it defines all of them.

    Example: "apply() and the property `interval`".
    """
    if not cls.__abstractmethods__:
        return ""
    missing = ((name, isinstance(getattr(cls, name), property)) for name in sorted(cls.__abstractmethods__))
    return " and ".join(f"the property `{name}`" if is_property else f"{name}()" for name, is_property in missing)


def is_final(attribute: object) -> bool:
    """Return True for a method, a class method or a property that is marked as final."""
    function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    return bool(getattr(function, "__final__", False))


def _refuse_hidden_methods(cls: type[Component], fields: Set[str]) -> None:
    """Raise TypeError if a field of `cls` has the name of an inherited method or property. A call of the method would
    get the value of the field instead.

    fields: names of the fields.
    """
    for base in cls.__mro__[1:]:
        for name in sorted(fields & vars(base).keys() if base not in BaseModel.__mro__ else ()):
            if inspect.isroutine(vars(base)[name]) or isinstance(vars(base)[name], (property, cached_property)):
                raise TypeError(
                    f"{cls.__name__}: the field `{name}` hides the method `{name}` of the family '{cls.family_name}'; "
                    f"give the field another name and `Field(alias='{name}')`, so that YAML files still write `{name}`"
                )


def _refuse_fields_without_type(cls: type[Component], annotated: Set[str]) -> None:
    """Raise TypeError if a value in the class body of `cls` is neither annotated nor a class variable of a base.

    annotated: names with an annotation in the class body.
    """
    for name, value in vars(cls).items():
        known = name.startswith("_") or name in annotated or name in cls.__class_vars__ or name == "model_config"
        inside = isinstance(value, type) and value.__qualname__.startswith(f"{cls.__qualname__}.")
        # pydantic makes no fields of these values either
        if known or inside or hasattr(type(value), "__get__") or type(value).__module__ in ("functools", "typing"):
            continue
        default, written = value, value.__name__ if isinstance(value, type) else short(value)
        if isinstance(value, FieldInfo):
            default, written = value.default, "Field(...)"
        kind = type(default).__name__
        if isinstance(default, type):
            kind = f"type[{default.__name__}]"
        elif default is PydanticUndefined or default is None:
            kind = "float" if default is PydanticUndefined else "float | None"
        advice = f"; for a constant, {name}: ClassVar[{kind}] = {written}" if value is default else ""
        if name == "kind":
            kind, advice = f"Literal[{written}]", ""
        raise TypeError(f"{cls.__name__}.{name}: a field needs a type, as in {name}: {kind} = {written}{advice}")


def _refuse_other_decorators(cls: type[Component], name: str, own: object, base: type) -> None:
    """Raise TypeError if a class replaces an attribute of a base by one of another kind.

    Two cases are refused: only one of the two attributes is a property; a method without decorator replaces a class
    method.

    cls: the class.
    name: name of the attribute.
    own: the attribute of the class.
    base: the base class, which defines the attribute, too.
    """
    kinds = {property: "@property", cached_property: "@property", classmethod: "@classmethod"}
    kinds |= {staticmethod: "@staticmethod", FunctionType: "no decorator"}
    got, needed = (next((kinds[own] for own in kinds if isinstance(x, own)), "") for x in (own, vars(base)[name]))
    differ = "@property" in (got, needed) or (got, needed) == ("no decorator", "@classmethod")
    if got and needed and got != needed and differ:
        wanted = needed if needed == "no decorator" else f"the decorator {needed}"
        raise TypeError(f"{cls.__name__}: `{name}` must have {wanted}, as in {base.__name__}, got {got}")


def _accepts_calls_of(own: FunctionType, inherited: FunctionType) -> bool:
    """Return True if a method accepts every number of positional arguments that an inherited method accepts.

    own: the method of the class, which replaces the inherited one.
    """
    ours, theirs = own.__code__, inherited.__code__
    needed = ours.co_argcount - len(own.__defaults__ or ())
    enough = bool(ours.co_flags & inspect.CO_VARARGS) or ours.co_argcount >= theirs.co_argcount
    return enough and needed <= theirs.co_argcount - len(inherited.__defaults__ or ())


def _arguments(method: FunctionType) -> str:
    """Return the arguments of a method as one writes them, without annotations."""
    return ", ".join(str(one.replace(annotation=one.empty)) for one in inspect.signature(method).parameters.values())


def _register(cls: type[Component]) -> None:
    for base in cls.__mro__[1:]:
        for name in vars(cls):
            if is_final(vars(base).get(name)):
                raise TypeError(
                    f"{cls.__name__}: `{name}` of {base.__name__} is final and cannot be overridden; rename it"
                )
    for name, own in vars(cls).items():
        base = next((base for base in cls.__mro__[1:] if name in vars(base)), object)
        inherited = vars(base).get(name)
        if base not in BaseModel.__mro__:
            _refuse_other_decorators(cls, name, own, base)
        if inspect.isfunction(own) and inspect.isfunction(inherited) and not _accepts_calls_of(own, inherited):
            raise TypeError(
                f"{cls.__name__}: the method `{name}` is called as {name}({_arguments(inherited)}), but is defined as "
                f"{name}({_arguments(own)}); give it the same arguments"
            )
    kind = cls.model_fields["kind"].default if "kind" in cls.model_fields else PydanticUndefined
    if not isinstance(kind, str):
        got = "none" if kind is PydanticUndefined else repr(kind)
        raise TypeError(
            f"{cls.__name__}: the field `kind` needs the name of the component as its default, got {got}; write "
            "`kind: Literal['name'] = 'name'`, with a name of your choice"
        )
    annotation = cls.model_fields["kind"].annotation
    words = get_args(annotation)
    if get_origin(annotation) is not Literal:
        raise TypeError(
            f"{cls.__name__}: the field `kind` has the annotation {getattr(annotation, '__name__', annotation)}; write "
            f"`kind: Literal[{kind!r}] = {kind!r}`"
        )
    if words != (kind,):
        raise TypeError(
            f"{cls.__name__}: `kind` has the annotation Literal[{', '.join(map(repr, words))}] and the default "
            f"{kind!r}, so that its name in recipes is unclear; write the same word in both"
        )
    parents = [base for base in cls.__mro__[1:] if base in cls.members.values()]
    if parents:
        parent = parents[0].__name__
        family = next(base.__name__ for base in cls.__mro__ if issubclass(base, Component) and base.is_family())
        raise TypeError(
            f"{cls.__name__}: {parent} is a member of the family '{cls.family_name}' and cannot be subclassed; "
            f"subclass {family} with a field of type {parent}, whose methods you call, or add a field to {parent}"
        )
    known = cls.members.get(kind)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(
            f"{cls.__name__}: kind '{kind}' of family '{cls.family_name}' already belongs to "
            f"{known.__module__}.{known.__qualname__}; choose another kind"
        )
    cls.members[kind] = cls


_UNKNOWN_KIND: Final = "unknown_kind"
"""Type of the errors of pydantic about unknown kinds."""


def is_unknown_kind(error: BaseException | None) -> bool:
    """Return True if an error, or an error that led to it, is about an unknown kind. Return False for None."""
    if isinstance(error, ValidationError) and any(fault["type"] == _UNKNOWN_KIND for fault in error.errors()):
        return True
    return error is not None and is_unknown_kind(error.__cause__ or error.__context__)


def families() -> dict[str, type[Component]]:
    """Return every family defined so far, by name."""
    return dict(_FAMILIES)


C = TypeVar("C", bound=Component)


def validated(cls: type[C], data: Any, where: str = "") -> C:
    """Return `data` as a component of class `cls`.

    Raises one RecipeError for all faults, with paths that call stages by their names.

    where: path of the data, in front of all paths in errors.
    """
    data = plain(data)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise RecipeError("\n".join(fault_lines(error, data, where, cls.family_name or "recipe"))) from None


@dataclass(frozen=True)
class TextForm:
    """Annotation of a text field whose values must match a regular expression. Errors describe the form in words.

    pattern: the regular expression.
    words: noun phrase for the form, without braces.
    """

    pattern: str
    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(
            core_schema.str_schema(pattern=self.pattern),
            custom_error_type="form",
            custom_error_message=f"{self.words} is required",
        )


PathName = Annotated[
    str, TextForm(r"^[A-Za-z_][A-Za-z0-9_]*$", "a name of letters, digits and _ that does not begin with a digit")
]
"""Name of a part in dotted paths."""


@dataclass(frozen=True)
class ChainOf:
    """Annotation of a field `tuple[Family, ...]`: a chain of components, whose names must be distinct.

    In YAML the field is a list, or a single component, which is a chain of one.

    family: name of the family.
    members: noun in the plural for the components, for errors.
    """

    family: str
    members: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        distinct = core_schema.no_info_after_validator_function(self._distinct, handler(source))
        return core_schema.no_info_before_validator_function(as_tuple, distinct)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        component = {FAMILY_MARK: self.family}
        return {"anyOf": [{"type": "array", "items": component}, component]}

    def _distinct(self, components: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [stage_name(component) for component in components]
        twice = sorted({name for name in names if name is not None and names.count(name) > 1})
        if twice:
            raise ValueError(f"{self.members} need distinct names, got '{twice[0]}' more than once: set `name` of each")
        return components


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, and a single value as a tuple of one."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def with_nearest(cls: type[Component], error: ValidationError) -> ValidationError:
    """Return the error with advice added to its messages.

    For an unknown field, the advice is the text in `elsewhere`, else the field that is probably meant, else the names
    of all fields.
    For a missing field, the advice is the text in `if_missing`.
    For a value that is not a mapping from fields to values, the advice is the names of all fields.

    cls: the component that refused the value.
    """
    details: list[InitErrorDetails] = []
    for fault in error.errors(include_url=False):
        kind, message = fault["type"], fault["msg"]
        if kind == "model_type" and not fault["loc"]:
            kind, message = "fields_required", f"{_REQUIRED[kind]}; the fields are {', '.join(_field_names(cls))}"
        if kind == "missing" and (remedy := cls.if_missing.get(str(fault["loc"][0]))):
            kind, message = "field_required", f"required, got nothing; {remedy}"
        if kind == "extra_forbidden" and len(fault["loc"]) == 1:
            kind, message = "unknown_field", f"unknown field{advice(cls, str(fault['loc'][0]))}"
        details.append({"type": PydanticCustomError(kind, message), "loc": fault["loc"], "input": fault["input"]})
    return ValidationError.from_exception_data(error.title, details)


def _field_names(cls: type[Component]) -> list[str]:
    return [field.alias or name for name, field in cls.model_fields.items()]


def advice(cls: type[Component], name: str) -> str:
    """Return the end of an error about a field that the component class `cls` does not have, as in `with_nearest`."""
    known = [*cls.loader_fields, *_field_names(cls)]
    if where := cls.elsewhere.get("." if "." in name else name):
        return f"; {where}"
    if hint := did_you_mean(name.lower(), known, first=_inside(cls, name), separator="; "):
        return hint
    near = near_names(name.lower(), cls.elsewhere.keys() - {"."}, 0.75)[:1]
    return "".join(f"; if {other} is meant, {cls.elsewhere[other]}" for other in near) or (
        f"; the fields are {', '.join(known)}"
    )


def _inside(cls: type[BaseModel], name: str) -> Iterator[str]:
    """Yield the dotted path of every field called `name` inside a component, such as `distribution.bucket` for
    `bucket`.

    Only components that are the default of a field of `cls`, and components inside these, are searched.
    """
    for field, info in cls.model_fields.items():
        if isinstance(info.default, BaseModel):
            own = type(info.default)
            yield from [f"{field}.{name}"] if name in own.model_fields else (f"{field}.{p}" for p in _inside(own, name))


def fault_lines(error: ValidationError, data: Any, where: str, whole: str = "recipe") -> list[str]:
    """Return one line for each fault of `data`. Paths begin with `where` and call stages by their names.

    whole: word for `data` in a fault that has no path.
    """
    faults = error.errors()
    # pydantic drops wrong items of a tuple, and may then also report the tuple as too short. This fault is left out.
    inside = {fault["loc"][:depth] for fault in faults for depth in range(len(fault["loc"]))}
    faults = [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in inside]
    return list(dict.fromkeys(_fault(detail, data, where, whole) for detail in faults))


_REQUIRED = {
    "dict_type": "a mapping is required",
    "model_type": "a mapping of fields is required",
    "tuple_type": "a list is required",
    "too_short": "at least 1 item is required",
}
"""Messages that replace those of pydantic, by the type of its error. They use the words of YAML instead of Python's
types."""


_NUMBERS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "float_type": ("a number", float),
    "int_type": ("a whole number", int),
}
"""For errors of pydantic about values that are no numbers, by type of the error: noun for the number, and the function
that parses one."""


def _text_in_place_of_number(got: str, noun: str, parse: Callable[[str], float]) -> str:
    """Return the message about a text in a field of numbers. A number in quotes is a text, too.

    got: the text.
    noun: noun for the number, which begins the message, such as "a whole number".
    parse: function that returns the number that a text contains, and raises ValueError if it contains none.
    """
    try:
        remedy = "; remove the quotes" if math.isfinite(parse(got)) else ""
    except (ValueError, OverflowError):
        remedy = ""
    return f"{noun} is required, got the text {short(got)}{remedy}"


def _fault(detail: Any, data: Any, where: str, whole: str) -> str:
    names, message = list(_names(detail["loc"], data)), detail["msg"].removeprefix("Value error, ")
    place = detail["loc"][-1] if detail["type"] == "missing_kind" and detail["loc"] else None
    if isinstance(place, int) and names[-1:] == [str(place)]:  # paths name a stage by its kind, which is missing here
        names, message = names[:-1], f"item {place + 1} of the list: {message}"
    path, got = ".".join([where] * bool(where) + names), detail["input"]
    if detail["type"] == "missing":
        return f"{path}: required, got nothing"
    if detail["type"] in _REQUIRED:
        message = _REQUIRED[detail["type"]]
        if detail["type"] == "tuple_type" and isinstance(got, (int, float, str)):
            message += f", got {short(got)}; write a list, such as [{short(got)}]"
    if isinstance(got, str) and detail["type"] in _NUMBERS:
        message = _text_in_place_of_number(got, *_NUMBERS[detail["type"]])
    if isinstance(got, Mapping) and "from" in got and detail["type"] in _NUMBERS:
        message = f"cannot be scheduled, {_NUMBERS[detail['type']][0].replace('a ', 'a constant ', 1)} is required"
    field, component = message.partition(": ")[0], isinstance(got, Mapping)
    if component and field in got:
        got, component = got[field], False
    message = f"{message[:1].lower()}{message[1:]}"
    if not _has_value(message, got, component):
        at = _end_of_fault(message)
        message = f"{message[:at]}, got {short(got)}{message[at:]}"
    return located(path, message, whole)


def _has_value(message: str, got: Any, component: bool) -> bool:
    """Return True if the refused value need not be added to a message: the message has it already, or is clear without
    it.

    message: the message about a fault.
    got: the refused value.
    component: True if the value is a mapping of all fields of a component.
    """
    if ", got " in message or isinstance(got, type):
        return True
    if isinstance(got, (Mapping, list, tuple)) and re.search(r"cannot be combined|^(\S+: )?unknown (?!field)", message):
        return True
    named = _names_field(message) and (component or short(got).lower() in message.lower())
    return named or (isinstance(got, str) and repr(got) in message)


def _end_of_fault(message: str) -> int:
    """Return the index in a message at which the fault ends and the remedy begins.

    A remedy begins with "; " or ", did you mean ", outside of parentheses. Without a remedy, the index is the length of
    the message.
    """
    found = re.compile(r"\([^()]*\)|(; |, did you mean )").finditer(message)
    return next((match.start() for match in found if match[1]), len(message))


def located(path: str, message: str, whole: str = "recipe") -> str:
    """Return a message with a path in front, or with `whole` if there is no path.

    If the message begins with a field, as in `beta: ...`, the field becomes the last part of the path.
    """
    if _names_field(message):
        return message if path == message.partition(": ")[0] or not path else f"{path}.{message}"
    return f"{path or whole}: {message}"


def _names_field(message: str) -> bool:
    """Return True if a message begins with the path of a field, as `beta: ...`."""
    field, colon, _ = message.partition(": ")
    return bool(colon) and re.fullmatch(r"[a-z_]+(\.[\w/]+)*", field) is not None


def _names(location: tuple[int | str, ...], data: Any) -> Iterator[str]:
    """Yield the parts of a path to a value, as dotted paths name them: an item of a list by its name or kind.

    location: path of the value in an error of pydantic, with the position of each item of a list.
    data: the data in which the value is.
    """
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
    """Return the name of a stage in raw data: its `name`, else its `kind`. A bare string is a kind."""
    if isinstance(data, str):
        return data
    if isinstance(data, Mapping):
        name = data.get("name") or data.get("kind")
        return name if isinstance(name, str) else None
    name = getattr(data, "name", None) or getattr(data, "kind", None)
    return name if isinstance(name, str) else None


def short(value: object) -> str:
    """Return the text of a value, cut off after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
