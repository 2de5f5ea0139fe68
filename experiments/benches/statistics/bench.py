"""Statistics: how near the Kronecker product of their factors comes to the full second moment of the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor

from eigengraft.component import checked
from eigengraft.preconditioners import Eigh, Every, Shampoo, Statistic

from ..common.bench import Bench
from ..common.declarations import Declaration, defaults, label, listed, require_distinct
from ..common.fields import DTYPES, PositiveInts
from ..common.results import FigurePanel, ResultTable
from ..common.stage_runner import StageRunner
from ..common.timing import milliseconds
from ..problems import dense_kronecker as kronecker
from ..problems.gradients import GRADIENT_LAYERS, layer_gradients
from .rows import BEST, DIAGONAL, StatisticRow
from .view import statistic_advice, statistic_panels, statistic_summary

LONG = 0.995
"""Decay of statistics named by their kind alone: the mean of some hundred gradients."""
_PREFERRED: tuple[Declaration, ...] = ({"kind": "gram"}, *({"kind": "bregman", "q": q} for q in ("2", "1", "1/2", "0")))


def slow(kind: str) -> Declaration:
    """The statistic called `kind` with a long memory, where it has one."""
    member = Statistic.members.get(kind)
    return {"kind": kind, **({"beta": LONG} if member is not None and "beta" in member.model_fields else {})}


def _statistics(value: Any) -> Any:
    """Read a bare kind as the statistic with a long memory."""
    return tuple(slow(item) if isinstance(item, str) else item for item in listed(value))


def _default() -> tuple[Statistic, ...]:
    declared = [{**slow(item["kind"]), **item} for item in defaults(Statistic, _PREFERRED)]
    found = (checked(Statistic, item) for item in declared)  # type: ignore[type-abstract]
    return tuple(statistic for statistic in found if not statistic.of_inputs)


def statistic_label(statistic: Statistic) -> str:
    """The statistic's name, which always says the power of a Bregman divergence."""
    return label(statistic, slow, always=("q",))


