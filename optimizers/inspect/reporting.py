"""Tables of what an optimizer does with each parameter and what its state takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from eigengraft.errors import name_some

from ..isolation import isolated
from ..recipe.recipe import Recipe
from ..signals.signals import steps_taken
from ..stacks.placement import lr_factors
from ..stacks.stack import StackState
from ..state.param_sets import ParamSets
from ..state.shown_state import own_state
from ..write.averaging import Mode
from .inspect import Watched, inspect, watch_next_step
from .left_out import left_out
from .reached import Reached, reached
from .sizes import SlotSize, slot_bytes, slot_sizes
from .solvers import solver_choices
from .speed import fallbacks, slow_products
from .table import Inspection, Measurement


@dataclass(frozen=True)
class RoutedParameter:
    """Where one parameter went, and why.

    name, shape: the parameter's.
    route: path of the route that took it; "" is the recipe's own update.
    reason: why that route took it.
    view: which matrices it is seen as, and why; "" for one tensor that nobody had to decide about.
    blocks: shapes of its blocks.
    state_bytes: bytes of all its state.
    left_out: what stages leave alone of its blocks, and why, each once: axes that are too long for a factor.
    fallbacks: why its steps are not compiled, not fused, or not taken in chunks, though this is asked for or worth it.
    lr_factors: what `lr_scale` multiplies the directions of its matrices by, each once; (): nothing.
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
    """Where each parameter went and why, in the order of the groups; state: of each parameter, by state key."""
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
    """A few lines: the recipe, how many parameters went where, the output heads, averaging, each group, the bytes."""
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
    fused = [own for each in param_sets for own in each.stack_states if each.execution(own).adam is not None]
    if fused:
        lines.append(
            f"  fused: steps of {sum(len(own.stack.grids) for own in fused)} parameters by torch's kernel of Adam"
        )
    if any(update.compile for update in recipe.updates().values()):
        compiled = [own for each in param_sets for own in each.stack_states if each.execution(own).compiled]
        kernels = sum(len(own.stack.grids) for own in compiled)
        lines.append(
            f"  compiled: steps of {kernels} parameters; `fallbacks` in routing_table() says why others are not"
        )
    lines += (f"  {line}" for line in solver_choices(own for each in param_sets for own in each.stack_states))
    for path, value in param_sets.schedules.values(steps_taken(param_sets)).items():
        lines.append(f"  {path}: {value:g}, scheduled")
    return "\n".join([*lines, f"  state: {state_bytes} bytes)"])


class Reporting:
    """What an optimizer tells of itself; nothing here changes a number.

    watched_rows: what the last watched step was seen to do.
    """

    recipe: Recipe
    param_sets: ParamSets
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    watched_rows: tuple[Measurement, ...] = ()

    def _settle(self, thorough: bool = True) -> None:
        """Takes over what a host has changed, before state is read."""
        raise NotImplementedError

    @property
    def iterate(self) -> Mode:
        """Which iterate the parameters hold."""
        raise NotImplementedError

    @isolated
    def watch_next_step(self: Watched) -> None:
        """Measures what each stage does in the next step, for `inspect`; that step takes longer, no number changes."""
        watch_next_step(self)

    @isolated
    def inspect(self) -> Inspection:
        """Measures of every stage and block: of the state as it is now, and of the step that was watched last.

        Ranks that share parameters call it together; each gets the rows of all of them. Nothing is kept for it, and a
        step that is not watched costs what it cost without.
        """
        self._settle()
        return inspect(self.param_sets, self.watched_rows)

    @property
    @isolated
    def skipped(self) -> Counter[str]:
        """How often each parameter was left alone because its gradient was not finite, by name."""
        return self.param_sets.skipped()

    def routing_table(self) -> list[RoutedParameter]:
        """Where each parameter went and why, in the order of the groups."""
        return routing_table(self.param_sets, self.state)

    def reached(self) -> list[Reached]:
        """What the routes make of each expectation of the recipe."""
        return reached(self.recipe, chain(self.param_sets.others, *self.param_sets.infos))

    def slow_products(self) -> list[str]:
        """What the recipe asks to be multiplied in bfloat16 on devices without instructions for it, a line for each."""
        devices = (stack_state.stack.device for stack_state in self.stack_states())
        return list(slow_products(self.recipe, devices))

    def solver_choices(self, device: str | None = None) -> list[str]:
        """A line for each solver that is chosen by device and each order of its matrices, with the times that decided.

        device: type of the accelerator to choose for; default: that of the parameters, where a CPU has no choice.
        """
        return list(solver_choices(self.stack_states(), device))

    def slot_sizes(self) -> list[SlotSize]:
        """Bytes that each slot was declared to take, and bytes that it takes in its storage."""
        return slot_sizes(self.stack_states(), self.state.values())

    def stack_states(self) -> list[StackState]:
        """The stacks with their state."""
        return [stack_state for param_set in self.param_sets for stack_state in param_set.stack_states]

    def state_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(slot_bytes(state) for state in self.state.values())

    def __repr__(self) -> str:
        return describe(self.param_sets, self.param_groups, self.iterate, self.state_bytes())
