"""Orthonormal columns, coded and rectified (4-bit Shampoo, Wang et al. 2024, arXiv:2405.18144, section 3.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import transposed
from eigengraft.orthonormal import rectified
from eigengraft.slots import Parts, Slot, Uniform

from .structure import Structure, inside, stored


class Orthogonal(Structure):
    """V = D(Q(V^T))^T, then `rectify` times  V <- 3/2 V - 1/2 V V^T V  (Bjorck)

    V `[N, d, r]`, r <= d. Its transpose is what is coded: a block of the inner format is a piece of one column of V.
    One step takes the symmetric half of the rounding error away and leaves the half that is a rotation.
    """

    kind: Literal["orthogonal"] = "orthogonal"
    rectify: int = Field(default=1, ge=0, le=16, description="Bjorck steps after decoding; 0 = none")

    def refuses(self, slot: Slot) -> str | None:
        return self.misfit(slot) or self.inner.refuses(_transposed(slot))

    def misfit(self, slot: Slot) -> str | None:
        if slot.role == "basis" and len(slot.shape) == 2 and slot.shape[0] >= slot.shape[1]:
            return None
        return f"orthonormal columns (role basis) are required, got a {slot.role} of shape {slot.shape}"

    def encode(self, x: Tensor, before: Parts | None = None, uniform: Uniform | None = None) -> Parts:
        return stored(self.inner.encode, "vectors", transposed(x), before, uniform)

    def decode(self, parts: Parts, slot: Slot, dtype: torch.dtype) -> Tensor:
        rows = self.inner.decode(inside("vectors", parts), _transposed(slot), dtype)
        return rectified(rows.mT, self.rectify)


def _transposed(slot: Slot) -> Slot:
    return replace(slot, shape=(slot.shape[1], slot.shape[0]))
