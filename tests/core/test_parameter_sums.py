"""Sums over parameters: numbers of blocks in one stack and in several, and runs that do not agree."""

from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from eigengraft.blocking.parameter_sums import ParameterSum, run_stacks
from eigengraft.errors import ContractError

from ..refusals import refused

IDS = [np.array([7, 3, 7]), np.array([3]), np.array([9, 7])]
VALUES = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([8.0]), torch.tensor([16.0, 32.0])]
SUMS = [[37.0, 10.0, 37.0], [10.0], [16.0, 37.0]]


def test_one_stack_adds_its_own_blocks() -> None:
    assert run_stacks([lambda sums: sums(VALUES[0]).tolist()], IDS[:1]) == [[5.0, 2.0, 5.0]]


def test_stacks_that_share_parameters_go_on_from_sum_to_sum() -> None:
    """A second sum is of what each made of the first; a nested function may take it."""
    told: list[int] = []

    def run(index: int, sums: ParameterSum) -> list[float]:
        first = sums(VALUES[index])
        told.append(index)
        return [*first.tolist(), *_twice(sums, first)]

    def _twice(sums: ParameterSum, x: Tensor) -> list[float]:
        return sums(2 * torch.ones_like(x)).tolist()

    found = run_stacks([lambda sums, k=k: run(k, sums) for k in range(3)], IDS)  # type: ignore[misc]
    blocks = {7: 3.0, 3: 2.0, 9: 1.0}
    assert found == [[*own, *(2 * blocks[one] for one in ids.tolist())] for own, ids in zip(SUMS, IDS, strict=True)]
    assert told == [0, 1, 2]


def test_runs_see_the_context_of_the_caller() -> None:
    precision = ContextVar("precision", default="low")
    precision.set("high")
    runs = [lambda sums, k=k: (sums(VALUES[k]), precision.get())[1] for k in range(3)]  # type: ignore[misc]
    assert run_stacks(runs, IDS) == ["high"] * 3


def test_stacks_that_take_different_numbers_of_sums_are_refused() -> None:
    runs = [lambda sums: sums(VALUES[0]), lambda sums: VALUES[1], lambda sums: sums(VALUES[2])]
    with refused(ContractError, 1, 3):
        run_stacks(runs, IDS)


def test_an_error_in_one_run_ends_the_others_and_reaches_the_caller() -> None:
    ended: list[int] = []

    def waits(index: int, sums: ParameterSum) -> Tensor:
        try:
            return sums(VALUES[index])
        finally:
            ended.append(index)

    def fails(sums: ParameterSum) -> Tensor:
        raise ValueError("a fault")

    runs = [lambda sums: waits(0, sums), fails, lambda sums: waits(2, sums)]
    with refused(ValueError, "fault"):
        run_stacks(runs, IDS)
    assert ended == [0]  # the last one has not begun
