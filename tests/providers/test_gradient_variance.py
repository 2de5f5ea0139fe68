"""The variance of gradients over the micro-batches of a step against its definition."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, compose, watch_gradient_variance

from ..parity.test_more_methods import LR
from ..refusals import refused
from ..trajectories import normal

METRIC: dict[str, Any] = {"update": [{"kind": "noise_metric", "beta": 0.0, "inner": "sign"}], "routes": []}
SHAPE = (4, 3)


def parts(count: int, seed: int = 0) -> list[Tensor]:
    return [normal(*SHAPE, seed=seed + k) / count for k in range(count)]


def backward(weight: Tensor, some: Sequence[Tensor]) -> None:
    """A backward for each gradient, as micro-batches make them."""
    for part in some:
        (weight * part).sum().backward()


def watched() -> tuple[nn.Parameter, Optimizer]:
    weight = nn.Parameter(normal(*SHAPE, seed=9))
    optimizer = Optimizer([("p0", weight)], METRIC, lr=LR)
    assert watch_gradient_variance(optimizer) is not None
    return weight, optimizer


def variance(some: Sequence[Tensor]) -> Tensor:
    """Return the variance of the gradients of the mean losses. Each part is one of them divided by their number."""
    return (len(some) * torch.stack(list(some))).var(0, correction=0)


def means_after_step(optimizer: Optimizer, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the variance over the columns and over the rows, as `noise_metric` keeps them."""
    optimizer.step()
    rows, columns = ("rows", "columns")
    found = {key.split("/")[-1]: x for key, x in optimizer.state[weight].items()}
    return found[rows], found[columns]


def require(found: tuple[Tensor, Tensor], expected: Tensor) -> None:
    """1e-12: rounding of squares and their difference."""
    torch.testing.assert_close(found[0], expected.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], expected.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [2, 5])
def test_the_signal_is_the_variance_over_the_backwards_of_a_step(count: int) -> None:
    weight, optimizer = watched()
    for step in range(3):
        some = parts(count, seed=10 * step)
        backward(weight, some)
        require(means_after_step(optimizer, weight), variance(some))
        optimizer.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_vectors_and_numbers_have_a_variance(shape: tuple[int, ...]) -> None:
    """`noise_metric` updates them as matrices of one column. 1e-12: as in `require`."""
    weight = nn.Parameter(normal(*shape, seed=9))
    optimizer = Optimizer([("p0", weight)], METRIC, lr=LR)
    assert watch_gradient_variance(optimizer) is not None
    some = [normal(*shape, seed=k) / 2 for k in range(2)]
    backward(weight, some)
    rows, _ = means_after_step(optimizer, weight)
    torch.testing.assert_close(rows.flatten(), variance(some).flatten(), rtol=1e-12, atol=1e-12)


def test_dropped_gradients_do_not_count() -> None:
    weight, optimizer = watched()
    backward(weight, parts(3, seed=50))
    optimizer.zero_grad()
    torch.autograd.grad((weight * parts(1, seed=60)[0]).sum(), weight)
    some = parts(2)
    backward(weight, some)
    require(means_after_step(optimizer, weight), variance(some))


def test_gradients_that_are_clipped_are_clipped_in_the_signal() -> None:
    weight, optimizer = watched()
    some = parts(3)
    backward(weight, some)
    norm = float(nn.utils.clip_grad_norm_([weight], 0.1))
    factor = 0.1 / (norm + 1e-6)  # torch's
    rows, columns = means_after_step(optimizer, weight)
    # the factor is measured in float32
    torch.testing.assert_close(rows, factor**2 * variance(some).mean(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(columns, factor**2 * variance(some).mean(0), rtol=1e-5, atol=0)


def test_a_step_with_one_backward_keeps_the_means() -> None:
    weight, optimizer = watched()
    some = parts(2)
    backward(weight, some)
    means_after_step(optimizer, weight)
    optimizer.zero_grad()
    backward(weight, parts(1, seed=70))
    require(means_after_step(optimizer, weight), variance(some))


def test_a_first_step_with_one_backward_is_refused() -> None:
    weight, optimizer = watched()
    backward(weight, parts(1))
    with refused(ValueError, "update.noise_metric", "gradient_variance", "watch_gradient_variance", "accumulate: 2"):
        optimizer.step()


def test_compose_watches_and_copies_of_models_do_not() -> None:
    net = nn.Linear(3, 4, bias=False).double()
    optimizer = compose(METRIC, net, lr=LR)
    twin = copy.deepcopy(net)
    some = parts(2)
    backward(net.weight, some)
    backward(twin.weight, parts(3, seed=80))
    require(means_after_step(optimizer, net.weight), variance(some))


def test_removed_hooks_provide_nothing() -> None:
    weight, optimizer = watched()
    del optimizer
    weight.grad = None
    backward(weight, parts(2))  # of an optimizer that is gone
    weight = nn.Parameter(normal(*SHAPE, seed=9))
    optimizer = Optimizer([("p0", weight)], METRIC, lr=LR)
    remove = watch_gradient_variance(optimizer)
    assert remove is not None
    remove()
    backward(weight, parts(2))
    with refused(ValueError, "update.noise_metric", "gradient_variance"):
        optimizer.step()


def test_nothing_is_watched_for_a_recipe_that_does_not_ask() -> None:
    assert watch_gradient_variance(Optimizer([nn.Parameter(torch.ones(2))], "adamw")) is None
    with refused(TypeError, "watch_gradient_variance", "Linear"):
        watch_gradient_variance(nn.Linear(2, 2))  # type: ignore[arg-type]
