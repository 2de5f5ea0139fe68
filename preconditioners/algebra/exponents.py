"""Exponents as exact fractions: `1/4`, 0.25 and Fraction(1, 4) are the same value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from eigengraft.errors import counted

_NUMBER = {"type": "number", "minimum": 0}
_FRACTION = {"type": "string", "pattern": "^[0-9]+(/[0-9]+)?$"}


def _fraction(value: Any, zero: bool) -> Fraction:
    """Return a number, or a text such as '1/4', as a fraction.

    zero: True if 0 is allowed.
    """
    required = f"a number {'>= 0' if zero else '> 0'} or a fraction such as '1/4' is required"
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Fraction)):
        raise ValueError(required)
    try:
        # the float 0.3 is read as 3/10, not as its binary expansion, by limiting the denominator to 1000
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
    """Return exponents in their validated form, as `exponent_of` reads them.

    A single exponent becomes a fraction. A mapping becomes {order: one fraction for each axis}. None stays None.

    value: one exponent, a number or a text such as '1/4', for every axis; or a mapping from the order of a block (its
        number of axes) to one exponent, or to a list with one for each axis; or None.
    """
    if value is None or not isinstance(value, Mapping):
        return None if value is None else _fraction(value, zero=False)
    exponents = {}
    for key, item in value.items():
        if not str(key).isdigit() or int(key) < 1:
            raise ValueError("keys must be orders of blocks (numbers of axes: 1, 2, ...)")
        several = isinstance(item, (list, tuple))
        if several and len(item) != int(key):
            raise ValueError(
                f"a block of order {key} has {counted(int(key), 'axis', 'axes')}, got a list of "
                f"{counted(len(item), 'exponent')}; give one number, or a list with one for each axis"
            )
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
"""The exponents of the inverse roots of a block, one for each axis.

A single number applies to every axis. A mapping gives exponents by order, which is the number of axes of a block: one
exponent for all axes, or a list with one for each axis, such as {2: [1/2, 0]}. An axis with exponent 0 has no factor.
"""


def default_exponent(axes: Sequence[int]) -> Fraction:
    """Return 1 / (2k), the default exponent of inverse roots, for k axes. With this exponent the product of the roots
    of all axes is proportional to 1 / ||gradient||, for any k.

    axes: the axes of a block that have a factor, and therefore a root.
    """
    return Fraction(1, 2 * max(1, len(axes)))


def exponent_of(exponents: Fraction | ByOrder | None, order: int, axis: int, default: Fraction) -> Fraction:
    """Return the exponent of one axis of a block with `order` axes.

    exponents: one exponent for all axes, or {order: one exponent for each axis}. None: no exponents are given.
    default: exponent for orders that `exponents` does not contain, and for all orders if `exponents` is None.
    """
    if exponents is None or isinstance(exponents, Fraction):
        return default if exponents is None else exponents
    return exponents[order][axis] if order in exponents else default
