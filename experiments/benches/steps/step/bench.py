"""Steps of recipes and of other libraries' optimizers, in turn, and how far each recipe is from its floor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator
from torch.nn import Parameter

from eigengraft.optimizers import Optimizer

from ...common.bench import Bench
from ...common.declarations import listed, require_distinct
from ...common.fields import PositiveInts
from ...common.results import FigurePanel, ResultTable
from .cases import QUICK, STEP_CASES, StepCase
from .floor import MachineRates, step_work
from .measure import CLOCKS, Contender, Rounds, held_bytes, kernels, operators, peak_bytes, step_times, take_turns
from .rows import StepRow
from .sets import ShapeSet, initial_values, shape_set, turns_of_gradients
from .view import step_advice, step_panels, step_summary

GROWTH = ("gpt:layers=2", "gpt:layers=8", "gpt:width=128", "gpt:width=512", "squares:size=16", "squares:size=64")
"""Sets that differ from others in one dimension."""


def parse_candidates(value: Any) -> Any:
    """Read "module:Class" as a peer and another name as a recipe."""
    return [{"peer" if ":" in item else "recipe": item} if isinstance(item, str) else item for item in listed(value)]


class StepBench(Bench):
    """Candidates x sets of parameters x intervals: rounds in which each candidate takes one step, A B C A B C.

    `warm` rounds are not counted, nor are those in which operators and bytes are; `periods` intervals are. Candidates
    of the same maths meet in the same rounds; where the interval plays no role, they meet once. `seconds` is not used.
    """

    kind: Literal["step"] = "step"
    candidates: Annotated[tuple[StepCase, ...], BeforeValidator(parse_candidates)] = Field(
        default=STEP_CASES, strict=False, description="recipes and peers, or their names"
    )
    sets: Annotated[tuple[str, ...], BeforeValidator(listed)] = Field(
        default=("gpt", "convolutions", "matrices", "squares", "embedding", *GROWTH),
        strict=False,
        description="gpt, convolutions, matrices, squares, embedding, gpt2, or one with a dimension, as gpt:layers=8",
    )
    intervals: PositiveInts = Field(default=(1, 10), strict=False, description="steps between refreshes")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="dtype of parameters and gradients")
    clock: Literal["wall", "cpu"] = Field(
        default="wall", description="what is read: the time of day, or that of the processor, which other work spares"
    )
    warm: int = Field(default=4, ge=1, description="first rounds, in which state, roots and bases are made")
    periods: int = Field(default=3, ge=1, description="intervals measured; 10 steps at least")
    candidate_field: ClassVar[str] = "candidates"
    quick_fields: ClassVar[Mapping[str, Any]] = {
        "candidates": STEP_CASES[:QUICK],
        "sets": ("gpt", "convolutions", "matrices", "squares"),
        "intervals": (10,),
        "periods": 2,
    }

    @model_validator(mode="after")
    def _clock_fits(self) -> Self:
        if self.clock == "cpu" and (self.threads > 1 or self.device != "cpu"):
            raise ValueError("clock: one thread of a CPU is required for 'cpu', which adds up threads, got more")
        return self

    @field_validator("candidates")
    @classmethod
    def _distinct(cls, candidates: tuple[StepCase, ...]) -> tuple[StepCase, ...]:
        require_distinct(candidates, StepCase.label)
        return candidates

    @field_validator("sets")
    @classmethod
    def _known(cls, sets: tuple[str, ...]) -> tuple[str, ...]:
        for name in sets:
            shape_set(name)
        return sets

    def _meetings(self) -> Iterator[tuple[ShapeSet, list[StepCase], int]]:
        for name in self.sets:
            for maths in dict.fromkeys(case.kind_of_maths() for case in self.candidates):
                cases = [case for case in self.candidates if case.kind_of_maths() == maths]
                for interval in self.intervals if any(case.refreshes for case in cases) else (1,):
                    yield shape_set(name), cases, interval

    def cells(self) -> int:
        return len(list(self._meetings()))

    def measure(self) -> Iterator[list[StepRow]]:
        rates = MachineRates.measured(self.target_device(), getattr(torch, self.dtype), CLOCKS[self.clock])
        for shapes, cases, interval in self._meetings():
            yield self._meet(shapes, cases, interval, rates)

    def _meet(self, shapes: ShapeSet, cases: Sequence[StepCase], interval: int, rates: MachineRates) -> list[StepRow]:
        """The rows of candidates of the same maths on one set."""
        dtype, device = getattr(torch, self.dtype), self.target_device()
        gradients = [[g.to(device, dtype) for g in turn] for turn in turns_of_gradients(shapes.shapes, self.seed)]
        rows = {case.label(): self._row(shapes, case, interval) for case in cases}
        ready: dict[str, Contender] = {}
        for case in cases:
            try:
                contender = self._contender(case, shapes, interval)
                take_turns([contender], gradients, Rounds(0, 2))
                ready[case.label()] = contender
            except (ImportError, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
                rows[case.label()] = self._row(shapes, case, interval, problem=first_line(error))
        rounds = Rounds(self.warm, max(10, self.periods * interval), CLOCKS[self.clock])
        times = take_turns(list(ready.values()), gradients, rounds)
        for (label, contender), own in zip(ready.items(), times, strict=True):
            optimizer, peak = contender.optimizer, peak_bytes(contender, gradients[0])
            totals, launched = [step.total for step in own], kernels(contender, gradients[0])
            measured: dict[str, Any] = {
                **step_times(totals, interval)._asdict(),
                "state": held_bytes(optimizer) / shapes.numbers,
                "peak": None if peak is None else peak / shapes.numbers,
                "host": median(step.host for step in own),
                "operators": operators(contender, gradients[0]),
                "kernels": None if launched is None else launched.kernels,
                "build": contender.build,
                "floor": rates.milliseconds(step_work(optimizer)) if isinstance(optimizer, Optimizer) else None,
                "steps_ms": tuple(totals),
            }
            case = next(case for case in cases if case.label() == label)
            rows[label] = self._row(shapes, case, interval, **measured)
        return list(rows.values())

    def _contender(self, case: StepCase, shapes: ShapeSet, interval: int) -> Contender:
        dtype, device = getattr(torch, self.dtype), self.target_device()
        parameters = [Parameter(x.to(device, dtype)) for x in initial_values(shapes.shapes, self.seed)]
        start = time.perf_counter()
        optimizer = case.build(parameters, interval)
        return Contender(optimizer, parameters, time.perf_counter() - start)

    def _row(self, shapes: ShapeSet, case: StepCase, interval: int, **measured: Any) -> StepRow:
        return StepRow(
            candidate=case.label(),
            declaration=case.declaration(),
            device=self.device,
            set=shapes.name,
            maths=case.kind_of_maths(),
            interval=interval,
            dtype=self.dtype,
            threads=self.threads,
            numbers=shapes.numbers,
            **measured,
        )

    def summary(self, rows: Sequence[StepRow]) -> ResultTable:
        return step_summary(rows)

    def panels(self, rows: Sequence[StepRow]) -> tuple[FigurePanel, FigurePanel]:
        return step_panels(rows)

    def advice(self, rows: Sequence[StepRow]) -> list[str]:
        return step_advice(rows)


def first_line(error: Exception) -> str:
    """What went wrong, in one short line; a missing library is named as such."""
    text = f"{type(error).__name__}: {error}" if not isinstance(error, ImportError) else f"not installed: {error.name}"
    return text.splitlines()[0][:80]
