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
from ..refusals import refused
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
        with refused(ValueError, "compile"):
            Optimizer(named, compiled(recipe))
        return
    optimizer = Optimizer(named, compiled(recipe), lr=1e-3)
    for step in range(STEPS):
        for i, parameter in enumerate(parameters):
            parameter.grad = normal(*parameter.shape, seed=100 * step + i)
        optimizer.step(lambda: torch.tensor(1.0)) if optimizer.recipe.line_search else optimizer.step()
    programs = [how for param_set in optimizer.param_sets for how in param_set.executions if how.blocks is not None]
    assert not programs or len({*steps}) > 2


@pytest.mark.parametrize(
    ("case", "updates"),
    {
        "all blocks": [1, 2, 3, 4],
        "a block without a gradient": [1, 2],  # then it is one update behind
        "a gradient with nan": [1, 2],
        "two rates": [],
        "checked": [],
    }.items(),
)
def test_programs_are_of_all_blocks_at_one_update_and_one_rate(case: str, updates: list[int], steps: list[int]) -> None:
    """And where nothing watches the stages: other steps of the same stack run as they are."""
    held = [nn.Parameter(normal(8, 6, seed=i)) for i in range(3)]
    rates = [0.1, 0.1, 0.3 if case == "two rates" else 0.1]
    groups = [{"params": [(f"p{i}", p)], "weight_decay": rates[i]} for i, p in enumerate(held)]
    update = {"update": ["momentum", "spectral"], "after_decay": ["clip_norm"], "failure": {"detect": "device"}}
    optimizer = Optimizer(groups, {**update, "compile": True}, lr=0.1, checked=case == "checked")
    for step in range(4):
        for i, parameter in enumerate(held):
            parameter.grad = normal(8, 6, seed=10 * step + i)
        if step == 2 and case == "a block without a gradient":
            held[1].grad = None
        if step == 2 and case == "a gradient with nan":
            held[1].grad = torch.full_like(held[1], torch.nan)
        optimizer.step()
    assert steps == updates


def test_a_statistic_with_an_interval_leaves_most_steps_to_the_program(steps: list[int]) -> None:
    """The program is of steps late in the run in which the statistic is not observed."""
    parameter = nn.Parameter(normal(8, 6, seed=0))
    statistic, refresh = {"kind": "gram", "interval": 3}, {"kind": "every", "steps": 20}
    update = [{"kind": "shampoo", "statistic": statistic, "refresh": refresh}]
    optimizer = Optimizer([("p", parameter)], {"update": update, "compile": True})
    for step in range(8):
        parameter.grad = normal(8, 6, seed=step)
        optimizer.step()
    assert steps == [2, 3, 5, 6, 8]  # observed at updates 1, 4 and 7


CLIP = {"kind": "clip_norm", "max_norm": 0.1, "per": "parameter"}
CLIPPED: Any = {"update": ["momentum", CLIP], "blocking": {"size": 8}}


def coded(codebook: str) -> Any:
    storage = {"update.momentum/m": {"kind": "int4", "codebook": codebook, "min_elements": 1}}
    return {"update": ["momentum", "spectral"], "storage": storage}


@pytest.mark.parametrize(
    "kinds",
    [
        [(CLIPPED, [(16, 8)]), (CLIPPED, [(8, 8), (8, 8)])],
        [(coded("nf4"), [(8, 8)]), (coded("symmetric_integer"), [(8, 8)])],
    ],
    ids=["blocks of one parameter or of two", "another format of the same shape"],
)
def test_stacks_that_differ_in_one_thing_have_programs_of_their_own(kinds: list[Any], steps: list[int]) -> None:
    for recipe, shapes in kinds:
        parameters = [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]
        optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(parameters)], {**recipe, "compile": True})
        for step in range(3):
            for i, parameter in enumerate(parameters):
                parameter.grad = normal(*parameter.shape, seed=10 * step + i)
            optimizer.step()
    assert steps == [1, 2, 3] * 2
