"""Steps of recipes and of optimizers of other libraries, measured in turn, and times counted for this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from statistics import linear_regression, median
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator
from torch.nn import Parameter

from eigengraft.optimizers import Optimizer
from eigengraft.optimizers.plan.plan import plan

from ..track.cost import Card
from . import view
from .bench import Bench, Column, Problem, first_line
from .candidates import Listed, PositiveInts, listed
from .steps.cases import QUICK, STEP_CASES, StepCase
from .steps.measure import (
    CLOCKS,
    Contender,
    Rounds,
    held_bytes,
    kernels,
    measured_card,
    operators,
    peak_bytes,
    step_times,
    take_turns,
)
from .steps.sets import ShapeSet, initial_values, shape_set, turns_of_gradients
from .view import BenchRows, LinePoints, Panel, Recommendation, Row, Table

GROWTH = ("gpt:layers=2", "gpt:layers=8", "gpt:width=128", "gpt:width=512", "squares:size=16", "squares:size=64")
"""Sets of parameters in which one dimension differs from its default, to measure how times grow with the dimension."""


def parse_candidates(value: Any) -> Any:
    """Read "module:Class" as an optimizer of another library (a peer), and any other name as a recipe."""
    return tuple(
        {"peer" if ":" in item else "recipe": item} if isinstance(item, str) else item for item in listed(value)
    )


class StepBench(Bench):
    """Candidates x sets of parameters x intervals, in rounds in which each candidate makes one step: A B C A B C ...

    Candidates with the same algorithm take turns in the same rounds. The first `warm` rounds are not timed, nor are the
    steps in which operators and bytes are counted. After that, `periods` intervals between refreshes are measured, or
    one interval if no candidate has refreshes. The columns `steady` to `largest` are computed from medians over these
    intervals. The field `seconds` has no effect.
    """

    kind: Literal["step"] = "step"
    candidates: Annotated[tuple[StepCase, ...], BeforeValidator(parse_candidates)] = Field(
        STEP_CASES, description="recipes and peers, or their names"
    )
    sets: Listed[str] = Field(
        default=("gpt", "convolutions", "matrices", "squares", "embedding", *GROWTH),
        description="gpt, convolutions, matrices, squares, embedding, gpt2, or one with a dimension, as gpt:layers=8",
    )
    intervals: PositiveInts = Field((1, 10), description="steps between refreshes")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of parameters and gradients")
    clock: Literal["wall", "cpu", "thread"] = Field(
        default="wall",
        description="clock: time of day, or processor time, on which other work has no influence: of the process, or "
        "of the thread that calls `step`, without delayed refreshes",
    )
    warm: int = Field(4, ge=1, description="first rounds, in which state, roots and bases are made")
    periods: int = Field(3, ge=1, description="intervals measured; 10 steps at least")
    candidate_field: ClassVar[str] = "candidates"
    columns: ClassVar[Mapping[str, Column]] = {
        "numbers": Column("entries of all parameters"),
        "steady": Column("time of a step without refreshes, the lower quartile over the steps of an interval", "ms"),
        "refresh": Column("time that refreshes add in one interval", "ms"),
        "amortised": Column("time of a step, refreshes included", "ms"),
        "median": Column("median step of an interval", "ms"),
        "largest": Column("longest step of an interval", "ms"),
        "state": Column("bytes of state for each entry of parameters", "bytes"),
        "peak": Column("most bytes a step allocates beyond the state, for each entry; null: not measured", "bytes"),
        "host": Column("median time until `step` returns; on a device the rest of the step runs after that", "ms"),
        "operators": Column("operators of a step without refresh, views left out, a foreach once; null: not counted"),
        "kernels": Column("kernels that a CUDA device runs in a step without refresh; null on a CPU"),
        "build": Column("time of the construction", "s"),
        "counted": Column("time of a step by its counted operations and bytes; null: unknown", "ms"),
        "times_counted": Column("amortised over counted; null: unknown"),
        "over_best_other": Column("amortised over that of the fastest compared candidate; null for these"),
        "steps_ms": Column("time of every measured step", "ms"),
    }
    quick_fields: ClassVar[Mapping[str, Any]] = {
        "candidates": STEP_CASES[:QUICK],
        "sets": ("gpt", "convolutions", "matrices", "squares"),
        "intervals": (10,),
        "periods": 2,
    }

    @model_validator(mode="after")
    def _clock_fits(self) -> Self:
        if self.clock != "wall" and (self.threads > 1 or self.device != "cpu"):
            raise ValueError(
                f"clock: '{self.clock}' cannot be combined with several threads or a device, because it is "
                "processor time, summed over threads and without the device; use one thread on a CPU, or clock=wall"
            )
        return self

    @field_validator("sets")
    @classmethod
    def _known(cls, sets: tuple[str, ...]) -> tuple[str, ...]:
        for name in sets:
            shape_set(name)
        return sets

    def problems(self) -> Sequence[Problem]:
        @cache  # the machine is measured once for all problems, with the declared number of threads
        def card() -> Card:
            return measured_card(self.target_device(), getattr(torch, self.dtype), CLOCKS[self.clock])

        found = []
        for name in self.sets:
            for maths, cases in self._by_maths().items():
                for interval in self.intervals if any(case.refreshes for case in cases) else (1,):
                    shapes = shape_set(name)
                    fields = {
                        "set": name, "maths": maths, "interval": interval, "dtype": self.dtype,
                        "threads": self.threads, "numbers": shapes.numbers,
                    }  # fmt: skip
                    found.append(Problem(fields, partial(lambda *given: (*given, card()), shapes, cases)))
        return found

    def _by_maths(self) -> dict[str, list[StepCase]]:
        found: dict[str, list[StepCase]] = {}
        for case in self.candidates:
            found.setdefault(case.kind_of_maths(), []).append(case)
        return found

    def label(self, candidate: StepCase) -> str:
        return candidate.label()

    def cells_of(self, problem: Problem) -> Iterator[list[Row]]:
        """Yield the rows of all candidates on one set of parameters. Candidates with the same algorithm take turns."""
        shapes, cases, card = problem.make()
        interval = problem.fields["interval"]
        dtype, device = getattr(torch, self.dtype), self.target_device()
        gradients = [[g.to(device, dtype) for g in turn] for turn in turns_of_gradients(shapes.shapes, self.seed)]
        rows: dict[str, Row] = {}
        ready: list[tuple[StepCase, Contender]] = []
        for case in cases:
            rows[case.label()] = self.row(case, problem.fields)
            try:
                contender = self._contender(case, shapes, interval)
                take_turns([contender], gradients, Rounds(0, 2))
                ready.append((case, contender))
            except Exception as error:  # a peer may be any code
                rows[case.label()]["problem"] = first_line(error)
        rounds = Rounds(self.warm, max(10, self.periods * interval), CLOCKS[self.clock])
        times = take_turns([contender for _, contender in ready], gradients, rounds)
        for (case, contender), own in zip(ready, times, strict=True):
            optimizer, peak = contender.optimizer, peak_bytes(contender, gradients[0])
            totals, launched = [step.total for step in own], kernels(contender, gradients[0])
            spent = step_times(totals, interval)
            counted = counted_ms(optimizer, card) if isinstance(optimizer, Optimizer) else None
            rows[case.label()] |= {
                **spent._asdict(),
                "state": held_bytes(optimizer) / shapes.numbers,
                "peak": None if peak is None else peak / shapes.numbers,
                "host": median(step.host for step in own),
                "operators": operators(contender, gradients[0]),
                "kernels": None if launched is None else launched.kernels,
                "build": contender.build,
                "counted": counted,
                "times_counted": spent.amortised / counted if counted else None,
                "steps_ms": totals,
            }
        others = [rows[case.label()]["amortised"] for case, _ in ready if case.is_other]
        for case, _ in ready:
            own_time = rows[case.label()]["amortised"]
            rows[case.label()]["over_best_other"] = own_time / min(others) if others and not case.is_other else None
        yield list(rows.values())

    def _contender(self, case: StepCase, shapes: ShapeSet, interval: int) -> Contender:
        dtype, device = getattr(torch, self.dtype), self.target_device()
        parameters = [Parameter(x.to(device, dtype)) for x in initial_values(shapes.shapes, self.seed)]
        start = time.perf_counter()
        optimizer = case.build(parameters, interval)
        return Contender(optimizer, parameters, time.perf_counter() - start)

    def table(self) -> Table:
        return Table(
            "steps of all candidates in turn, amortised over an interval",
            {"set": "set", "interval": "interval", "candidate": "candidate"},
            {
                "ms a step": view.first("amortised", view.milli),
                "host": view.first("host", view.milli),
                "steady": view.first("steady", view.milli),
                "refreshes": view.first("refresh", view.milli),
                "largest / median": lambda rows: f"{rows[0]['largest'] / rows[0]['median']:.2f}",
                "state B/p": view.first("state", view.finite("{:.1f}")),
                "peak B/p": view.first("peak", view.finite("{:.1f}")),
                "operators": view.first("operators"),
                "kernels": view.first("kernels"),
                "build s": view.first("build", view.finite("{:.2f}")),
                "times counted": view.first("times_counted", view.finite("{:.2f}")),
                "/ best other": view.first("over_best_other", view.finite("{:.2f}")),
            },
        )

    def panels(self) -> tuple[Panel, Panel]:
        lines = {"{}": _points("numbers", "amortised"), "{}, counted": _points("numbers", "counted")}
        return (
            Panel("numbers in parameters", "milliseconds a step", lines),
            Panel("bytes of state a parameter", "largest step over the median",
                  {"{}": lambda rows: [(row["state"], row["largest"] / row["median"]) for row in rows]},
                  band=(1.0, 1.3)),
        )  # fmt: skip

    def recommendations(self) -> Sequence[Recommendation]:
        return [
            Recommendation(
                lambda row: f"{row['set']}, {row['maths']}, interval {row['interval']}",
                cost=lambda rows: float(rows[0]["amortised"]), cost_text=view.in_ms,
            )
        ]  # fmt: skip

    def notes(self, rows: BenchRows) -> list[str]:
        return [f"{name}: milliseconds ~ numbers^{value:.2f} over {varied}" for name, varied, value in slopes(rows)]


def counted_ms(optimizer: Optimizer, card: Card) -> float:
    """Return the milliseconds of a step on a card, by the operations and bytes that `eigengraft plan` counts."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = [(str(place), tuple(parameter.shape)) for place, parameter in enumerate(parameters)]
    found = plan(optimizer.recipe, shapes, (1,), "ddp", parameters[0].dtype)
    traffic = 3.0 * sum(parameter.nbytes for parameter in parameters) + 2.0 * float(found.state[0])
    return card.milliseconds(float(found.work[0]), 0.0, traffic)


def _points(x: str, y: str) -> LinePoints:
    return lambda rows: sorted((row[x], row[y]) for row in rows if row[y])


def slopes(rows: BenchRows) -> list[tuple[str, str, float]]:
    """Return how the time of a step grows with the number of parameters, for each candidate and each varied dimension.

    Each item is (candidate, varied dimension such as gpt:layers, slope of log time over log number of parameters).
    """
    found = []
    varied = [row for row in view.measured_rows(rows) if ":" in row["set"]]
    for (name, dimension, _), own in view.groups(
        varied, lambda row: (row["candidate"], row["set"].partition("=")[0], row["interval"])
    ):
        if len({row["numbers"] for row in own}) > 1:
            value = slope([row["numbers"] for row in own], [row["amortised"] for row in own])
            found.append((name, dimension, value))
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of log y over log x."""
    return linear_regression([math.log(value) for value in x], [math.log(value) for value in y]).slope
