"""Entry-wise updates in chunks: the numbers of the same steps on stacks, bit for bit."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from eigengraft import Optimizer, Slot, Stage, State, StepContext
from eigengraft.optimizers.step import execution, stack_step
from eigengraft.optimizers.step.execution import Execution
from eigengraft.preconditioners import Traits

from ...trajectories import normal


class RootMean(Stage):
    """d / (|m| + 1)^(1/2), with the mean m of all gradients: an entry-wise stage that is no part of the library."""

    kind: Literal["root_mean_for_test"] = "root_mean_for_test"

    def slots(self, block: tuple[int, ...]) -> dict[str, Slot]:
        return {"m": Slot(block)}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        m = state["m"]
        state["m"] = m = m + context.per_block(lambda step: 1 / step, m) * (gradient - m)
        return direction / (m.abs() + 1).sqrt()


Stage.members.pop("root_mean_for_test")  # the laws are about every member of the family

ADAM = {"base": "adamw", "set": {"update.momentum.nesterov": True}}
"""Two moments that no fused kernel computes."""
RECIPES: dict[str, Any] = {
    "adam": ADAM,
    "sgd": "sgd",
    "l2": {"base": "sgd", "weight_decay": {"kind": "l2", "rate": 0.1}},
    "cautious": {"base": "lion", "weight_decay": {"kind": "cautious", "rate": 0.1}},
    "scaled by width": {**ADAM, "width_scaling": {}},
    "a stage of one's own": {"update": [RootMean()], "routes": []},
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 320 entries are taken in three chunks."""
    monkeypatch.setattr(execution, "_LEAST", 1)
    monkeypatch.setattr(execution, "CHUNK_ENTRIES", 128)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Entries of every chunk that was moved."""
    found, write = list[int](), stack_step.write
    monkeypatch.setattr(stack_step, "write", lambda p, *rest: (found.append(p[0].numel()), write(p, *rest)))
    return found


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(normal(10, 32, seed=i).to(dtype)) for i in range(2)]


def run(recipe: Any, dtype: torch.dtype, in_chunks: bool, given: Callable[[int, int], bool]) -> list[Tensor]:
    """Parameters after four steps; given: whether a parameter has a gradient in a step."""
    held = parameters(dtype)
    optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(held)], recipe, lr=0.01, weight_decay=0.1)
    for param_set in optimizer.param_sets if not in_chunks else ():
        param_set.executions = [Execution()] * len(param_set.executions)
    for step in range(4):
        for i, parameter in enumerate(held):
            parameter.grad = normal(10, 32, seed=10 * step + i).to(dtype) if given(i, step) else None
        optimizer.step()
    return [parameter.detach() for parameter in held]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_chunks_give_the_bits_of_stacks(name: str, dtype: torch.dtype, moved: list[int]) -> None:
    stacked = run(RECIPES[name], dtype, False, lambda i, step: True)
    assert not moved
    found = run(RECIPES[name], dtype, True, lambda i, step: True)
    assert moved == [128, 128, 64] * 8  # 4 steps of 2 parameters
    assert all(torch.equal(a, b) for a, b in zip(found, stacked, strict=True))


def test_blocks_with_different_step_counts_are_not_updated_in_chunks(moved: list[int]) -> None:
    """Their corrections are rounded to the dtype of the stack, as those of any blocks that do not agree."""

    def given(i: int, step: int) -> bool:
        return i == 0 or step != 1

    assert all(map(torch.equal, run(ADAM, torch.float32, True, given), run(ADAM, torch.float32, False, given)))
    assert moved == [128, 128, 64] * 3  # both in the first step, one alone in the second


def test_steps_with_a_mask_of_gradients_do_not_run_in_chunks(moved: list[int]) -> None:
    """The mask of usable gradients is on the device, and chunks are written without one."""
    held = parameters(torch.float32)
    recipe = {**ADAM, "failure": {"detect": "device"}}
    optimizer = Optimizer([(f"p{i}", p) for i, p in enumerate(held)], recipe, lr=0.01)
    before = [parameter.detach().clone() for parameter in held]
    held[0].grad, held[1].grad = torch.full((10, 32), torch.nan), torch.ones(10, 32)
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(held, before, strict=True)] == [True, False]
    assert not moved


def test_checked_steps_do_not_run_in_chunks(moved: list[int]) -> None:
    """What checks a stage follows the state of a stack; a chunk has none that is followed."""
    (held, _) = parameters(torch.float32)
    optimizer = Optimizer([held], ADAM, lr=0.01, checked=True)
    held.grad = torch.ones(10, 32)
    optimizer.step()
    assert not moved and optimizer.state[held]["step"] == 1


def test_updates_with_stages_after_the_decay_do_not_run_in_chunks(moved: list[int]) -> None:
    """Chunks are decayed by their write, after all stages: a sign after the decay would not see it."""
    recipe = {**ADAM, "after_decay": ["sign"]}
    found, wanted = (run(recipe, torch.float64, in_chunks, lambda i, step: True) for in_chunks in (True, False))
    assert all(map(torch.equal, found, wanted)) and not moved


def test_a_transposed_parameter_is_not_updated_in_chunks(moved: list[int]) -> None:
    held = nn.Parameter(normal(32, 10, seed=0).mT)
    optimizer = Optimizer([held], ADAM, lr=0.01)
    held.grad = torch.ones_like(held)
    optimizer.step()
    assert not moved
    assert held.is_contiguous() is False
