"""A schedule of your own: a cosine that starts again several times in a run (Loshchilov & Hutter 2017).

In an experiment:

    imports: [schedule.py]
    recipe: adamw
    schedule: {kind: restarts, cycles: 3, warmup_steps: 10}
"""

import math
from typing import Literal

from pydantic import Field

from eigengraft.experiments.training.schedule import LearningRateSchedule


class Restarts(LearningRateSchedule):
    """decay(t) = (1 + cos(pi u)) / 2,  u the fraction of the present cycle"""

    kind: Literal["restarts"] = "restarts"
    cycles: int = Field(default=3, ge=1, description="cycles of a run, all of the same length")

    def decay(self, t: float) -> float:
        return (1 + math.cos(math.pi * (self.cycles * t % 1.0))) / 2


if __name__ == "__main__":
    from eigengraft.testing import check_schedule

    print(check_schedule(Restarts()))
