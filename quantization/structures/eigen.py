"""A statistic as its eigenvalues and encoded eigenvectors (4-bit Shampoo, Wang et al. 2024, arXiv:2405.18144)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import apply_aligned, per_block, rectified, symmetrized, transposed
from eigengraft.slots import Encoded, Slot, Uniform

from .base import Structure, encode_under, replaced_where, square_shape_error, unit_size, without_prefix


class Eigen(Structure):
    """P = qr(A V),  l = diag(P^T A P);  stored: l exact, and Q(P^T);  decoded: V Diag(l) V^T

    This is Algorithm 1 of 4-bit Shampoo (Wang et al. 2024).

    A `[N, d, d]` is the matrix; Q quantizes with the inner format. V is the decoded basis of the last encoding,
    rectified by Bjorck steps (see `orthogonal`), and the identity at the start. Only the part of A that is diagonal in
    P is stored. Each encoding makes `steps` power steps from V, so the structure suits running means that change
    slowly. The trace of A is stored exactly. Negative entries of l, which are rounding errors, become 0. For a zero
    matrix the basis is not changed; for a matrix that is not finite no stored tensor is changed.
    """

    roles: ClassVar[tuple[str, ...]] = ("statistic",)
    kind: Literal["eigen"] = "eigen"
    rectify: int = Field(default=1, ge=0, le=16, description="Bjorck steps after decoding; 0 = none")
    steps: int = Field(default=1, ge=1, le=16, description="power steps each time the slot is stored")

    def shape_error(self, slot: Slot) -> str | None:
        return square_shape_error(self, slot, "positive semi-definite matrices")

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        ok = x.isfinite().flatten(1).all(-1)
        a, size = unit_size(torch.where(per_block(ok, x), x, 0.0))
        p = v = self._basis(x, before)
        for _ in range(self.steps):
            p = apply_aligned(torch.linalg.qr, torch.bmm(a, p))[0]
        p = torch.where(per_block(size > 0, p), p, v)
        values = (p * torch.bmm(a, p)).sum(-2).clamp_min(0.0) * size[:, None]
        encoded = {"values": values, **encode_under(self.inner.encode, "vectors", transposed(p), before, uniform)}
        return replaced_where(ok, encoded, before)

    def _basis(self, x: Tensor, before: Encoded | None) -> Tensor:
        """Return the basis V `[N, d, d]` of eigenvectors, decoded from the last encoding, or the identity if there is
        none.
        """
        if before is None:
            return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
        return self._vectors(before, Slot(tuple(x.shape[1:]), role="statistic"), x.dtype)

    def _vectors(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        rows = self.inner.decode(without_prefix("vectors", encoded), slot, dtype)
        return rectified(rows.mT, self.rectify)

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        v = self._vectors(encoded, slot, dtype)
        return symmetrized(torch.bmm(v * encoded["values"].to(dtype).unsqueeze(-2), v.mT))
