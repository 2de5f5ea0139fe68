"""The family of benches: one kind of component measured alone over a grid of problems, without training anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field

from eigengraft.component import Component, checked
from eigengraft.errors import RecipeError

from .results import FigurePanel, ResultTable


class Bench(Component, ABC, family="bench"):
    """Candidates x problems x sizes, and what is measured of each.

    Laws: rows depend on the declaration alone, times excepted; a candidate that fails a problem has a row that says so.
    """

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    threads: int = Field(default=1, ge=1, description="CPU threads of torch")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of all random numbers")
    seconds: float = Field(default=0.03, gt=0, description="least time spent on timing one cell")
    candidate_field: ClassVar[str]
    """Name of the field that holds the candidates."""
    quick_fields: ClassVar[Mapping[str, Any]]
    """Fields of the quick run, which takes seconds."""

    @abstractmethod
    def cells(self) -> int:
        """Count how many times `measure` yields."""

    @abstractmethod
    def measure(self) -> Iterator[list[Any]]:
        """Yield the rows of one cell after the other."""

    @abstractmethod
    def summary(self, rows: Sequence[Any]) -> ResultTable:
        """Summarize the rows in a table of one screen."""

    @abstractmethod
    def panels(self, rows: Sequence[Any]) -> tuple[FigurePanel, FigurePanel]:
        """Draw the rows as the two panels of a figure."""

    @abstractmethod
    def advice(self, rows: Sequence[Any]) -> list[str]:
        """Recommend a candidate for this device, by these rows, one line per problem."""

    def run(self) -> list[Any]:
        """Measure all rows."""
        return [row for cell in self.cell_by_cell() for row in cell]

    def cell_by_cell(self) -> Iterator[list[Any]]:
        """Run `measure` on the declared number of threads; on small matrices more threads only slow each other down."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield from self.measure()
        finally:
            torch.set_num_threads(threads)

    def target_device(self) -> torch.device:
        """The device to measure on. Raises RecipeError where this machine lacks it."""
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise RecipeError(f"device: a device of this machine is required, got '{self.device}'; use device=cpu")
        return device


def load_bench(kind: str, fields: Mapping[str, Any], quick: bool = False) -> Bench:
    """The bench called `kind` with these fields; with `quick`, fields not given come from its quick settings."""
    known = Bench.members.get(kind)
    defaults = known.quick_fields if quick and known is not None and issubclass(known, Bench) else {}
    return checked(Bench, {"kind": kind, **defaults, **fields}, "bench")  # type: ignore[type-abstract]
