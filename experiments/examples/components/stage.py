"""A stage of your own: random noise on the direction, in proportion to the direction's RMS.

In an experiment:

    imports: [stage.py]
    recipe: {update: [{kind: momentum}, {kind: dither, size: 0.01}]}
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft import Stage, State, StepContext
from eigengraft.noise import normal
from eigengraft.numerics import block_norm, per_block


class Dither(Stage):
    """d + size RMS(d) n,  d the direction, n standard normal numbers, seeded by the block and its step"""

    kind: Literal["dither"] = "dither"
    size: float = Field(default=0.01, ge=0, description="standard deviation of the noise, in units of RMS(d)")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        block = tuple(direction.shape[1:])
        noise = normal(context.seed, context.step, block, direction.dtype)  # [N, *block]
        rms = block_norm(direction) / direction[0].numel() ** 0.5  # [N]
        return direction + self.size * per_block(rms, direction) * noise


if __name__ == "__main__":
    from eigengraft.testing import check_stage

    print(check_stage(Dither()))
