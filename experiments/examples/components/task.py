"""A task of your own: regression on a sine. `experiments/examples/regression.py` is a longer one.

In an experiment:

    imports: [task.py]
    task: {kind: sine, width: 32}
    recipe: soap
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from eigengraft.experiments.tasks import Batch, Dataset, Fingerprint, Task, generator


class Points(Dataset):
    """y = sin(3 x) at 500 points. The first 400 are for training, the last 100 for validation."""

    def __init__(self) -> None:
        self.x = torch.from_numpy(generator(0).uniform(-1, 1, (500, 1))).float()
        self.y = torch.sin(3 * self.x)
        self.fingerprint = Fingerprint.of("sin", self.x.numpy().tobytes())

    def batch(self, seed: int, step: int) -> Batch:
        chosen = torch.from_numpy(generator(seed, step).integers(0, 400, 32))
        return Batch(self.x[chosen], self.y[chosen])

    def evaluation(self) -> Iterator[Batch]:
        yield Batch(self.x[400:], self.y[400:])


class Sine(Task):
    """Regression on a sine, squared errors."""

    kind: Literal["sine"] = "sine"
    width: int = Field(default=32, ge=1, description="units of the hidden layer")

    def load(self) -> Dataset:
        return Points()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)


if __name__ == "__main__":
    from eigengraft.testing import check_task

    print(check_task(Sine()))
