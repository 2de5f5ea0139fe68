"""Estimates of the diagonal of the Hessian against the Hessian itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, compose, gauss_newton_bartlett, hutchinson

from ..parity.test_more_methods import LR
from ..refusals import refused, warned
from ..trajectories import normal

NEWTON: dict[str, Any] = {
    "update": [{"kind": "diagonal_newton", "beta": 0.0, "gamma": 1.0, "bound": 1e9}],
    "routes": [],
}


def parts() -> list[nn.Parameter]:
    return [nn.Parameter(normal(3, 2, seed=1)), nn.Parameter(normal(4, seed=2))]


def told(optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    """What was provided, as `diagonal_newton` keeps it."""
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [next(x for key, x in optimizer.state[p].items() if key.endswith("/h")) for p in parameters]


def test_a_diagonal_hessian_is_found_exactly() -> None:
    """Loss sum c w^4 / 12, H = c w^2; a parameter that it does not depend on has 0. 1e-12, rounding."""
    parameters = parts()
    scale = normal(3, 2, seed=3)
    optimizer, unused = Optimizer([*parameters], NEWTON, lr=LR), parameters[1]
    before = parameters[0].detach().clone()
    assert hutchinson(optimizer, lambda: (scale * parameters[0] ** 4).sum() / 12, samples=2)
    found = told(optimizer, parameters)
    assert torch.allclose(found[0], scale * before**2, rtol=1e-12)
    assert torch.equal(found[1], torch.zeros_like(unused))


def test_the_mean_over_probes_is_the_diagonal() -> None:
    """Loss w^T A w / 2, H = A. The estimate of one probe has variance sum of squares off the diagonal; 4 sigma."""
    w = nn.Parameter(normal(6, seed=1))
    a = normal(6, 6, seed=2)
    a = a + a.mT
    optimizer, samples = Optimizer([w], NEWTON, lr=0.0), 400
    hutchinson(optimizer, lambda: w @ a @ w / 2, samples=samples)
    found = told(optimizer, [w])[0]
    off = (a.square().sum(1) - a.diagonal().square()).sqrt()
    assert bool(((found - a.diagonal()).abs() <= 4 * off / samples**0.5).all())
    assert float((found - a.diagonal()).abs().max()) > 0


@pytest.mark.slow
def test_labels_that_the_model_draws_give_the_gauss_newton_diagonal() -> None:
    """count G^2 of the mean negative log-likelihood, by formula; its mean over draws is diag(J^T (P - p p^T) J) / n."""
    w, x, count, draws = nn.Parameter(normal(3, 2, seed=1)), normal(5, 2, seed=2), 5, 600
    optimizer, mean = Optimizer([w], NEWTON, lr=0.0), torch.zeros(3, 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    p = (x @ w.detach().mT).softmax(1)
    for _ in range(draws):
        labels = torch.multinomial(p, 1, generator=generator)[:, 0]

        def loss(labels: Tensor = labels) -> Tensor:
            return nn.functional.cross_entropy(x @ w.mT, labels)

        gauss_newton_bartlett(optimizer, loss, count)
        g = (p - nn.functional.one_hot(labels, 3)).mT @ x / count
        found = told(optimizer, [w])[0].clone()
        assert torch.allclose(found, count * g.square(), rtol=1e-9)
        mean += found / draws
    exact = torch.einsum("nk,nj->kj", p * (1 - p), x.square()) / count
    assert torch.allclose(mean, exact, rtol=0.25)  # the spread of 600 draws is 6 % of the mean


@pytest.mark.parametrize("estimate", [hutchinson, lambda *given: gauss_newton_bartlett(*given, count=3)])
def test_nothing_is_estimated_that_nobody_asks_for(estimate: Callable[..., bool]) -> None:
    def loss() -> Tensor:
        raise AssertionError("no forward is required")

    assert not estimate(Optimizer(parts(), "adamw"), loss)


def test_sophia_trains_with_estimates_of_every_few_steps() -> None:
    """Frozen parameters are left out, and what a probe runs is not collected as inputs of layers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    net[0].bias.requires_grad_(False)
    optimizer, x = compose("sophia", net, lr=0.02), normal(32, 4, seed=1)

    def loss() -> Tensor:
        result: Tensor = (net(x)[:, 0] - x.prod(1)).square().mean()
        return result

    losses = []
    for step in range(60):
        optimizer.zero_grad()
        if step % 5 == 0:
            assert hutchinson(optimizer, loss)
            assert all(p.grad is None for p in net.parameters())
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]


