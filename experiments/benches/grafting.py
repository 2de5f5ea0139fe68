"""Magnitudes: size of the update of each chain of stages, compared over shapes of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from eigengraft.preconditioners import Stage, Stages

from . import view
from .bench import Bench, Column, Declaration, Listed, MatrixShapes, Problem, label
from .stage_runner import StageRunner
from .view import BenchRows, Panel, Recommendation, Row, Table

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
    """Return the usual declaration of a stage of this kind. Labels show only fields that differ from it."""
    return {"kind": kind, **({"beta": 0.9} if kind == "momentum" else {})}


def _default_chains() -> Any:
    known = Stage.members
    return tuple(chain for chain in _PREFERRED if all(stage["kind"] in known for stage in chain))


class GraftingBench(Bench):
    """The size of the updates of every chain on every shape [m, n].

    The gradients are S + Z_t, where S is constant and has rank 4, Z_t is normal, and both have the same norm. A
    learning rate means the same for all shapes only if the update's RMS, or its spectral norm divided by sqrt(m / n),
    is the same for all shapes. Time is per block of the stack.
    """

    kind: Literal["grafting"] = "grafting"
    chains: Listed[Stages] = Field(default_factory=_default_chains, description="chains of stages, or single stages")
    shapes: MatrixShapes = Field(SHAPES, description="shapes m x n of the blocks")
    steps: int = Field(30, ge=1, description="updates before the one that is measured")
    scale: float = Field(1e-3, gt=0, description="RMS of the gradients")
    count: int = Field(2, ge=1, description="blocks in a stack")
    threshold: float = Field(1.25, ge=1, description="largest over smallest RMS that the advice calls equal")
    candidate_field: ClassVar[str] = "chains"
    columns: ClassVar[Mapping[str, Column]] = {
        "rms": Column("RMS of the update's entries, the mean over the stack"),
        "norm": Column("Frobenius norm of the update, the mean over the stack"),
        "spectral": Column("spectral norm of the update, the mean over the stack"),
        "relative": Column("spectral norm over sqrt(m / n)"),
        "milliseconds": Column("time of one block and step", "ms"),
    }
    quick_fields: ClassVar[dict[str, Any]] = {
        "shapes": [(8, 8), (16, 16), (32, 32), (8, 32)], "steps": 12, "seconds": 0.005
    }  # fmt: skip

    def problems(self) -> Sequence[Problem]:
        return [Problem({"m": m, "n": n}, partial(self._gradients, (m, n))) for m, n in self.shapes]

    def _gradients(self, shape: tuple[int, int]) -> Tensor:
        """Return gradients `[steps + 1, count, m, n]` in float32 of RMS `scale`."""
        random = np.random.default_rng((self.seed, *shape))
        left, right = (torch.from_numpy(random.standard_normal((self.count, d, 4))) / 2**0.5 for d in shape)
        noise = torch.from_numpy(random.standard_normal((self.steps + 1, self.count, *shape)))
        return ((left @ right.mT + noise) * (self.scale / 2**0.5)).float()

    def label(self, candidate: tuple[Stage, ...]) -> str:
        return " > ".join(label(stage, usual_fields) for stage in candidate)

    def measure(self, candidate: tuple[Stage, ...], fields: Mapping[str, Any], given: Tensor) -> Iterator[Row]:
        given = given.to(self.target_device())
        m, n = given.shape[2:]
        runner = StageRunner(candidate, (m, n), self.count, given)
        for gradient in given:
            update = runner.step(gradient).double()
        time = self.milliseconds(lambda: runner.step(given[-1]))
        norm = float(torch.linalg.matrix_norm(update).mean())
        spectral = float(torch.linalg.matrix_norm(update, ord=2).mean())
        yield {
            "rms": norm / (m * n) ** 0.5,
            "norm": norm,
            "spectral": spectral,
            "relative": spectral / math.sqrt(m / n),
            "milliseconds": time / self.count,
        }

    def table(self) -> Table:
        return Table(
            "size of updates over shapes",
            {"chain": "candidate"},
            {
                "RMS": view.span("rms", view.finite("{:.3g}")),
                "ratio": view.cell(_ratio("rms"), view.finite("{:.2f}")),
                "spectral / sqrt(m/n)": view.span("relative", view.finite("{:.3g}")),
                "its ratio": view.cell(_ratio("relative"), view.finite("{:.2f}")),
                "norm": view.cell(_at_largest("norm"), view.finite("{:.3g}")),
                "at": lambda rows: "{m} x {n}".format(**_largest_block(rows)),
                "ms": view.cell(_at_largest("milliseconds"), view.milli),
            },
        )

    def panels(self) -> tuple[Panel, Panel]:
        aspects = view.per(lambda row: row["m"] / row["n"], lambda rows: rows[0]["m"] / rows[0]["n"], _mean("relative"))
        return (
            Panel("d of blocks d x d", "update RMS", {"{}": view.xy("n", "rms")}, lambda row: row["m"] == row["n"]),
            Panel("m / n", r"spectral norm of the update / $\sqrt{m/n}$", {"{}": lambda rows: sorted(aspects(rows))}),
        )

    def recommendations(self) -> Sequence[Recommendation]:
        if len(self.shapes) < 2:
            return []
        return [
            Recommendation(
                lambda row, what=what: f"equal {what} over these shapes, within {self.threshold:g}",  # type: ignore[misc]
                _ratio(name), "ratio {:.2f}".format, error=_ratio(name), error_name="ratio", threshold=self.threshold,
                all_good=True,
            )
            for what, name in (("RMS", "rms"), ("spectral norm relative to sqrt(m / n)", "relative"))
        ]  # fmt: skip

    def notes(self, rows: BenchRows) -> list[str]:
        return ["more than one shape is needed to compare"] if len(self.shapes) < 2 else []


def _ratio(name: str) -> Callable[[BenchRows], float]:
    """Return a function from rows to the largest value of a column divided by its least."""
    return lambda rows: view.largest(name)(rows) / low if (low := view.least(name)(rows)) > 0 else math.inf


def _mean(name: str) -> Callable[[BenchRows], float]:
    return lambda rows: fmean(row[name] for row in rows)


def _largest_block(rows: BenchRows) -> Row:
    return max(rows, key=lambda row: row["m"] * row["n"])


def _at_largest(name: str) -> Callable[[BenchRows], float]:
    return lambda rows: float(_largest_block(rows)[name])
