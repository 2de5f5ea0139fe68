"""A bench that chooses how to compute and store the roots of each layer of a model.

For each layer it finds the root solver, the interval between refreshes and the quantizer that cost least, among those
with an error of at most a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from eigengraft.preconditioners import RootSolver
from eigengraft.preconditioners.algebra.exponents import Rational
from eigengraft.quantization import Quantizer

from ..reports.records import group_by
from . import view
from .bench import Column, PositiveInts, Problem
from .bench import label as label_of
from .matrices import OWN_BETA, DampedBench, matrix_power, trained_factors, with_unit_norm
from .quantizers import INT4, StoredStack, parse_quantizers, quantizer_label, role_of
from .roots import RootSolvers, default_solvers, ridgeless
from .view import BenchRows, Panel, Recommendation, Row, Table

_STORAGES: Any = (
    {"kind": "float32"},
    {"kind": "bf16"},
    {"kind": "symmetric", "inner": {"kind": "int16"}},
    {"kind": "exact_diagonal", "inner": {"kind": "int8"}},
    {"kind": "exact_diagonal", "inner": INT4},
)


class BudgetBench(DampedBench):
    """error = sqrt(1 - prod_i cos_i^2) <= bound,  cos_i = tr(X_i A_i Y_i) / sqrt(tr(X_i A_i X_i) tr(Y_i A_i Y_i))

    A_i: the present factor of axis i of a layer.
    Y_i: the exact root (A_i + r I)^-e, with e the field `exponent` and r = `ridge` times the largest eigenvalue of A_i.
    X_i: the root that the optimizer would use. A solver computes it in float32, and a storage encodes and decodes it.
        The solver reads the factor of `interval - 1` steps ago, because a root is in use until it is that old.
    cos_i: the cosine of X_i G and Y_i G over gradients G with E[G G^T] = A_i.

    The bench measures every solver, interval and storage for each layer of a model. It recommends the cheapest choice
    whose error is at most `bound`. The error is the sine of the angle between two directions of the layer: that with
    the roots X_i, and that with the exact roots Y_i. It ignores scalar factors of a direction, because grafting removes
    them. The factors are those of a run (`record`). A `checkpoint` or a spectrum has no earlier factors, so that only
    interval 1 can be measured.

    The cost is the stored bytes, or the time of a step: the time to solve and encode, divided by the interval, plus the
    time to decode.
    """

    kind: Literal["budget"] = "budget"
    solvers: RootSolvers = Field(
        default_factory=default_solvers, description="root solvers to measure, each a kind or a declaration"
    )
    intervals: PositiveInts = Field((1, 10, 50), description="steps between two roots")
    storages: Annotated[tuple[Quantizer, ...], BeforeValidator(parse_quantizers)] = Field(
        _STORAGES, description="quantizers in which roots are stored, each a kind or a declaration"
    )
    exponent: Rational = Field(Fraction(1, 4), description="exponent e of the root A^-e")
    bound: float = Field(
        0.2, gt=0, description="largest accepted error of a layer's direction, as the sine of an angle"
    )
    cost: Literal["milliseconds", "bytes"] = Field(
        "milliseconds", description="cost by which choices are compared: milliseconds of a step, or stored bytes"
    )
    candidate_field: ClassVar[str] = "solvers"
    layer_field: ClassVar[str] = "layer"
    columns: ClassVar[Mapping[str, Column]] = {
        "interval": Column("steps between two roots", "steps"),
        "storage": Column("storage of the roots"),
        "error": Column("sine of the angle between the direction of the layer and that of exact, present roots"),
        "milliseconds": Column("time of a step: solve and encode over the interval, and decode", "ms"),
        "bytes": Column("stored bytes of the roots of the layer", "bytes"),
    }
    quick_fields: ClassVar[dict[str, Any]] = {
        "sizes": [32],
        "spectra": [{"kind": "geometric", "condition": 1e4}, "power_law"],
        "count": 2,
        "seconds": 0.005,
    }

    def problems(self) -> Sequence[Problem]:
        times: dict[Any, tuple[float, float]] = {}
        return [
            Problem({"layer": name, "sizes": [a[0].shape[-1] for a in own]}, partial(LayerFactors, own, times))
            for name, own in self._layers().items()
        ]

    def _layers(self) -> dict[str, list[list[Tensor]]]:
        """Return the factors of each layer, by name of the layer: running means of G G^T and G^T G of its gradients G.

        Each factor is a list of its values at different steps. If the field `record` names a run, the first value is
        that of the run's last step. One more value follows for each interval: the value `interval - 1` steps earlier.
        The root that is in use at the last step can be that old if roots are computed every `interval` steps.

        If `record` is None, matrices from another source are the factors, and each list has one value.
        """
        found: dict[str, list[list[Tensor]]] = {}
        if self.record is not None:
            last = max(self.steps, *self.intervals)
            at = (last, *(last - interval + 1 for interval in self.intervals))
            for name, path in trained_factors(self.record, at, OWN_BETA).items():
                found.setdefault(name.partition(" ")[0], []).append([with_unit_norm(a) for a in path])
        else:
            for source in self.sources():
                own = source.name.partition(" ")[0] if self.own else f"{source.name}, {source.size}"
                if (a := source.stack()) is not None:
                    found.setdefault(own, []).append([a])
        return found

    def label(self, candidate: RootSolver) -> str:
        return label_of(candidate, ridgeless)

    def measure(self, candidate: RootSolver, given: LayerFactors) -> Iterator[Row]:
        if reason := candidate.check(self.exponent):
            yield {"problem": reason}
            return
        for place, interval in enumerate(self.intervals, start=1):
            if interval > 1 and len(given.histories[0]) == 1:
                problem = "earlier factors are unknown; record a run"
                yield {"interval": interval, "storage": "", "problem": problem}
                continue
            roots = [self._root(candidate, past[place if len(past) > 1 else 0]) for past in given.histories]
            if any(root is None for root, _ in roots):
                yield {"interval": interval, "storage": "", "problem": "the solver rejected a factor"}
                continue
            for storage in self.storages:
                yield {"interval": interval, **self._stored(candidate, storage, interval, roots, given)}

    def _root(self, solver: RootSolver, a: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return (X, B): the damped factor B = A + r I in float32, and its root X.

        X is None if the solver rejects B, or if the root is not finite.

        a: the factor A `[N, d, d]`.
        """
        damped = self.damped(a).to(self.target_device(), torch.float32)
        found = solver.root(damped, self.exponent)
        usable = bool(found.ok.all()) and bool(found.value.isfinite().all())
        return found.value if usable else None, damped

    def _stored(
        self,
        solver: RootSolver,
        storage: Quantizer,
        interval: int,
        roots: Sequence[tuple[Tensor | None, Tensor]],
        given: LayerFactors,
    ) -> Row:
        """Return the error, the time and the bytes of one layer whose roots are stored by `storage`, as columns of the
        results. If `storage` cannot store a root, return the reason as the column `problem`.

        interval: steps between two roots, by which the time to solve and encode is divided.
        roots: for each factor of the layer, its root and the damped factor.
        given: the factors of the layer, and the times that were measured so far.
        """
        name, kept, spent, held = quantizer_label(storage), 1.0, 0.0, 0
        for (root, damped), past in zip(roots, given.histories, strict=True):
            assert root is not None
            if role_of(storage, root.shape[-1], ("root",)) is None:
                return {"storage": name, "problem": f"{name} stores no root of size {root.shape[-1]}"}
            stored = StoredStack(storage, root, "root", self.seed).encoded(1)
            kept *= 1 - self.squared_sine(stored.decode(), past[0])
            key = solver, storage, root.shape
            if key not in given.times:
                solve = partial(solver.root, damped, self.exponent)
                given.times[key] = (
                    self.milliseconds(solve) + self.milliseconds(stored.encode),
                    self.milliseconds(stored.decode),
                )
            rare, always = given.times[key]
            spent += rare / interval + always
            held += stored.code_bytes()
        return {"storage": name, "error": math.sqrt(1 - kept), "milliseconds": spent, "bytes": held}

    def squared_sine(self, x: Tensor, a: Tensor) -> float:
        """Return 1 - cos_i^2 for one axis i of a layer. cos_i is the cosine of X_i G and Y_i G (see `BudgetBench`).

        The exact root Y_i is computed from A_i. The result is the largest value over the N matrices of the stacks.

        x: roots X_i that the optimizer would use, after decoding, `[N, d, d]`.
        a: factors A_i at the present step, `[N, d, d]`.
        """
        y = matrix_power(self.damped(a), -float(self.exponent))

        def unit(z: Tensor) -> Tensor:
            return z / _squares(z, a).sqrt()[:, None, None]

        apart = _squares(unit(x.double().cpu()) - unit(y), a)  # 2 - 2 cos, accurate also for tiny angles
        return float((apart - apart.square() / 4).max())

    def table(self) -> Table:
        def chosen(rows: BenchRows) -> BenchRows:
            return [best] if (best := self.choice(rows)) else []

        return Table(
            f"the choice of least {self.cost} with an error of at most {self.bound:g}",
            {"layer": "layer"},
            {
                "solver": view.cell("candidate", of=chosen),
                "interval": view.cell("interval", of=chosen),
                "storage": view.cell("storage", of=chosen),
                "error": view.cell("error", "first", view.scientific, chosen),
                "ms a step": view.cell("milliseconds", "first", view.milli, chosen),
                "bytes": view.cell("bytes", "first", "{:,}".format, chosen),
                "least error": view.cell("error", "min", view.scientific),
            },
        )

    def choice(self, rows: BenchRows) -> Row | None:
        """Return the cheapest row of a layer's results with an error of at most `bound`. Return None if all errors are
        larger.
        """
        good = [row for row in rows if row["error"] <= self.bound]
        return min(good, key=lambda row: (row[self.cost], row["error"]), default=None)

    def panels(self) -> tuple[Panel, Panel]:
        error, band = "error of the direction", self.bound
        return (
            Panel("ms of a step of one layer", error, {"{}": _front("milliseconds")}, band=band),
            Panel("bytes of the roots of one layer", error, {"{}": _front("bytes")}, band=band),
        )

    def recommendations(self) -> Sequence[Recommendation]:
        return []

    def notes(self, rows: BenchRows) -> list[str]:
        """Return a line for each choice (solver, interval and storage) with its layers, a line about the total cost,
        and a line about the worst layer.
        """
        layers = group_by(view.measured_rows(rows), lambda row: row["layer"])
        chosen = {layer: self.choice(own) for layer, own in layers.items()}
        kinds: dict[str, list[str]] = {}
        for layer, best in chosen.items():
            text = f"no choice is at most {self.bound:g}"
            if best is not None:
                text = f"{best['candidate']}, every {best['interval']}, {best['storage']}"
            kinds.setdefault(text, []).append(layer)
        lines = [f"{text}: {', '.join(own)}" for text, own in kinds.items()]
        exact = {layer: min(own, key=lambda row: row["error"]) for layer, own in layers.items()}
        found = {layer: best for layer, best in chosen.items() if best is not None}
        if found:
            times, sizes = (
                [sum(row[key] for row in some) for some in (found.values(), (exact[layer] for layer in found))]
                for key in ("milliseconds", "bytes")
            )
            lines.append(
                f"{len(found)} of {len(chosen)} layers: {view.milli(times[0])} ms a step and {sizes[0]:,} bytes; "
                f"the most accurate choices take {view.milli(times[1])} ms and {sizes[1]:,} bytes"
            )
        if exact:
            worst = max(exact, key=lambda layer: float(exact[layer]["error"]))
            lines.append(f"worst layer: {worst}, error {exact[worst]['error']:.2g} by its most accurate choice")
        return lines


