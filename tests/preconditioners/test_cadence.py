"""Refreshes of `every`: which steps, and how phases spread them; and the laws of cadences."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

from eigengraft import StepContext
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


class NeverFirst(Cadence):
    """Due at every step; no refresh is said to be the first."""

    kind: Literal["cadence_neverfirst"] = "cadence_neverfirst"

    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        yield 0, len(context.steps), False


class Beyond(Cadence):
    """Due at every step; one block more than there are."""

    kind: Literal["cadence_beyond"] = "cadence_beyond"

    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        yield 0, len(context.steps) + 1, bool(context.steps[0] == earliest)


class Overlapping(Cadence):
    """Due at every step; the first two blocks twice."""

    kind: Literal["cadence_overlapping"] = "cadence_overlapping"

    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        first = bool(context.steps[0] == earliest)
        yield from ((0, 2, first), (1, len(context.steps), first))


class Rare(Cadence):
    """Due at the first step and never again."""

    kind: Literal["cadence_rare"] = "cadence_rare"

    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        if context.steps[0] == earliest:
            yield 0, len(context.steps), True


class Impossible(Cadence):
    """Due at every step, and says that no step is possible."""

    kind: Literal["cadence_impossible"] = "cadence_impossible"

    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        yield 0, len(context.steps), bool(context.steps[0] == earliest)

    def possible(self, step: int, earliest: int) -> bool:
        return False


class Joint(Cadence):
    """All blocks are due where the first block is at its first step, or an even one."""

    kind: Literal["cadence_joint"] = "cadence_joint"

    @property
    def interval(self) -> float:
        return 2.0

    def due(self, context: StepContext, earliest: int) -> Iterator[tuple[int, int, bool]]:
        if context.steps[0] == earliest or context.steps[0] % 2 == 0:
            yield 0, len(context.steps), bool(context.steps[0] == earliest)


@pytest.mark.parametrize(
    ("cadence", "says"),
    [
        (NeverFirst(), ("True", 0, "False")),
        (Beyond(), (0, 7, "(0, 8)")),
        (Overlapping(), (0, "(0, 2)", "(1, 7)")),
        (Rare(), (1,)),
        (Impossible(), ("(0, 0)", "False", "blocks")),
        (Joint(), ("due",)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_cadence_that_breaks_a_law_is_named(cadence: Cadence, says: tuple[object, ...]) -> None:
    with refused(LawError, *says):
        check_cadence(cadence)
