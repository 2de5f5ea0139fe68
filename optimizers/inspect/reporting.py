"""Reports of an optimizer about itself: routes and their parameters, bytes of state, slow steps, chosen solvers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch

from eigengraft.component import components_in
from eigengraft.errors import counted, name_some
from eigengraft.numerics import has_fast_bfloat16
from eigengraft.preconditioners import Stages
from eigengraft.preconditioners.base import walk_blocks
from eigengraft.preconditioners.roots import ByDevice
from eigengraft.slots import StateKey

from ..isolation import isolated
from ..recipe.expect import Reached
from ..recipe.recipe import Recipe
from ..signals.signals import steps_taken
from ..stacks.stack import StackState
from ..state.param_sets import ParamSets
from ..state.shown_state import own_state
from ..step.execution import Chunks, Entries, Fused
from ..step.spikes import SpikeCounts
from ..step.step import ParamSet
from ..write.averaging import Mode
from ..write.write import Hyper
from .inspect import inspect, watch_next_step
from .table import Inspection, Measurement


@dataclass(frozen=True)
class RoutedParameter:
    """The route of one parameter, the reason for it, and its effects: blocks, bytes of state, and speed of the step.

    name: name of the parameter.
    shape: global shape of the parameter.
    route: path of the route that matched; "" is the recipe's own update.
    reason: why that route matched.
    view: the matrices that the parameter is viewed as, and why; "" if the tensor is used as it is.
    blocks: shapes of the parameter's blocks.
    state_bytes: bytes of all state of the parameter.
    width_factors: distinct factors by which `width_scaling` multiplies updates of the parameter's matrices; () if it
        multiplies none.
    left_out: a text for each axis that the stages do not precondition, with the reason.
    fallbacks: a text for each faster way that the step of the parameter does not use, with the reason. Such a way is a
        compiled program if the recipe has `compile`, a fused kernel if the chain is Adam's, and chunks if the parameter
        is large enough.
    """

    name: str
    shape: tuple[int, ...]
    route: str
    reason: str
    view: str
    blocks: tuple[tuple[int, ...], ...]
    state_bytes: int
    width_factors: tuple[float, ...] = ()
    left_out: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()


def left_out(stages: Stages, blocks: Iterable[tuple[int, ...]]) -> tuple[str, ...]:
    """Return one text for each axis that the stages of a chain do not precondition, with the reason.

    blocks: shapes of blocks. Repeated shapes are ignored.
    """
    shapes = dict.fromkeys(blocks)
    seen = ((block, stage.cached_traits(own)) for block in shapes for _, stage, own in walk_blocks(stages, block))
    found = (f"{'x'.join(map(str, block))}: {text}" for block, traits in seen for text in traits.left_out)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class SlotSize:
    """Bytes of one slot, summed over all parameters that have it.

    key: "<stage path>/<slot>"; for state that belongs to no stack, its key in the state dict ("averaging/<slot>").
    role: role of the slot.
    storage: kind of the slot's quantizer; "" if the slot is not quantized.
    declared: bytes of the slot in the dtype in which it is computed.
    stored: bytes of the slot in its storage.
    location: memory of an offloaded slot between steps, "cpu" or "disk"; "" for the memory of its device.
    """

    key: str
    role: str
    storage: str
    declared: int
    stored: int
    location: str = ""


def slot_bytes(state: Any) -> int:
    """Return the bytes of one parameter's state, without entries that other libraries have added to the state."""
    return sum(slot.numel() * slot.element_size() for slot in own_state(state).values())


def fallbacks(param_set: ParamSet) -> dict[int, tuple[str, ...]]:
    """Return the reasons, by position of a parameter, why its step is not compiled, not fused or not run in chunks."""
    found: dict[int, dict[str, None]] = {}
    for own in param_set.stack_states:
        for position in dict.fromkeys(own.stack.param_ids.tolist()):
            for reason in _fallbacks(own, param_set, position):
                found.setdefault(position, {})[reason] = None
    return {position: tuple(reasons) for position, reasons in found.items()}