@dataclass(frozen=True)
class LayerFactors:
    """The factors of one layer, and the times that were measured so far.

    histories: for each axis a list of factors `[N, d, d]` in float64. The first is the factor at the present step. For
        a run, one factor follows for each item of `intervals`: that of `interval - 1` steps before.
    times: (solver, storage, shape) -> milliseconds to solve and encode once, and to decode once. All layers share this
        mapping, so that nothing is timed twice.
    """

    histories: Sequence[Sequence[Tensor]]
    times: dict[Any, tuple[float, float]] = field(repr=False)


def _squares(z: Tensor, a: Tensor) -> Tensor:
    """Return tr(Z A Z^T) `[N]` for stacks of matrices `[N, d, d]`."""
    return torch.einsum("nij,njk,nik->n", z, a, z)


def _front(cost: str) -> view.LinePoints:
    """Return a function that computes the Pareto front of (cost, error) from the rows of a candidate.

    A candidate is a solver, and each of its rows has one layer, interval and storage. The front is computed from the
    rows of the worst layer. Each layer has a smallest error over its rows, and the worst layer has the largest of these
    smallest errors.

    cost: column of the rows that has the cost, "milliseconds" or "bytes".
    """

    def points(rows: BenchRows) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        least = view.reduction("error", "min")
        worst = max(group_by(rows, lambda row: row["layer"]).values(), key=least)
        for row in sorted(worst, key=lambda row: (row[cost], row["error"])):
            if not found or row["error"] < found[-1][1]:
                found.append((row[cost], row["error"]))
        return found

    return points
