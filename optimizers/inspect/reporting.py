"""Reports of an optimizer about itself: routes, bytes of state, steps that run slower than asked, chosen solvers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from eigengraft.component import Component
from eigengraft.errors import name_some, stage_name
from eigengraft.numerics import has_fast_bfloat16
from eigengraft.preconditioners import Stages
from eigengraft.preconditioners.base import walk_blocks
from eigengraft.preconditioners.roots import ByDevice
from eigengraft.slots import StateKey

from ..isolation import isolated
from ..recipe.recipe import Recipe
from ..signals.signals import steps_taken
from ..stacks.placement import lr_factors
from ..stacks.stack import StackState
from ..state.param_sets import ParamSets
from ..state.shown_state import own_state
from ..step.step import ParamSet
from ..write.averaging import Mode
from .inspect import Watched, inspect, watch_next_step
from .reached import Reached, reached
from .table import Inspection, Measurement


@dataclass(frozen=True)
class RoutedParameter:
    """The route of one parameter, with the reason, and what follows from it.

    name: name of the parameter.
    shape: global shape of the parameter.
    route: path of the route that matched; "" is the recipe's own update.
    reason: why that route matched.
    view: the matrices that the parameter is viewed as, and why; "" if the tensor is used as it is.
    blocks: shapes of its blocks.
    state_bytes: bytes of all its state.
    lr_factors: distinct factors by which `lr_scale` multiplies the directions of its matrices; () for none.
    left_out: axes that have no factor, because they are too long, with the reason.
    fallbacks: reasons why its step is not compiled although the recipe asks for it, not fused although it is Adam's
        chain, or not run in chunks although the parameter is large enough.
    """

    name: str
    shape: tuple[int, ...]
    route: str
    reason: str
    view: str
    blocks: tuple[tuple[int, ...], ...]
    state_bytes: int
    lr_factors: tuple[float, ...] = ()
    left_out: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()


def routing_table(param_sets: ParamSets, state: Mapping[Tensor, Mapping[str, Tensor]]) -> list[RoutedParameter]:
    """Return the route of each parameter in the order of the groups. state: of each parameter, by state key."""
    rows, slower = [], dict[int, tuple[str, ...]]()
    for each in param_sets:
        slower.update({id(each.parameters[position]): why for position, why in fallbacks(each).items()})
    for index, infos in enumerate(param_sets.infos):
        labels, parameters = param_sets.labels(index), param_sets.parameters[index]
        for parameter, info, label in zip(parameters, infos, labels, strict=True):
            route, reason = param_sets.recipe.route(info)
            view = param_sets.recipe.view_of(info)
            grids = param_sets.recipe.updates()[route].blocking.grids(info.shape, view.matrices)
            blocks = tuple(grid.shape for grid in grids for _ in grid.keys)
            if not parameter.requires_grad and not own_state(state.get(parameter)):
                reason += "; frozen, no state"
            size = slot_bytes(state.get(parameter, {}))
            factors = tuple(dict.fromkeys(lr_factors(param_sets.recipe, info)))
            left = left_out(param_sets.recipe.updates()[route].update, blocks)
            seen = view.describe(info.shape)
            why = slower.get(id(parameter), ())
            rows.append(RoutedParameter(label, info.shape, route, reason, seen, blocks, size, factors, left, why))
    return rows


def describe(param_sets: ParamSets, groups: Sequence[Mapping[str, Any]], iterate: Mode, state_bytes: int) -> str:
    """Return the text of `print(optimizer)`: recipe, routes, output heads, averaging, groups, solvers and bytes."""
    recipe = param_sets.recipe
    routes = Counter(recipe.route(info)[0] or "update" for infos in param_sets.infos for info in infos)
    where = ", ".join(f"{count} parameter{'s' * (count != 1)} by {path}" for path, count in routes.items())
    lines = [f"Optimizer(recipe={recipe.name or 'unnamed'}: {where}"]
    heads = [f"{info.name} ({info.why})" for infos in param_sets.infos for info in infos if info.role == "head"]
    heads = heads or [f"none found, perhaps {info.name}" for own in param_sets.infos for info in own if info.unclear]
    if heads and any("head" in route.match.role for route in recipe.routes):
        lines.append(f"  output heads: {name_some(heads, 3)}")
    if recipe.averaging is not None:
        kind = getattr(recipe.averaging, "kind")  # noqa: B009  every member has a kind, the family has none
        lines.append(f"  averaging: {kind}, the parameters hold the iterate to {iterate}")
    for index, group in enumerate(groups):
        own = Counter(recipe.route(info)[0] or "update" for info in param_sets.infos[index])
        where = ", ".join(f"{count} by {path}" for path, count in own.items())
        rates = f"lr={float(group['lr']):g}, weight_decay={float(group['weight_decay']):g}"
        lines.append(f"  group {index}: {len(group['params'])} parameters ({where}), {rates}")
    if any(update.compile for update in recipe.updates().values()):
        compiled = [own for each in param_sets for own in each.stack_states if each.execution(own).compiled]
        kernels = sum(len(own.stack.grids) for own in compiled)
        lines.append(
            f"  compiled: steps of {kernels} parameters; `fallbacks` in routing_table() says why others are not"
        )
    fused = [own for each in param_sets for own in each.stack_states if each.execution(own).adam is not None]
    if fused:
        lines.append(
            f"  fused: steps of {sum(len(own.stack.grids) for own in fused)} parameters by torch's kernel of Adam"
        )
    lines += (f"  {line}" for each in param_sets if each.graphs is not None for line in each.graphs.lines())
    lines += (f"  {line}" for line in solver_choices(own for each in param_sets for own in each.stack_states))
    for path, value in param_sets.schedules.values(steps_taken(param_sets)).items():
        lines.append(f"  {path}: {value:g}, scheduled")
    return "\n".join([*lines, f"  state: {state_bytes} bytes)"])


class Reporting:
    """The methods by which an optimizer reports about itself. None of them changes a trajectory.

    watched_rows: measurements of the step that was watched last.
    """

    recipe: Recipe
    param_sets: ParamSets
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    watched_rows: tuple[Measurement, ...] = ()

    def _settle(self, thorough: bool = True) -> None:
        """Apply changes that a host made to parameters and state. It is called before state is read."""
        raise NotImplementedError

    @property
    def iterate(self) -> Mode:
        """Return which iterate the parameters hold: the one of training or the one of evaluation."""
        raise NotImplementedError

    @isolated
    def watch_next_step(self: Watched) -> None:
        """Measure the directions of every stage in the next step, for `inspect`.

        That step takes longer, and its result is the same.

        Raises:
            ValueError: a parameter is a fake tensor, which has no values.
        """
        watch_next_step(self)

    @isolated
    def inspect(self) -> Inspection:
        """Return measurements of every stage and block: of the present state and of the step that was watched last.

        Ranks that share parameters must call it together. Each rank receives the rows of all ranks. Steps that are not
        watched cost nothing extra.

        Raises:
            ValueError: a parameter is a fake tensor, which has no values.
        """
        self._settle()
        return inspect(self.param_sets, self.watched_rows)

    @property
    @isolated
    def skipped(self) -> Counter[str]:
        """Return how many updates of each parameter, by name, were skipped because its gradient was not finite."""
        return self.param_sets.skipped()

    def routing_table(self) -> list[RoutedParameter]:
        """Return the route of each parameter, with the reason, in the order of the param groups."""
        return routing_table(self.param_sets, self.state)

    def reached(self) -> list[Reached]:
        """Return, for each `expect` entry of the recipe, how much of the model its stage or route receives."""
        return reached(self.recipe, chain(self.param_sets.others, *self.param_sets.infos))

    def slow_products(self) -> list[str]:
        """Return a line for each device without instructions for the bfloat16 products that the recipe asks for."""
        devices = (stack_state.stack.device for stack_state in self.stack_states())
        return list(slow_products(self.recipe, devices))

    def solver_choices(self, device: str | None = None) -> list[str]:
        """Return a line for each solver that is chosen by device, and each order of its matrices, with the times.

        Args:
            device: type of the accelerator to choose for, such as "cuda". None means the device of the parameters. On
                a CPU there is no choice, and no line.
        """
        return list(solver_choices(self.stack_states(), device))

    def slot_sizes(self) -> list[SlotSize]:
        """Return the declared and the stored bytes of each slot, summed over all parameters."""
        return slot_sizes(self.stack_states(), self.state.values())

    def stack_states(self) -> list[StackState]:
        """Return all stacks with their state."""
        return [stack_state for param_set in self.param_sets for stack_state in param_set.stack_states]

    def state_bytes(self) -> int:
        """Return the bytes of all state tensors."""
        return sum(slot_bytes(state) for state in self.state.values())

    def __repr__(self) -> str:
        return describe(self.param_sets, self.param_groups, self.iterate, self.state_bytes())


def left_out(stages: Stages, blocks: Iterable[tuple[int, ...]]) -> tuple[str, ...]:
    """Return one text for each axis that the stages of a chain do not precondition, with the reason.

    blocks: shapes of blocks. Each shape, and each text, is listed once.
    """
    shapes = dict.fromkeys(blocks)
    seen = ((block, stage.cached_traits(own)) for block in shapes for _, stage, own in walk_blocks(stages, block))
    found = (f"{'x'.join(map(str, block))}: {text}" for block, traits in seen for text in traits.left_out)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class SlotSize:
    """Bytes of one slot, summed over all parameters that have it.

    key: "<stage path>/<slot>", or "averaging/<slot>" and the like.
    role: role of the slot.
    storage: kind of the slot's quantizer; "" without one.
    declared: bytes that the slot takes in the dtype in which it is computed.
    stored: bytes that the slot takes as it is stored.
    """

    key: str
    role: str
    storage: str
    declared: int
    stored: int


def slot_sizes(stack_states: Iterable[StackState], states: Iterable[Any]) -> list[SlotSize]:
    """Return the sizes of all slots in the order of the chains, then of iterates and counts, which belong to no stack.

    states: the state of each parameter, by state key.
    """
    found: dict[tuple[str, str, str], list[int]] = {}
    for stack_state in stack_states:
        for key, slot in stack_state.slots():
            coded = stack_state.encoded.get(str(key))
            kind = str(getattr(coded.codec, "kind", "")) if coded is not None else ""
            dtype = slot.dtype or stack_state.stack.dtype
            declared = len(stack_state.stack.param_ids) * math.prod(slot.shape) * dtype.itemsize
            stored = sum(tensor.numel() * tensor.element_size() for tensor in stack_state.stored(key))
            sizes = found.setdefault((str(key), slot.role, kind), [0, 0])
            sizes[0], sizes[1] = sizes[0] + declared, sizes[1] + stored
    for state in states:
        for text, tensor in own_state(state).items():
            if StateKey.parse(text).block is None:
                size = tensor.numel() * tensor.element_size()
                sizes = found.setdefault((text, "count" if text == "step" else "iterate", ""), [0, 0])
                sizes[0], sizes[1] = sizes[0] + size, sizes[1] + size
    return [SlotSize(*names, *sizes) for names, sizes in found.items()]


def slot_bytes(state: Any) -> int:
    """Return the bytes of one parameter's state, without entries that a host has put there."""
    return sum(slot.numel() * slot.element_size() for slot in own_state(state).values())


