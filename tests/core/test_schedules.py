"""Scheduled fields: the numbers of every step, exact corrections, resumes, and what is refused."""

import math
from typing import Any, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from eigengraft import Optimizer, RecipeError, Stage, load_recipe
from eigengraft.optimizers.recipe.schema import json_schema
from eigengraft.preconditioners import Momentum
from eigengraft.schedules import Segment, read_schedule, value_at

from ..refusals import refused
from ..trajectories import normal

STEPS = 8
BETA = {"from": 0.8, "to": 0.95, "steps": 6}
BETAS = [0.8 + 0.15 * min(t / 6, 1) for t in range(1, STEPS + 1)]


def gradients(steps: int = STEPS) -> Tensor:
    return torch.stack([normal(4, 3, seed=t) for t in range(steps)])


def trained(recipe: Any, given: Tensor, lr: float = 0.1) -> list[Tensor]:
    """The parameter after every step."""
    parameter = nn.Parameter(torch.ones(given.shape[1:], dtype=given.dtype))
    optimizer = Optimizer([parameter], {"routes": [], **recipe}, lr=lr, checked=True)
    values = []
    for gradient in given:
        parameter.grad = gradient.clone()
        optimizer.step()
        values.append(parameter.detach().clone())
    return values


@pytest.mark.parametrize(("nesterov", "beta3"), [(False, None), (True, None), (False, 0.6)])
def test_scheduled_moments_are_corrected_by_the_sum_of_their_weights(nesterov: bool, beta3: float | None) -> None:
    given, w, m = gradients(), torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    v, sum_m, sum_v, expected = m.clone(), 0.0, 0.0, []
    for beta, gradient in zip(BETAS, given, strict=True):
        old, old_sum = m, sum_m
        m, sum_m = beta * m + (1 - beta) * gradient, beta * sum_m + 1 - beta
        v, sum_v = beta * v + (1 - beta) * gradient**2, beta * sum_v + 1 - beta
        mean = m / sum_m
        if nesterov:
            mean = (beta * m + (1 - beta) * gradient) / (beta * sum_m + 1 - beta)
        if beta3 is not None:
            mean = (beta3 * old + (1 - beta3) * gradient) / (beta3 * old_sum + 1 - beta3)
        w = w - 0.1 * mean / ((v / sum_v).sqrt() + 1e-8)
        expected.append(w)
    momentum = {"kind": "momentum", "beta": BETA, "nesterov": nesterov, "beta3": beta3}
    found = trained({"update": [momentum, {"kind": "rms", "beta": BETA}]}, given)
    assert all(torch.allclose(ours, theirs, rtol=0, atol=1e-12) for ours, theirs in zip(found, expected, strict=True))


def test_a_schedule_that_stays_where_it_is_is_a_constant() -> None:
    """Up to the rounding of products in place of powers."""
    given = gradients()
    still = {"from": 0.9, "to": 0.9, "steps": 3}
    ours = trained({"update": [{"kind": "momentum", "beta": still}, {"kind": "rms", "beta": still}]}, given)
    theirs = trained({"update": [{"kind": "momentum", "beta": 0.9}, {"kind": "rms", "beta": 0.9}]}, given)
    assert torch.allclose(ours[-1], theirs[-1], rtol=0, atol=1e-13)


def test_the_numbers_of_a_schedule() -> None:
    pieces = read_schedule([{"from": 0.0, "to": 1.0, "steps": 4}, {"from": 3.0, "to": 2.0, "fraction": 0.2}])
    assert pieces is not None
    assert [value_at(pieces, t, 20) for t in range(1, 10)] == [0.25, 0.5, 0.75, 3.0, 2.75, 2.5, 2.25, 2.0, 2.0]
    (cosine,) = read_schedule({"from": 1.0, "to": 0.0, "steps": 4, "shape": "cosine"}) or ()
    assert [cosine.at(x) for x in (0.0, 0.5, 1.0)] == [1.0, 0.5, 0.0]
    assert math.isclose(cosine.at(0.25), (1 + math.cos(math.pi / 4)) / 2, rel_tol=1e-15)


def test_a_half_life_goes_linearly_as_in_ademamix() -> None:
    """f^-1((1 - x) f(from) + x f(to)) with f the half-life ln(1/2) / ln(b) - 1 of the published code."""
    segment, x = Segment.model_validate({"from": 0.9, "to": 0.9999, "steps": 10, "shape": "half_life"}), 0.3
    lives = [math.log(0.5) / math.log(b) - 1 for b in (0.9, 0.9999)]
    assert math.isclose(segment.at(x), 0.5 ** (1 / ((1 - x) * lives[0] + x * lives[1] + 1)), rel_tol=1e-12)


def test_numbers_deep_inside_follow_too() -> None:
    """The weight of a path, and a number of a constraint's chain: W of the last step is that of its own factor."""
    given = gradients(4)
    factor = {"from": 0.0, "to": 4.0, "fraction": 1.0}
    paths = [{"name": "a", "weight": factor, "stages": "identity"}, {"name": "b", "weight": 1.0, "stages": "sign"}]
    ours = trained({"update": [{"kind": "sum", "paths": paths}], "total_steps": 4}, given)
    expected = torch.ones(4, 3, dtype=torch.float64)
    for t, gradient in enumerate(given, start=1):
        expected = expected - 0.1 * (t * gradient + gradient.sign())
    assert torch.allclose(ours[-1], expected, rtol=0, atol=1e-12)