def _fallbacks(own: StackState, param_set: ParamSet, position: int) -> Iterator[str]:
    how, way = param_set.execution(own), "compiled" if own.rule.compile else "in chunks"
    for other, reason in how.why_not.items():
        yield f"not {other}: {reason}"
    if isinstance(how, (Chunks, Entries)) and not param_set.own_entries[position].is_contiguous():
        yield f"not {way}: it is not contiguous"
    if param_set.recipe.compile and not own.rule.compile and not isinstance(how, Fused):
        yield f"not compiled: {own.path}.compile is not set, and compile of the recipe is not for parameters of routes"


def unfused_warning(param_sets: Iterable[ParamSet]) -> str:
    """Return a warning if there are parameters that no fused kernel updates despite `fused=True`, else ""."""
    found = dict[str, str]()
    for each in param_sets:
        for own in each.stack_states:
            if not isinstance(how := each.execution(own), Fused):
                names = (each.names[position] for position in own.stack.param_ids.tolist())
                found |= dict.fromkeys(names, how.why_not.get("fused", "its chain is not Adam's"))
    why = next(iter(found.values()), "")
    return f"fused=True has no effect on {name_some([*found], 1)}: {why}" if found else ""


class Released(Protocol):
    """The object that updates parameters during backward (`eigengraft.release`), as far as the optimizer uses it."""

    @property
    def stepped(self) -> Sequence[str]:
        """Names of the parameters that were updated in the present backward."""

    def finish(self) -> tuple[list[Hyper], int] | None:
        """End the part of the present step that ran during backward. `Optimizer.step` updates the other parameters.

        Return (values of the param groups that the updates used, number of steps before this one), or None if backward
        updated no parameter.
        """


