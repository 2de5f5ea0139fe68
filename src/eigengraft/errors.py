"""Errors and warnings that users read, and the lists of names in them."""

from __future__ import annotations

import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


class RecipeError(ValueError):
    """A declaration that cannot be used. The message has one line for each fault, with its path and the value."""


class ContractError(ValueError):
    """A stage that breaks its contract. The message begins with the path of the stage."""


class ArgumentError(ValueError):
    """Error about an argument of a function that users call from Python and from the command line.

    The message names the argument, as `lr=`. The command line prints the option in its place, as --lr.

    argument: name of the argument, and of the option.
    fault: text about the wrong value and the remedy.
    """

    def __init__(self, argument: str, fault: str) -> None:
        super().__init__(f"`{argument}=`: {fault}")
        self.for_commands = f"--{argument}: {fault}"


def with_notes(error: BaseException) -> str:
    """Return the message of an error followed by its notes, one line each."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def first_lines(lines: Sequence[str]) -> list[str]:
    """Return the first lines of an error or warning. If there are more than eight, a last line counts the lines left
    out.
    """
    return [*lines[:8], *([f"... and {len(lines) - 8} more"] if len(lines) > 8 else [])]


def name_some(names: Sequence[str], most: int) -> str:
    """Return at most `most` names separated by commas, followed by "and <n> more" if there are more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, as "1 row" or "2 rows".

    plural: the plural of the noun; "": the noun followed by an s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def did_you_mean(
    name: str, known: Iterable[str], cutoff: float = 0.6, first: Iterable[str] = (), separator: str = ", "
) -> str:
    """Return the question "did you mean ...?" for an unknown name, as the end of an error; "" if no known name is near.

    Names that are equally near, such as int4 and int8 for int9, are all suggested, up to three. A known field is also
    suggested for a name that is very similar to its name in another library (`_OTHER_NAMES`).

    cutoff: least similarity of near names, as in `near_names`.
    first: suggestions that replace the near names. Only the first one is suggested. (): near names are suggested.
    separator: beginning of the question, after the text of the error.
    """
    known = list(known)
    others = {
        other: field
        for other, field in _OTHER_NAMES.items()
        if field in known and _similarity(name, other) >= _VERY_SIMILAR
    }
    near = list(first)[:1] or near_names(name, [*known, *others], cutoff)
    far = [(typing_errors(name, other), _letters(name) != _letters(other)) for other in near]
    equal = [f"'{others.get(other, other)}'" for other, own in zip(near, far, strict=True) if own == far[0]][:3]
    return f"{separator}did you mean {' or '.join(equal)}?" if near else ""


_OTHER_NAMES = {
    "learning_rate": "lr",
    "betas": "beta",
    "epsilon": "eps",
    "wd": "weight_decay",
    "optimizer": "recipe",
    "lr_ratio": "lr_multiplier",
    "lr_scale": "width_scaling",
    "at_once": "min_wave_work",
    "keep_axes": "min_axes",
}
"""Names that other libraries and version 0.1 give to fields: {their name: name of the field here}."""


_VERY_SIMILAR = 0.75
"""Suggestions begin with names that are at least this similar, before names that only share a word with the unknown
name. 0.75 is one typing error in four characters."""
_LEAST_WORD = 3
"""A word that two names share makes them near only if it has at least this many characters. Shorter words are in many
names."""


def near_names(name: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the known names that are near `name`, the nearest first.

    The order is: (1) very similar names; (2) names in which some word begins with `name`; (3) names that are the
    beginning of a word of `name`; (4) all other similar names.

    cutoff: two names are similar if their similarity is at least this. See `_similarity`.
    """
    others = list(known)
    similarity = {other: _similarity(name, other) for other in others}
    similar = sorted(
        (other for other in others if similarity[other] >= cutoff),
        key=lambda other: (-similarity[other], _letters(other) != _letters(name)),
    )
    found = [other for other in similar if similarity[other] >= _VERY_SIMILAR]
    found += sorted((other for other in others if _begins_word(name, other)), key=len)
    found += sorted((other for other in others if _begins_word(other, name)), key=len, reverse=True)
    return list(dict.fromkeys([*found, *similar]))


def _similarity(name: str, other: str) -> float:
    """Return 1 minus the number of typing errors per character of the longer name."""
    return 1 - typing_errors(name, other) / max(len(name), len(other), 1)


def near_path(path: Path, suffixes: Iterable[str] | None = None) -> str:
    """Return the question "did you mean ...?" for a path that does not exist, as the end of an error; "" if no path in
    the same folder is near. Files are compared without their suffixes.

    suffixes: suffixes of the paths that may be suggested. None: directories may be suggested.
    """
    if not path.parent.is_dir():
        return ""
    if suffixes is None:
        known, name = {one.name: one for one in path.parent.iterdir() if one.is_dir()}, path.name
    else:
        known, name = {one.stem: one for one in path.parent.iterdir() if one.suffix in suffixes}, path.stem
    near = near_names(name, sorted(known))
    return f", did you mean '{known[near[0]]}'?" if near else ""


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case, without underscores and other characters."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _begins_word(part: str, name: str) -> bool:
    """Return True if a name has `part` at the beginning of one of its words."""
    return len(part) >= _LEAST_WORD and re.search(rf"(?:^|[^a-z0-9]){re.escape(part)}", name) is not None


def typing_errors(a: str, b: str) -> int:
    """Return the least number of typing errors that turn one text into another (optimal string alignment).

    A typing error is a missing, a wrong or an additional character, or two neighbors in the wrong order.
    """
    before, row = list[int](), list(range(len(b) + 1))
    for i in range(1, len(a) + 1):
        earlier, before, row = before, row, [i]
        for j in range(1, len(b) + 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a[i - 1] != b[j - 1]))
            if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]


def warn_user(message: str) -> None:
    """Issue a UserWarning that points to the line of the user's code that called the library.

    Frames of the library are skipped, and frames of torch, which wraps methods of optimizers.
    """
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("eigengraft.", "torch.")):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


def hide_installed_lines() -> None:
    """Let warnings of this process show a file and a line only if the file is neither installed nor of this library.

    Commands and worker processes call this function, because the line that calls the library is in typer or
    multiprocessing there, and does not help the user.
    """
    usual, paths = warnings.formatwarning, sysconfig.get_paths()
    folders = [Path(__file__).parents[2], *(Path(paths[name]) for name in ("stdlib", "purelib", "platlib", "scripts"))]

    def text(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        file = Path(filename).resolve()
        if any(file.is_relative_to(folder.resolve()) for folder in folders):
            return f"{category.__name__}: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = text


def import_optional(package: str, needed_by: str) -> Any:
    """Return an optional package. Raise RecipeError with the line that installs it if it is not installed.

    package: name of the package.
    needed_by: name of the component that needs the package, for the error.
    """
    try:
        return import_module(package)
    except ImportError:
        raise RecipeError(f"{needed_by}: {package} is not installed; run `pip install {package}`") from None