def solver_choices(stack_states: Iterable[StackState], device: str | None = None) -> Iterator[str]:
    """Yield a line for each solver that is chosen by device, and each order of its matrices.

    device: type of the accelerator to choose for. None means the device of each stack. On a CPU there is no choice,
        and no line.

    A line names the path in the recipe, the chosen solver, the other candidates, and the times that decided.
    """
    found: dict[tuple[str, int, str], str] = {}
    for own in stack_states:
        place, dtype = device or own.stack.device.type, own.stack.dtype
        matrices = [(key.stage, slot.shape) for key, slot in own.slots() if slot.role in ("root", "basis")]
        for path, stage in own.rule.stages(own.path) if place != "cpu" else ():
            for name, solver in stage:
                if isinstance(solver, ByDevice) and solver.by_device:
                    for order in {shape[0] for where, shape in matrices if where == path and len(shape) == 2}:
                        found[f"{path}.{name}", order, place] = solver.choice(place, order, dtype)
    for (path, order, place), text in sorted(found.items()):
        yield f"{path}, order {order} on {place}: {text}"


def fallbacks(param_set: ParamSet) -> dict[int, tuple[str, ...]]:
    """Return the reasons why a parameter's step runs slower than its recipe or its size suggests, by position.

    A reason says why the step is not compiled although the update asks for it, why it is not fused although it is
    Adam's chain, or why it is not run in chunks although the parameter is large enough to gain from chunks.
    """
    found: dict[int, dict[str, None]] = {}
    for own in param_set.stack_states:
        for position in dict.fromkeys(own.stack.param_ids.tolist()):
            for reason in _fallbacks(own, param_set, position):
                found.setdefault(position, {})[reason] = None
    return {position: tuple(reasons) for position, reasons in found.items()}