def test_a_run_goes_on_where_its_schedule_was() -> None:
    recipe = {"update": [{"kind": "momentum", "beta": BETA}, {"kind": "rms", "beta": BETA}], "routes": []}
    ours, given = nn.Parameter(torch.ones(4, 3)), gradients().float()
    optimizer = Optimizer([ours], recipe, lr=0.1)
    for t, gradient in enumerate(given):
        if t == 3:
            theirs = nn.Parameter(ours.detach().clone())
            resumed = Optimizer([theirs], recipe, lr=0.1)
            resumed.load_state_dict(optimizer.state_dict())
            assert "update.momentum.beta: 0.875, scheduled" in repr(resumed)
        for parameter, own in [(ours, optimizer), *([(theirs, resumed)] if t >= 3 else [])]:
            parameter.grad = gradient.clone()
            own.step()
    assert torch.equal(ours, theirs)


def test_the_printed_path_of_a_scheduled_field_is_that_of_its_override() -> None:
    """The chain inside is the field `chain`, which recipes and overrides write `inner`."""
    path = "update.eigenbasis.inner.momentum.beta"
    declared = {"update": {"kind": "eigenbasis", "inner": [{"kind": "momentum", "beta": BETA}, "rms"]}}
    optimizer = Optimizer([nn.Parameter(torch.ones(4, 3))], declared, lr=0.1)
    assert f"{path}: 0.825, scheduled" in repr(optimizer)
    changed = Optimizer([nn.Parameter(torch.ones(4, 3))], load_recipe(declared, {path: 0.5}), lr=0.1)
    assert "scheduled" not in repr(changed)


def test_declarations_of_schedules_are_kept() -> None:
    recipe = load_recipe(
        {"update": [{"kind": "momentum", "beta": BETA}]}, {"update.momentum.beta": {**BETA, "steps": 9}}
    )
    assert recipe.rules()[""].update[0].declaration()["beta"] == {**BETA, "steps": 9, "shape": "linear"}
    (momentum,) = recipe.update
    assert isinstance(momentum, Momentum) and momentum.beta == 0.8 and momentum.scheduled("beta")
    assert momentum.replace(nesterov=True).scheduled("beta") and not momentum.replace(beta=0.5).scheduled("beta")
    assert momentum != Momentum(beta=0.8) and load_recipe(recipe.model_dump(mode="json")) == recipe
    fields = json_schema(type(recipe))["$defs"]["stage.momentum"]["properties"]
    assert {"$ref": "#/$defs/scheduled_number"} in fields["beta"]["anyOf"] and "anyOf" not in fields["nesterov"]


class Decaying(Stage):
    """d (1 - b^t), written as if b were a constant."""

    kind: Literal["decaying_for_test"] = "decaying_for_test"
    beta: float = Field(default=0.9, ge=0, lt=1)

    def apply(self, state: Any, gradient: Tensor, direction: Tensor, context: Any) -> Tensor:
        return direction * context.correction(self.beta, direction)


Stage.members.pop("decaying_for_test")  # the laws are about every member of the family


def test_schedules_that_cannot_be_are_refused() -> None:
    def build(kind: str, **fields: Any) -> Any:
        return load_recipe({"update": [{"kind": kind, **fields}]})

    with refused(RecipeError, "update.momentum.beta", 1, 1.5):
        build("momentum", beta={"from": 0.5, "to": 1.5, "steps": 3})
    with refused(RecipeError, "update.momentum.beta", "steps", "fraction"):
        build("momentum", beta={"from": 0.5, "to": 0.6})
    with refused(RecipeError, "beta"):
        build("momentum", beta={"from": 0.5, "to": 0.6, "steps": 3, "until": 3})
    with refused(RecipeError, "threshold", 0, 1, "half_life"):
        build("clip_rms", threshold={"from": 0.5, "to": 2.0, "steps": 3, "shape": "half_life"})
    with refused(RecipeError, "shampoo.statistic.beta", "from"):
        build("shampoo", statistic={"kind": "gram", "beta": {"from": 0.5, "to": 0.6, "steps": 3}})
    with refused(RecipeError, "shampoo.refresh.steps", "from"):
        build("shampoo", refresh={"kind": "every", "steps": {"from": 1, "to": 6, "steps": 3}})
    with refused(RecipeError, "weight_decay.rate", "from"):
        load_recipe({"base": "adamw", "weight_decay": {"kind": "decoupled", "rate": BETA}})
    with refused(ValueError, "update.momentum.beta", "total_steps"):
        trained({"update": [{"kind": "momentum", "beta": {"from": 0.5, "to": 0.6, "fraction": 0.5}}]}, gradients())
    with refused(ValueError, "b^t"):
        trained({"update": [Decaying.model_validate({"beta": BETA})]}, gradients())
