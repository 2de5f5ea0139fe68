"""An averaging of your own: the mean of all iterates (Polyak and Ruppert). Training does not change.

In an experiment:

    imports: [averaging.py]
    recipe: {base: adamw, averaging: {kind: polyak, start: 2}}
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft import Slot
from eigengraft.optimizers.write import Averaging, IterateBatch, ParameterUpdate, blend


class Polyak(Averaging):
    """mean <- mean + (W - mean) / (t - start + 1)  from step t = start on, mean <- W before.  The mean is evaluated."""

    kind: Literal["polyak"] = "polyak"
    start: int = Field(default=1, ge=1, description="number of the first update after which W enters the mean")

    def slots(self, shape: tuple[int, ...], low_precision: bool) -> Mapping[str, Slot]:
        return {"mean": Slot(shape, role="iterate")}

    def step(self, batch: IterateBatch, write: ParameterUpdate) -> None:
        write(batch.parameters)  # weight decay, update and constraints
        ages = [max(1, t - self.start + 1) for t in batch.steps.tolist()]  # each parameter has its own step
        blend(batch.slots["mean"], batch.parameters, [1 / age for age in ages], batch.mask)

    def evaluated(self, batch: IterateBatch) -> Sequence[Tensor]:
        return batch.slots["mean"]


if __name__ == "__main__":
    from eigengraft.testing import check_averaging

    print(check_averaging(Polyak()))
