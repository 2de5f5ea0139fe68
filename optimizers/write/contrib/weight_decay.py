"""A weight decay that no shipped recipe uses: cautious weight decay."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from ..write import WeightDecay


class CautiousDecay(WeightDecay):
    """alpha = rate on entries with U W > 0, 0 elsewhere,  in  W <- W - lr alpha W - lr U.

    This is cautious weight decay (Chen et al. 2025).
    """

    kind: Literal["cautious"] = "cautious"
    cautious: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate
