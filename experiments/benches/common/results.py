"""Results of every bench: rows, a table and the two panels of a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...files import write_text


@dataclass(frozen=True)
class BenchRow:
    """One measurement.

    candidate: the name of what was measured, in figures and tables.
    declaration: the candidate as a recipe declares it.
    device: where it was measured.
    """

    candidate: str
    declaration: Any
    device: str


@dataclass(frozen=True)
class ResultTable:
    """Lines of text below their column headings."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Line:
    """Points of one candidate; `style` picks colour, dashes and marker, the same in all panels."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class FigurePanel:
    """One half of a figure, both axes logarithmic; `band` is a value or an interval to compare with."""

    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    band: tuple[float, float] | None = None


def write_rows(rows: Iterable[Any], path: Path) -> None:
    """Write dataclass instances, one JSON object per line; NaN and infinity, which JSON lacks, become null."""
    lines = (json.dumps({key: _finite_or_none(value) for key, value in asdict(row).items()}) for row in rows)
    write_text(path, "".join(f"{line}\n" for line in lines))


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
