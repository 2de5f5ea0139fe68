"""Tables of measurements, with one row for each measure of each stage and block.

Rows of several ranks, or of the blocks of a parameter, are joined by adding the sums from which a measure is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, overload

from eigengraft.errors import did_you_mean, name_some

Sums = tuple[float, float, float]
"""The numbers a, b, c of a measurement a / sqrt(b c). Each number is a sum over entries, blocks and ranks."""


@dataclass(frozen=True)
class Measurement:
    """One measure of one block.

    parameter: name of the parameter.
    block: index of the block in the parameter; None for the whole parameter.
    stage: dotted path of the stage, or of a chain for its final direction; "" for measures of the parameter.
    slot: name of the measured slot; "" for none.
    measure: name of the measure.
    sums: the numbers a, b, c of the value a / sqrt(b c). For a value that is no ratio they are (value, 1, 1): added
        over n blocks, they give (sum, n, n), and so the mean.
    """

    parameter: str
    block: int | None
    stage: str
    slot: str
    measure: str
    sums: Sums = field(repr=False)

    @property
    def value(self) -> float:
        """Return a / sqrt(b c) for the numbers a, b and c in `sums`.

        The result is 0 for 0 / 0, nan for any other a / 0, and nan or inf if the measured state is not finite.
        """
        a, b, c = self.sums
        below = math.sqrt(b * c) if 0 < b * c < math.inf else math.sqrt(b) * math.sqrt(c)
        return a / below if below else 0.0 if a == 0 else math.nan

    @property
    def defined(self) -> bool:
        """Return False for a / 0, as for the first update of a bias that was 0. True for 0 / 0, whose value is 0."""
        a, b, c = self.sums
        return not (0 < abs(a) < math.inf and 0 in (b, c))

    @property
    def usual(self) -> tuple[float, float] | None:
        """Return the usual range of the measure, None if none is known."""
        return USUAL.get(self.measure)

    @property
    def unusual(self) -> bool:
        """Return True if the value is outside of the usual range, or not finite. False if no range is known."""
        return self.usual is not None and not self.usual[0] <= self.value <= self.usual[1]

    @property
    def key(self) -> tuple[str, int | None, str, str, str]:
        """Return (parameter, block, stage, slot, measure), which identifies a row."""
        return self.parameter, self.block, self.stage, self.slot, self.measure


WORST: Mapping[str, tuple[Literal["largest", "smallest"], ...]] = {
    "update_ratio": ("largest", "smallest"),
    "gradient_norm": ("largest", "smallest"),
    "weight_norm": ("largest",),
    "weight_growth": ("largest", "smallest"),
    "zero_gradients": ("largest",),
    "skipped": ("largest",),
    "failures": ("largest",),
    "condition": ("largest",),
    "residual": ("largest",),
    "angle": ("largest",),
    "orthogonality": ("largest",),
    "storage_error": ("largest",),
}
"""For each measure that can indicate a layer with a problem: the extreme values that indicate it. Reports list the
measures in this order."""
_COUNTS = ("zero_gradients", "skipped", "failures")
"""Measures that count events. A layer with the count 0 has no problem and is never listed as the worst."""

USUAL: Mapping[str, tuple[float, float]] = {
    "update_ratio": (1e-4, 0.1),
    "skipped": (0, 0),
    "failures": (0, 0),
    "condition": (1, 1e6),
    "residual": (0, 1),
    "angle": (0, 45),
    "orthogonality": (0, 0.1),
    "storage_error": (0, 1),
}
"""Usual range of a measure, where one is known.

- update_ratio: rule of thumb for learning rates is 1e-4 to 1e-2. Short runs of small models need more: of 108 runs of
  60 steps of adamw, soap_fitted, muon and shampoo on digits and two tables, 45 halved their loss. These had 0.005 to
  0.13 from step 10 on.
