"""A statistic stored as its encoded Cholesky factor, with error feedback (Li et al. 2024, arXiv:2412.10663)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import apply_aligned, identity_like, may_branch_on_values, per_block, symmetrized
from eigengraft.slots import Encoded, Slot, Uniform

from .base import (
    Structure,
    encode_under,
    folded_shape,
    lower_triangular,
    replaced_where,
    square_shape_error,
    strictly_lower,
    unit_size,
    without_prefix,
)


class Cholesky(Structure):
    """C = chol(A + eps |A| I);  stored: diag(C) exact, Q(C + E) below the diagonal;  decoded: D D^T

    A `[N, d, d]` is the matrix, and |A| its largest entry. Q quantizes with the inner format. D is the decoded factor:
    its diagonal is diag(C), and its entries below the diagonal are decoded from Q(C + E). E, the accumulated
    quantization error, is strictly lower triangular and quantized like C:  E <- b E + (1 - b) (C + E - D)  below the
    diagonal, with b = error_feedback.

    D D^T is positive semi-definite by construction. Each triangle is folded to a rectangle without gaps, so that C and
    E together have as many codes as one full matrix. If A is 0, C and E are 0. If the factorization fails, it is
    repeated with a larger ridge; if the second attempt fails too, the stored tensors are not changed.
    """

    roles: ClassVar[tuple[str, ...]] = ("statistic", "root")
    kind: Literal["cholesky"] = "cholesky"
    eps: float = Field(default=1e-6, gt=0, lt=1, description="ridge in units of the largest entry of A")
    error_feedback: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="decay b of the accumulated error E; 0: E is the error of the last encoding; none: errors are not "
        "fed back",
    )

    def shape_error(self, slot: Slot) -> str | None:
        return square_shape_error(self, slot, "positive semi-definite matrices", least=2)

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        c, ok = self._factor(x)
        below = strictly_lower(c)
        encoded = {"diagonal": c.diagonal(dim1=-2, dim2=-1).clone()}
        if self.error_feedback is None:
            encoded.update(encode_under(self.inner.encode, "lower", below, before, uniform))
            return replaced_where(ok, encoded, before)
        error = torch.zeros_like(below) if before is None else self._below("error", before, x.shape[-1], x.dtype)
        error = torch.where(per_block((encoded["diagonal"] > 0).any(-1), error), error, 0.0)
        wanted = below + error
        encoded.update(encode_under(self.inner.encode, "lower", wanted, before, uniform))
        made = wanted - self._below("lower", encoded, x.shape[-1], x.dtype)
        encoded.update(
            encode_under(self.inner.encode, "error", torch.lerp(made, error, self.error_feedback), before, uniform)
        )
        return replaced_where(ok, encoded, before)

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        below = self._below("lower", encoded, slot.shape[-1], dtype, slot)
        c = lower_triangular(encoded["diagonal"].to(dtype), below)
        return symmetrized(torch.bmm(c, c.mT))

    def _below(self, prefix: str, encoded: Encoded, d: int, dtype: torch.dtype, slot: Slot | None = None) -> Tensor:
        slot = replace(slot or Slot((d, d), role="statistic"), shape=folded_shape(d))
        return self.inner.decode(without_prefix(prefix, encoded), slot, dtype)

    def _factor(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (C, ok), with C the Cholesky factor of the matrix x with its ridge.

        C: `[N, d, d]`, 0 where the factorization failed.
        ok: bool `[N]`, False where the factorization failed.
        """
        finite = x.isfinite().flatten(1).all(-1)
        a, size = unit_size(torch.where(per_block(finite, x), x, 0.0))
        eye = identity_like(a)
        c, info = apply_aligned(torch.linalg.cholesky_ex, a + self.eps * eye)
        if not may_branch_on_values(info) or bool((info > 0).any()):
            ridge = max(100 * self.eps, 16 * x.shape[-1] * torch.finfo(x.dtype).eps)
            again, info_again = apply_aligned(torch.linalg.cholesky_ex, a + ridge * eye)
            c, info = torch.where(per_block(info > 0, c), again, c), torch.where(info > 0, info_again, info)
        ok = finite & (info == 0)
        return torch.where(per_block(ok, c), c * per_block(size.sqrt(), c), 0.0), ok
