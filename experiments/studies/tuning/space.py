"""The values that a field of a search may take."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from eigengraft.component import Component, validated
from eigengraft.errors import RecipeError

from ..axes import LABEL
from .base import six_digits, text

Scalar = bool | int | float | str
"""A value of a list in a space."""

NEAR = 0.05
"""The share of a range at its ends where a best value counts as being at the end."""


class Range(Component):
    """All numbers from `low` to `high`, both included, to six digits."""

    low: float = Field(description="least value")
    high: float = Field(description="largest value")
    log: bool = Field(False, description="whether equal ratios are equally likely, not equal differences")
    integer: bool = Field(False, description="whole numbers only")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"high: more than low {self.low:g} is required, got {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"low: a positive number is required with log, got {self.low:g}")
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low: whole numbers are required with integer, got {self.low:g} to {self.high:g}")
        return self

    def value(self, fraction: float) -> float | int:
        """The value at a fraction of the way from `low` to `high`."""
        if self.integer:  # equal shares for all of them
            low, high = self.low - 0.5, self.high + 0.5
            found = low * (high / low) ** fraction if self.log else low + (high - low) * fraction
            return int(min(max(round(found), self.low), self.high))
        found = (
            self.low * (self.high / self.low) ** fraction if self.log else self.low + (self.high - self.low) * fraction
        )
        return self.rounded(found)

    def rounded(self, value: float) -> float | int:
        """A value as it stands in names, inside the range."""
        return int(value) if self.integer else min(max(six_digits(value), self.low), self.high)

    def edge(self, value: float) -> str | None:
        """Whether a value is the "least" or the "largest", to 5 percent of the range; 0 counts as neither."""
        if self.log:
            place = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        near = "least" if place <= NEAR else "largest" if place >= 1 - NEAR else None
        return None if near == "least" and self.low == 0 else near


def read_space(space: Any, interval: type[Component]) -> Any:
    """The space with every mapping as an `interval`. Raises ValueError with the path of what is none, and no list."""
    if not isinstance(space, Mapping):
        return space
    found: dict[str, Any] = {}
    for path, values in space.items():
        if not re.fullmatch(r"[\w.]+", str(path)):
            raise ValueError(f"dotted paths of fields are required, got {path!r}")
        if isinstance(values, (list, tuple)):
            found[path] = _choices(path, list(values))
        elif isinstance(values, (Mapping, Component)):
            try:
                found[path] = validated(interval, values, path)
            except RecipeError as error:
                raise ValueError("; ".join(str(error).splitlines())) from None
        else:
            known = ", ".join(interval.model_fields)
            raise ValueError(f"{path}: a list of values or a mapping of {known} is required, got {values!r}")
    return found


def _choices(path: str, choices: list[Any]) -> list[Any]:
    """A list of values. Raises ValueError where one is repeated, or is no name of a directory."""
    if len(choices) < 2 or len({text(choice) for choice in choices}) < len(choices):
        raise ValueError(f"{path}: at least two distinct values are required, got {choices}")
    for choice in choices:
        if not isinstance(choice, Scalar) or not LABEL.fullmatch(text(choice)):
            raise ValueError(f"{path}: numbers, and texts of letters, digits and . _ + - are required, got {choice!r}")
    return choices