- condition: above 1e6, rounding in float32 (6e-8) changes the least eigenvalue by more than 6 %.
- residual, storage_error: an error of 1 means that the root, or the stored number, is 0.
- angle: above 45 degrees, A q is closer to other directions than to q.
- orthogonality: about the relative error of ‖Qx‖² for a vector x.
"""

WATCHED = ("weight_norm", "gradient_norm", "update_ratio", "update_rms", "cosine", "storage_error")
"""Measures of a step. They are in the table only after `watch_next_step` was called before the step."""


def _names(row: Measurement, column: str) -> tuple[str, ...]:
    """Return the texts by which `select` finds a row in a column: the value that the row has there.

    In the column "stage" the value is a dotted path, and the last name of the path is a second text.

    column: name of the column, such as "stage".
    """
    value: str = getattr(row, column)
    return (value, value.rpartition(".")[2]) if column == "stage" else (value,)


def _hint(column: str, value: str, known: Sequence[str]) -> str:
    """Return the advice at the end of the error about a value that `select` finds in no row.

    column: name of the column, such as "measure".
    value: the value that was not found.
    known: all values by which `select` finds rows in this column.
    """
    if column == "measure" and value in WATCHED:
        return "; call `optimizer.watch_next_step()` before a step, and `inspect()` after it"
    listed = name_some([name for name in known if name], 12) or "none"
    return f"{did_you_mean(value, known)} (the table has: {listed})"


COLUMNS = ("parameter", "block", "stage", "slot", "measure", "value")
"""Columns of a printed table, and keys of `Inspection.columns`, in order."""


@dataclass(frozen=True)
class Inspection(Sequence[Measurement]):
    """A read-only table of measurements. `print(table)` aligns columns; `table.columns()` fits `pandas.DataFrame`.

    rows: the measurements, one for each row.
    judged: True for the table that `worst` returns. Printed rows then have the usual range of their measure, and a mark
        if the value is outside of it.
    """

    rows: tuple[Measurement, ...] = ()
    judged: bool = field(default=False, kw_only=True)

    @classmethod
    def joined(cls, rows: Iterable[Measurement]) -> Self:
        """Return a table in which measurements with equal keys, such as those of several ranks, are one row.

        The sums a, b, c of these measurements are added.
        """
        found: dict[tuple[str, int | None, str, str, str], Measurement] = {}
        for row in rows:
            known = found.get(row.key)
            if known is not None:
                a, b, c = (x + y for x, y in zip(known.sums, row.sums, strict=True))
                row = replace(row, sums=(a, b, c))
            found[row.key] = row
        return cls(tuple(found.values()))

    def by_parameter(self) -> Self:
        """Return a table with one row for each measure of each parameter, joined over the parameter's blocks.

        A ratio is computed from sums over all entries of the parameter. Any other value is the mean over blocks.
        """
        return self.joined(replace(row, block=None) for row in self.rows)

    def select(
        self,
        parameter: str | None = None,
        stage: str | None = None,
        slot: str | None = None,
        measure: str | None = None,
    ) -> Self:
        """Return the rows that match every argument that is not None.

        Args:
            parameter: name of the parameter.
            stage: dotted path of the stage, or its last component.
            slot: name of the slot.
            measure: name of the measure.

        Raises:
            ValueError: an argument has a value that no row of the table has.
        """
        wanted = {"parameter": parameter, "stage": stage, "slot": slot, "measure": measure}
        found = self.rows
        for name, value in wanted.items():
            if value is None:
                continue
            known = {text: None for row in self.rows for text in _names(row, name)}
            if value not in known:
                raise ValueError(f"select: no row has the {name} '{value}'{_hint(name, value, [*known])}")
            found = tuple(row for row in found if value in _names(row, name))
        return type(self)(found)

    def worst(self) -> Self:
        """Return the rows with the extreme values of the measures in `WORST`, in the order of `WORST`.

        A condition number has one row, with its largest value. Gradients and updates have two rows, with the largest
        and then the smallest value, or one row if all values are equal. A count that is 0 everywhere has no row.
        Printed rows have the usual range of their measure (see `USUAL`), and the word `outside` if the value is outside
        of this range. A ratio to a norm of 0 is left out.
        """
        rows: list[Measurement] = []
        for measure, ends in WORST.items():
            own = [row for row in self.rows if row.measure == measure and row.defined]
            own = [row for row in own if row.value != 0 or measure not in _COUNTS]
            values = [math.inf if math.isnan(row.value) else row.value for row in own]
            extremes = (max(values) if end == "largest" else min(values) for end in ends) if own else ()
            rows += [own[place] for place in dict.fromkeys(map(values.index, extremes))]
        return type(self)(tuple(rows), judged=True)

    def values(self) -> list[float]:
        """Return the value of every measurement, in the order of the table."""
        return [row.value for row in self.rows]

    def columns(self) -> dict[str, list[Any]]:
        """Return a list for each column: parameter, block, stage, slot, measure, value."""
        return {name: [getattr(row, name) for row in self.rows] for name in COLUMNS}

    def records(self) -> list[dict[str, Any]]:
        """Return a mapping for each measurement. Values that JSON cannot represent (nan, inf) are None."""
        rows = ({name: getattr(row, name) for name in COLUMNS} for row in self.rows)
        return [{**row, "value": row["value"] if math.isfinite(row["value"]) else None} for row in rows]

    def __str__(self) -> str:
        cells = [COLUMNS, *(tuple(map(_text, (getattr(row, name) for name in COLUMNS))) for row in self.rows)]
        if self.judged:
            judgments = [("usual", ""), *map(_judgment, self.rows)]
            cells = [(*line, *judgment) for line, judgment in zip(cells, judgments, strict=True)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        legend = "usual: range of the measure in most runs, where one is known; other values need not be faults"
        return "\n".join([*lines, *[legend] * self.judged])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> Measurement: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Measurement | Self:
        return type(self)(self.rows[index]) if isinstance(index, slice) else self.rows[index]


def _judgment(row: Measurement) -> tuple[str, str]:
    """Return the usual range of a row as text, and a mark if the value is outside of it."""
    if row.usual is None:
        return "", ""
    low, high = row.usual
    return f"{low:g} to {high:g}" if low < high else f"{low:g}", "outside" if row.unusual else ""


def _text(value: Any) -> str:
    if value is None:
        return "all"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
