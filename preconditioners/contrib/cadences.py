"""A cadence that no shipped recipe names: refreshes at random steps."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from eigengraft.noise import uniform
from eigengraft.step_context import StepContext

from ..cadence import Cadence

DRAWS = 1 << 32
"""Number of the random stream from which `noise` draws refreshes if the field `seed` is 0. A larger seed is added to
this number. The number is far from the numbers of streams for other purposes, so that draws for different purposes are
independent.
"""


class Probability(Cadence):
    """Due at t = start, then at every later step with a fixed probability, as in implementations of PSGD.

    A block is due if u(s, t) < probability. u in [0, 1) is a hash of the block's seed s (from the context) and of the
    block's step t. Draws are therefore the same on every rank, after a restart, and if blocks are stacked in another
    way.

    With `shared: true` all blocks that are at the same step are due together, as in implementations of PSGD. With
    `shared: false` each block has its own draw, which is slower, because the due blocks form many short spans of a
    stack.
    """

    kind: Literal["probability"] = "probability"
    probability: float = Field(default=0.1, gt=0, le=1, description="probability of a refresh in an update of a block")
    start: int | None = Field(
        default=None, ge=1, description="update of the first refresh; default: as soon as the stage can"
    )
    shared: bool = Field(
        default=False, description="true: one draw in each step, for all blocks; false: one draw for each block"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the draws; another seed gives independent draws")

    @property
    def interval(self) -> float:
        return 1 / self.probability

    def first_due(self, earliest: int) -> int:
        return self.start if self.start is not None else earliest

    def due_again(self, context: StepContext) -> NDArray[np.bool_]:
        steps = context.steps
        seeds = np.zeros_like(steps) if self.shared or not len(context.seeds) else context.seeds
        stream = DRAWS + self.seed
        drawn = uniform(torch.from_numpy(seeds), torch.from_numpy(steps), (), torch.float64, stream).numpy()
        due: NDArray[np.bool_] = drawn < self.probability
        return due
