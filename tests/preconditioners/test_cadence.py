"""Refreshes of `every`: which steps, and how phases spread them."""

import numpy as np
import pytest

from eigengraft import StepContext
from eigengraft.preconditioners import Every


def due(cadence: Every, phases: list[float], steps: int) -> list[list[int]]:
    """The steps of 1 .. `steps` at which each block is due."""
    found: list[list[int]] = [[] for _ in phases]
    for t in range(1, steps + 1):
        context = StepContext(np.full(len(phases), t), np.array(phases), np.arange(len(phases)))
        for start, stop, _ in cadence.due(context, 1):
            for row in range(start, stop):
                found[row].append(t)
    return found


def test_a_phase_delays_the_refreshes_after_the_first_by_its_part_of_the_interval() -> None:
    assert due(Every(steps=10), [0.0, 0.3, 0.95], 30) == [[1, 10, 20, 30], [1, 3, 13, 23], [1, 9, 19, 29]]


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"steps": 4}, [1, 4, 8, 12]),
        ({"steps": 4, "offset": 1}, [1, 5, 9]),
        ({"steps": 4, "start": 6}, [6, 8, 12]),
        ({"steps": 1, "start": 10}, [10, 11, 12]),
    ],
)
def test_without_stagger_all_blocks_are_due_at_once(fields: dict[str, int], steps: list[int]) -> None:
    cadence = Every.model_validate({**fields, "stagger": "none"})
    assert due(cadence, [0.0, 0.3, 0.95], 12) == [steps] * 3
