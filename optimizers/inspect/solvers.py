"""Solvers that are chosen for the device of their matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from eigengraft.preconditioners.roots import ByDevice

from ..stacks.stack import StackState


def solver_choices(stack_states: Iterable[StackState], device: str | None = None) -> Iterator[str]:
    """Yield a line for each solver that is chosen by device, and each order of its matrices.

    device: type of the accelerator to choose for; None: that of each stack, where a CPU has nothing to choose.
    A line holds the path of the solver, the solver that is taken, those that are not, and the times that decided.
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
