"""The statistic of Shampoo and SOAP: Gram matrices of unfolded gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..algebra.products import unfold
from .base import Statistic
from .terms import Contribution, Powers


class Gram(Statistic):
    """O_k = mat_k(G) mat_k(G)^T, all other axes contracted (Algorithm 2 of the paper; Shi et al. 2023, section 3).

    normalize: `dimension` divides by the product of the other axes' lengths, so that factors do not grow with width.
    """

    kind: Literal["gram"] = "gram"
    normalize: Literal["none", "dimension"] = Field(default="none", description="what a contribution is divided by")

    def state_meaning(self) -> Mapping[str, Any]:
        return {**super().state_meaning(), "normalize": self.normalize}

    @property
    def decay_of_squares(self) -> float | None:
        return self.beta if self.every_gradient else None

    def contribution(self, state: State, x: Tensor, axis: int, powers: Powers, context: StepContext) -> Contribution:
        y = unfold(x, axis)
        return Contribution(y, y, self._unit(y))

    def _unit(self, y: Tensor) -> float:
        return 1.0 if self.normalize == "none" else 1.0 / max(1, y.shape[-1])
