"""The parameter sets of all param groups: their construction, and their state as shown in `optimizer.state`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

from eigengraft.distributed.balance import Balance, Loads
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.numerics import fake_mode, local
from eigengraft.signals import asking
from eigengraft.slots import dotted

from ..param_groups import check_values, require_facts, require_own_memory
from ..recipe.recipe import Recipe
from ..recipe.routing import ParamInfo, describe_named, describe_unnamed
from ..signals import Signals
from ..signals.signals import Schedules
from ..stacks.assignment import Assignments, ParamGroup
from ..stacks.placement import ParamSpec
from ..step.spikes import SpikeCheck, require_same_ranks
from ..step.step import ParamSet
from ..write.averaging import Mode
from ..write.write import is_number
from .shown_state import ShownState, fill, host_changes, own_state, refuse, show

StateValues = Mapping[Tensor, Mapping[str, Tensor]]
"""State by parameter and state key."""


@dataclass(eq=False)
class GroupBatch:
    """Param groups that were added together. They share parameter sets, and their blocks get owners together.

    groups: the groups.
    loads: for each set of ranks that share parameters, the bytes of state and the work of each rank, as in
        `assign_owners`. Blocks of this batch and of all earlier batches are counted.
    sets: the parameter sets. The list is empty until `ParamSets.install`.
    """

    groups: Sequence[ParamGroup]
    loads: dict[RankGroup, Loads]
    sets: Sequence[ParamSet] = ()

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups, in their order."""
        return [parameter for group in self.groups for parameter in group.parameters]


