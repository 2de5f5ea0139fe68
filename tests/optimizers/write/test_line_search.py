"""Steps as long as losses allow: Armijo's condition, what is tried, and what is kept for the next step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, RecipeError, compose, load_recipe

from ...refusals import refused
from ...trajectories import normal

LR = 8.0
SEARCH: dict[str, Any] = {"sufficient": 0.3, "shrink": 0.5, "grow": 2.0, "trials": 6}
CURVED = torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64)
Start = tuple[Optimizer, nn.Parameter, list[Tensor]]


def quadratic(w: Tensor) -> Tensor:
    return (CURVED * w.square()).sum() / 2


def begun(search: dict[str, Any] = SEARCH, lr: float = LR, **recipe: Any) -> Start:
    w = nn.Parameter(normal(4, 3, seed=1))
    optimizer = Optimizer([w], {"update": "identity", "routes": [], "line_search": search, **recipe}, lr=lr)
    return optimizer, w, []


def closure_of(start: Start, loss: Callable[[Tensor], Tensor] = quadratic) -> Callable[[], Tensor]:
    optimizer, w, seen = start

    def closure() -> Tensor:
        seen.append(w.detach().clone())
        optimizer.zero_grad()
        value = loss(w)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    return closure


def test_the_first_step_that_is_short_enough_is_taken() -> None:
    """s = 1, 1/2, 1/4, ... of W - s lr (G + decay W), then from twice the last s; as written out. 1e-12, roundings."""
    optimizer, w, seen = start = begun(weight_decay={"kind": "decoupled", "rate": 0.01})
    here, last = w.detach().clone(), 1.0
    for _ in range(8):
        g = CURVED * here
        step = LR * (g + 0.01 * here)
        tried, scale = [here], min(1.0, 2 * last)
        while True:
            tried.append(here - scale * step)
            if quadratic(tried[-1]) <= quadratic(here) - 0.3 * scale * (g * step).sum():
                break
            scale *= 0.5
        seen.clear()
        loss = optimizer.step(closure_of(start))
        assert float(loss) == float(quadratic(seen[0])) and len(seen) == len(tried)
        assert w.grad is not None and torch.equal(w.grad, CURVED * seen[0])
        for ours, theirs in zip([*seen, w.detach()], [*tried, tried[-1]], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        here, last = w.detach().clone(), scale
    assert last < 1 and optimizer.param_groups[0]["step_scale"] == last


@pytest.mark.parametrize("recipe", ["adamw", "soap_fitted", "muon"])
def test_a_step_that_the_condition_allows_is_that_of_the_recipe(recipe: str) -> None:
    """Bit for bit, with one more call of the closure."""
    nets = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x, calls = normal(8, 4, seed=1, dtype=torch.float32), [0, 0]
    optimizers = [
        compose({"base": recipe, **more}, net, lr=1e-5)
        for net, more in zip(nets, ({}, {"line_search": {"sufficient": 0.0}}), strict=True)
    ]
    for _ in range(5):
        for index, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):

            def closure(net: nn.Module = net, optimizer: Optimizer = optimizer, index: int = index) -> Tensor:
                calls[index] += 1
                optimizer.zero_grad()
                loss: Tensor = net(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)
    for ours, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert calls == [5, 10]


def test_losses_that_are_not_finite_are_too_high_and_the_last_trial_is_taken() -> None:
    optimizer, w, seen = start = begun()
    origin = w.detach().clone()

    def wall(x: Tensor) -> Tensor:
        return quadratic(x) + (0.0 if torch.equal(x.detach(), origin) else torch.nan)

    optimizer.step(closure_of(start, wall))
    assert len(seen) == 1 + SEARCH["trials"]
    torch.testing.assert_close(w.detach(), origin - LR * 0.5**5 * CURVED * origin, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("detect", ["host", "device"])
def test_a_trial_that_raises_leaves_parameters_gradients_and_counts(detect: str, in_place: bool) -> None:
    """The next step is the one that the same gradient would have had."""
    start = begun(failure={"detect": detect})
    optimizer, w, _ = start
    optimizer.step(closure_of(start))
    before, calls, scale = w.detach().clone(), list[int](), optimizer.param_groups[0]["step_scale"]

    def interrupted() -> Tensor:
        optimizer.zero_grad(set_to_none=not in_place)
        loss = quadratic(w)
        loss.backward()  # type: ignore[no-untyped-call]
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    assert torch.equal(w.detach(), before) and w.grad is not None and torch.equal(w.grad, CURVED * before)
    assert int(optimizer.state[w]["step"]) == 1 and optimizer.param_groups[0]["step_scale"] == scale
    optimizer.step(closure_of(start))
    assert int(optimizer.state[w]["step"]) == 2 and not torch.equal(w.detach(), before)


def test_a_step_along_which_the_gradient_rises_must_not_raise_the_loss() -> None:
    """Momentum goes on against the gradient, on a loss that rises by less than the condition's part of its slope."""
    optimizer, w, seen = start = begun(lr=0.1, update="momentum")
    optimizer.step(closure_of(start, torch.sum))
    origin = w.detach().clone()
    seen.clear()
    optimizer.step(closure_of(start, lambda x: 0.01 - 0.01 * (50 * (x - origin).sum()).exp()))
    assert len(seen) == 1 + SEARCH["trials"] and optimizer.param_groups[0]["step_scale"] == 0.5**5
    assert bool((w < origin).all())


def test_a_resumed_search_goes_on_where_it_was() -> None:
    first = begun()
    for _ in range(3):
        first[0].step(closure_of(first))
    second = begun()
    with torch.no_grad():
        second[1].copy_(first[1])
    second[0].load_state_dict(first[0].state_dict())
    for start in (first, second):
        start[2].clear()
        start[0].step(closure_of(start))
    assert len(first[2]) == len(second[2]) and torch.equal(first[1], second[1])


def test_trials_are_not_collected_as_inputs_of_layers() -> None:
    """The inputs of the forward at the start of the step alone."""
    stage = {
        "kind": "shampoo",
        "statistic": {"kind": "input_gram", "beta": 0.0},
        "solver": "cholesky",
        "exponent": 1,
        "refresh": {"kind": "every", "steps": 1, "stagger": "none"},
    }
    net, rows = nn.Linear(3, 2, bias=False).double(), [0]
    optimizer = compose({"update": [stage], "routes": [], "line_search": {"trials": 3}}, net, lr=1e3)

    def closure() -> Tensor:
        rows[0] += 1
        optimizer.zero_grad()
        loss: Tensor = net(normal(5, 3, seed=rows[0])).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    x = normal(5, 3, seed=1)
    factor = next(value for key, value in optimizer.state[net.weight].items() if key.endswith("factor.1"))
    torch.testing.assert_close(factor, x.mT @ x / 5, rtol=1e-12, atol=1e-12)
    assert rows[0] == 1 + 3


def test_faults_are_named() -> None:
    optimizer, _, _ = begun()
    with refused(RuntimeError, "line_search", "none"):
        optimizer.step()
    start = begun()
    with refused(TypeError, "line_search", "NoneType"):
        start[0].step(lambda: closure_of(start)() and None)
    for more in ({"sam": {}}, {"averaging": "ema"}, {"constraints": "hyperball"}):
        with refused(RecipeError, "line_search", next(iter(more))):
            load_recipe({"update": "sign", "line_search": {}, **more})
    with refused(RecipeError, "shrink", 1):
        load_recipe({"update": "sign", "line_search": {"shrink": 1.0}})
