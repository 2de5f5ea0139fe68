"""The Gram matrix of the gradient along an axis (Gupta, Koren & Singer 2018, arXiv:1802.09568)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.slots import State

from ..algebra.mode_product import unfold
from .base import Powers, Statistic


class Gram(Statistic):
    """O_k = mat_k(G) mat_k(G)^T, all other axes contracted (Algorithm 2 of the paper; Shi et al. 2023, section 3).

    normalize: `dimension` divides by the product of the other axes' lengths, so that factors do not grow with width.
    """

    kind: Literal["gram"] = "gram"
    normalize: Literal["none", "dimension"] = Field(default="none", description="what a contribution is divided by")

    def contribution(self, state: State, x: Tensor, axis: int, powers: Powers) -> tuple[Tensor, Tensor, Tensor | float]:
        y = unfold(x, axis)
        return y, y, 1.0 if self.normalize == "none" else 1.0 / max(1, y.shape[-1])
