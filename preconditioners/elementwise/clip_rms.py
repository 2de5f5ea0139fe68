"""Update clipping (Shazeer & Stern 2018, arXiv:1804.04235, section 6)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.numerics import block_norm, per_block
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage


class ClipRMS(Stage):
    """d / max(1, RMS(d) / threshold), per block (Shazeer & Stern 2018, section 6: update clipping)."""

    kind: Literal["clip_rms"] = "clip_rms"
    threshold: float = Field(default=1.0, gt=0, description="the largest update RMS that passes unchanged")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        rms = block_norm(direction) / math.sqrt(max(1, direction[0].numel()))
        return direction / per_block((rms / self.threshold).clamp_min_(1.0), direction)
