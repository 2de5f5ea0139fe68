"""The laws of three families of rules, which the host evaluates: views of parameters, schedules and weight decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eigengraft.blocking.views import Factor, Matrices, ModuleFacts, View, ViewChoice
from eigengraft.optimizers.write.write import WeightDecay

from .accelerator import accelerator
from .device_laws import require_no_waits, without_accelerator
from .laws import Case, Law, broken, in_parentheses, require, the_declaration_survives

if TYPE_CHECKING:
    from eigengraft.experiments.training.schedule import LearningRateSchedule

VIEW_SHAPES = ((6, 4), (5,), (12, 8), (4, 6, 5), (8, 4, 3, 3))
"""Shapes of the parameters to try: matrices, a vector, a batch of matrices and a convolution."""
_FACTS = (
    ModuleFacts(),
    ModuleFacts(convolution=False),
    ModuleFacts(convolution=True),
    ModuleFacts(convolution=False, factor=Factor("inputs", "lora_B")),
)
RUN = 100
"""Number of steps of the run for which a schedule is tried."""
_RATES = (0.1, 0.05, 0.0)
_PEAK = 0.1


@dataclass(frozen=True)
class ViewCase(Case[View]):
    """A view under test.

    shapes: shapes of the parameters to try. The view must accept at least one of them.
    """

    shapes: tuple[tuple[int, ...], ...] = VIEW_SHAPES

    def accepted(self) -> list[tuple[tuple[int, ...], ViewChoice]]:
        """Return (shape, `ViewChoice`) for each shape that the view accepts. Raises LawError if there are none.

        A shape is tried, and may be returned, several times: once for each of the facts about modules in `_FACTS`.
        """
        found, refused = [], ""
        for shape in self.shapes:
            for facts in _FACTS:
                try:
                    found.append((shape, self.component.of(shape, facts)))
                except ValueError as error:
                    refused = str(error)
                except Exception as error:
                    error.add_note(f"in the call of({shape}); for a parameter that does not fit, raise ValueError")
                    raise
        if not found:
            cause = in_parentheses(f"the last: {refused}; give shapes that the view accepts as `shapes`")
            got = "a ValueError for each shape"
            raise broken(f"of() for the shapes {list(self.shapes)}", "a choice for at least one", got, cause)
        return found


def views_return_a_choice_of_matrices(case: ViewCase) -> None:
    """`of` returns a `ViewChoice` with `Matrices`, or raises ValueError."""
    for shape, found in case.accepted():
        choice: object = found
        fine = isinstance(choice, ViewChoice) and isinstance(choice.matrices, Matrices)
        remedy = in_parentheses("return ViewChoice(Matrices(...), why)")
        require(fine, f"of({shape})", "a ViewChoice", f"{choice!r}", remedy)


def matrices_have_every_entry_once(case: ViewCase) -> None:
    """The matrices fit the shape, and have as many entries as the parameter."""
    for shape, choice in case.accepted():
        try:
            choice.matrices.require_fit(shape)
        except ValueError as error:
            expected = "a choice of matrices that fit this shape, or a refusal by ValueError"
            raise broken(f"of({shape})", expected, f"a choice of matrices that do not fit ({error})") from error
        count = sum(math.prod(matrix) for matrix in choice.matrices.each(shape))
        require(count == math.prod(shape), f"entries of the matrices of of({shape})", f"{math.prod(shape)}", count)


def a_choice_follows_from_shape_and_facts_alone(case: ViewCase) -> None:
    """For equal shapes and equal `ModuleFacts` of a parameter, `of` chooses equal matrices.

    All ranks then choose the same matrices, no matter when a parameter is added to an optimizer.
    """
    same = case.accepted() == case.accepted()
    require(same, "of() for equal arguments", "equal choices", "different ones")


VIEW_LAWS: tuple[Law[ViewCase], ...] = (
    Law(the_declaration_survives),
    Law(views_return_a_choice_of_matrices, decisive=True),
    Law(matrices_have_every_entry_once),
    Law(a_choice_follows_from_shape_and_facts_alone),
)


@dataclass(frozen=True)
class ScheduleCase(Case[Any]):
    """A schedule of the learning rate under test. In each step the schedule returns the factor of the peak learning
    rate.

    steps: number of steps of the run.
    """

    component: LearningRateSchedule
    steps: int = RUN


def factors_are_numbers_from_zero_to_one(case: ScheduleCase) -> None:
    """Every factor that `decay(t)` returns is a finite float in [0, 1]. t is a fraction of the run after warm-up."""
    for step in range(case.steps + 1):
        t = (step - case.component.warmup_steps) / (case.steps - case.component.warmup_steps)
        if t < 0:
            continue
        found: object = case.component.decay(t)
        fine = isinstance(found, (int, float)) and math.isfinite(found) and 0 <= found <= 1
        hint = "decay(t) is a factor on the learning rate, not a rate; t in [0, 1] is a fraction of the run, not a step"
        require(fine, f"decay({t:g})", "a float in [0, 1]", f"{found!r}", in_parentheses(hint))


def the_peak_is_the_learning_rate(case: ScheduleCase) -> None:
    """The largest factor of a run is 1, so that the `lr` of an experiment is its peak. The tolerance is 1e-6."""
    peak = max(case.component.factor(step, case.steps) for step in range(case.steps))
    require(abs(peak - 1) <= 1e-6, f"the largest factor in a run of {case.steps} steps", "1", f"{peak:.6g}")


def factors_follow_from_the_fraction_alone(case: ScheduleCase) -> None:
    """The factors of all steps are the same if they are computed in the reverse order.

    A run that continues from a checkpoint needs this, because it does not compute the factors of earlier steps.
    """
    steps = range(case.steps)
    once = [case.component.factor(step, case.steps) for step in steps]
    again = [case.component.factor(step, case.steps) for step in reversed(steps)][::-1]
    different = next((step for step in steps if once[step] != again[step]), None)
    cause = in_parentheses("does decay() count its calls?")
    require(different is None, f"the factor of step {different}, computed twice", "the same factor", "another", cause)


SCHEDULE_LAWS: tuple[Law[ScheduleCase], ...] = (
    Law(the_declaration_survives),
    Law(factors_are_numbers_from_zero_to_one, decisive=True),
    Law(the_peak_is_the_learning_rate),
    Law(factors_follow_from_the_fraction_alone),
)


def alpha_is_a_number_at_every_rate(case: Case[WeightDecay]) -> None:
    """`alpha`, the decay factor of a step, is a finite number >= 0 for every learning rate, also for 0. It is 0 if the
    rate of weight decay is 0.
    """
    for lr in _RATES:
        for rate in (0.0, 0.1):
            found: object = case.component.alpha(rate, lr, _PEAK)
            fine = isinstance(found, (int, float)) and math.isfinite(found) and found >= 0
            where = f"alpha({rate}, lr={lr}, peak_lr={_PEAK})"
            require(fine, where, "a number >= 0", f"{found!r}")
            require(rate or not found, where, "0 for the rate 0", found)


def a_learning_rate_on_the_device_is_not_read(case: Case[WeightDecay]) -> None:
    """`alpha` returns the same number for a learning rate that is a tensor on a device as for a float, and the host
    does not wait.
    """
    with accelerator("cuda") as run:
        for lr in _RATES[:2]:
            given = torch.tensor(lr, dtype=torch.float64).to(run.device)
            with accelerator("cuda") as counts:
                found = case.component.alpha(0.1, given, _PEAK)
            remedy = "`lr` may be a tensor on the device: return a tensor then, and use neither float() nor `if`"
            require_no_waits(counts, "alpha()", remedy)
            value = float(found.cpu()) if isinstance(found, Tensor) else found
            wanted = float(case.component.alpha(0.1, lr, _PEAK))
            fine = math.isclose(value, wanted, rel_tol=1e-6)
            require(fine, f"alpha() at lr {lr} as a tensor", f"{wanted:g}, as for the float", f"{value:g}")


WEIGHT_DECAY_LAWS: tuple[Law[Case[WeightDecay]], ...] = (
    Law(the_declaration_survives),
    Law(alpha_is_a_number_at_every_rate, decisive=True),
    Law(a_learning_rate_on_the_device_is_not_read, without_accelerator),
)
