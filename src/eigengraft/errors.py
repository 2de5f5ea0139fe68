"""Errors and warnings that users read: the path in a declaration, what is wrong with the value, and what to do."""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class RecipeError(ValueError):
    """A declaration that cannot be used. The message has one line for each fault, with its path and the value."""


class ContractError(ValueError):
    """A stage that breaks its contract. The message begins with the path of the stage."""


OTHER_NAMES = {"learning_rate": "lr", "betas": "beta", "epsilon": "eps", "wd": "weight_decay", "optimizer": "recipe"}
"""Names that other libraries give to fields, and the names of the fields here."""


def with_nearest(cls: type[BaseModel], elsewhere: Mapping[str, str], error: ValidationError) -> ValidationError:
    """Return the error with advice for each unknown field: where the field belongs, or which known one is meant.

    cls: the component that refused the fields.
    elsewhere: advice by the name of a field; "." stands for every dotted path.
    """
    details: list[InitErrorDetails] = []
    for fault in error.errors(include_url=False):
        kind, message = fault["type"], fault["msg"]
        if kind == "extra_forbidden" and len(fault["loc"]) == 1:
            kind, message = "unknown_field", f"unknown field{_advice(cls, elsewhere, str(fault['loc'][0]))}"
        details.append({"type": PydanticCustomError(kind, message), "loc": fault["loc"], "input": fault["input"]})
    return ValidationError.from_exception_data(error.title, details)


def _advice(cls: type[BaseModel], elsewhere: Mapping[str, str], name: str) -> str:
    known = [field.alias or name for name, field in cls.model_fields.items()]
    if where := elsewhere.get("." if "." in name else name):
        return f"; {where}"
    near = [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in known else []
    near = near or [*_inside(cls, name), *difflib.get_close_matches(name.lower(), known, n=1)]
    return f" (did you mean '{near[0]}'?)" if near else f" (there are: {', '.join(known)})"


def _inside(cls: type[BaseModel], name: str) -> Iterator[str]:
    """Yield the paths of a field in the components that the fields of a component hold by default."""
    for field, info in cls.model_fields.items():
        if isinstance(info.default, BaseModel):
            own = type(info.default)
            yield from [f"{field}.{name}"] if name in own.model_fields else (f"{field}.{p}" for p in _inside(own, name))


def fault_lines(error: ValidationError, data: Any, where: str) -> list[str]:
    """Return one line for each fault of `data`. Paths begin with `where` and call stages by their names."""
    faults = error.errors()
    # a tuple without its wrong items is then also too short
    inside = {fault["loc"][:depth] for fault in faults for depth in range(len(fault["loc"]))}
    faults = [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in inside]
    return list(dict.fromkeys(_fault(detail, data, where) for detail in faults))


_REQUIRED = {
    "dict_type": "a mapping is required",
    "model_type": "a mapping of fields is required",
    "tuple_type": "a list is required",
    "too_short": "at least 1 item is required",
}
"""Messages by the type of pydantic's error, in the words of a YAML file instead of types of Python."""


def _fault(detail: Any, data: Any, where: str) -> str:
    path, got = ".".join([where] * bool(where) + list(_names(detail["loc"], data))), detail["input"]
    if detail["type"] == "missing":
        return f"{path}: required, got nothing"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in _REQUIRED:
        message = _REQUIRED[detail["type"]]
    field, whole = message.partition(": ")[0], isinstance(got, Mapping)
    if whole and field in got:
        got, whole = got[field], False
    # a message that names a field says what is wrong with it: no value twice, and no whole component after it
    said = _names_field(message) and (whole or short(got).lower() in message.lower())
    said = said or ", got " in message
    return located(path, f"{message[:1].lower()}{message[1:]}") + ("" if said else f", got {short(got)}")


def located(path: str, message: str) -> str:
    """The message under a path; where it names a field of what is there (`beta: ...`), that is part of the path."""
    if _names_field(message):
        return message if path == message.partition(": ")[0] or not path else f"{path}.{message}"
    return f"{path or 'recipe'}: {message}"


def _names_field(message: str) -> bool:
    """Return True if a message begins with the path of a field, as `beta: ...`."""
    field, colon, _ = message.partition(": ")
    return bool(colon) and re.fullmatch(r"[a-z_]+(\.[\w/]+)*", field) is not None


def _names(location: tuple[int | str, ...], data: Any) -> Iterator[str]:
    """Yield the parts of a pydantic location, with positions in lists replaced by the name or kind found there."""
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


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return at most eight lines of an error or warning, and one more that counts the lines left out."""
    return [*lines[:8], *([f"... and {len(lines) - 8} more"] if len(lines) > 8 else [])]


def name_some(names: Sequence[str], most: int) -> str:
    """Return at most `most` names as they stand in a sentence, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def warn_user(message: str) -> None:
    """Issue a UserWarning at the line of the user's code that called the library.

    Frames of the library, and of torch, which wraps methods of optimizers, are skipped.
    """
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("eigengraft.", "torch.")):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)
