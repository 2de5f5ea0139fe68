"""Sharpness-aware steps: the second call of a closure, against the formulas and around whole recipes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, RecipeError, load_recipe

from ...recipes import BROAD, few_quick, without_routes
from ...refusals import refused
from ...trajectories import normal

LR, RHO = 0.1, 0.3
SCALES = (torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64))


def slopes(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sum s w^4 / 4 over both parameters."""
    return SCALES[0] * first**3, SCALES[1] * second**3


def closure_of(optimizer: Optimizer, weights: list[nn.Parameter], calls: list[float]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = sum((s * w**4).sum() / 4 for s, w in zip(SCALES, weights, strict=True))  # type: ignore[assignment]
        loss.backward()  # type: ignore[no-untyped-call]
        calls.append(loss.item())
        return loss

    return closure


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_gradient_is_taken_where_the_loss_is_higher(adaptive: bool) -> None:
    weights = [nn.Parameter(normal(4, 3, seed=1)), nn.Parameter(normal(5, seed=2))]
    sam = {"rho": RHO, "adaptive": adaptive}
    optimizer = Optimizer(weights, {"update": "identity", "routes": [], "sam": sam}, lr=LR)
    expected, calls = [w.detach().clone() for w in weights], list[float]()
    for _ in range(4):
        found = slopes(*expected)
        units = [w.abs() if adaptive else torch.ones_like(w) for w in expected]
        norm = torch.cat([(u * g).flatten() for u, g in zip(units, found, strict=True)]).norm()
        there = [w + RHO * u**2 * g / norm for w, u, g in zip(expected, units, found, strict=True)]
        expected = [w - LR * g for w, g in zip(expected, slopes(*there), strict=True)]
        loss = optimizer.step(closure_of(optimizer, weights, calls))
        assert loss.item() == calls[-2] < calls[-1]
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-13, atol=1e-13)  # a hundred roundings


@pytest.mark.parametrize("name", few_quick(BROAD))
def test_any_recipe_takes_the_gradients_of_the_neighborhood(name: str) -> None:
    """Bit for bit what the recipe does with the gradients of the second call; parameters come back in between."""
    raw = load_recipe(name).model_dump(mode="json")
    ours, theirs = ([nn.Parameter(normal(6, 3, seed=1)), nn.Parameter(normal(5, seed=2))] for _ in range(2))
    declared = {**without_routes(raw), "averaging": None}
    around, plain = Optimizer(ours, {**declared, "sam": {"rho": RHO}}, lr=LR), Optimizer(theirs, declared, lr=LR)
    for _ in range(3):
        around.step(closure_of(around, ours, []))
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.grad is not None
            other.grad = mine.grad.clone()
        plain.step()
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_a_gradient_that_is_not_finite_or_zero_perturbs_nothing() -> None:
    weight = nn.Parameter(normal(4, 3, seed=1))
    optimizer = Optimizer([weight], {"update": "identity", "routes": [], "sam": {}}, lr=LR)
    seen: list[Tensor] = []
    for value in (torch.nan, 0.0):

        def closure(value: float = value) -> float:
            seen.append(weight.detach().clone())
            weight.grad = torch.full_like(weight, value)
            return 1.0

        optimizer.step(closure)
    assert all(torch.equal(one, normal(4, 3, seed=1)) for one in (*seen, weight)) and len(seen) == 4


def test_a_step_without_closure_and_wrong_declarations_are_refused() -> None:
    def make(sam: Any) -> Optimizer:
        return Optimizer([nn.Parameter(torch.ones(3))], {"update": "identity", "routes": [], "sam": sam})

    with refused(RuntimeError, "Optimizer.step", "sam"):
        make({}).step()
    with refused(RecipeError, "sam.rho", 0):
        make({"rho": 0.0})

    def fails() -> Tensor:
        raise ZeroDivisionError

    optimizer = make({})
    weight = optimizer.param_groups[0]["params"][0]
    answers = iter([lambda: setattr(weight, "grad", torch.ones(3)), fails])
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: next(answers)())
    assert torch.equal(weight, torch.ones(3))
