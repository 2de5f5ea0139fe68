"""Numbers of a recipe that change during a run, brought to where they are used before every step."""

from __future__ import annotations

from collections.abc import Iterable

from eigengraft.ramps import at, present, schedules

from ...recipe.recipe import Recipe
from ..param_set import ParamSet


def steps_taken(param_sets: Iterable[ParamSet]) -> int:
    """Steps of the run so far: gradients of the parameter that has had most. It follows from the state alone."""
    return max((int(param_set.step_counts.max()) for param_set in param_sets), default=0)


class Schedules:
    """The schedules of a recipe. ramps: by dotted path."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.ramps = recipe, dict(schedules(recipe))

    def follow(self, param_sets: Iterable[ParamSet]) -> None:
        """Gives the stages and constraints of all parameters the numbers of the next step."""
        if not self.ramps:
            return
        updates = at(self.recipe, steps_taken(param_sets) + 1, self.recipe.total_steps).updates()
        for param_set in param_sets:
            param_set.iterates.constraints = {path: update.constraints for path, update in updates.items()}
            for stack_state in param_set.stack_states:
                stack_state.rule = updates[stack_state.path]

    def values(self, step: int) -> dict[str, float]:
        """The scheduled numbers of a step, by dotted path; before the first step those that it will have."""
        total = self.recipe.total_steps
        return {path: float(present(ramps, max(step, 1), total)) for path, ramps in self.ramps.items()}
