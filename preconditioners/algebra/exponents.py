"""Exponents as exact fractions: `1/4`, 0.25 and Fraction(1, 4) are the same value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_NUMBER = {"type": "number", "minimum": 0}
_FRACTION = {"type": "string", "pattern": "^[0-9]+(/[0-9]+)?$"}


def _fraction(value: Any, zero: bool) -> Fraction:
    """Return a number or a text such as '1/4' as a fraction. zero: True if 0 is allowed."""
    required = f"a number {'>= 0' if zero else '> 0'} or a fraction such as '1/4' is required"
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Fraction)):
        raise ValueError(required)
    try:
        # a user who writes 0.3 means 3/10, not the binary expansion of the float
        fraction = Fraction(value).limit_denominator(1000)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ValueError(required) from None
    if fraction < 0 or (fraction == 0 and not zero):
        raise ValueError(required)
    return fraction


Rational = Annotated[
    Fraction,
    BeforeValidator(lambda value: _fraction(value, zero=False)),
    PlainSerializer(str),
    WithJsonSchema({"anyOf": [{**_NUMBER, "exclusiveMinimum": 0}, _FRACTION]}),
]
"""A positive rational number with a denominator of at most 1000."""

Rational0 = Annotated[
    Fraction,
    BeforeValidator(lambda value: _fraction(value, zero=True)),
    PlainSerializer(str),
    WithJsonSchema({"anyOf": [_NUMBER, _FRACTION]}),
]
"""A rational number >= 0 with a denominator of at most 1000."""

ByOrder = dict[int, tuple[Fraction, ...]]


def _by_order(value: Any) -> ByOrder | Fraction | None:
    """Return one exponent as a fraction, or exponents by order of the block with one for each axis. None stays None."""
    if value is None or not isinstance(value, Mapping):
        return None if value is None else _fraction(value, zero=False)
    exponents = {}
    for key, item in value.items():
        if not str(key).isdigit() or int(key) < 1:
            raise ValueError("keys must be orders of blocks (1, 2, ...)")
        several = isinstance(item, (list, tuple))
        if several and len(item) != int(key):
            raise ValueError(f"a block of order {key} has {key} axes: give one exponent, or one for each axis")
        exponents[int(key)] = tuple(_fraction(part, zero=True) for part in (item if several else [item] * int(key)))
    return exponents


def _plain(value: ByOrder | Fraction | None) -> Any:
    """Return exponents as plain data, for YAML and JSON."""
    if isinstance(value, dict):
        return {str(order): [str(part) for part in parts] for order, parts in value.items()}
    return None if value is None else str(value)


_ONE = {"anyOf": [_NUMBER, _FRACTION]}
Exponents = Annotated[
    Fraction | ByOrder | None,
    BeforeValidator(_by_order),
    PlainSerializer(_plain),
    WithJsonSchema(
        {
            "anyOf": [
                *_ONE["anyOf"],
                {"type": "null"},
                {"type": "object", "additionalProperties": {"anyOf": [_ONE, {"type": "array", "items": _ONE}]}},
            ]
        }
    ),
]
"""An exponent for all axes, or by order of the block one for all axes or one for each, as {2: [1/2, 0]}. 0: the axis
has no factor.
"""


def default_exponent(axes: Sequence[int]) -> Fraction:
    """Return 1 / (2k) for k axes with a factor. With it the product of all roots divides by the size of a gradient
    once, for any k.
    """
    return Fraction(1, 2 * max(1, len(axes)))


def exponent_of(exponents: Fraction | ByOrder | None, order: int, axis: int, default: Fraction) -> Fraction:
    """Return the exponent of one axis of a block of this order. default: exponent if `exponents` has none for the
    order.
    """
    if exponents is None or isinstance(exponents, Fraction):
        return default if exponents is None else exponents
    return exponents[order][axis] if order in exponents else default
