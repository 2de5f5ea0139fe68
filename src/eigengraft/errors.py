"""Errors and warnings that users read, and the lists of names in them."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence


class RecipeError(ValueError):
    """A declaration that cannot be used. The message has one line for each fault, with its path and the value."""


class ContractError(ValueError):
    """A stage that breaks its contract. The message begins with the path of the stage."""


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return at most eight lines of an error or warning, and one more that counts the lines left out."""
    return [*lines[:8], *([f"... and {len(lines) - 8} more"] if len(lines) > 8 else [])]


def name_some(names: Sequence[str], most: int) -> str:
    """Return at most `most` names separated by commas, followed by "and <n> more" if there are more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, as "1 row" or "2 rows".

    plural: the noun in plural; empty: the noun followed by an s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6, first: Iterable[str] = ()) -> str:
    """Return the part of an error that asks for the nearest of some known names, or "" if no name is near.

    cutoff: least similarity of a near name, from 0 to 1, as in `difflib.get_close_matches`.
    first: names that the caller prefers to near names. If there are any, the error asks for the first of them.
    """
    near = [*first, *difflib.get_close_matches(name, [*known], 1, cutoff)]
    return f", did you mean '{near[0]}'?" if near else ""


def warn_user(message: str) -> None:
    """Issue a UserWarning at the line of the user's code that called the library.

    Frames of the library, and of torch, which wraps methods of optimizers, are skipped.
    """
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("eigengraft.", "torch.")):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)
