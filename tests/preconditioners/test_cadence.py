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


def test_at_once_makes_waves() -> None:
    """Of 20 refreshes in all: as many waves of at least so many, but no more than there are steps, and at least one."""
    waves = {at_once: Every(steps=5, at_once=at_once).waves(20.0) for at_once in (1, 2, 4, 5, 9, 20, 21)}
    assert waves == {1: None, 2: 5, 4: 5, 5: 4, 9: 2, 20: 1, 21: 1}
    assert Every(steps=5).waves(20.0) == Every(steps=5, at_once=8).waves(20.0) == 2
    assert Every(steps=5, stagger="none").waves(20.0) is None and Every(steps=1).waves(20.0) is None


def test_all_at_once_are_not_spread() -> None:
    with pytest.raises(ValueError, match=r"at_once: `stagger: cost` is required, .*, got 4"):
        Every(stagger="none", at_once=4)


@pytest.mark.parametrize("steps", [3, 10, 29, 100])
def test_blocks_of_equal_parts_are_due_at_different_steps(steps: int) -> None:
    """n times k / n may round to less than k, and yet every step has one block."""
    assert sorted(Every(steps=steps).steps_due(np.arange(steps) / steps)) == list(range(steps))
