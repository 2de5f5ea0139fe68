"""Inverse roots by eigendecomposition: exact up to rounding, the solver of choice on a CPU."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import finite_blocks, identity_like, tiny, to_power

from ...algebra.symmetric import symmetric_product
from ..base import Root, RootSolver, eigh
from ..by_device import ByDevice, chosen


class Eigh(RootSolver, ByDevice):
    """Q f(lambda)^(-e) Q^T with A = Q diag(lambda) Q^T `[N, d, d]`; f treats rank deficiency.

    add: max(lambda, 0) + r.
    floor: max(lambda, r).
    clip_shift: lambda + r, shifted up so that the least is r (Shi et al. 2023, section 3.2.1; the ridge is added once).
    perturb_before: the same with the ridge inside the decomposition: lambda of A + r I, all shifted up where the least
    is below r so that it is r (the default of Distributed Shampoo); equal to clip_shift up to rounding, which here
    never meets a singular matrix.
    pseudo_inverse: eigenvalues up to max(r, atol, rtol * lambda_max) are dropped, 0 in the root.

    r = eps, or eps * lambda_max if `relative`; in units of A. Takes every e > 0, exact up to rounding: an error of
    about d u lambda_max in each eigenvalue, u the rounding unit, so that r below that is noise. Fails where A or the
    root is not finite; a decomposition that does not converge in float32 is tried again in float64.

    With `by_device` the solver is exchanged on an accelerator alone, for decompositions on the host, or for
    `coupled_newton` with the same ridge if that is relative, added to all eigenvalues, and above rounding.
    """

    kind: Literal["eigh"] = "eigh"
    eps: float = Field(default=1e-12, ge=0, description="ridge r, in units of the matrix, or of its largest eigenvalue")
    relative: bool = Field(default=False, description="whether eps is relative to the largest eigenvalue")
    deficiency: Literal["add", "clip_shift", "floor", "perturb_before", "pseudo_inverse"] = Field(
        default="clip_shift", description="what happens to eigenvalues at and below zero"
    )
    rtol: float | None = Field(
        default=0.0,
        ge=0,
        description="pseudo_inverse: cutoff relative to the largest eigenvalue; null: d * machine epsilon",
    )
    atol: float = Field(default=0.0, ge=0, description="pseudo_inverse: cutoff in units of the matrix")
    precision: Literal["input", "float64"] = Field(default="input", description="dtype of the decomposition")

    on_host: bool = Field(
        default=False, description="copy matrices of an accelerator to the host and decompose them there"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.deficiency == "perturb_before" and self.relative:
            raise ValueError(
                "eigh: perturb_before adds its ridge before eigenvalues are known: `relative: false` required"
            )
        if self.deficiency != "pseudo_inverse" and (self.rtol != 0 or self.atol != 0):
            raise ValueError(
                f"eigh: rtol and atol belong to deficiency pseudo_inverse, got deficiency {self.deficiency}"
            )
        return self

    @classmethod
    def equal_to(cls, other: RootSolver, dtype: torch.dtype) -> Self | None:
        return other.replace(on_host=True, by_device=False) if isinstance(other, cls) and not other.on_host else None

    def runs_on(self, device: str) -> str:
        return "cpu" if self.on_host else device

    def root(self, a: Tensor, exponent: Fraction) -> Root:
        solver = chosen(self, a)
        if solver is not self and solver.check(exponent) is None:
            return solver.root(a, exponent)
        a, dtype = a.double() if self.precision == "float64" else a, a.dtype
        values, q, ok = eigh(
            a + self.eps * identity_like(a) if self.deficiency == "perturb_before" else a, self.on_host
        )
        values = self._treat(values)
        power = to_power(values, -float(exponent))
        if self.deficiency == "pseudo_inverse":
            power = torch.where(values > 0, power, 0.0)
        root = symmetric_product(q * power.unsqueeze(1), q).to(dtype)
        ok = ok & finite_blocks(root)
        nothing = torch.zeros_like(ok)
        return Root(root, ok, nothing.int(), nothing.to(dtype), ok & (power > 0).all(-1))

    def regularized(self, values: Tensor) -> Tensor:
        return self._treat(values + self.eps if self.deficiency == "perturb_before" else values)

    def _treat(self, values: Tensor) -> Tensor:
        if values.shape[1] == 0:
            return values
        floor = tiny(values.dtype)
        least, peak = values.amin(1, keepdim=True), values.amax(1, keepdim=True).clamp_min(floor)  # [N, 1]
        ridge = self.eps * peak if self.relative else torch.full_like(peak, self.eps)
        if self.deficiency == "pseudo_inverse":
            cutoff = ridge.clamp_min(max(floor, self.atol))
            rtol = values.shape[1] * torch.finfo(values.dtype).eps if self.rtol is None else self.rtol
            return torch.where(values > torch.maximum(cutoff, rtol * peak), values, 0.0)
        if self.deficiency == "floor":
            return torch.maximum(values, ridge).clamp_min(floor)
        if self.deficiency == "add":
            return (values.clamp_min(0) + ridge).clamp_min(floor)
        if self.deficiency == "perturb_before":
            return torch.where(least < ridge, values - least + ridge, values).clamp_min(floor)
        return (values - least.clamp_max(0) + ridge).clamp_min(floor)
