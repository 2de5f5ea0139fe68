"""Magnitudes: how large the update of each chain of stages is over the shapes of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from eigengraft.preconditioners import Stage, Stages

from ..common.bench import Bench, Panel, Row, Summary
from ..common.declarations import Declaration, distinct, label, listed
from ..common.stage_runner import Alone
from ..common.timing import milliseconds
from .view import grafting_advice, grafting_panels, grafting_summary

MOMENTUM, ROOTS = {"kind": "momentum", "beta": 0.9}, {"kind": "every", "steps": 10}
SHAMPOO: Declaration = {"kind": "shampoo", "statistic": {"kind": "gram", "beta": 0.95}, "refresh": ROOTS}
PREFERRED: tuple[tuple[Declaration, ...], ...] = (
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


def plain(kind: str) -> Declaration:
    """What a name takes for granted about a stage."""
    return {"kind": kind, **({"beta": 0.9} if kind == "momentum" else {})}


def chain_label(stages: tuple[Stage, ...]) -> str:
    """The stages' names joined by arrows."""
    return " > ".join(label(stage, plain) for stage in stages)


def _default_rules() -> Any:
    known = Stage.members
    return tuple(chain for chain in PREFERRED if all(stage["kind"] in known for stage in chain))


def _shapes(value: Any) -> Any:
    """`[m, n]` and `mxn` are shapes, a single number a square."""
    flat = isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(item, int) for item in value)
    return tuple(_shape(item) for item in ([value] if flat else listed(value)))


def _shape(item: Any) -> Any:
    if isinstance(item, int) and not isinstance(item, bool):
        return (item, item)
    if isinstance(item, str):
        parts = item.split("x")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise PydanticCustomError("shape", "a shape such as 16x64 or [16, 64] is required")
        return tuple(map(int, parts))
    return tuple(item) if isinstance(item, list) else item


@dataclass(frozen=True)
class GraftingRow(Row):
    """One chain on one shape at its last step, the mean over the stack: RMS, Frobenius and spectral norm of updates."""

    m: int
    n: int
    rms: float
    norm: float
    spectral: float
    milliseconds: float


class Graftings(Bench):
    """Chains x shapes m x n on gradients S + Z_t, S a constant of rank 4 and Z_t standard normal, both of one size.

    What a learning rate means depends on the shape unless the update's RMS (or its spectral norm, relative to
    sqrt(m / n)) is the same for all shapes. Time is per block of the stack.
    """

    kind: Literal["graftings"] = "graftings"
    rules: Annotated[tuple[Stages, ...], BeforeValidator(listed)] = Field(
        default_factory=_default_rules, strict=False, description="chains of stages, or single stages"
    )
    shapes: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], ...], BeforeValidator(_shapes)
    ] = Field(default=SHAPES, strict=False, description="of the blocks")
    steps: int = Field(default=30, ge=1, description="updates before the one that is measured")
    scale: float = Field(default=1e-3, gt=0, description="RMS of the gradients")
    count: int = Field(default=2, ge=1, description="blocks in a stack")
    threshold: float = Field(default=1.25, ge=1, description="largest over smallest RMS that the advice calls equal")
    parts: ClassVar[str] = "rules"
    small: ClassVar[dict[str, Any]] = {"shapes": [(8, 8), (16, 16), (32, 32), (8, 32)], "steps": 12, "seconds": 0.005}

    @field_validator("rules")
    @classmethod
    def _distinct(cls, rules: tuple[tuple[Stage, ...], ...]) -> tuple[tuple[Stage, ...], ...]:
        distinct(rules, chain_label)
        return rules

    def cells(self) -> int:
        return len(self.rules) * len(self.shapes)

    def measure(self) -> Iterator[list[GraftingRow]]:
        device = self.target()
        for shape in self.shapes:
            gradients = self._gradients(shape).to(device)
            for stages in self.rules:
                yield [self._row(stages, shape, gradients)]

    def _gradients(self, shape: tuple[int, int]) -> Tensor:
        """`[steps + 1, count, m, n]`, float32, of RMS `scale`."""
        random = np.random.default_rng((self.seed, *shape))
        left, right = (torch.from_numpy(random.standard_normal((self.count, d, 4))) / 2**0.5 for d in shape)
        noise = torch.from_numpy(random.standard_normal((self.steps + 1, self.count, *shape)))
        return ((left @ right.mT + noise) * (self.scale / 2**0.5)).float()

    def _row(self, stages: tuple[Stage, ...], shape: tuple[int, int], gradients: Tensor) -> GraftingRow:
        alone = Alone(stages, shape, self.count, gradients)
        for gradient in gradients:
            update = alone.step(gradient).double()
        took = milliseconds(lambda: alone.step(gradients[-1]), self.threads, self.seconds)
        norms = torch.linalg.matrix_norm(update)
        return GraftingRow(
            part=chain_label(stages),
            declaration=[stage.declaration() for stage in stages],
            device=self.device,
            m=shape[0],
            n=shape[1],
            rms=float(norms.mean()) / (shape[0] * shape[1]) ** 0.5,
            norm=float(norms.mean()),
            spectral=float(torch.linalg.matrix_norm(update, ord=2).mean()),
            milliseconds=took / self.count,
        )

    def summary(self, rows: Sequence[GraftingRow]) -> Summary:
        return grafting_summary(rows)

    def panels(self, rows: Sequence[GraftingRow]) -> tuple[Panel, Panel]:
        return grafting_panels(rows)

    def advice(self, rows: Sequence[GraftingRow]) -> list[str]:
        return grafting_advice(rows, self.threshold)
