"""Traced programs of shipped recipes: each step against the same step as it is, from the same state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, load_recipe
from eigengraft.optimizers.step import execution, traced
from eigengraft.optimizers.step.execution import Execution
from eigengraft.optimizers.step.program import StackStep

from ..recipes import EVERY_BROAD
from ..trajectories import normal

SHAPES = ((24, 16), (24, 16), (16, 40), (16,), (16,))
STEPS = 14
"""More than the interval of most refreshes, so that programs run before and after one."""
SCHEDULED = ("ademamix",)
"""Recipes with a number that changes during the run, which a program would keep, and no refresh in each step."""


def compiled(recipe: str) -> Any:
    routes = [f"routes.{route.name}.compile" for route in load_recipe(recipe).routes]
    return load_recipe(recipe, dict.fromkeys(["compile", *routes], True))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates in which a traced program has run on a stack, each beside the same step as it is."""
    seen, run = list[int](), Execution.direction

    def both(how: Execution, step: StackStep) -> Tensor:
        program, own = how.blocks, step.blocks.stack_state
        inputs = None if program is None else execution._block_inputs(program, step)
        if program is None or inputs is None:
            return run(how, step)
        before = {name: x.clone() for name, x in own.tensors.items()}
        (found,) = program.compiled(inputs)
        after = {name: x.clone() for name, x in own.tensors.items()}
        for name, x in before.items():
            own.tensors[name].copy_(x)
        wanted = step.direction()
        # the same operations in float64, some of them in another order: a few hundred roundings of the largest entry
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12 * float(wanted.abs().max()))
        for name, x in own.tensors.items():
            largest = max(float(x.double().abs().max()), 0.01)  # less is what rounding leaves of a difference
            torch.testing.assert_close(after[name].double(), x.double(), rtol=1e-9, atol=1e-12 * largest)
        seen.append(int(step.context.steps[0]))
        return wanted

    monkeypatch.setattr(Execution, "direction", both)
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: lambda tensors: graph(*tensors))
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    return seen


@pytest.mark.parametrize("recipe", EVERY_BROAD)
def test_a_traced_step_is_the_step_as_it_is(recipe: str, steps: list[int]) -> None:
    parameters = [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    named = [(f"layers.{i}.weight", parameter) for i, parameter in enumerate(parameters)]
    if recipe in SCHEDULED:
        with pytest.raises(ValueError, match=r"^compile: .* is scheduled"):
            Optimizer(named, compiled(recipe))
        return
    optimizer = Optimizer(named, compiled(recipe), lr=1e-3)
    for step in range(STEPS):
        for i, parameter in enumerate(parameters):
            parameter.grad = normal(*parameter.shape, seed=100 * step + i)
        optimizer.step(lambda: torch.tensor(1.0)) if optimizer.recipe.line_search else optimizer.step()
    programs = [how for param_set in optimizer.param_sets for how in param_set.executions if how.blocks is not None]
    assert not programs or len({*steps}) > 2
