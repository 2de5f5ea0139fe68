"""Closures that are called again: one function in all calls, and what the first call leaves."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from eigengraft import Optimizer, compose, hutchinson

from ...trajectories import normal

AGAIN = [{"sam": {"rho": 0.1}}, {"line_search": {"trials": 4}}]
IDS = ["sam", "line_search"]


class Counted(nn.Module):
    """x, whose buffers a forward replaces and writes into."""

    calls: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("table", torch.ones(100))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = torch.stack([x.detach().mean(), x.detach().std()])
        return x


def net_of(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [spectral_norm(nn.Linear(5, 6)), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), Counted()]
    return nn.Sequential(*layers, nn.Linear(6, 2))


def closure_of(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, losses: list[float]) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        return loss

    return closure


@pytest.mark.parametrize("again", AGAIN, ids=IDS)
def test_buffers_advance_once_in_a_step(again: dict[str, Any]) -> None:
    """As after one forward at the parameters before each step. Exact."""
    net, x = net_of(), normal(16, 5, seed=1, dtype=torch.float32)
    optimizer, losses = compose({"base": "sgd", **again}, net, lr=1.0), list[float]()
    for _ in range(3):
        reference = copy.deepcopy(net)
        reference(x)
        kept = dict(net.named_buffers())["4.table"]
        optimizer.step(closure_of(net, optimizer, x, losses))
        assert dict(net.named_buffers())["4.table"] is kept
        for (name, ours), theirs in zip(net.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(ours, theirs), name
    assert int(net[4].calls) == 3 and len(losses) > 3


@pytest.mark.parametrize("again", AGAIN, ids=IDS)
def test_all_calls_are_of_one_function(again: dict[str, Any]) -> None:
    """With a step of length 0 every call has the loss of the first, dropout and spectral norm included. Exact."""
    net, x = net_of(dropout=0.5), normal(16, 5, seed=1, dtype=torch.float32)
    options = {"sam": {"rho": 1e-30}} if "sam" in again else {"line_search": {"trials": 3, "sufficient": 0.9}}
    optimizer, losses = compose({"base": "sgd", **options}, net, lr=1e-12, weight_decay=0.0), list[float]()
    for step in range(2):
        optimizer.step(closure_of(net, optimizer, x, losses))
        assert len(set(losses)) == step + 1 and len(losses) > step + 1


@pytest.mark.parametrize("again", AGAIN, ids=IDS)
def test_random_numbers_go_on_after_those_of_one_call(again: dict[str, Any]) -> None:
    nets = [net_of(dropout=0.5) for _ in range(2)]
    x, after = normal(16, 5, seed=1, dtype=torch.float32), list[Tensor]()
    for net, more in zip(nets, ({}, again), strict=True):
        optimizer = compose({"base": "sgd", **more}, net, lr=0.1)
        torch.manual_seed(3)
        optimizer.step(closure_of(net, optimizer, x, []))
        after.append(torch.rand(4))
    assert torch.equal(*after)


def test_a_call_that_fails_leaves_what_the_first_left() -> None:
    net, x = net_of(), normal(16, 5, seed=1, dtype=torch.float32)
    optimizer, losses = compose({"base": "sgd", "sam": {}}, net), list[float]()
    reference, weight = copy.deepcopy(net), net[5].weight.detach().clone()
    reference(x)
    closure = closure_of(net, optimizer, x, losses)

    def failing() -> Any:
        loss = closure()
        if len(losses) == 2:
            raise ArithmeticError
        return loss

    with pytest.raises(ArithmeticError):
        optimizer.step(failing)
    assert torch.equal(net[5].weight, weight)
    for ours, theirs in zip(net.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("again", AGAIN, ids=IDS)
def test_an_optimizer_that_does_not_know_the_model_says_so_once(
    again: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    net, x = net_of(), normal(16, 5, seed=1, dtype=torch.float32)
    alone = Optimizer(net.named_parameters(), {"base": "sgd", **again})
    known = compose({"base": "sgd", **again}, net)
    for optimizer in (known, alone, alone):
        optimizer.step(closure_of(net, optimizer, x, []))
    assert [type(w.message) for w in recwarn if "BatchNorm" in str(w.message)] == [UserWarning]


def test_an_estimate_of_curvature_leaves_buffers_alone() -> None:
    net, x = net_of(), normal(16, 5, seed=1, dtype=torch.float32)
    optimizer, before = compose("sophia", net), [buffer.clone() for buffer in net.buffers()]
    assert hutchinson(optimizer, lambda: net(x).square().mean())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(net.buffers(), before, strict=True))
