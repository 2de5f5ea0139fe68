"""A cadence of your own: refreshes that become rarer, as statistics settle.

In an experiment:

    imports: [cadence.py]
    recipe: {base: soap, set: {update.eigenbasis.refresh: {kind: doubling, steps: 64}}}
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eigengraft import StepContext
from eigengraft.preconditioners import Cadence


class Doubling(Cadence):
    """Due at t = 1, 2, 4, 8, ... up to `steps`, then whenever t % steps == 0."""

    kind: Literal["doubling"] = "doubling"
    steps: int = Field(default=64, ge=1, description="longest interval between refreshes, in updates of the block")

    @property
    def interval(self) -> float:
        return float(self.steps)

    def due_again(self, context: StepContext) -> NDArray[np.bool_]:
        t = context.steps  # [N], a NumPy array on the host
        early = (t < self.steps) & ((t & (t - 1)) == 0)
        due: NDArray[np.bool_] = early | (t % self.steps == 0)
        return due


if __name__ == "__main__":
    from eigengraft.testing import check_cadence

    print(check_cadence(Doubling()))
