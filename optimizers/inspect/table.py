"""Tables of measurements: one row for each measure of each stage and block, joined over blocks and ranks by sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, overload

Sums = tuple[float, float, float]
"""a, b, c of a measurement a / sqrt(b c): sums over entries, which add up over blocks and ranks."""


@dataclass(frozen=True)
class Measurement:
    """One measure of one block.

    parameter: name of the parameter.
    block: number of the block in it; None: all of the parameter.
    stage: dotted path of the stage, or of a chain for what left the chain; "" for what belongs to the parameter.
    slot: name of the slot that is measured; "" for none.
    measure: name of the measure.
    sums: a, b, c; a value that is no ratio of sums has (value, 1, 1), and joined ones are means.
    """

    parameter: str
    block: int | None
    stage: str
    slot: str
    measure: str
    sums: Sums = field(repr=False)

    @property
    def value(self) -> float:
        """a / sqrt(b c); 0 for a ratio of zeros, nan or inf where the state is not finite or says nothing."""
        a, b, c = self.sums
        below = math.sqrt(b * c) if 0 < b * c < math.inf else math.sqrt(b) * math.sqrt(c)
        return a / below if below else 0.0 if a == 0 else math.nan

    @property
    def key(self) -> tuple[str, int | None, str, str, str]:
        """What is measured where: (parameter, block, stage, slot, measure)."""
        return self.parameter, self.block, self.stage, self.slot, self.measure


COLUMNS = ("parameter", "block", "stage", "slot", "measure", "value")


@dataclass(frozen=True)
class Inspection(Sequence[Measurement]):
    """A table of measurements, read-only. It is printed aligned; `columns()` is what data frames are made of."""

    rows: tuple[Measurement, ...] = ()

    @classmethod
    def joined(cls, rows: Iterable[Measurement]) -> Self:
        """The table in which rows of the same key are one, whose sums are theirs together."""
        found: dict[tuple[str, int | None, str, str, str], Measurement] = {}
        for row in rows:
            known = found.get(row.key)
            if known is not None:
                a, b, c = (x + y for x, y in zip(known.sums, row.sums, strict=True))
                row = replace(row, sums=(a, b, c))
            found[row.key] = row
        return cls(tuple(found.values()))

    def by_parameter(self) -> Self:
        """One row for all blocks of a parameter: ratios of sums over all its entries, means of other values."""
        return self.joined(replace(row, block=None) for row in self.rows)

    def select(
        self,
        parameter: str | None = None,
        stage: str | None = None,
        slot: str | None = None,
        measure: str | None = None,
    ) -> Self:
        """The rows that have all that is given; a stage by its path, or by its last part."""
        wanted = {"parameter": parameter, "slot": slot, "measure": measure}
        asked = {name: value for name, value in wanted.items() if value is not None}
        rows = (row for row in self.rows if all(getattr(row, name) == value for name, value in asked.items()))
        return type(self)(tuple(row for row in rows if stage in (None, row.stage, row.stage.rpartition(".")[2])))

    def values(self) -> list[float]:
        """The value of every row."""
        return [row.value for row in self.rows]

    def columns(self) -> dict[str, list[Any]]:
        """Lists by column: parameter, block, stage, slot, measure, value."""
        return {name: [getattr(row, name) for row in self.rows] for name in COLUMNS}

    def records(self) -> list[dict[str, Any]]:
        """A mapping for each row, with None for values that JSON has no number for."""
        rows = ({name: getattr(row, name) for name in COLUMNS} for row in self.rows)
        return [{**row, "value": row["value"] if math.isfinite(row["value"]) else None} for row in rows]

    def __str__(self) -> str:
        cells = [COLUMNS, *(tuple(map(_text, (getattr(row, name) for name in COLUMNS))) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)

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


def _text(value: Any) -> str:
    if value is None:
        return "all"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