class ComposedOptimizer(torch.optim.Optimizer):
    """A torch optimizer with a recipe and parameter sets, and the methods by which it reports about itself.

    None of these methods changes the result of a step.

    state: state by parameter, and entries that a user adds under other keys.
    watched_rows: measurements of the last step for which `watch_next_step` was called.
    released: the object that updates parameters during backward. None: `step` updates all parameters.
    """

    recipe: Recipe
    param_sets: ParamSets
    state: defaultdict[Any, Any]
    watched_rows: Sequence[Measurement] = ()
    released: Released | None = None

    def _adopt_changes(self, thorough: bool = True) -> None:
        """Adopt changes that other code made to parameters and state. Reports call this before they read state.

        thorough: True to check all state for changes and to finish delayed refreshes, False to check only the largest
            tensors.
        """
        raise NotImplementedError

    @property
    def iterate(self) -> Mode:
        """The iterate that the parameters hold, "train" or "eval"."""
        raise NotImplementedError

    @isolated
    def watch_next_step(self) -> None:
        """Measure the directions of every stage in the next step, for `inspect`.

        The watched step takes longer, but has the result of an ordinary step.

        Raises:
            ValueError: a parameter is a fake tensor, which has no values, or gradients are released during backward.
        """
        if self.released is not None:
            raise ValueError(
                "watch_next_step: cannot be combined with eigengraft.release, by which parameters step during "
                "backward; call remove() of the release before the steps that you watch"
            )
        watch_next_step(self, self.param_sets, partial(setattr, self, "watched_rows"))

    @isolated
    def inspect(self) -> Inspection:
        """Return measurements of every stage and block.

        Measurements of state are of the present state. Measurements of directions are of the last step for which
        `watch_next_step` was called. Other steps cost nothing extra.

        Ranks that share parameters must call it together. Each rank receives the measurements of all ranks.

        Raises:
            ValueError: a parameter is a fake tensor, which has no values.
        """
        self._adopt_changes()
        return inspect(self.param_sets, self.watched_rows)

    @property
    @isolated
    def skipped(self) -> Counter[str]:
        """Return the number of skipped updates, by name of the parameter.

        An update is skipped if the gradient is not finite, or too large to be squared.
        """
        return self.param_sets.skipped()

    @property
    @isolated
    def spikes(self) -> SpikeCounts | None:
        """Return the number of spikes, and the mean, deviation and bound of the loss or gradient norm in recent steps.

        None: the recipe has no `failure.spike`. On a device the host waits for the numbers.
        """
        return None if self.param_sets.spikes is None else self.param_sets.spikes.counts()

    def routing_table(self) -> list[RoutedParameter]:
        """Return the route of each parameter, with the reason, in the order of the param groups."""
        sets, recipe, rows, slower = self.param_sets, self.recipe, [], dict[int, tuple[str, ...]]()
        for each in sets:
            slower.update({id(each.parameters[position]): why for position, why in fallbacks(each).items()})
        for group in sets.groups:
            for parameter, info, name in zip(group.parameters, group.infos, group.names, strict=True):
                (route, reason), view, held = recipe.route(info), recipe.view_of(info), self.state.get(parameter, {})
                rule = recipe.rules()[route]
                blocks = [grid.shape for grid in rule.blocking.grids(info.shape, view.matrices) for _ in grid.keys]
                if not parameter.requires_grad and not own_state(held):
                    reason += "; frozen, no state"
                row = RoutedParameter(
                    name=name,
                    shape=info.shape,
                    route=route,
                    reason=reason,
                    view=view.describe(info.shape),
                    blocks=tuple(blocks),
                    state_bytes=slot_bytes(held),
                    width_factors=tuple(dict.fromkeys(recipe.width_factors(info))),
                    left_out=left_out(rule.update, blocks),
                    fallbacks=slower.get(id(parameter), ()),
                )
                rows.append(row)
        return rows

    def reached(self) -> list[Reached]:
        """Return, for each entry of `expect` in the recipe, the share of the model that its stage or route receives."""
        return self.recipe.reached([*self.param_sets.others, *self.param_sets.infos])

    def slow_products(self) -> list[str]:
        """Return a line for each device without instructions for bfloat16 products, if the recipe has such products."""
        parts = components_in(self.recipe)
        fields = ", ".join(f"{path}.precision" for path, part in parts if getattr(part, "precision", "") == "bfloat16")
        devices = dict.fromkeys(stack_state.stack.device for stack_state in self.stack_states())
        return [
            f"{fields}: bfloat16 saves no time here, because this {device.type} has no instructions for bfloat16 "
            "products; the products are computed in float32 from the rounded numbers"
            for device in (devices if fields else ())
            if has_fast_bfloat16(device) is False
        ]

    def solver_choices(self, device: str | None = None) -> list[str]:
        """Return a line for each solver that is chosen by device, and for each size of the matrices that it solves.

        A line has the path in the recipe, the chosen solver, the other candidates, and the times that decided.

        Args:
            device: type of the accelerator to choose for, such as "cuda". None means the device of the parameters. For
                a CPU no solver is chosen by device, and the result is empty.
        """
        found: dict[tuple[str, int, str], str] = {}
        for own in self.stack_states():
            place, dtype = device or own.stack.device.type, own.stack.dtype
            matrices = [(key.stage, slot.shape) for key, slot in own.slots() if slot.role in ("root", "basis")]
            for path, stage in own.rule.stages(own.path) if place != "cpu" else ():
                for name, solver in stage:
                    if isinstance(solver, ByDevice) and solver.by_device:
                        for order in {shape[0] for where, shape in matrices if where == path and len(shape) == 2}:
                            found[f"{path}.{name}", order, place] = solver.choice(place, order, dtype)
        return [f"{path}, order {order} on {place}: {text}" for (path, order, place), text in sorted(found.items())]

    def delays(self) -> list[str]:
        """Return a line for each stage whose refreshes are delayed: the delay, and where refreshes are computed."""
        found = dict[str, None]()
        for own in self.stack_states():
            if (refreshes := own.refreshes) is None:
                continue
            for path, cadence in own.rule.cadences(own.path).items():
                if cadence.postponed:
                    found[f"{path}: a refresh takes effect after {cadence.postponed} updates; {refreshes.place}"] = None
        return list(found)

    def slot_sizes(self) -> list[SlotSize]:
        """Return the declared and the stored bytes of each slot, summed over all parameters.

        The slots of stages come first, in the order of the chains. Averaged iterates and counts of steps come last.
        """
        found: dict[tuple[str, str, str, str], list[int]] = {}
        for own in self.stack_states():
            for key, stored in own.stored_slots().items():
                slot, place = stored.slot, stored.place(own.stack.device)
                location = "" if place is None else place.to
                kind = str(getattr(stored.codec, "kind", ""))
                declared = len(own.stack.param_ids) * math.prod(slot.shape) * stored.dtype.itemsize
                sizes = found.setdefault((str(key), slot.role, kind, location), [0, 0])
                sizes[0] += declared
                sizes[1] += sum(tensor.nbytes for tensor in own.stored(key))
        for text, tensor in chain.from_iterable(own_state(state).items() for state in self.state.values()):
            if StateKey.parse(text).block is None:
                sizes = found.setdefault((text, "count" if text == "step" else "iterate", "", ""), [0, 0])
                sizes[0], sizes[1] = sizes[0] + tensor.nbytes, sizes[1] + tensor.nbytes
        return [
            SlotSize(key, role, storage, declared, stored, location)
            for (key, role, storage, location), (declared, stored) in found.items()
        ]

    def offloaded_bytes(self) -> dict[str, int]:
        """Return the bytes of the slots that are in host memory between steps, by location: "cpu" or "disk".

        Each step copies these bytes to the device and back. Slots of parameters on a CPU do not count as offloaded to
        "cpu", because they are in host memory anyway.
        """
        found = Counter[str]()
        for row in self.slot_sizes():
            if row.location:
                found[row.location] += row.stored
        return dict(found)

    def stack_states(self) -> list[StackState]:
        """Return all stacks with their state."""
        return [stack_state for param_set in self.param_sets for stack_state in param_set.stack_states]

    def state_bytes(self) -> int:
        """Return the bytes of all state tensors."""
        return sum(slot_bytes(state) for state in self.state.values())

    def __repr__(self) -> str:
        recipe, sets = self.recipe, self.param_sets
        routes = Counter(recipe.route(info)[0] or "update" for info in sets.infos)
        where = ", ".join(f"{count} parameter{'s' * (count != 1)} by {path}" for path, count in routes.items())
        lines = [f"Optimizer(recipe={recipe.name or 'unnamed'}: {where}"]
        heads = [f"{info.name} ({info.why})" for info in sets.infos if info.role == "head"]
        heads = heads or [f"none found, perhaps {info.name}" for info in sets.infos if info.unclear]
        if heads and any("head" in route.match.role for route in recipe.routes):
            lines.append(f"  output heads: {name_some(heads, 3)}")
        if recipe.averaging is not None:
            kind = getattr(recipe.averaging, "kind")  # noqa: B009  every member has a kind, the family has none
            lines.append(f"  averaging: {kind}, the parameters hold the iterate to {self.iterate}")
        for index, group in enumerate(self.param_groups):
            routes = Counter(recipe.route(info)[0] or "update" for info in sets.groups[index].infos)
            where = ", ".join(f"{count} by {path}" for path, count in routes.items())
            rates = f"lr={float(group['lr']):g}, weight_decay={float(group['weight_decay']):g}"
            lines.append(f"  group {index}: {counted(len(group['params']), 'parameter')} ({where}), {rates}")
        hows = [(len(own.stack.grids), each.execution(own)) for each in sets for own in each.stack_states]
        if any(rule.compile for rule in recipe.rules().values()):
            count = sum(count for count, how in hows if how.compiled)
            why = "`fallbacks` in routing_table() says why others are not"
            lines.append(f"  compiled: steps of {counted(count, 'parameter')}; {why}")
        if count := sum(count for count, how in hows if isinstance(how, Fused)):
            lines.append(f"  fused: steps of {counted(count, 'parameter')} by torch's kernel of Adam")
        lines += (f"  {line}" for each in sets if each.graphs is not None for line in each.graphs.lines())
        lines += (f"  {line}" for line in (*self.solver_choices(), *self.delays()))
        if skipped := self.skipped:
            what = f"{counted(skipped.total(), 'update')} of {counted(len(skipped), 'parameter')}"
            lines.append(f"  skipped: {what}, whose gradients were not finite or too large to be squared")
        if sets.spikes is not None and (found := self.spikes) is not None:
            lines.append(f"  spikes: {sets.spikes.rule.describe(*found)}")
        for path, value in sets.schedules.values(steps_taken(sets)).items():
            lines.append(f"  {path}: {value:g}, scheduled")
        moved = "".join(f", {size} of them on {place}" for place, size in self.offloaded_bytes().items())
        return "\n".join([*lines, f"  state: {self.state_bytes()} bytes{moved})"])
