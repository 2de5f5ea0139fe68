"""Which stages and constraints of a recipe ask for which signals, and in which steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from eigengraft.chains import asking

from ...apply import Constraint
from ...recipe.recipe import Recipe, Route
from ...recipe.routing import ParamInfo
from ...sharding.placement import ParamSpec
from ..param_set import ParamSet


class DescribedSets(Protocol):
    """All parameter sets of an optimizer.

    infos, parameters: for each param group, a description of each of its parameters, and these.
    """

    infos: list[list[ParamInfo]]
    parameters: list[Sequence[Tensor]]

    def __iter__(self) -> Iterator[ParamSet]: ...


class Listeners:
    """What asks for signals in a recipe.

    asking: path of the first stage or constraint that asks for each signal, by name.
    asked: the same for each update, by the update's path.
    somewhere: path of the first constraint that asks for each signal which some parameter must have, by name.
    paused: whether forwards are trials, of which nothing is to be collected.
    """

    paused = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self._rules = recipe, recipe.updates()
        self.asking = asking(pair for where, rule in self._rules.items() for pair in listeners(rule, where))
        bound = [own for where, rule in self._rules.items() for own in constraints(rule, where)]
        self.somewhere = {name: path for path, own in reversed(bound) for name in own.requires_some}
        self.asked = {where: asking(listeners(rule, where)) for where, rule in self._rules.items()}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Makes forwards trials inside."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def needed(self, path: str, step: int) -> frozenset[str]:
        """The signals that must be there at a step of a parameter of that update."""
        asks = [own.signals_at(step) for _, own in listeners(self._rules[path], path)]
        return frozenset().union(*asks)

    def takers(self, name: str, param_sets: DescribedSets) -> set[int]:
        """The ids of all parameters whose update asks for a signal; param_sets: all of an optimizer."""
        rows = zip(param_sets.infos, param_sets.parameters, strict=True)
        pairs = ((p, info) for infos, parameters in rows for p, info in zip(parameters, infos, strict=True))
        return {id(p) for p, info in pairs if name in self.asked[self.recipe.route(info)[0]]}

    def next(self, name: str, param_sets: DescribedSets) -> set[int]:
        """The ids of parameters whose update takes a signal in its next step; param_sets: all of an optimizer.

        On a device also of those that would if their last gradient turns out to have been of no use.
        """
        due, seen = set[int](), set[int]()
        for param_set in param_sets:
            back = (0,) if param_set.parameters[0].device == torch.device("cpu") else (0, 1)
            for parameter, spec, count in self._rows(param_set):
                seen.add(id(parameter))
                if any(self._takes(spec.path, name, count - less) for less in back):
                    due.add(id(parameter))
        for infos, parameters in zip(param_sets.infos, param_sets.parameters, strict=True):
            fresh = ((parameter, info) for parameter, info in zip(parameters, infos, strict=True))
            due |= {id(p) for p, info in fresh if id(p) not in seen and self._takes_first(info, name)}
        return due

    def _rows(self, param_set: ParamSet) -> Iterable[tuple[Tensor, ParamSpec, int]]:
        return zip(param_set.parameters, param_set.specs, (param_set.update_counts + 1).tolist(), strict=True)

    def _takes(self, path: str, name: str, step: int) -> bool:
        """Whether an update takes a signal at that step of a parameter: it must have it, or may at every step."""
        if name not in self.asked[path]:
            return False
        own = [listener for _, listener in listeners(self._rules[path], path)]
        return name in self.needed(path, step) or any(
            request.optional and request.name == name for listener in own for request in listener.requests
        )

    def _takes_first(self, info: ParamInfo, name: str) -> bool:
        """Whether the first step of a parameter takes a signal, which has no state before it."""
        path = self.recipe.route(info)[0]
        return self._takes(path, name, 1 - int(self._rules[path].lagging()))


def listeners(rule: Recipe | Route, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted path, stage or constraint) of everything in an update that may ask for signals."""
    yield from rule.stages(path)
    yield from constraints(rule, path)


def constraints(rule: Recipe | Route, path: str) -> Iterator[tuple[str, Constraint]]:
    """(dotted path, constraint) of every constraint of an update."""
    prefix = f"{path}." if path else ""
    yield from ((f"{prefix}constraints.{constraint.label}", constraint) for constraint in rule.constraints)
