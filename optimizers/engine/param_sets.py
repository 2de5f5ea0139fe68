"""The parameter sets of every param group: how they are built, shown to torch, and built again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigengraft.distributed.rank_group import RankGroup

from ..apply.averaging import Mode
from ..param_groups import check_values, group_infos, require_facts
from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo
from ..sharding.assignment import Assignment, Assignments
from ..sharding.phases import Phases
from .manifest import fill, show
from .param_set import ParamSet
from .signals import Signals
from .signals.schedules import Schedules

StateValues = Mapping[Tensor, Mapping[str, Tensor]]
"""State by parameter and state key."""


class ParamSets:
    """All parameter sets of an optimizer, by param group.

    recipe: declares the updates.
    recipe_text: the recipe as JSON text, which every param group holds.
    checked: whether the contract of every stage is checked at every step.
    others: parameters of the same model that other optimizers have.
    infos: for each group, a description of each parameter.
    parameters: for each group, its parameters.
    frozen: for each group, which of its parameters had no gradients when it was added.
    groups: for each group, its parameter sets, one for each device and set of ranks.
    batches: how many groups there were each time when owners were decided.
    signals, schedules: what stages ask for besides gradients, and their numbers that change during the run.
    consolidated: what `consolidate` has gathered of the state as it is now; None: it has changed since.
    """

    def __init__(self, recipe: Recipe, checked: bool = False, others: Sequence[ParamInfo] = ()) -> None:
        self.recipe, self.checked, self.others = recipe, checked, others
        self.recipe_text = recipe.to_json()
        self.infos: list[list[ParamInfo]] = []
        self.groups: list[list[ParamSet]] = []
        self.parameters: list[Sequence[Tensor]] = []
        self.frozen: list[list[bool]] = []
        self.batches: list[int] = []
        self.consolidated: object | None = None
        self.signals, self.schedules = Signals(recipe), Schedules(recipe)
        self._assignments = Assignments(recipe, others)

    def __iter__(self) -> Iterator[ParamSet]:
        for param_sets in self.groups:
            yield from param_sets

    def declare_group(self, groups: Sequence[dict[str, Any]], known: Mapping[int, ParamInfo] | None) -> None:
        """Adds the last of the param groups, with what every group holds; known: what describes its parameters."""
        group = groups[-1]
        check_values(group)
        group.setdefault("peak_lr", float(group["lr"]))
        group["recipe"] = self.recipe_text
        group["iterate"] = groups[0]["iterate"] if len(groups) > 1 else "train"
        infos = group_infos(group, known, self.names())
        require_facts(self.recipe, infos)
        self.declare(group["params"], infos)

    def declare(self, parameters: Sequence[Tensor], infos: list[ParamInfo], frozen: list[bool] | None = None) -> None:
        """Adds a group without state, whose blocks have no owners yet; frozen: default, those that are frozen now."""
        self.infos.append(infos)
        self.groups.append([])
        self.parameters.append(list(parameters))  # a host may put others into the group's list
        self.frozen.append([not p.requires_grad for p in parameters] if frozen is None else frozen)
        self._assignments.add(parameters, infos, self.labels(len(self.infos) - 1), self.frozen[-1])

    def assign(self, index: int) -> None:
        """Decides which rank owns which block of the groups from `index` on, and when the blocks of all are due."""
        self._assignments.assign(index)
        self.batches.append(len(self.infos))

    def complete(self, index: int, groups: Sequence[Mapping[str, Any]], state: MutableMapping[Tensor, Any]) -> None:
        """Gives owners and fresh state to the groups from `index` on, all at once, so that no number depends on groups.

        groups: all param groups. Raises ValueError on every rank if ranks were not given the same recipe and groups.
        """
        for place in range(index, len(groups)):
            self._assignments.agree(place, groups[place])
        self.assign(index)
        self._assignments.require_same_owners(index)
        if index == 0:
            self._assignments.warn_of_waiting()
        trained = [{id(p) for p in group["params"] if p.requires_grad} for group in groups[index:]]
        built = [self.build(place, wanted) for place, wanted in enumerate(trained, start=index)]
        for place, param_sets in enumerate(built, start=index):
            self.install(place, param_sets, state, groups[place]["iterate"])
        self._spread_refreshes(index)

    def _spread_refreshes(self, end: int) -> None:
        """Tells blocks of the groups before `end`, which have state, when they are due now that there are more."""
        phases = self._assignments.phases
        for param_set in (param_set for param_sets in self.groups[:end] for param_set in param_sets):
            for stack_state in param_set.stack_states:
                due = [phases[param_set.specs[position].key][key] for _, position, key in stack_state.rows()]
                stack_state.phases = np.array(due, dtype=np.float64)

    def forget(self, index: int) -> None:
        """Removes the groups from `index` on."""
        del self.infos[index:], self.groups[index:], self.parameters[index:], self.frozen[index:]
        self.batches = [groups for groups in self.batches if groups <= index]
        self._assignments.forget(index)

    def names(self) -> set[str]:
        """Names of all parameters that have one."""
        return {info.name for infos in self.infos for info in infos if info.name is not None}

    def labels(self, index: int) -> list[str]:
        """What errors and counts call the parameters of a group."""
        return [info.name or f"group {index} parameter {place}" for place, info in enumerate(self.infos[index])]

    def build(self, index: int, wanted: set[int]) -> list[ParamSet]:
        """Fresh parameter sets for the parameters of a group whose id is wanted.

        The sets depend on `wanted` alone, so that a copy or a resumed run has equal ones.
        """
        parameters = self.parameters[index]
        chosen = [position for position, parameter in enumerate(parameters) if id(parameter) in wanted]
        return _make(parameters, self._assignments[index], self.recipe, self._assignments.phases, chosen)

    def install(
        self,
        index: int,
        param_sets: list[ParamSet],
        state: MutableMapping[Tensor, Any],
        mode: Mode,
        values: StateValues | None = None,
    ) -> None:
        """Makes parameter sets the group's, shows their state in `state`, and copies `values` into it."""
        for param_set in param_sets:
            param_set.iterates.hold(mode)
            for stack_state in param_set.stack_states if self.checked else ():
                stack_state.check()
            show(param_set, state)
            for parameter in param_set.parameters:
                fill(state[parameter], (values or {}).get(parameter, {}))
        inherit_counts(param_sets, self.groups[index])
        self.groups[index] = param_sets
        self.consolidated = None

    def thaw(self, index: int, state: MutableMapping[Tensor, Any], mode: Mode) -> None:
        """Gives state to parameters of a group that were frozen and now have a gradient."""
        parameters = self.parameters[index]
        if any(p.grad is not None and p not in state for p in parameters):
            owned = {p: state[p] for p in parameters if p in state}
            wanted = {id(p) for p in parameters if p in owned or p.grad is not None}
            self.install(index, self.build(index, wanted), state, mode, owned)

    def resolve_deferred(self) -> None:
        """Takes back the steps of parameters whose last gradient turned out, on the device, to be unusable."""
        for param_set in self:
            param_set.resolve_deferred()

    def swap_iterate(self, mode: Mode, state: MutableMapping[Tensor, Any]) -> None:
        """Makes all parameters hold the iterate of a mode."""
        self.resolve_deferred()
        self.consolidated = None
        for param_set in self:
            param_set.swap_iterate(mode)
            show(param_set, state)

    def skipped(self) -> Counter[str]:
        """How often the gradient of each parameter was not finite, by name."""
        self.resolve_deferred()
        return sum((param_set.skipped for param_set in self), Counter())


def inherit_counts(param_sets: Iterable[ParamSet], before: Iterable[ParamSet]) -> None:
    """Adds to new parameter sets what was counted of their parameters in the sets before."""
    counts = {param_set: dict(param_set.skipped) for param_set in before}
    for param_set in param_sets:
        for other, skipped in counts.items():
            if other is not param_set:
                param_set.skipped.update({name: count for name, count in skipped.items() if name in param_set.names})


def _make(
    parameters: Sequence[Tensor], assignment: Assignment, recipe: Recipe, phases: Phases, chosen: Iterable[int]
) -> list[ParamSet]:
    """Fresh parameter sets for the chosen positions of a param group, one for each device and set of ranks."""
    found: dict[tuple[torch.device, RankGroup | None], list[int]] = {}
    for position in chosen:
        found.setdefault((parameters[position].device, assignment.rank_groups[position]), []).append(position)
    return [
        ParamSet([parameters[p] for p in own], [assignment.specs[p] for p in own], recipe, phases, rank_group)
        for (_, rank_group), own in found.items()
    ]
