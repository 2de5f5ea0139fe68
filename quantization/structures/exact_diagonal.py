"""A matrix with its diagonal stored exactly (Distributed Shampoo in JAX; Wang et al. 2024, arXiv:2405.18144)."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import symmetrized
from eigengraft.slots import Encoded, Slot, Uniform

from .base import Structure, encode_under, square_shape_error, without_prefix


class ExactDiagonal(Structure):
    """A = Diag(a) + D(Q(A - Diag(a)))  with a = diag(A) `[N, d]` exact;  Q encodes and D decodes with the inner format

    A is the matrix. If the inner format has a scale for each row, the decoded matrix of a symmetric A is not symmetric.
    `symmetrize` replaces the decoded matrix by the mean of this matrix and its transpose, which also halves the
    variance of rounding errors. An inner format that stores one triangle needs no symmetrization.
    """

    roles: ClassVar[tuple[str, ...]] = ("statistic", "root")
    kind: Literal["exact_diagonal"] = "exact_diagonal"
    symmetrize: bool = Field(
        default=True,
        description="true: the decoded matrix A is replaced by (A + A^T) / 2; false: it is not, as in Distributed "
        "Shampoo in JAX",
    )

    @model_validator(mode="after")
    def _symmetrize_matters(self) -> Self:
        if self.inner.symmetric and not self.symmetrize:
            kind = getattr(self.inner, "kind", "")
            raise ValueError(f"symmetrize: false has no effect with the symmetric inner format '{kind}'; remove it")
        return self

    @property
    def symmetric(self) -> bool:
        return self.symmetrize

    def shape_error(self, slot: Slot) -> str | None:
        return square_shape_error(self, slot, "square matrices")

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        diagonal = x.diagonal(dim1=-2, dim2=-1).clone()
        return {"diagonal": diagonal, **encode_under(self.inner.encode_hollow, "offdiagonal", x, before, uniform)}

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        a = self.inner.decode(without_prefix("offdiagonal", encoded), slot, dtype)
        if self.symmetrize and not self.inner.symmetric:
            a = symmetrized(a)
        a.diagonal(dim1=-2, dim2=-1).copy_(encoded["diagonal"])
        return a
