"""Descriptions of a component for readers: its docstring, its fields with their ranges, and an example.

`help`, the commands `list` and `show`, and the reference pages of the documentation use these functions.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import is_dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

FAMILY_MARK = "x-family"
"""Key that marks the places of a generated JSON schema at which any member of a family may stand."""


class FieldText(NamedTuple):
    """One field of a component as text: its name in YAML, its JSON schema, its default and its meaning.

    default: the default in YAML; None if the field is required, or if it has no value by default.
    """

    name: str
    schema: dict[str, Any]
    required: bool
    default: str | None
    meaning: str


def summary(cls: type[BaseModel]) -> str:
    """Return the docstring of a class as its source has it, without the list of fields and the example that `help`
    shows.
    """
    return inspect.cleandoc(vars(cls).get("__doc__") or "")


def full_docstring(cls: type[BaseModel], kinds: Collection[str] = ()) -> str:
    """Return the docstring of a class with a list of its fields and an example, as `help` shows it.

    For each field the list has the accepted values, the default and the meaning.

    kinds: if the class is a family, the kinds of its members. These kinds are listed in place of fields, after the
        signatures of the methods that a member defines.
    """
    parts = [summary(cls)]
    if kinds:
        kinds_text = textwrap.fill(", ".join(sorted(kinds)), 110, break_on_hyphens=False)
        defines = [one.signature + " (required)" * one.required for one in contract_of(cls)]
        parts += ["A member defines:\n" + textwrap.indent("\n".join(defines), "    ")] if defines else []
        return "\n\n".join([*parts, "Kinds:\n" + textwrap.indent(kinds_text, "    ")])
    fields = list(fields_of(cls))
    if fields:
        parts.append("Fields:\n" + "\n".join(textwrap.indent(_entry(field), "    ") for field in fields))
    exemplified = all(info.examples for info in cls.model_fields.values() if info.is_required())
    if not inspect.isabstract(cls) and fields and exemplified:
        parts.append("Example:\n" + textwrap.indent(example_of(cls), "    "))
    return "\n\n".join(part for part in parts if part)


def _entry(field: FieldText) -> str:
    default = "required" if field.required else f"default {field.default or 'none'}"
    text = f"{field.name}: {type_text(field.schema)}; {default}. {field.meaning}"
    return textwrap.fill(text, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def example_of(cls: type[BaseModel]) -> str:
    """Return an import and a call of the class as text, and the same component in YAML if the class has a kind.

    The call has the required fields. If there are none, it has a field with an example, or else a field with its
    default.
    """
    examples = [
        (info, info.alias or name, info.examples[0]) for name, info in cls.model_fields.items() if info.examples
    ]
    required = [example for example in examples if example[0].is_required()]
    given = {name: value for _, name, value in required or examples[:1]}
    if not given:
        chosen = [name for name in cls.model_fields if name not in ("kind", "name")]
        infos = [(cls.model_fields[name].alias or name, cls.model_fields[name].default) for name in chosen]
        shown = [(name, _short_value(default)) for name, default in infos if default is not PydanticUndefined]
        given = dict(next(([pair] for pair in shown if pair[1] is not None), []))
    call = ", ".join(f"{name}={value!r}" for name, value in given.items())
    lines = [f"from {public_module(cls)} import {cls.__name__}", f"{cls.__name__}({call})"]
    kind = cls.model_fields["kind"].default if "kind" in cls.model_fields else None
    if isinstance(kind, str):
        lines.append(f"{flow({'kind': kind, **given})}  # in YAML")
    return "\n".join(lines)


def _short_value(value: Any) -> Any:
    """Return a default as one writes it: a number, a text, or the kind of a component. Return None for other values."""
    if isinstance(value, BaseModel):
        return getattr(value, "kind", None)
    return value if isinstance(value, (bool, int, float, str)) else None


def public_module(cls: type[Any]) -> str:
    """Return the name of the outermost package that exports a class, or of the module that defines it.

    The module of a file that a recipe imports by path has a name with a hash; the name of the file is returned in its
    place.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if "." not in cls.__module__ and file is not None and cls.__module__ != "__main__":
        return Path(file).stem
    for package in accumulate(cls.__module__.split("."), "{}.{}".format):
        names = vars(sys.modules[package]) if package in sys.modules else {}
        if names.get(cls.__name__) is cls or cls.__name__ in names.get("__all__", ()):  # listed, but not imported yet
            return package
    return cls.__module__


