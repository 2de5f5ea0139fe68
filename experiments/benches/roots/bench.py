"""Inverse roots: error, residual, definiteness, iterations and time of each solver over spectra, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator
from pydantic_core.core_schema import ValidationInfo
from torch import Tensor

from eigengraft.component import checked
from eigengraft.preconditioners import RootSolver
from eigengraft.preconditioners.algebra.exponents import Rational

from ..common.bench import Bench, Panel, Row, Summary
from ..common.declarations import Declaration, defaults, distinct, label, listed
from ..common.timing import angle, inverse_power, milliseconds, relative_error, worst
from ..problems.spectra import Geometric, Spectrum, invertible
from .view import root_advice, root_panels, root_summary

DTYPES = {"float32": torch.float32, "float64": torch.float64}
PREFERRED: tuple[Declaration, ...] = ({"kind": "eigh"}, {"kind": "eigh", "precision": "float64"})
SPECTRA: tuple[Declaration, ...] = (
    *({"kind": "geometric", "condition": condition} for condition in (1e1, 1e2, 1e3, 1e4, 1e5, 1e6)),
    {"kind": "one_large"},
    {"kind": "one_small"},
    {"kind": "power_law"},
    {"kind": "clustered"},
    {"kind": "rank_deficient"},
    {"kind": "recorded"},
)


def ridgeless(kind: str) -> Declaration:
    """The solver called `kind` without a ridge of its own where it can do without: the bench adds one for all."""
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
    """A bare kind means the solver without a ridge of its own."""
    return tuple(ridgeless(item) if isinstance(item, str) else item for item in listed(value))


def _default_solvers() -> tuple[RootSolver, ...]:
    declared = [{**ridgeless(item["kind"]), **item} for item in defaults(RootSolver, PREFERRED)]
    return tuple(checked(RootSolver, item) for item in declared)  # type: ignore[type-abstract]


def default_spectra() -> tuple[Spectrum, ...]:
    return tuple(checked(Spectrum, dict(item)) for item in SPECTRA)  # type: ignore[type-abstract]


@dataclass(frozen=True)
class RootRow(Row):
    """One solver on one stack. Errors are the worst of the stack, over the matrices the solver did not reject.

    error: ||X - Y||_F / ||Y||_F with Y = (A + r I)^-e in float64. angle: between X and Y, degrees.
    residual: ||X^p A^q - I||_F / sqrt(d) for e = q/p, in float64; reported: the solver's own measure.
    ok, definite: the share of the stack not rejected, and the share whose root is positive definite.
    """

    spectrum: str
    condition: float
    size: int
    dtype: str
    exponent: str
    error: float
    angle: float
    residual: float
    reported: float
    ok: float
    definite: float
    iterations: int
    milliseconds: float


class Roots(Bench):
    """(A + r I)^-e,  r = ridge lambda_max:  solvers x exponents x spectra x sizes x dtypes.

    The ridge is part of the problem, so that all solvers have the same one: a solver named by its kind alone gets no
    ridge of its own (`eps: 0`), one that is declared in full is taken as it is. Time is per matrix of the stack.
    """

    kind: Literal["roots"] = "roots"
    solvers: Annotated[tuple[RootSolver, ...], BeforeValidator(_solvers)] = Field(
        default_factory=_default_solvers, strict=False, description="declarations, or kinds"
    )
    spectra: Annotated[tuple[Spectrum, ...], BeforeValidator(listed)] = Field(
        default_factory=default_spectra, strict=False, description="the matrices"
    )
    sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(listed)] = Field(
        default=(16, 64, 128), strict=False, description="d of the matrices d x d"
    )
    dtypes: Annotated[tuple[Literal["float32", "float64"], ...], BeforeValidator(listed)] = Field(
        default=("float32",), strict=False, description="of the matrices"
    )
    exponents: Annotated[tuple[Rational, ...], BeforeValidator(listed)] = Field(
        default=(Fraction(1, 4),), strict=False, description="e of the root A^-e"
    )
    ridge: float = Field(default=1e-6, ge=0, description="added to all eigenvalues, in units of the largest")
    count: int = Field(default=4, ge=1, description="matrices in a stack")
    threshold: float = Field(default=0.05, gt=0, description="largest error that the advice accepts")
    parts: ClassVar[str] = "solvers"
    small: ClassVar[dict[str, Any]] = {
        "sizes": [16, 32],
        "spectra": [*({"kind": "geometric", "condition": c} for c in (1e2, 1e4, 1e6)), "recorded"],
        "count": 4,
        "seconds": 0.005,
    }

    @field_validator("solvers")
    @classmethod
    def _distinct(cls, solvers: tuple[RootSolver, ...]) -> tuple[RootSolver, ...]:
        distinct(solvers, lambda part: label(part, ridgeless))
        return solvers

    @field_validator("exponents")
    @classmethod
    def _somebody_takes_each(cls, exponents: tuple[Fraction, ...], info: ValidationInfo) -> tuple[Fraction, ...]:
        for exponent in exponents:
            refusals = [solver.check(exponent) for solver in info.data.get("solvers", ())]
            if refusals and all(refusals):
                raise ValueError(str(refusals[0]))
        return exponents

    @field_validator("ridge")
    @classmethod
    def _inverses_exist(cls, ridge: float, info: ValidationInfo) -> float:
        return invertible(ridge, info.data.get("spectra", ()))

    def cells(self) -> int:
        return len(self.solvers) * len(self.exponents) * len(self.spectra) * len(self.sizes) * len(self.dtypes)

    def measure(self) -> Iterator[list[RootRow]]:
        device = self.target()
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
            part=label(solver, ridgeless),
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

    def summary(self, rows: Sequence[RootRow]) -> Summary:
        return root_summary(rows)

    def panels(self, rows: Sequence[RootRow]) -> tuple[Panel, Panel]:
        swept = {label(spectrum) for spectrum in self.spectra if isinstance(spectrum, Geometric)}
        return root_panels(rows, swept, self.threshold)

    def advice(self, rows: Sequence[RootRow]) -> list[str]:
        return root_advice(rows, self.threshold)