def _fallbacks(own: StackState, param_set: ParamSet, position: int) -> Iterator[str]:
    how, reason = param_set.execution(own), param_set.execution(own).reason
    if reason is None and (how.chunks or how.entries) and not param_set.local[position].is_contiguous():
        reason = "it is not contiguous"
    if how.not_fused is not None:
        yield f"not fused: {how.not_fused}"
    if reason is not None and (own.rule.compile or reason != how.not_fused):
        yield f"{'not compiled' if own.rule.compile else 'not in chunks'}: {reason}"


def slow_products(recipe: Recipe, devices: Iterable[torch.device]) -> Iterator[str]:
    """Yield a line for each device without instructions for bfloat16 products, if the recipe asks for such products."""
    asked = list(_in_bfloat16(recipe))
    for device in dict.fromkeys(devices) if asked else ():
        if has_fast_bfloat16(device) is False:
            yield (
                f"{', '.join(asked)}: bfloat16 saves no time here, because this {device.type} has no instructions for "
                "bfloat16 products; the products are computed in float32 from the rounded numbers"
            )


def _in_bfloat16(component: Component, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields `precision: bfloat16` of a component and of the components inside it."""
    for name, value in component:
        if name == "precision" and value == "bfloat16":
            yield f"{path}{name}"
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Component):
                inner = f"{name}.{stage_name(one)}" if isinstance(value, tuple) else name
                yield from _in_bfloat16(one, f"{path}{inner}.")
