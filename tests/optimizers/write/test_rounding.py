"""Writes into parameters in bfloat16: what rounding to nearest loses is kept, or comes on average."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, RecipeError
from eigengraft.optimizers.plan.plan import plan

from ...refusals import refused

RULES = ["stochastic", "compensated", "split"]
EPS = 2.0**-8
"""Distance of bfloat16 numbers in [1, 2), halved."""


def recipe(rule: str | None, **more: Any) -> dict[str, Any]:
    constraints = [] if rule is None else [{"kind": "rounding", "rule": rule}]
    return {"update": "identity", "routes": [], "constraints": constraints, **more}


def start(n: int = 4096) -> Tensor:
    """Numbers in [1, 2) that bfloat16 has."""
    return (1 + torch.rand(n, generator=torch.Generator().manual_seed(0))).bfloat16().clamp_max(1.9)


def trained(rule: str | None, gradients: list[Tensor], lr: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    weight = nn.Parameter(start(len(gradients[0])).to(dtype))
    optimizer = Optimizer([("w", weight)], recipe(rule), lr=lr, weight_decay=0.0)
    for gradient in gradients:
        weight.grad = gradient.to(dtype)
        optimizer.step()
    return weight.detach().double()


@pytest.mark.parametrize("rule", RULES)
def test_updates_below_half_an_ulp_arrive(rule: str) -> None:
    """Steps of 1/64 to 3/64 ulp: rounded to nearest they are lost; in the mean over 4096 entries they all arrive.

    Of 64 steps with p = 1/32 the standard deviation is 1.4 ulp, of the mean 0.022 ulp, and 0.1 is over four times that;
    a remainder leaves at most half an ulp in one entry, and roundings of the remainder itself.
    """
    generator, ulp = torch.Generator().manual_seed(5), EPS * 2
    gradients = [(0.5 + torch.rand(4096, generator=generator)).bfloat16().float() for _ in range(64)]
    assert torch.equal(trained(None, gradients, ulp / 32), start().double())
    left = (start().double() - trained(rule, gradients, ulp / 32)) / ulp - torch.stack(gradients).double().sum(0) / 32
    assert abs(float(left.mean())) <= 0.1
    if rule != "stochastic":
        assert float(left.abs().max()) <= 0.75


@pytest.mark.parametrize("rule", ["compensated", "split"])
def test_with_the_remainder_it_is_float32_within_a_bound(rule: str) -> None:
    """|w + r - w_32| <= T e, e the error of a remainder: 2^-8 of half an ulp split, 2^-9 of it in bfloat16.

    What the model sees differs by half an ulp more.
    """
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(512, generator=generator).bfloat16().float() for _ in range(100)]
    exact, ours = trained(None, gradients, 1e-3, torch.float32), trained(rule, gradients, 1e-3)
    error = 2.0**-8 * EPS if rule == "split" else 2.0**-9 * EPS
    assert float((exact - ours).abs().max()) <= EPS + 100 * (error + 2.0**-23)
    nearest = trained(None, gradients, 1e-3)
    assert float((exact - ours).square().mean()) < 0.3 * float((exact - nearest).square().mean())


def test_a_random_write_goes_to_one_of_two_neighbors_by_its_distance() -> None:
    """W' = W - u ulp goes down where chance is below u: in the mean of u of 20,000 entries.

    The standard deviation is at most 0.0036; bits of W', the source of chance, are equal for some of them: 0.02.
    """
    generator = torch.Generator().manual_seed(2)
    values, u = (1.5 + 0.1 * torch.rand(20000, generator=generator)).bfloat16(), torch.rand(20000, generator=generator)
    weight = nn.Parameter(values.clone())
    optimizer = Optimizer([("w", weight)], recipe("stochastic"), lr=EPS * 2, weight_decay=0.0)
    weight.grad = u.bfloat16()
    optimizer.step()
    down = (values.float() - weight.detach().float()) / (EPS * 2)
    assert down.unique().tolist() == [0.0, 1.0]
    assert float(down.mean()) == pytest.approx(float(weight.grad.float().mean()), abs=0.02)
    assert float(down[u < 0.1].mean()) < 0.1 and float(down[u > 0.9].mean()) > 0.9


@pytest.mark.parametrize("rule", RULES)
def test_resume_is_exact_and_bytes_are_those_of_the_plan(rule: str) -> None:
    weight = nn.Parameter(start(96).reshape(8, 12))
    optimizer = Optimizer([("w", weight)], recipe(rule), lr=1e-3)
    generator = torch.Generator().manual_seed(4)
    gradients = [torch.randn(8, 12, generator=generator).bfloat16() for _ in range(8)]
    for gradient in gradients[:4]:
        weight.grad = gradient
        optimizer.step()
    other = nn.Parameter(weight.detach().clone())
    resumed = Optimizer([("w", other)], recipe(rule), lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for gradient in gradients[4:]:
        for p, o in ((weight, optimizer), (other, resumed)):
            p.grad = gradient.clone()
            o.step()
    assert torch.equal(weight, other)
    assert plan(recipe(rule), [("w", (8, 12))], (1,), "ddp", torch.bfloat16).state[0] == optimizer.state_bytes()
    each = {"stochastic": 8, "compensated": 2 * 96, "split": 96}[rule]
    assert optimizer.state_bytes() == each + 8  # the count of steps


@pytest.mark.parametrize("rule", RULES)
def test_a_bad_gradient_changes_neither_parameter_nor_remainder(rule: str) -> None:
    weight = nn.Parameter(start(64))
    optimizer = Optimizer([("w", weight)], recipe(rule), lr=1e-3)
    weight.grad = torch.ones(64).bfloat16()
    optimizer.step()
    before = weight.detach().clone(), copy.deepcopy(dict(optimizer.state[weight]))
    weight.grad = torch.full((64,), float("nan")).bfloat16()
    optimizer.step()
    assert torch.equal(weight, before[0])
    assert all(torch.equal(value, before[1][key]) for key, value in optimizer.state[weight].items())


def test_parameters_in_32_bits_have_no_remainder_and_the_same_numbers() -> None:
    gradients = [torch.ones(8)] * 3
    ours, plain = (trained(rule, gradients, 0.1, torch.float32) for rule in ("compensated", None))
    assert torch.equal(ours, plain)
    weight = nn.Parameter(torch.ones(8))
    assert list(Optimizer([("w", weight)], recipe("compensated")).state[weight]) == ["step"]


def test_constraints_after_rounding_and_averaging_beside_it_are_refused() -> None:
    with refused(RecipeError, "constraints", "rounding"):
        Optimizer([nn.Parameter(torch.ones(2))], {**recipe(None), "constraints": ["rounding", "hyperball"]})
    with refused(ValueError, "constraints", "rounding", "averaging", "ema"):
        Optimizer([("w", nn.Parameter(start(4)))], recipe("split", averaging={"kind": "ema", "decay": 0.9}))
