"""Signals that an optimizer must have in its first step, and that later steps may lack."""

from __future__ import annotations

from collections.abc import Iterable

from ...recipe.recipe import Recipe
from ..param_set import ParamSet


class FirstStep:
    """The signals that stages ask for in the first step, until parameters that take them have had a gradient.

    open: paths of the updates whose parameters must have a signal in the next step, by its name.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.open: dict[str, set[str]] = {}
        for path, rule in recipe.updates().items():
            for _, stage in rule.stages(path):
                for name in (request.name for request in stage.requests if request.when == "first"):
                    self.open.setdefault(name, set()).add(path)

    def follow(self, param_sets: Iterable[ParamSet]) -> None:
        """Leaves the signals of which no parameter that takes them has had a gradient, be it before a checkpoint."""
        if self.open:
            rows = [row for own in param_sets for row in zip(own.specs, own.step_counts.tolist(), strict=True)]
            trained = {spec.path for spec, count in rows if count}
            self.open = {name: paths for name, paths in self.open.items() if not paths & trained}

    def close(self, names: Iterable[str]) -> None:
        """Takes out signals that were provided, also to a step that had no usable gradient."""
        for name in names:
            self.open.pop(name, None)

    def asks(self, name: str, path: str) -> bool:
        """Whether a parameter of an update must have a signal in the next step."""
        return path in self.open.get(name, ())

    def when(self, name: str) -> str:
        """The steps in which a signal that is missing must be there, for errors."""
        return "the first step" if name in self.open else "every step"
