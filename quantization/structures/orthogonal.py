"""Orthonormal columns, encoded and rectified (4-bit Shampoo, Wang et al. 2024, arXiv:2405.18144, section 3.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, per_block, rectified, safe_factor, transposed
from eigengraft.slots import Encoded, Slot, Uniform

from .base import Structure, encode_under, role_error, without_prefix


class Orthogonal(Structure):
    """V = D(Q(V^T))^T,  then `rectify` times  V <- 3/2 V - 1/2 V V^T V  (Bjorck)

    V is `[N, d, r]`, r <= d. Q encodes and D decodes with the inner format. The transpose is encoded, so that a block
    of the inner format is a piece of one column of V. One Bjorck step removes the symmetric half of the quantization
    error, but not the other half, which is a rotation. The steps do not converge if a singular value exceeds sqrt 3; a
    V that would be decoded with such singular values is scaled down before it is stored.
    """

    roles: ClassVar[tuple[str, ...]] = ("basis",)
    kind: Literal["orthogonal"] = "orthogonal"
    rectify: int = Field(default=1, ge=0, le=16, description="Bjorck steps after decoding; 0 = none")

    def unsupported(self, slot: Slot) -> str | None:
        return self.shape_error(slot) or self.inner.unsupported(_transposed(slot))

    def shape_error(self, slot: Slot) -> str | None:
        problem = role_error(self, slot, "matrices with orthonormal columns")
        if problem is None and not (len(slot.shape) == 2 and slot.shape[0] >= slot.shape[1]):
            problem = (
                "a matrix with orthonormal columns is required, which has at least as many rows as columns, got shape "
                f"{slot.shape}"
            )
        return problem

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        rows = transposed(x)
        encoded = encode_under(self.inner.encode, "vectors", rows, before, uniform)
        if self.rectify == 0:
            return encoded
        factor = safe_factor(self._decoded(encoded, Slot(tuple(x.shape[1:]), role="basis"), x.dtype))
        if may_branch_on_values(factor) and bool((factor == 1).all()):
            return encoded
        return encode_under(self.inner.encode, "vectors", rows * per_block(factor, rows), before, uniform)

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        return rectified(self._decoded(encoded, slot, dtype), self.rectify, safe=True)

    def _decoded(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(without_prefix("vectors", encoded), _transposed(slot), dtype).mT


def _transposed(slot: Slot) -> Slot:
    return replace(slot, shape=(slot.shape[1], slot.shape[0]))