def signature_of(signature: inspect.Signature, cls: type[BaseModel]) -> inspect.Signature:
    """Return the signature of a class with its types as text, without pydantic's metadata and without the kind."""
    types = {info.alias or name: info.annotation for name, info in cls.model_fields.items()}
    parameters = [
        one.replace(annotation=_Text(type_name(types[name]))) if name in types else one
        for name, one in signature.parameters.items()
        if name != "kind"
    ]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


class _Text(str):
    """An annotation that signatures show without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def type_name(annotation: Any) -> str:
    """Return a type as one writes it in code, without the metadata of `Annotated` and without names of modules."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, args))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if annotation is type(None) or annotation is None:
        return "None"
    if args and origin is not None:
        return f"{type_name(origin)}[{', '.join('...' if one is ... else type_name(one) for one in args)}]"
    return getattr(annotation, "__name__", None) or str(annotation)


def fields_of(cls: type[BaseModel]) -> Iterator[FieldText]:
    """Yield the fields of a component, without its kind."""
    schema = cls.model_json_schema(by_alias=True)
    for own, field in cls.model_fields.items():
        name = field.alias or own
        if own != "kind":
            default = None if field.default in (None, PydanticUndefined) else flow(field.default)
            yield FieldText(name, schema["properties"][name], field.is_required(), default, field.description or "")


