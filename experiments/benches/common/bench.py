"""The family of benches: one kind of part measured alone over a grid of problems, without training anything."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from eigengraft.component import Component, RecipeError, checked


@dataclass(frozen=True)
class Row:
    """One measurement. `part` is what was measured, as figures and tables call it; `declaration` makes it again."""

    part: str
    declaration: Any
    device: str


@dataclass(frozen=True)
class Summary:
    """A table: rows of text below their headings."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Line:
    """Points of one part; `style` picks colour, dashes and marker, the same in all panels."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One half of a figure, both axes logarithmic; `band` is a value or an interval to compare with."""

    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    band: tuple[float, float] | None = None


class Bench(Component, ABC, family="bench"):
    """Parts x problems x sizes, and what is measured of each.

    Laws: rows depend on the declaration alone, times excepted; a part that fails a problem has a row that says so.
    """

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    threads: int = Field(default=1, ge=1, description="CPU threads of torch")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of everything random")
    seconds: float = Field(default=0.03, gt=0, description="least time spent on timing one cell")
    parts: ClassVar[str]
    """The field that holds what is compared."""
    small: ClassVar[Mapping[str, Any]]
    """Fields of the quick run, which takes seconds."""

    @abstractmethod
    def cells(self) -> int:
        """How many times `measure` yields."""

    @abstractmethod
    def measure(self) -> Iterator[list[Any]]:
        """The rows of one cell after the other."""

    @abstractmethod
    def summary(self, rows: Sequence[Any]) -> Summary:
        """The rows in one screen."""

    @abstractmethod
    def panels(self, rows: Sequence[Any]) -> tuple[Panel, Panel]:
        """The figure."""

    @abstractmethod
    def advice(self, rows: Sequence[Any]) -> list[str]:
        """What one would choose on this device, by these rows."""

    def run(self) -> list[Any]:
        """All rows."""
        return [row for cell in self.cell_by_cell() for row in cell]

    def cell_by_cell(self) -> Iterator[list[Any]]:
        """`measure` on the declared number of threads, for small matrices more of them only get in each other's way."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield from self.measure()
        finally:
            torch.set_num_threads(threads)

    def target(self) -> torch.device:
        """The device, if this machine has it."""
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise RecipeError(f"device: a device of this machine is required, got '{self.device}'; use device=cpu")
        return device


def load_bench(kind: str, given: Mapping[str, Any], quick: bool = False) -> Bench:
    """The bench called `kind` with the fields `given`; a quick one takes the others from its small settings."""
    known = Bench.members.get(kind)
    small = known.small if quick and known is not None and issubclass(known, Bench) else {}
    return checked(Bench, {"kind": kind, **small, **given}, "bench")  # type: ignore[type-abstract]


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """One JSON object a line; JSON has no NaN and no infinity, they become null."""
    lines = (json.dumps({key: _plain(value) for key, value in asdict(row).items()}) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
