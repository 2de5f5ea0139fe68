"""Refreshes of `every`: which steps, and how phases spread them; and the laws of cadences."""

import random
from typing import Any, Literal

import numpy as np
import pytest
import torch

from eigengraft import RecipeError, StepContext, load_recipe
from eigengraft.preconditioners import Cadence, Every, Probability
from eigengraft.testing import LawError, check_cadence

from ..refusals import refused


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


def test_a_least_work_makes_waves() -> None:
    """Of 20 refreshes in all: as many waves of at least so many, but no more than there are steps, and at least one."""
    waves = {work: Every(steps=5, min_wave_work=work).waves(20.0) for work in (1, 2, 4, 5, 9, 20, 21)}
    assert waves == {1: None, 2: 5, 4: 5, 5: 4, 9: 2, 20: 1, 21: 1}
    assert Every(steps=5).waves(20.0) == Every(steps=5, min_wave_work=8).waves(20.0) == 2
    assert Every(steps=5, stagger="none").waves(20.0) is None and Every(steps=1).waves(20.0) is None


def test_all_at_once_are_not_spread() -> None:
    with refused(ValueError, "min_wave_work", 4):
        Every(stagger="none", min_wave_work=4)


@pytest.mark.parametrize("steps", [3, 10, 29, 100])
def test_blocks_of_equal_parts_are_due_at_different_steps(steps: int) -> None:
    """n times k / n may round to less than k, and yet every step has one block."""
    assert sorted(Every(steps=steps).steps_due(np.arange(steps) / steps)) == list(range(steps))


@pytest.mark.parametrize(
    "cadence",
    [
        Every(),
        Every(steps=1),
        Every(steps=7, offset=2, start=5),
        Every(steps=4, stagger="none"),
        Probability(probability=0.3),
        Probability(probability=0.5, shared=True, start=3),
        Probability(probability=1.0),
    ],
    ids=repr,
)
def test_the_shipped_cadences_keep_the_laws(cadence: Cadence) -> None:
    assert "6 laws hold" in str(check_cadence(cadence))


class Faulty(Cadence):
    """Due at every second step, with a fault."""

    kind: Literal["faulty_for_test"] = "faulty_for_test"
    fault: str

    @property
    def interval(self) -> float:
        return 10.0 if self.fault == "rare" else 2.0

    def first_due(self, earliest: int) -> int:
        return earliest - 1 if self.fault == "early" else earliest

    def possible(self, step: int, earliest: int) -> bool:
        return self.fault != "impossible"

    def due_again(self, context: StepContext) -> Any:
        steps = context.steps
        found: dict[str, Any] = {
            "a tensor": context.step % 2 == 0,
            "numbers": steps % 2,
            "every block of the library": np.ones(9, dtype=bool),
            "the first block": bool(steps[0] % 2 == 0),
            "the parameter": context.matrix_ids % 2 == 0,
            "the place": np.arange(len(steps)) % 2 == steps % 2,
            "torch": torch.rand(len(steps)).numpy() < 0.5 if self.fault == "torch" else None,
            "numpy": np.random.rand(len(steps)) < 0.5 if self.fault == "numpy" else None,
            "python": random.random() < 0.5 if self.fault == "python" else None,
            "one generator": np.random.default_rng(0).random(len(steps)) < 0.5,
            "never": np.zeros(len(steps), dtype=bool),
            "stops": (steps <= 8) & (steps % 2 == 0),
            "slows down": steps % np.where(steps <= 12, 1, 24) == 0,
        }
        return found.get(self.fault, steps % 2 == 0)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("a tensor", ("due_again()", "Tensor", "context.steps", "context.step")),
        ("numbers", ("due_again()", "int64", "[7]")),
        ("every block of the library", ("due_again()", "[9]", "[N]", 7)),
        ("the first block", ("due_again()", "one block")),
        ("the place", ("due_again()", "place")),
        ("the parameter", ("due_again()", "parameter")),
        ("one generator", ("due_again()", "place")),
        ("torch", ("torch's global generator", "rand", "test_cadence.py", "context.seeds")),
        ("numpy", ("NumPy's global generator", "context.seeds")),
        ("python", ("`random`", "context.seeds")),
        ("early", ("first_due(0)", -1)),
        ("impossible", ("possible(0, 0)", "False")),
        ("never", (2, "interval")),
        ("stops", (8, 2, "interval")),
        ("slows down", (12, 2, "interval")),
        ("rare", (10, "interval")),
    ],
)
def test_a_cadence_that_breaks_a_law_is_named(fault: str, says: tuple[object, ...]) -> None:
    with refused(LawError, "cadence.faulty_for_test", *says):
        check_cadence(Faulty(fault=fault))


def test_a_sound_cadence_gets_a_report() -> None:
    assert len(check_cadence(Faulty(fault="none")).held) == 6


def test_a_cadence_without_an_interval_is_refused() -> None:
    class Unstated(Cadence):
        """Due at every fourth step."""

        kind: Literal["unstated_for_test"] = "unstated_for_test"

        def due_again(self, context: StepContext) -> Any:
            return context.steps % 4 == 0

    with refused(TypeError, "Unstated", "property", "interval"):
        Unstated()  # type: ignore[abstract]
    with refused(RecipeError, "update.eigenbasis.refresh", "Unstated", "interval"):
        load_recipe("soap", {"update.eigenbasis.refresh": "unstated_for_test"})
    Cadence.members.pop("unstated_for_test")


def test_the_spans_of_blocks_are_not_for_members() -> None:
    with refused(TypeError, "due", "final"):

        class Spans(Cadence):
            """Due at every step."""

            kind: Literal["spans_for_test"] = "spans_for_test"

            def due(self, context: StepContext, earliest: int) -> Any:  # type: ignore[misc]
                yield 0, len(context.steps), False
