"""A task of your own in one file: regression on a noisy curve, and a callback.

eigengraft train regression.yaml                                        trains it
python -c "import regression; from eigengraft.testing import check_task; print(check_task(regression.Curve()))"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from eigengraft.experiments.tasks import Batch, Dataset, Fingerprint, Task
from eigengraft.experiments.tasks.base import generator
from eigengraft.experiments.training.callbacks import Callback, RunView
from eigengraft.experiments.training.outcome import Result


class Curve(Task):
    """y = sin(3 x_1) + x_2 x_3 + noise, squared errors. The noise alone gives a loss of noise^2."""

    kind: Literal["curve"] = "curve"
    width: int = Field(default=32, ge=1, description="units per hidden layer")
    noise: float = Field(default=0.1, ge=0, description="standard deviation of the noise in y")
    batch_size: int = Field(default=32, ge=2, description="points per step")

    def load(self) -> Dataset:
        return Points(self.noise, self.batch_size)

    def build(self) -> nn.Module:
        first, second, last = nn.Linear(3, self.width), nn.Linear(self.width, self.width), nn.Linear(self.width, 1)
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return {"mean_error": functional.l1_loss(outputs, targets)}


class Points(Dataset):
    """1200 points x [N, 3] with values y [N, 1]. The first 1000 are for training, the last 200 for validation."""

    def __init__(self, noise: float, batch_size: int) -> None:
        random = generator(2026)
        x = torch.from_numpy(random.uniform(-1, 1, (1200, 3))).float()
        errors = noise * torch.from_numpy(random.normal(size=(1200, 1))).float()
        y = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:] + errors
        self.train, self.validation, self.batch_size = Batch(x[:1000], y[:1000]), Batch(x[1000:], y[1000:]), batch_size
        content = x.numpy().tobytes() + y.numpy().tobytes()
        self.fingerprint = Fingerprint.of("a noisy curve", content)

    def batch(self, seed: int, step: int) -> Batch:
        chosen = torch.from_numpy(generator(seed, step).integers(0, 1000, self.batch_size))
        return Batch(self.train.inputs[chosen], self.train.targets[chosen])

    def evaluation(self) -> Iterator[Batch]:
        yield self.validation


class SaveWeights(Callback):
    """Write the weights that were evaluated last to weights.pt in the run's directory."""

    kind: Literal["save_weights"] = "save_weights"

    def finished(self, run: RunView, result: Result) -> None:
        torch.save(run.model.state_dict(), run.directory / "weights.pt")