def flow(value: Any) -> str:
    """Return plain data or a component in YAML's flow style, without fields of a component that have their default."""
    if isinstance(value, BaseModel):
        changed = {n: getattr(value, n) for n, f in type(value).model_fields.items() if getattr(value, n) != f.default}
        kind = getattr(value, "kind", None)
        return kind if kind and not changed else flow(({"kind": kind} if kind else {}) | changed)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def type_text(
    schema: dict[str, Any],
    link: Callable[[str], str] = str,
    code: Callable[[str], str] = str,
    escape: Callable[[str], str] = str,
) -> str:
    """Describe in words the values that a field accepts, with ranges, by the field's JSON schema.

    link: function that formats the name of a family or of a component.
    code: function that formats a literal value.
    escape: function that formats a range.
    """

    def text(inner: dict[str, Any]) -> str:
        return type_text(inner, link, code, escape)

    if FAMILY_MARK in schema:
        return link(schema[FAMILY_MARK])
    if "$ref" in schema:
        return link(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(dict.fromkeys(map(text, schema.get("anyOf") or schema["oneOf"])))
    if "allOf" in schema:
        return text(schema["allOf"][0])
    if "enum" in schema or "const" in schema:
        return ", ".join(code(flow(value)) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        items = [schema["items"]] if schema.get("items") else schema.get("prefixItems", [])
        return "list of " + " and ".join(map(text, items)) if items else "list"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"mapping to {text(values)}" if isinstance(values, dict) else "mapping"
    words = {"null": "none", "string": "text", "boolean": f"{code('true')}, {code('false')}"}
    return words[kind] if kind in words else f"{kind or 'anything'}{escape(interval(schema))}"


def interval(schema: dict[str, Any]) -> str:
    """Return the bounds of a number as text, such as " in [0, 1)"; "" if the number has no bounds."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is high is above is below is None:
        return ""
    start = f"[{low:g}" if low is not None else f"({above:g}" if above is not None else "(-∞"
    end = f"{high:g}]" if high is not None else f"{below:g})" if below is not None else "∞)"
    return f" in {start}, {end}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring: its first paragraph, up to a full stop. That of "et al." is none."""
    line = " ".join(re.split(r"\n\s*\n", text.strip())[0].split("\n"))
    return re.split(r"(?<=[a-z)])(?<!et al)\.(?:\s|$)", line)[0].rstrip(".")


class MemberText(NamedTuple):
    """One method, property or class variable that a component may define, as text for the reference pages.

    signature: its declaration, as `decay(t: float) -> float`.
    required: True if every component of the family, such as all cadences, has to define it.
    meaning: its docstring.
    """

    signature: str
    required: bool
    meaning: str


def contract_of(family: type[BaseModel]) -> list[MemberText]:
    """Return the methods, properties and class variables that a member of a family may define, the required ones first.

    Final methods are left out.
    """
    found = []
    for name, value in vars(family).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if name.startswith("_") or not inspect.isfunction(function) or getattr(function, "__final__", False):
            continue
        if getattr(function, "__module__", "") == family.__module__ and function.__doc__:
            required = name in getattr(family, "__abstractmethods__", ())
            required = required or "NotImplementedError" in function.__code__.co_names
            found.append(MemberText(_written(name, value, function), required, inspect.cleandoc(function.__doc__)))
    found += [MemberText(declaration, False, text) for declaration, text in _class_variables(family)]
    return sorted(found, key=lambda one: not one.required)


def types_in_contract(family: type[BaseModel]) -> list[type[Any]]:
    """Return the classes of the library that occur in the signatures of a family's methods, without components.

    They are named tuples, data classes and abstract classes.
    """
    module = sys.modules[family.__module__]
    names = {name for one in contract_of(family) for name in re.findall(r"\b[A-Z]\w+", one.signature)}
    found = (getattr(module, name, None) for name in sorted(names))
    package = family.__module__.partition(".")[0]
    ours = (cls for cls in found if isinstance(cls, type) and cls.__module__.partition(".")[0] == package)
    plain = (cls for cls in ours if not issubclass(cls, BaseModel))
    return [cls for cls in plain if hasattr(cls, "_fields") or is_dataclass(cls) or inspect.isabstract(cls)]


def constructor_of(cls: type[Any]) -> str:
    """Return the arguments that make an object of a class, as `Root(value: Tensor, ok: Tensor | None = None)`.

    Return the name alone for an abstract class.
    """
    if inspect.isabstract(cls):
        return cls.__name__
    signature = inspect.signature(cls)
    return f"{cls.__name__}{_arguments(signature, list(signature.parameters.values()))}"


def _written(name: str, value: object, function: Any) -> str:
    """Return the signature of a method or property as one writes it, without `self`.

    name: name of the attribute.
    value: the attribute in the dict of its class: a function, a property or a class method.
    function: the function inside `value`, which has the signature.
    """
    signature = inspect.signature(function)
    result = type_name(signature.return_annotation)
    if isinstance(value, property):
        return f"{name} -> {result}  (property)"
    text = _arguments(signature, list(signature.parameters.values())[1:])
    decorator = "  (class method)" if isinstance(value, classmethod) else ""
    return f"{name}{text} -> {result}{decorator}"


def _arguments(signature: inspect.Signature, parameters: Iterable[inspect.Parameter]) -> str:
    """Return some parameters of a signature in parentheses, with their types as one writes them in code.

    signature: the signature.
    parameters: the parameters to return, for example all except `self`.
    """
    typed = [one.replace(annotation=_Text(type_name(one.annotation))) for one in parameters]
    return str(signature.replace(parameters=typed, return_annotation=inspect.Signature.empty))


def _class_variables(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield (declaration, docstring) of the class variables that have a docstring in the source of a class."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):  # a class of an interactive session has no source
        return
    assert isinstance(body, ast.ClassDef)
    for statement, after in pairwise(body.body):
        text = after.value if isinstance(after, ast.Expr) else None
        kind = ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else ""
        if isinstance(text, ast.Constant) and kind.startswith("ClassVar["):
            yield ast.unparse(statement), inspect.cleandoc(str(text.value))


def aliases_in_contract(family: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """Return the type aliases of the library that occur in signatures of the methods of a family, such as all cadences.

    The result is {name: (definition, docstring)}.
    """
    own = vars(sys.modules[family.__module__])
    names = {name for one in contract_of(family) for name in re.findall(r"\b[A-Z]\w+", one.signature)}
    package = family.__module__.partition(".")[0]
    found = {}
    for name in sorted(name for name in names & own.keys() if not isinstance(own[name], type)):
        for module in [own["__name__"], *(one for one in sys.modules if one.startswith(f"{package}."))]:
            if vars(sys.modules[module]).get(name) is own[name]:
                source = inspect.getsource(sys.modules[module])
                written = re.search(rf'^{name} = ([^\n]+)\n"""(.*?)"""', source, re.MULTILINE | re.DOTALL)
                if written is not None:
                    found[name] = written[1], inspect.cleandoc(written[2])
                    break
    return found
