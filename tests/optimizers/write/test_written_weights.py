"""Weights written between steps count as they do in float32, wherever another copy of them is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer

from ...trajectories import normal

AVERAGINGS: dict[str, Any] = {
    "schedule_free": {"kind": "schedule_free"},
    "primal_averaging": {"kind": "primal_averaging"},
    "ema_nesterov": {"kind": "ema_nesterov", "start": 1},
    "ema of schedule_free": {"kind": "ema", "inner": {"kind": "schedule_free"}},
}
DTYPES = (torch.bfloat16, torch.float16)
ROWS = slice(1, 3)
"""Rows of a weight that are written."""


def load(weight: nn.Parameter, values: Tensor) -> None:
    holder = nn.Module()
    holder.weight = weight
    holder.load_state_dict({"weight": values})


def assign(weight: nn.Parameter, values: Tensor) -> None:
    weight.data = values


WRITES: dict[str, Callable[[nn.Parameter, Tensor], None]] = {
    "copy_": lambda weight, values: weight.data.copy_(values),
    "load_state_dict": load,
    "data": assign,
}


class Pair:
    """The same run in few bits and in float32: equal gradients, and start values that both dtypes have."""

    def __init__(self, averaging: Any, dtype: torch.dtype) -> None:
        start = normal(4, 3, seed=1).to(dtype)
        self.low, self.full = nn.Parameter(start.clone()), nn.Parameter(start.float())
        declared = {"update": ["momentum"], "routes": [], "averaging": averaging}
        self.optimizers = [Optimizer([("w", own)], declared, lr=0.1, weight_decay=0.1) for own in (self.low, self.full)]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        gradient = normal(4, 3, seed=10 + self.steps).to(self.low.dtype)
        for optimizer, own in zip(self.optimizers, (self.low, self.full), strict=True):
            own.grad = gradient.to(own.dtype)
            optimizer.step()

    @property
    def y(self) -> Tensor:
        """The training iterate that the low-precision run computes with."""
        return self.optimizers[0].state[self.low]["averaging/y"]

    def write(self, how: str, values: Tensor) -> None:
        for own in (self.low, self.full):
            written = own.detach().clone()
            written[ROWS] = values.to(own.dtype)
            WRITES[how](own, written)


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("averaging", AVERAGINGS.values(), ids=list(AVERAGINGS))
def test_a_written_weight_is_the_training_iterate(averaging: Any, dtype: torch.dtype, how: str) -> None:
    """Bit for bit: rows that were written continue from there, the other rows from the iterate with all its bits."""
    pair = Pair(averaging, dtype)
    for _ in range(3):
        pair.step()
    assert torch.equal(pair.y, pair.full)
    pair.write(how, torch.full((2, 3), 2.0**-7))
    for _ in range(2):
        pair.step()
        assert torch.equal(pair.y, pair.full)
        assert torch.equal(pair.low, pair.full.to(dtype))


@pytest.mark.parametrize("averaging", AVERAGINGS.values(), ids=list(AVERAGINGS))
def test_a_written_weight_counts_in_the_evaluated_iterate(averaging: Any) -> None:
    pair = Pair(averaging, torch.bfloat16)
    for _ in range(3):
        pair.step()
    pair.write("copy_", torch.full((2, 3), 2.0**-7))
    for optimizer in pair.optimizers:
        optimizer.eval()
    assert torch.equal(pair.low, pair.full.bfloat16())
    for optimizer in pair.optimizers:
        optimizer.train()
    pair.step()
    assert torch.equal(pair.y, pair.full)


def test_a_diverged_run_continues_from_weights_that_are_loaded() -> None:
    """An iterate with nan does not survive the weights that replace it."""
    pair = Pair({"kind": "ema_nesterov", "start": 100}, torch.bfloat16)
    pair.step()
    pair.y.fill_(float("nan"))
    pair.low.data.fill_(float("nan"))
    pair.write("data", torch.full((2, 3), 0.5))
    pair.step()
    assert pair.low[ROWS].isfinite().all()


@pytest.mark.parametrize("rule", ["compensated", "split", "stochastic"])
def test_remainders_of_overwritten_weights_are_dropped(rule: str) -> None:
    """A written weight stays as it is while its update is 0: what was kept of a larger one before is not added."""
    weight = nn.Parameter((1 + torch.rand(64, generator=torch.Generator().manual_seed(0))).bfloat16())
    declared = {"update": "identity", "routes": [], "constraints": [{"kind": "rounding", "rule": rule}]}
    optimizer = Optimizer([("w", weight)], declared, lr=2.0**-12)
    for gradient in (torch.rand(64).bfloat16(), torch.zeros(64).bfloat16()):
        weight.grad = gradient
        optimizer.step()
        with torch.no_grad():
            weight.clamp_(max=2.0**-10)
    assert torch.equal(weight, torch.full((64,), 2.0**-10).bfloat16())


def test_weights_that_nobody_writes_keep_their_remainders() -> None:
    """Each of 64 steps is a 64th of what bfloat16 resolves: they add up to a whole unit in the last place."""
    weight = nn.Parameter(torch.full((8,), 1.5).bfloat16())
    declared = {"update": "identity", "routes": [], "constraints": ["rounding"]}
    optimizer = Optimizer([("w", weight)], declared, lr=2.0**-13)
    for _ in range(64):
        weight.grad = torch.ones(8).bfloat16()
        optimizer.step()
    assert torch.equal(weight, torch.full((8,), 1.5 - 2.0**-7).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "averaging", [{"kind": "ema", "decay": 0.9}, {"kind": "lawa"}, {"kind": "schedule_free"}], ids=lambda m: m["kind"]
)
def test_averages_keep_their_values_until_the_state_is_cleared(averaging: Any, dtype: torch.dtype) -> None:
    """Only the training iterate takes what is written, so the evaluated iterate is not what was loaded."""
    pair = Pair(averaging, dtype)
    for _ in range(5):
        pair.step()
    low, optimizer, loaded = pair.low, pair.optimizers[0], torch.full((4, 3), 8.0, dtype=dtype)
    state = optimizer.state[low]
    others = [name for name in state if name.startswith("averaging/") and name != "averaging/y"]
    before = {name: state[name].clone() for name in others}
    load(low, loaded)
    optimizer.eval()
    assert not torch.equal(low.detach(), loaded)
    optimizer.train()
    assert torch.equal(low.detach(), loaded)
    assert before and all(torch.equal(optimizer.state[low][name], value) for name, value in before.items())
    optimizer.state.clear()
    optimizer.eval()
    assert torch.equal(low.detach(), loaded)
    optimizer.train()
    pair.step()
    optimizer.eval()
    assert float((low.detach() - loaded).abs().max()) < 1
