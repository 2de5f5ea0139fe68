"""Magnitudes: how large the update of each chain of stages is over the shapes of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor

from eigengraft.preconditioners import Stage, Stages

from ..common.bench import Bench
from ..common.declarations import Declaration, label, listed, require_distinct
from ..common.fields import MatrixShapes
from ..common.results import FigurePanel, ResultTable
from ..common.stage_runner import StageRunner
from ..common.timing import milliseconds
from .rows import GraftingRow
from .view import grafting_advice, grafting_panels, grafting_summary

MOMENTUM, ROOTS = {"kind": "momentum", "beta": 0.9}, {"kind": "every", "steps": 10}
SHAMPOO: Declaration = {"kind": "shampoo", "statistic": {"kind": "gram", "beta": 0.95}, "refresh": ROOTS}
_PREFERRED: tuple[tuple[Declaration, ...], ...] = (
    ({"kind": "identity"},),
    ({"kind": "sign"},),
    (MOMENTUM, {"kind": "rms", "beta": 0.95}),
    (MOMENTUM, {"kind": "adafactor"}),
    (MOMENTUM, {"kind": "spectral"}),
    (MOMENTUM, {"kind": "spectral"}, {"kind": "scale", "rule": "match_rms"}),
    (MOMENTUM, {"kind": "spectral"}, {"kind": "scale", "rule": "aspect"}),
    (MOMENTUM, {"kind": "spectral"}, {"kind": "scale", "rule": "spectral"}),
    (MOMENTUM, SHAMPOO),
    (MOMENTUM, {**SHAMPOO, "exponent": "1/2"}),
    ({"kind": "graft", "direction": SHAMPOO, "magnitude": {"kind": "rms", "beta": 0.95}},),
    (MOMENTUM, {"kind": "jorge"}),
    (MOMENTUM, {"kind": "psgd"}),
    (MOMENTUM, {"kind": "sirf"}),
)
SHAPES = ((16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (64, 16), (16, 256), (256, 16))


def usual_fields(kind: str) -> Declaration:
    """The declaration that a stage's bare name stands for in labels."""
    return {"kind": kind, **({"beta": 0.9} if kind == "momentum" else {})}


def chain_label(stages: tuple[Stage, ...]) -> str:
    """The stages' names joined by arrows."""
    return " > ".join(label(stage, usual_fields) for stage in stages)


def _default_chains() -> Any:
    known = Stage.members
    return tuple(chain for chain in _PREFERRED if all(stage["kind"] in known for stage in chain))


class GraftingBench(Bench):
    """Chains x shapes m x n on gradients S + Z_t, S a constant of rank 4 and Z_t standard normal, both of one size.

    The meaning of a learning rate depends on the shape unless the update's RMS (or its spectral norm, relative to
    sqrt(m / n)) is the same for all shapes. Time is per block of the stack.
    """

    kind: Literal["grafting"] = "grafting"
    chains: Annotated[tuple[Stages, ...], BeforeValidator(listed)] = Field(
        default_factory=_default_chains, strict=False, description="chains of stages, or single stages"
    )
    shapes: MatrixShapes = Field(default=SHAPES, strict=False, description="shapes m x n of the blocks")
    steps: int = Field(default=30, ge=1, description="updates before the one that is measured")
    scale: float = Field(default=1e-3, gt=0, description="RMS of the gradients")
    count: int = Field(default=2, ge=1, description="blocks in a stack")
    threshold: float = Field(default=1.25, ge=1, description="largest over smallest RMS that the advice calls equal")
    candidate_field: ClassVar[str] = "chains"
    quick_fields: ClassVar[dict[str, Any]] = {
        "shapes": [(8, 8), (16, 16), (32, 32), (8, 32)],
        "steps": 12,
        "seconds": 0.005,
    }

    @field_validator("chains")
    @classmethod
    def _distinct(cls, chains: tuple[tuple[Stage, ...], ...]) -> tuple[tuple[Stage, ...], ...]:
        require_distinct(chains, chain_label)
        return chains

    def cells(self) -> int:
        return len(self.chains) * len(self.shapes)

    def measure(self) -> Iterator[list[GraftingRow]]:
        device = self.target_device()
        for shape in self.shapes:
            gradients = self._gradients(shape).to(device)
            for stages in self.chains:
                yield [self._row(stages, shape, gradients)]

    def _gradients(self, shape: tuple[int, int]) -> Tensor:
        """`[steps + 1, count, m, n]`, float32, of RMS `scale`."""
        random = np.random.default_rng((self.seed, *shape))
        left, right = (torch.from_numpy(random.standard_normal((self.count, d, 4))) / 2**0.5 for d in shape)
        noise = torch.from_numpy(random.standard_normal((self.steps + 1, self.count, *shape)))
        return ((left @ right.mT + noise) * (self.scale / 2**0.5)).float()

    def _row(self, stages: tuple[Stage, ...], shape: tuple[int, int], gradients: Tensor) -> GraftingRow:
        runner = StageRunner(stages, shape, self.count, gradients)
        for gradient in gradients:
            update = runner.step(gradient).double()
        took = milliseconds(lambda: runner.step(gradients[-1]), self.threads, self.seconds)
        norms = torch.linalg.matrix_norm(update)
        return GraftingRow(
            candidate=chain_label(stages),
            declaration=[stage.declaration() for stage in stages],
            device=self.device,
            m=shape[0],
            n=shape[1],
            rms=float(norms.mean()) / (shape[0] * shape[1]) ** 0.5,
            norm=float(norms.mean()),
            spectral=float(torch.linalg.matrix_norm(update, ord=2).mean()),
            milliseconds=took / self.count,
        )

    def summary(self, rows: Sequence[GraftingRow]) -> ResultTable:
        return grafting_summary(rows)

    def panels(self, rows: Sequence[GraftingRow]) -> tuple[FigurePanel, FigurePanel]:
        return grafting_panels(rows)

    def advice(self, rows: Sequence[GraftingRow]) -> list[str]:
        return grafting_advice(rows, self.threshold)
