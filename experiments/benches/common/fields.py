"""Types of the fields that several benches share: sizes, shapes and dtypes of matrices."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from .declarations import listed

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def parse_shapes(value: Any) -> Any:
    """Read `[m, n]` and `mxn` as shapes and a single number as a square; one shape stands for a list of one."""
    single = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(item, int) for item in value)
    return tuple(_parse_shape(item) for item in ([value] if single else listed(value)))


def _parse_shape(item: Any) -> Any:
    if isinstance(item, int) and not isinstance(item, bool):
        return (item, item)
    if isinstance(item, str):
        numbers = item.split("x")
        if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
            raise PydanticCustomError("shape", "a shape such as 16x64 or [16, 64] is required")
        return tuple(map(int, numbers))
    return tuple(item) if isinstance(item, list) else item


PositiveInt = Annotated[int, Field(ge=1)]
PositiveInts = Annotated[tuple[PositiveInt, ...], BeforeValidator(listed)]
MatrixShapes = Annotated[tuple[tuple[PositiveInt, PositiveInt], ...], BeforeValidator(parse_shapes)]
MatrixDtypes = Annotated[tuple[Literal["float32", "float64"], ...], BeforeValidator(listed)]
