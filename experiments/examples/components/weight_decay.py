"""A rule of weight decay of your own: decay that fades faster than the learning rate.

In an experiment:

    imports: [weight_decay.py]
    recipe: {base: adamw, weight_decay: {kind: fading, rate: 0.1, power: 1.0}}
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from eigengraft.optimizers.write.write import WeightDecay, nonzero_peak


class Fading(WeightDecay):
    """alpha = rate (lr / peak)^power.  A step decays by lr alpha, in proportion to lr^(power + 1)."""

    kind: Literal["fading"] = "fading"
    power: float = Field(default=1.0, ge=0, description="exponent of lr / peak")
    relative: ClassVar[bool] = True

    def alpha(self, rate: float, lr: float | Tensor, peak_lr: float) -> float | Tensor:
        return rate * (lr / nonzero_peak(lr, peak_lr)) ** self.power


if __name__ == "__main__":
    from eigengraft.testing import check_weight_decay

    print(check_weight_decay(Fading()))