class ParamSets:
    """All parameter sets of an optimizer. Param groups that were added together form a batch, and share parameter sets.

    recipe: recipe that declares the updates.
    recipe_text: the recipe as JSON; every param group holds it.
    follows_peak: path of a part of the recipe that depends on the peak of the learning rate; None if no part does.
    checked: True if the contract of every stage is checked at every step.
    others: descriptions of parameters of the same model that other optimizers update.
    groups: all param groups, as they were when they were added.
    batches: the same groups in batches. Owners of blocks are assigned batch by batch.
    signals: signals that stages request.
    schedules: scheduled fields of stages.
    spikes: the check for spikes of losses or gradient norms. None: the recipe has no such check.
    skip_counts: number of unusable gradients by name of the parameter, as far as the host has read the checks.
    needs_signals: True if a step needs any signal.
    consolidated: entry "state" of state dicts after `consolidate`: the full state, or an empty `ShardedStateDict` on
        ranks that did not receive it. None: `consolidate` was not called, or the state has changed since.
    """

    def __init__(self, recipe: Recipe, checked: bool, others: Sequence[ParamInfo]) -> None:
        self.recipe, self.checked, self.others = recipe, checked, others
        self.recipe_text, self.follows_peak = recipe.to_json(), recipe.follows_peak()
        self.groups, self.batches = list[ParamGroup](), list[GroupBatch]()
        self.consolidated: dict[str, Any] | None = None
        self.skip_counts = Counter[str]()
        self.needs_signals = False
        self._shown = ShownState({}, [], [])
        self.signals, self.schedules = Signals(recipe), Schedules(recipe)
        self.spikes = None if recipe.failure.spike is None else SpikeCheck(recipe.failure.spike)
        self._assignments = Assignments(recipe, others)

    def __iter__(self) -> Iterator[ParamSet]:
        return chain.from_iterable(batch.sets for batch in self.batches)

    def declare_group(self, groups: Sequence[dict[str, Any]], known: Mapping[int, ParamInfo] | None) -> None:
        """Register the last of the param groups, and add entries such as `recipe` and `peak_lr` to it.

        known: descriptions of parameters by id; None: the descriptions are made from names and shapes.
        """
        group = groups[-1]
        check_values(group)
        rates = [float(group[key]) for key in ("lr", "initial_lr", "max_lr") if is_number(group.get(key))]
        group.setdefault("peak_lr", max(rates))  # a scheduler may have stored a larger rate than `lr`
        group["recipe"] = self.recipe_text
        group["iterate"] = groups[0]["iterate"] if len(groups) > 1 else "train"
        if known is None:
            named = list(zip(group.get("param_names", ()), group["params"], strict=False))
            known = describe_named(named, {info.name for info in self.infos if info.name is not None})
        infos = [known.get(id(parameter)) or describe_unnamed(parameter) for parameter in group["params"]]
        require_facts(self.recipe, infos)
        self.declare(group["params"], infos)

    def declare(
        self, parameters: Sequence[Tensor], infos: Sequence[ParamInfo], frozen: Sequence[bool] | None = None
    ) -> None:
        """Register a param group, and choose the update rule of each of its parameters.

        `complete` later creates the state, and assigns each block to its owner, the rank that computes its update.

        parameters: the parameters of the group.
        infos: description of each parameter.
        frozen: for each parameter, True if it counts as frozen. None: parameters with `requires_grad=False` are frozen.
        """
        self.groups.append(self._assignments.group(len(self.groups), parameters, infos, frozen))

    def assign(self, index: int) -> Mapping[RankGroup, Balance]:
        """Assign owners to the blocks of newly added param groups: the groups from `index` on.

        These groups are appended to `batches` as one `GroupBatch`, the record of param groups that were added together.

        Blocks of all groups, old and new, also get new phases. The phase of a block is the fraction of a refresh
        interval at which the block is refreshed.

        Return, for each set of ranks that share new parameters, how evenly its ranks divide the work.
        """
        before = self.batches[-1].loads if self.batches else {}
        batch = GroupBatch(self.groups[index:], {rank_group: deepcopy(loads) for rank_group, loads in before.items()})
        self.batches.append(batch)
        return self._assignments.assign(self.groups, batch.groups, batch.loads)

    def complete(self, index: int, groups: Sequence[Mapping[str, Any]], state: MutableMapping[Tensor, Any]) -> None:
        """Assign owners and create state for newly added param groups: the groups from `index` on.

        The new groups are processed together, as one batch, so that no result depends on the division of parameters
        into groups. `declare_group` must have registered these groups.

        groups: all param groups.
        state: the mapping `optimizer.state`, which receives the state of the new parameters.

        Raises:
            ValueError: ranks have different recipes or groups (on every rank), or the recipe needs sums over all
                parameters of a model and another optimizer updates some of these parameters.
        """
        for place in range(index, len(groups)):
            self._assignments.check(place, self.groups[place], groups[place])
        balances, batch = self.assign(index), self.batches[-1]
        self._assignments.require_same_owners(batch.groups, first=index == 0)
        if index == 0:
            self._assignments.warn_of_waiting(batch.groups, balances)
        param_sets = self.build(batch, {id(p) for p in batch.parameters if p.requires_grad})
        self.signals.require_all_parameters(param_sets, self.others)
        if self.spikes is not None:
            require_same_ranks([*self, *param_sets])
        self.install(batch, param_sets, state, groups[index]["iterate"])
        # new blocks also change the steps in which the blocks of earlier param groups are refreshed
        for param_set in chain.from_iterable(earlier.sets for earlier in self.batches[:-1]):
            phases = [self._assignments.phases[spec.key] for spec in param_set.specs]
            for one in param_set.stack_states:
                one.phases = np.array([phases[position][key] for _, position, key in one.rows()], dtype=np.float64)

    def forget(self, index: int) -> None:
        """Remove the groups from `index` on, after adding them has failed."""
        del self.groups[index:]
        self.batches = [batch for batch in self.batches if batch.groups[-1] in self.groups]
        self._assignments.set_phases(self.groups)

    def matches(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if parameters, their devices, dtypes and shapes are those for which the state was made."""
        return self.same_parameters(groups) and not self.changed()

    def same_parameters(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if the groups have the same parameters, in the same order, as when they were added."""
        return len(groups) == len(self.groups) and all(
            len(group["params"]) == len(own.parameters) and all(map(is_, group["params"], own.parameters))
            for group, own in zip(groups, self.groups, strict=True)
        )

    def changed(self) -> list[tuple[Tensor, ParamSpec]]:
        """Return the parameters that have another device, dtype or shape than when their state was made."""
        return [
            (parameter, spec)
            for param_set in self
            for parameter, spec in zip(param_set.real_parameters, param_set.specs, strict=True)
            if parameter.device != spec.device or parameter.dtype is not spec.dtype or parameter.shape != spec.shape
        ]

    def require_values(self) -> None:
        """Raise ValueError for parameters on the meta device, where a step or a load would change nothing."""
        for param_set in self:  # the parameters of a set are on one device
            first = param_set.parameters[0]
            if first.is_meta and fake_mode(first) is None:
                raise ValueError(
                    f"{param_set.names[0]}: a parameter with values is required, got one on the meta device; call "
                    "model.to_empty(device=...), which makes new parameters, and compose an optimizer of these, or put "
                    "them into param_groups"
                )

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [parameter for group in self.groups for parameter in group.parameters]

    @property
    def infos(self) -> list[ParamInfo]:
        """The descriptions of all parameters, in the order of the groups."""
        return [info for group in self.groups for info in group.infos]

    def rows(self) -> list[tuple[Tensor, ParamInfo]]:
        """Return all parameters with their descriptions, in the order of the groups."""
        return list(zip(self.parameters, self.infos, strict=True))

    def build(self, batch: GroupBatch, wanted: set[int]) -> list[ParamSet]:
        """Build parameter sets for a batch of param groups, from the parameters whose id is in `wanted`.

        The parameters of a batch form one set if they are on the same device and are shared by the same ranks.
        Parameters with a stage that requests the learning rate form separate sets for each param group.

        Raises:
            ValueError: parameters share memory, or the update of a complex parameter mixes entries.
        """
        found: dict[tuple[object, ...], list[tuple[Tensor, ParamSpec]]] = {}
        with_lr = {path for path, rule in self.recipe.rules().items() if "lr" in asking(rule.stages())}
        for group in batch.groups:
            for parameter, spec in zip(group.parameters, group.specs, strict=True):
                if id(parameter) in wanted:
                    if parameter.is_complex():
                        require_pairs(self.recipe, spec)
                    key = parameter.device, spec.rank_group, spec.group if spec.path in with_lr else None
                    here = spec if spec.device == parameter.device else replace(spec, device=parameter.device)
                    found.setdefault(key, []).append((parameter, here))
        earlier = (param_set for other in self.batches if other is not batch for param_set in other.sets)
        rows = [pair for one in earlier for pair in zip(one.parameters, one.specs, strict=True)]
        rows += chain.from_iterable(found.values())
        require_own_memory((spec.name, local(parameter)) for parameter, spec in rows)
        sets = [tuple(zip(*rows, strict=True)) for rows in found.values()]
        phases, counts = self._assignments.phases, self.skip_counts
        return [ParamSet(params, specs, self.recipe, phases, counts) for params, specs in sets]

    def install(
        self,
        batch: GroupBatch,
        param_sets: Sequence[ParamSet],
        state: MutableMapping[Tensor, Any],
        mode: Mode,
        values: StateValues | None = None,
    ) -> None:
        """Use new parameter sets for a batch of param groups that were added together, and show their state in
        `optimizer.state`.

        state: the mapping `optimizer.state`.
        mode: iterate that the parameters hold now.
        values: values to copy into the state, by parameter and key. None: the state keeps its initial values.
        """
        # delayed refreshes still write to the old state, with which `values` may share memory
        for old in batch.sets:
            old.finish_refreshes()
        for param_set in param_sets:
            param_set.iterates.hold(mode)
            for stack_state in param_set.stack_states if self.checked else ():
                stack_state.check()
            show(param_set, state)
            for parameter in param_set.parameters:
                fill(state[parameter], (values or {}).get(parameter, {}))
            param_set.note_counts()
        for old in batch.sets:
            if all(old is not new for new in param_sets):
                old.exchange.close()
        batch.sets = param_sets
        self.needs_signals = self.signals.asked_by(self)
        self.consolidated = None
        self._note_shown(state)

    def _note_shown(self, state: Mapping[Tensor, Any]) -> None:
        self._shown = ShownState(state, self, self.parameters)

    def begin_step(self, state: MutableMapping[Tensor, Any], taken: int | None = None) -> None:
        """Create state for thawed parameters, and set the scheduled numbers of the step in all parameter sets.

        taken: number of steps before this one. None: the largest step count of the parameters.
        """
        self._thaw(state)
        if self.schedules.by_path:
            self.schedules.follow(self, taken)

    def _thaw(self, state: MutableMapping[Tensor, Any]) -> None:
        """Create state for parameters with a gradient but no state: they were thawed, or their state was removed."""
        thawed = {id(p) for p in self._shown.missing if p.grad is not None}
        if not thawed:
            return
        # Apply the user's changes of `optimizer.state` before `install`. Changes are detected by comparison with a
        # record of the state, and `install` replaces this record by one of the changed state.
        self.follow(state, "train")
        for batch in self.batches:
            if any(id(p) in thawed for p in batch.parameters):
                for old in batch.sets:
                    old.resolve_deferred()
                owned = {p: state[p] for one in batch.sets for p in one.parameters}
                wanted = {id(p) for p in batch.parameters if p in owned or id(p) in thawed}
                self.install(batch, self.build(batch, wanted), state, "train", owned)

    def follow(
        self, state: MutableMapping[Tensor, Any], mode: Mode, thorough: bool = True, moved: bool = False
    ) -> None:
        """Apply changes that a user or framework made to `optimizer.state`. Every step and report begins with this.

        Changed values are copied into the stacks. A parameter whose entry was emptied or removed has no state until its
        next gradient, with which it starts again.

        mode: the iterate, for training or for evaluation, that the parameters hold.
        thorough: True to compare the addresses and versions of all tensors, False to compare only those of the largest
            tensors.
        moved: True to build the stacks again on the present devices of the parameters.

        Raises:
            ValueError: a value cannot be state. Then no change is applied.
        """
        if not moved and self._shown.is_held(state, thorough) and not any(one.any_count_set_back() for one in self):
            return
        for param_set in self:
            if param_set.offloaded is not None:
                param_set.offloaded.finish()
        plans = []
        for batch in self.batches:
            given = {id(p) for p in batch.parameters if own_state(state.get(p))}
            rebuilt = moved or given != {id(p) for one in batch.sets for p in one.parameters}
            for old in batch.sets if rebuilt else ():
                old.resolve_deferred()
            own = self.build(batch, given) if rebuilt else batch.sets
            plans.append((batch, rebuilt, [host_changes(one, state, self._shown, mode, rebuilt) for one in own]))
        refuse(one for _, _, changes in plans for one in changes)
        for batch, rebuilt, changes in plans:
            if rebuilt:
                pairs = [pair for one in changes for pair in zip(one.param_set.parameters, one.values, strict=True)]
                self.install(batch, [one.param_set for one in changes], state, mode, dict(pairs))
            for one in changes:
                if not rebuilt:
                    one.copy()
                one.restart()
                if one.replaced and not rebuilt:
                    show(one.param_set, state)
        for parameter in self.parameters:
            if parameter in state and not state[parameter]:
                del state[parameter]
        self.consolidated = None
        self._note_shown(state)

    def resolve_deferred(self) -> None:
        """Set back the step count of each parameter that the last step did not update, for example because its gradient
        was not finite.

        The checks of that step, made on the device, say which parameters these are.
        """
        for param_set in self:
            param_set.resolve_deferred()

    def finish_refreshes(self) -> None:
        """Wait for all delayed refreshes that have begun, and store their results in the state.

        A delayed refresh takes effect some steps after it began. Until then, a separate slot (of role "pending")
        stores its result.
        """
        for param_set in self:
            param_set.finish_refreshes()

    def store_spikes(self, groups: Iterable[dict[str, Any]]) -> None:
        """Store the window of the spike check in the param groups, so that checkpoints contain it.

        The window has the last losses or gradient norms, with which the next one is compared.
        """
        if self.spikes is not None:
            text = self.spikes.to_text()
            for group in groups:
                group["spikes"] = text

    def read_spikes(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace the window of the spike check by the one that `store_spikes` stored in the groups of a checkpoint.

        groups: param groups after a checkpoint was loaded.
        """
        if self.spikes is not None:
            self.spikes.read(next((group["spikes"] for group in groups if "spikes" in group), None))

    def swap_iterate(self, mode: Mode, state: MutableMapping[Tensor, Any]) -> None:
        """Write the iterate of a mode (training or evaluation) into all parameters."""
        self.resolve_deferred()
        self.consolidated = None
        for param_set in self:
            param_set.swap_iterate(mode)
            show(param_set, state)
        self._note_shown(state)

    def skipped(self) -> Counter[str]:
        """Return the number of updates that were skipped because of the gradient, by name of the parameter.

        Such a gradient is not finite, or too large to be squared.
        """
        self.resolve_deferred()
        return self.skip_counts.copy()


def require_pairs(recipe: Recipe, spec: ParamSpec) -> None:
    """Raise ValueError unless a complex parameter can be updated as pairs of real numbers, as in torch's optimizers.

    Entry-wise chains can update such pairs. Stages on matrices, and constraints, would mix real and imaginary parts.
    """
    rule = recipe.rules()[spec.path]
    mixing = next((path for path, stage in rule.stages(spec.path) if not stage.cached_traits().entrywise), None)
    if mixing is None and rule.constraints:
        mixing = dotted(spec.path, "constraints")
    if mixing is None and recipe.line_search is not None:
        mixing = "line_search"
    if mixing is None and spec.rank_group is None:
        return
    fault = "ranks hold shards of it" if mixing is None else f"{mixing} does not update entries one by one"
    raise ValueError(
        f"{spec.name}: the parameter is complex, and {fault}; send it to an entry-wise update with a route, or store "
        "torch.view_as_real of it as the parameter and apply torch.view_as_complex in the forward"
    )
