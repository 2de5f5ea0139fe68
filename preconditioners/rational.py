"""Exponents as exact fractions: `1/4`, 0.25 and Fraction(1, 4) are the same value."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema


def _rational(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Fraction)):
        raise ValueError("a positive number or a fraction such as '1/4' is required")
    try:
        # a float such as 0.3 is meant as 3/10, not as its binary expansion
        fraction = Fraction(value).limit_denominator(1000)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ValueError("a positive number or a fraction such as '1/4' is required") from None
    if fraction <= 0:
        raise ValueError("a positive number or a fraction such as '1/4' is required")
    return fraction


Rational = Annotated[
    Fraction,
    BeforeValidator(_rational),
    PlainSerializer(str),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": "^[0-9]+/[0-9]+$"}]}
    ),
]
"""A positive rational number with a denominator of at most 1000."""