FIRST = (
    "update.diagonal_newton",
    "hessian_diagonal",
    "optimizer.provide",
    "eigengraft.hutchinson",
    "eigengraft.gauss_newton_bartlett",
)


def gradients(parameters: list[nn.Parameter], value: float = 1.0) -> list[nn.Parameter]:
    for p in parameters:
        p.grad = torch.full_like(p, value)
    return parameters


def test_a_first_step_without_a_diagonal_is_refused() -> None:
    """Nothing changes; one for some of the parameters, which the step could not take, is no remedy."""
    parameters = gradients(parts())
    before, optimizer = (
        [p.detach().clone() for p in parameters],
        Optimizer(zip("ab", parameters, strict=True), "sophia", lr=LR),
    )
    with refused(ValueError, *FIRST, "a, b"):
        optimizer.step()
    assert all(torch.equal(p, x) and optimizer.state[p]["step"] == 0 for p, x in zip(parameters, before, strict=True))
    optimizer.provide("hessian_diagonal", {parameters[0]: torch.ones(3, 2)})
    with refused(ValueError, *FIRST, "b"):
        optimizer.step()
    optimizer.provide("hessian_diagonal", {parameters[1]: torch.ones(4)})
    optimizer.step()


def test_later_steps_and_parameters_need_no_diagonal() -> None:
    """Neither a parameter whose first gradient comes later, nor the first step after loading."""
    parameters = gradients(parts())
    optimizer, parameters[1].grad = Optimizer([*parameters], "sophia", lr=LR), None
    optimizer.provide("hessian_diagonal", {parameters[0]: torch.ones(3, 2)})
    optimizer.step()
    gradients(parameters)
    optimizer.step()
    copies = gradients([nn.Parameter(p.detach().clone()) for p in parameters])
    resumed = Optimizer([*copies], "sophia", lr=LR)
    resumed.load_state_dict(optimizer.state_dict())
    for one in (optimizer, resumed):
        one.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, copies, strict=True))


def test_a_diagonal_that_some_parameters_lack_is_left_out_with_a_warning() -> None:
    parameters = gradients(parts())
    optimizer = Optimizer([*parameters], "sophia", lr=LR)
    optimizer.provide("hessian_diagonal", {p: torch.ones_like(p) for p in parameters})
    optimizer.step()
    before = optimizer.state[parameters[0]]["0/update.diagonal_newton/h"].clone()
    optimizer.provide("hessian_diagonal", {parameters[0]: torch.full((3, 2), 5.0)})
    with warned(UserWarning, "hessian_diagonal", 1, 2):
        optimizer.step()
    assert before.any() and torch.equal(optimizer.state[parameters[0]]["0/update.diagonal_newton/h"], before)


def test_a_first_gradient_that_is_not_finite_costs_its_diagonal_and_no_error() -> None:
    parameters = gradients(parts(), torch.nan)
    optimizer = Optimizer([*parameters], "sophia", lr=LR)
    optimizer.provide("hessian_diagonal", {p: torch.ones_like(p) for p in parameters})
    optimizer.step()
    gradients(parameters)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [1, 1]


def test_faults_are_named() -> None:
    optimizer = Optimizer(parts(), NEWTON, lr=LR)
    with refused(ValueError, "hutchinson", 0):
        hutchinson(optimizer, lambda: torch.zeros(()), samples=0)
    with refused(ValueError, "gauss_newton_bartlett", 1, 0):
        gauss_newton_bartlett(optimizer, lambda: torch.zeros(()), count=0)
    for p in optimizer.param_groups[0]["params"]:
        p.requires_grad_(False)
    with refused(ValueError, "hutchinson"):
        hutchinson(optimizer, lambda: torch.zeros(()))