class StatisticBench(Bench):
    """Statistics x layers x numbers of gradients, from a byte-level language model trained for a moment.

    The statistic runs as in a recipe, inside `shampoo` with exponent 1/2 and a refresh every `every` gradients from the
    `start`-th on, which is what coupled statistics read. Time is per gradient and layer, refreshes included.
    """

    kind: Literal["statistics"] = "statistics"
    statistics: Annotated[tuple[Statistic, ...], BeforeValidator(_statistics)] = Field(
        default_factory=_default, strict=False, description="declarations, or kinds"
    )
    width: int = Field(default=16, ge=4, le=48, multiple_of=2, description="width of the layers; C has width^4 entries")
    samples: PositiveInts = Field(
        default=(40, 160, 640), strict=False, description="numbers of gradients after which statistics are measured"
    )
    held_out: int = Field(default=640, ge=1, description="gradients that no statistic sees")
    dtype: Literal["float32", "float64"] = Field(default="float32", description="dtype of gradients and statistics")
    steps: int = Field(default=100, ge=0, description="training steps before the gradients are taken")
    every: int = Field(default=5, ge=1, description="gradients between refreshes")
    start: int = Field(
        default=20, ge=1, description="gradients before the first refresh: roots of fewer may be singular"
    )
    candidate_field: ClassVar[str] = "statistics"
    quick_fields: ClassVar[dict[str, Any]] = {"width": 8, "samples": [20, 80], "held_out": 80, "seconds": 0.005}

    @field_validator("statistics")
    @classmethod
    def _distinct(cls, statistics: tuple[Statistic, ...]) -> tuple[Statistic, ...]:
        for statistic in statistics:
            if statistic.of_inputs:
                raise ValueError(f"statistics of gradients are required, got {statistic_label(statistic)}, of inputs")
        require_distinct(statistics, statistic_label)
        return statistics

    def cells(self) -> int:
        return len(self.statistics) + 1

    def measure(self) -> Iterator[list[StatisticRow]]:
        device = self.target_device()
        gradients = layer_gradients(self.width, max(self.samples) + self.held_out, self.seed, self.steps)
        seen, unseen = gradients[: max(self.samples)], gradients[max(self.samples) :]
        moments = [kronecker.second_moment(seen[:, layer]) for layer in range(len(GRADIENT_LAYERS))]
        yield self._baselines(moments)
        for statistic in self.statistics:
            yield self._rows(statistic, seen.to(device, DTYPES[self.dtype]), unseen, moments)

    def _rows(
        self, statistic: Statistic, seen: Tensor, unseen: Tensor, moments: Sequence[Tensor]
    ) -> list[StatisticRow]:
        solver, cadence = (
            Eigh(eps=1e-6, relative=True, deficiency="add"),
            Every(steps=self.every, start=self.start, stagger="none"),
        )
        stage = Shampoo(statistic=statistic, exponent=Fraction(1, 2), solver=solver, every=cadence)
        runner, rows = StageRunner((stage,), tuple(seen.shape[2:]), len(GRADIENT_LAYERS), seen), []
        for k, gradient in enumerate(seen, start=1):
            runner.step(gradient)
            if k in self.samples:
                factors = self._factors(runner, stage, statistic, torch.stack(list(moments)))
                took = milliseconds(lambda g=gradient: self._one_interval(runner, g), self.threads, self.seconds)  # type: ignore[misc]
                took /= self.every * len(GRADIENT_LAYERS)
                rows += [
                    self._row(statistic, layer, k, [*f, unseen[:, layer], moments[layer]], took)
                    for layer, f in enumerate(zip(*factors, strict=True))
                ]
        return rows

    def _one_interval(self, runner: StageRunner, gradient: Tensor) -> None:
        """Run the steps of one interval between refreshes and restore the state."""
        saved, steps = {name: tensor.clone() for name, tensor in runner.state.tensors.items()}, runner.steps
        for _ in range(self.every):
            runner.step(gradient)
        for name, tensor in runner.state.tensors.items():
            tensor.copy_(saved[name])
        runner.steps = steps

    def _factors(
        self, runner: StageRunner, stage: Shampoo, statistic: Statistic, moments: Tensor
    ) -> tuple[Tensor, Tensor]:
        """L and R of all layers `[layers, d, d]`; the identity for an axis without a factor."""
        state = runner.state.scope(stage.label)
        context = runner.context(self.target_device())
        found = []
        for axis in range(2):
            if axis in stage.factor_axes(state.block):
                estimate = statistic.estimate(state, axis, context).double().cpu()
                found.append(estimate if estimate.ndim == 3 else torch.diag_embed(estimate))
            else:
                found.append(torch.eye(self.width, dtype=torch.float64).expand(len(GRADIENT_LAYERS), -1, -1))
        if not getattr(statistic, "coupled", False):
            left, right, total = (x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (*found, moments))
            found[1] = found[1] * (total / (left * right))[:, None, None]
        return found[0], found[1]

    def _row(
        self, statistic: Statistic, layer: int, samples: int, matrices: Sequence[Tensor], took: float
    ) -> StatisticRow:
        left, right, unseen, moment = matrices
        return StatisticRow(
            candidate=statistic_label(statistic),
            declaration=statistic.declaration(),
            device=self.device,
            layer=GRADIENT_LAYERS[layer],
            samples=samples,
            cosine=kronecker.cosine_product(moment, left, right),
            cosine_root=kronecker.cosine_product(moment, kronecker.power(left, 0.5), kronecker.power(right, 0.5)),
            gain_error=kronecker.gain_error(unseen, left, right),
            gain_spread=kronecker.gain_spread(unseen, left, right),
            milliseconds=took,
        )

    def _baselines(self, moments: Sequence[Tensor]) -> list[StatisticRow]:
        rows = []
        for layer, c in zip(GRADIENT_LAYERS, moments, strict=True):
            best = kronecker.best_cosine(c, self.width, self.width)
            diagonal = kronecker.cosine(c, c.diagonal().diag())
            rows += [
                StatisticRow(candidate, None, self.device, layer, max(self.samples), value, None, None, None, None)
                for candidate, value in ((BEST, best), (DIAGONAL, diagonal))
            ]
        return rows

    def summary(self, rows: Sequence[StatisticRow]) -> ResultTable:
        return statistic_summary(rows)

    def panels(self, rows: Sequence[StatisticRow]) -> tuple[FigurePanel, FigurePanel]:
        return statistic_panels(rows)

    def advice(self, rows: Sequence[StatisticRow]) -> list[str]:
        return statistic_advice(rows)
