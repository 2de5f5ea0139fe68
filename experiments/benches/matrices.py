"""The matrices of benches, from spectra or from a run of the user's own, and distances between matrices."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from pydantic_core.core_schema import ValidationInfo
from torch import Tensor

from .bench import Bench, Listed, PositiveInts, label
from .gradients import saved_factors, trained_factors
from .spectra import Geometric, Spectrum, default_spectra, with_unit_norm
from .view import Panel, Recommendation, Row, groups, measured_rows, xy


def relative_error(x: Tensor, reference: Tensor) -> Tensor:
    """Return ||X - Y||_F / ||Y||_F of stacks `[N, m, n]`, in float64."""
    x = x.double()
    error: Tensor = torch.linalg.matrix_norm(x - reference) / torch.linalg.matrix_norm(reference)
    return error


def angle(x: Tensor, reference: Tensor) -> Tensor:
    """Return the angle in degrees between two matrices, taken as vectors x and y.

    It is computed as 2 asin(|x/|x| - y/|y|| / 2), which is exact for tiny angles too.
    """
    x = x.double()
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    reference = reference / torch.linalg.matrix_norm(reference, keepdim=True)
    found: Tensor = 2 * (torch.linalg.matrix_norm(x - reference) / 2).clamp_max(1).asin() * (180 / math.pi)
    return found


def inverse_power(a: Tensor, exponent: float) -> Tensor:
    """Return A^(-e) in float64 for positive definite A `[N, d, d]`."""
    values, q = torch.linalg.eigh(a.double())
    root: Tensor = (q * values.unsqueeze(1).pow(-exponent)) @ q.mT
    return root


def worst_of(values: Tensor) -> float:
    """Return the largest of `values`; NaN if `values` is empty or has a NaN."""
    return float(values.max()) if values.numel() else math.nan


OWN_BETA = 0.95
"""Decay per step of the factors of a recorded run, as in the shipped recipes."""


@dataclass(frozen=True)
class MatrixSource:
    """Matrices of one size: those of a spectrum, or the factor of a layer.

    name: label of the spectrum, or names of the parameter and its factor.
    size: order d.
    stack: function that returns the matrices `[N, d, d]` in float64, or None if the spectrum has no such matrices.
    spectrum: the spectrum; None for the user's own matrices.
    """

    name: str
    size: int
    stack: Callable[[], Tensor | None]
    spectrum: Spectrum | None = None


class OwnMatrices(Bench, ABC):
    """A bench that also accepts the gradients of a user's own run."""

    record: str | None = Field(
        None, description="run directory or experiment file; gradients of this run are used, a row a layer"
    )

    layer_field: ClassVar[str] = "layer"
    """Name of the field in which a row has the name of its layer."""

    @property
    def own(self) -> bool:
        """Return True if the matrices are the user's own."""
        return self.record is not None

    def recommended(self, where: Callable[[Row], str], **fields: Any) -> list[Recommendation]:
        """Return a list with one recommendation. For the user's own matrices, each layer is a problem of its own.

        where: function that returns the text that names the problem of a row.
        fields: other fields of `Recommendation`.
        """
        named = (lambda row: f"{row[self.layer_field]}: {where(row)}") if self.own else where
        return [Recommendation(named, **fields)]

    def notes(self, rows: Sequence[Row]) -> list[str]:
        """Return a line about the worst layer, on which the least error of all candidates is larger than on every other
        layer.

        Return [] if the matrices are not the user's own.
        """
        first = next(iter(self.recommendations()), None)
        if not self.own or first is None or first.error is None:
            return []
        layers: list[tuple[float, str]] = []
        kept = [row for row in measured_rows(rows) if first.keep(row)]
        for layer, own in groups(kept, lambda row: str(row[self.layer_field])):
            layers.append((min(first.error(some) for _, some in groups(own, lambda row: row["candidate"])), layer))
        value, name = max(layers, default=(0.0, ""))
        return [f"worst layer: {name}, {first.error_name} {value:.2g} by its most accurate candidate"] if name else []


class MatrixBench(OwnMatrices, ABC):
    """A bench of components that accept symmetric positive semi-definite matrices."""

    layer_field: ClassVar[str] = "spectrum"

    spectra: Listed[Spectrum] = Field(default_factory=default_spectra, description="the matrices")
    sizes: PositiveInts = Field((16, 64, 128), description="d of the matrices d x d")
    count: int = Field(4, ge=1, description="matrices in a stack")
    checkpoint: str | None = Field(
        None, description="run directory or saved optimizer state; its factors are used, a row a layer"
    )
    steps: int = Field(100, ge=1, description="training steps of the run `record`, which make its factors")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.checkpoint is not None and self.record is not None:
            raise ValueError("checkpoint cannot be combined with record; give one source of matrices")
        fields = type(self).model_fields
        for name in ("spectra", "sizes", "count") if self.own else ():
            if getattr(self, name) != fields[name].get_default(call_default_factory=True):
                raise ValueError(
                    f"{name} cannot be combined with checkpoint or record, whose matrices are fixed; remove it"
                )
        if self.record is None and self.steps != fields["steps"].default:
            raise ValueError("steps has no effect without record; give record or remove steps")
        return self

    @property
    def own(self) -> bool:
        return self.checkpoint is not None or self.record is not None

    def sources(self) -> list[MatrixSource]:
        """Return the sources: each spectrum in each size, or each factor of the user's own layers."""
        if not self.own:
            return [
                MatrixSource(label(spectrum), d, partial(spectrum.stack, self.count, d, self.seed), spectrum)
                for d in self.sizes
                for spectrum in self.spectra
            ]
        found: Mapping[str, Tensor] = (
            saved_factors(self.checkpoint)
            if self.checkpoint is not None
            else {k: v[0] for k, v in trained_factors(str(self.record), (self.steps,), OWN_BETA).items()}
        )
        return [MatrixSource(name, a.shape[-1], partial(with_unit_norm, a)) for name, a in found.items()]

    def sweep(self, error: str, y: str, same: tuple[str, ...], band: tuple[float, float]) -> Panel:
        """Return the panel of an error against the condition number, for the largest size.

        The panel shows the geometric spectra, or all of the user's own matrices.
        """
        swept = {label(spectrum) for spectrum in self.spectra if isinstance(spectrum, Geometric)}
        keep = bool if self.own else (lambda row: row["spectrum"] in swept)
        lines = {"{}": xy("condition", error)}
        return Panel("condition number", y, lines, keep, same, () if self.own else ("size",), band)


def ridge_for(ridge: float, info: ValidationInfo) -> float:
    """Return the ridge. Raise ValueError if it is 0 and matrices of a spectrum have no inverse."""
    own = info.data.get("checkpoint") is not None or info.data.get("record") is not None
    without = [label(spectrum) for spectrum in info.data.get("spectra", ()) if spectrum.singular and not own]
    if ridge == 0 and without:
        raise ValueError(f"0 leaves matrices of '{without[0]}' without an inverse; give a ridge above 0")
    return ridge
