"""Inverse roots: error, residual, definiteness, iterations and time of each solver over spectra, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator
from pydantic_core.core_schema import ValidationInfo
from torch import Tensor

from eigengraft.component import checked
from eigengraft.preconditioners import RootSolver
from eigengraft.preconditioners.algebra.exponents import Rational

from ..common.bench import Bench
from ..common.declarations import Declaration, defaults, label, listed, require_distinct
from ..common.fields import DTYPES, MatrixDtypes, PositiveInts
from ..common.results import FigurePanel, ResultTable
from ..common.timing import angle, inverse_power, milliseconds, relative_error, worst
from ..problems.spectra import Geometric, Spectrum, default_spectra, require_invertible
from .rows import RootRow
from .view import root_advice, root_panels, root_summary

_PREFERRED: tuple[Declaration, ...] = ({"kind": "eigh"}, {"kind": "eigh", "precision": "float64"})


def ridgeless(kind: str) -> Declaration:
    """The solver called `kind`, its own ridge 0 where its fields allow that: the bench adds one ridge for all."""
    member = RootSolver.members.get(kind)
    own: Declaration = {name: 0.0 for name in ("eps", "floor") if member is not None and name in member.model_fields}
    for fields in (own, dict[str, Any]()):
        try:
            RootSolver.model_validate({"kind": kind, **fields})
            return {"kind": kind, **fields}
        except ValueError:
            continue
    return {"kind": kind}


def _solvers(value: Any) -> Any:
    """Read a bare kind as the solver without a ridge of its own."""
    return tuple(ridgeless(item) if isinstance(item, str) else item for item in listed(value))


def _default_solvers() -> tuple[RootSolver, ...]:
    declared = [{**ridgeless(item["kind"]), **item} for item in defaults(RootSolver, _PREFERRED)]
    return tuple(checked(RootSolver, item) for item in declared)  # type: ignore[type-abstract]


class RootBench(Bench):
    """(A + r I)^-e,  r = ridge lambda_max:  solvers x exponents x spectra x sizes x dtypes.

    The ridge belongs to the problem, so that all solvers have the same one: a solver named by its kind alone gets no
    ridge of its own (`eps: 0`); a solver declared in full is taken as it is. Time is per matrix of the stack.
    """

    kind: Literal["roots"] = "roots"
    solvers: Annotated[tuple[RootSolver, ...], BeforeValidator(_solvers)] = Field(
        default_factory=_default_solvers, strict=False, description="declarations, or kinds"
    )
    spectra: Annotated[tuple[Spectrum, ...], BeforeValidator(listed)] = Field(
        default_factory=default_spectra, strict=False, description="the matrices"
    )
    sizes: PositiveInts = Field(default=(16, 64, 128), strict=False, description="d of the matrices d x d")
    dtypes: MatrixDtypes = Field(default=("float32",), strict=False, description="dtypes of the matrices")
    exponents: Annotated[tuple[Rational, ...], BeforeValidator(listed)] = Field(
        default=(Fraction(1, 4),), strict=False, description="exponents e of the root A^-e"
    )
    ridge: float = Field(default=1e-6, ge=0, description="added to all eigenvalues, in units of the largest")
    count: int = Field(default=4, ge=1, description="matrices in a stack")
    threshold: float = Field(default=0.05, gt=0, description="largest error that the advice accepts")
    candidate_field: ClassVar[str] = "solvers"
    quick_fields: ClassVar[dict[str, Any]] = {
        "sizes": [16, 32],
        "spectra": [*({"kind": "geometric", "condition": c} for c in (1e2, 1e4, 1e6)), "recorded"],
        "count": 4,
        "seconds": 0.005,
    }

    @field_validator("solvers")
    @classmethod
    def _distinct(cls, solvers: tuple[RootSolver, ...]) -> tuple[RootSolver, ...]:
        require_distinct(solvers, lambda solver: label(solver, ridgeless))
        return solvers

    @field_validator("exponents")
    @classmethod
    def _some_solver_takes_each(cls, exponents: tuple[Fraction, ...], info: ValidationInfo) -> tuple[Fraction, ...]:
        for exponent in exponents:
            refusals = [solver.check(exponent) for solver in info.data.get("solvers", ())]
            if refusals and all(refusals):
                raise ValueError(str(refusals[0]))
        return exponents

    @field_validator("ridge")
    @classmethod
    def _inverses_exist(cls, ridge: float, info: ValidationInfo) -> float:
        return require_invertible(ridge, info.data.get("spectra", ()))

    def cells(self) -> int:
        return len(self.solvers) * len(self.exponents) * len(self.spectra) * len(self.sizes) * len(self.dtypes)

    def measure(self) -> Iterator[list[RootRow]]:
        device = self.target_device()
        for size, dtype, spectrum in ((s, t, m) for s in self.sizes for t in self.dtypes for m in self.spectra):
            a = spectrum.stack(self.count, size, self.seed)
            given = None if a is None else (a + self.ridge * torch.eye(size, dtype=a.dtype)).to(device, DTYPES[dtype])
            for exponent in self.exponents:
                for solver in self.solvers:
                    if given is None or solver.check(exponent):
                        yield []
                    else:
                        yield [self._row(solver, given, spectrum, exponent)]

    def _row(self, solver: RootSolver, a: Tensor, spectrum: Spectrum, exponent: Fraction) -> RootRow:
        found = solver.root(a, exponent)
        ok = found.ok & found.value.isfinite().all(-1).all(-1)
        x, exact = found.value[ok].double(), a[ok].double()
        reference = inverse_power(exact, float(exponent))
        eigenvalues = torch.linalg.eigvalsh(a.double())
        powers = torch.linalg.matrix_power(x, exponent.denominator) @ torch.linalg.matrix_power(
            exact, exponent.numerator
        )
        rest = powers - torch.eye(a.shape[-1], dtype=x.dtype, device=x.device)
        definite = torch.linalg.eigvalsh((x + x.mT) / 2)[:, :1].amin(-1) > 0
        return RootRow(
            candidate=label(solver, ridgeless),
            declaration=solver.declaration(),
            device=self.device,
            spectrum=label(spectrum),
            condition=worst(eigenvalues[:, -1] / eigenvalues[:, 0]),
            size=a.shape[-1],
            dtype=str(a.dtype).removeprefix("torch."),
            exponent=str(exponent),
            error=worst(relative_error(x, reference)),
            angle=worst(angle(x, reference)),
            residual=worst(torch.linalg.matrix_norm(rest)) / a.shape[-1] ** 0.5,
            reported=worst(found.residual[ok].double()),
            ok=float(ok.double().mean()),
            definite=float(definite.double().sum() / len(a)),
            iterations=int(found.iterations.max()),
            milliseconds=milliseconds(lambda: solver.root(a, exponent), self.threads, self.seconds) / len(a),
        )

    def summary(self, rows: Sequence[RootRow]) -> ResultTable:
        return root_summary(rows)

    def panels(self, rows: Sequence[RootRow]) -> tuple[FigurePanel, FigurePanel]:
        swept = {label(spectrum) for spectrum in self.spectra if isinstance(spectrum, Geometric)}
        return root_panels(rows, swept, self.threshold)

    def advice(self, rows: Sequence[RootRow]) -> list[str]:
        return root_advice(rows, self.threshold)
