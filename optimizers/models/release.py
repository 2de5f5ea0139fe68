"""Gradient release: parameters are updated during backward, as soon as their gradients are complete, and the gradients
are then freed.

A *unit* is a set of parameters that are updated together, so that each parameter gets the same bits as in an ordinary
step. If the update treats parameters one by one (Adam's fused kernel, chunks), a unit is one parameter. Otherwise a
unit has all parameters with blocks in the same stacks.

If ranks share parameters, the update of a unit has collectives. All ranks therefore have the same units, made from the
stacks of all ranks. The ranks update a unit at the same time, because backward completes gradients in the same order
on all ranks: under `fully_shard`, each gradient comes from a collective of its own or of its layer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from eigengraft.distributed.checks import by_value
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.errors import counted, name_some
from eigengraft.numerics import is_dtensor

from ..isolation import isolation, kept_from_compiler
from ..optimizer import Optimizer
from ..signals.signals import PER_STACK, steps_taken
from ..stacks.stack import connected
from ..step.step import ParamSet
from ..write.write import Hyper
from .arguments import require_watchable
from .gradient_sums import remove_hooks

RELEASED_SIGNALS = PER_STACK | {"parameter", "step_fraction"}
"""Names of the signals that are known before backward has ended. Parameters whose update requests another signal cannot
be updated during backward."""


@kept_from_compiler
def release(model: nn.Module, optimizer: Optimizer, parts: int = 16) -> Release:
    """Step parameters during backward as soon as their gradients are complete, and free these gradients.

    Each parameter gets the same bits as in an ordinary step. After backward, `optimizer.step()` updates the parameters
    that backward has not updated. The learning rate must be set before backward. Code between backward and `step()`
    finds no gradients of updated parameters, so gradients must be clipped by the recipe. If gradients are accumulated,
    all backwards of a step but the last must run inside `with released.accumulate():`.

        released = eigengraft.release(model, optimizer)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()

    Args:
        model: the model. Under `fully_shard`, shard it before composing the optimizer. All ranks call `release`, with
            the same `parts`.
        optimizer: optimizer of parameters of the model.
        parts: parameters are updated when the complete gradients have 1 / `parts` of the bytes of all gradients. More
            parts save more memory, and need more updates of fewer parameters. 1: backward updates no parameter.

    Returns:
        The release, with the context `accumulate()`, and with `remove()`, which ends the release.

    Raises:
        TypeError: the arguments are no model and optimizer.
        ValueError: the recipe or the layout of parameters cannot be released, or ranks gave different `parts`. The
            error names each reason.
    """
    require_watchable("release", optimizer, model)
    if parts < 1:
        raise ValueError(f"release: parts must be at least 1, got {parts}")
    if optimizer.released is not None:
        raise ValueError(
            "release: the optimizer is released already; call remove() of the first release before a second one"
        )
    found = Release(optimizer, parts, any(isinstance(own, DistributedDataParallel) for own in model.modules()))
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    hooked = [parameter for parameter in model.parameters() if id(parameter) in held and parameter.requires_grad]
    if not hooked:
        raise ValueError(
            "release: no trained parameter of the optimizer is in this model; pass the model of the optimizer"
        )
    found.hook(hooked)
    optimizer.released = found
    return found


@dataclass
class _Unit:
    """Parameters of one parameter set that are updated together.

    param_set: the parameter set.
    positions: indices of the parameters in the parameter set.
    size: bytes of the full gradients of the parameters.
    missing: number of the parameters whose gradients are not complete in the present step.
    """

    param_set: ParamSet
    positions: list[int]
    size: int
    missing: int = 0


@dataclass
class _Step:
    """A step that has begun in backward.

    hypers: learning rate and weight decay of each param group, with which all parameters of the step are updated.
    taken: number of steps before this one.
    units: {id of a parameter: (`_Unit` with which the parameter is updated, index of the parameter in its parameter
        set)}.
    complete: ids of the parameters with complete gradients.
    stepped: names of the parameters that were updated.
    pending: units with complete gradients whose parameters were not updated yet.
    """

    hypers: list[Hyper]
    taken: int
    units: dict[int, tuple[_Unit, int]]
    complete: set[int] = field(default_factory=set)
    stepped: list[str] = field(default_factory=list)
    pending: list[_Unit] = field(default_factory=list)


class Release:
    """Updates the parameters of an optimizer during backward, and frees their gradients.

    The function `release` returns an object of this class.
    """

    def __init__(self, optimizer: Optimizer, parts: int, averaged: bool) -> None:
        """Prepare to update parameters during backward. The method `hook` then registers the hooks that update them.

        parts: complete gradients are collected until they have 1 / parts of the bytes of all gradients.
        averaged: True if the model averages gradients over ranks after they are complete.
        """
        self._optimizer, self._parts, self._averaged = weakref.ref(optimizer), parts, averaged
        self._handles: list[RemovableHandle] = []
        self._accumulates = False
        self._step: _Step | None = None
        self._known: list[ParamSet] = []
        self._made: list[_Unit] = []
        self._units(optimizer)

    def hook(self, parameters: Sequence[Tensor]) -> None:
        """Register a hook at each parameter. Backward calls the hook when the parameter's gradient is complete."""
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self)))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Return a context for all micro-batches of a step but the last. In it, gradients are only accumulated."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def remove(self) -> None:
        """Remove the hooks, so that backward updates no parameter any more.

        If backward has already updated parameters of the present step, the next `optimizer.step()` updates the others.
        """
        remove_hooks(self._handles)
        self._handles.clear()
        if (optimizer := self._optimizer()) is not None and self._step is None:
            optimizer.released = None

    @property
    def begun(self) -> bool:
        """True if backward has begun a step that `optimizer.step()` has not ended yet."""
        return self._step is not None

    def note(self, parameter: Tensor) -> None:
        """Record that backward has completed the gradient of a parameter.

        Parameters are updated in units (`_Unit`). A unit whose gradients are all complete waits until the gradients of
        all waiting units have 1 / `parts` of the bytes of all gradients. Then the waiting units are updated.

        Raises RuntimeError if the gradient of the parameter was already complete in this step.
        """
        optimizer = self._optimizer()
        if optimizer is None or self._accumulates:
            return
        with isolation(optimizer):
            step = self._step = self._step or self._begin(optimizer)
            if id(parameter) not in step.units:  # it has no state yet, and is updated by `optimizer.step()`
                return
            unit, position = step.units[id(parameter)]
            if id(parameter) in step.complete:
                raise RuntimeError(
                    f"release: {unit.param_set.names[position]} received a second gradient before step(), after its "
                    "first gradient was released; run all but the last backward of a step within `accumulate()` of "
                    "the release, and call optimizer.step() after each step"
                )
            step.complete.add(id(parameter))
            unit.missing -= 1
            if unit.missing == 0:
                step.pending.append(unit)
                total = sum(own.size for own in self._made)
                if sum(own.size for own in step.pending) * self._parts >= total and self._parts > 1:
                    self._update_pending(optimizer, step)

    def finish(self) -> tuple[list[Hyper], int] | None:
        """End the part of the present step that ran during backward. `Optimizer.step` updates the other parameters.

        Return (values of the param groups that the updates used, number of steps before this one), or None if backward
        updated no parameter. Raises RuntimeError if a learning rate or weight decay has changed since the step began in
        backward.
        """
        if self._step is None:
            return None
        optimizer, (step, self._step) = self._optimizer(), (self._step, None)
        assert optimizer is not None
        now = optimizer.hypers()
        changed = [
            str(at) for at, (one, two) in enumerate(zip(step.hypers, now, strict=False)) if rates_differ(one, two)
        ]
        if step.stepped and (changed or len(now) < len(step.hypers)):
            raise RuntimeError(
                f"release: lr or weight_decay of param group {', '.join(changed)} changed between backward and step(), "
                f"after the update of {counted(len(step.stepped), 'parameter')} with the old values "
                f"({name_some(step.stepped, 1)}); set new values before backward"
            )
        if not self._handles:
            optimizer.released = None
        return (step.hypers + now[len(step.hypers) :], step.taken) if step.stepped else None

    @property
    def stepped(self) -> Sequence[str]:
        """Names of the parameters that were updated in the present backward."""
        return () if self._step is None else self._step.stepped

    def _begin(self, optimizer: Optimizer) -> _Step:
        hypers = optimizer.begin_step()
        units = self._units(optimizer)
        for unit in units:
            unit.missing = sum(unit.param_set.parameters[at].requires_grad for at in unit.positions)
        places = {id(own.param_set.parameters[at]): (own, at) for own in units for at in own.positions}
        return _Step(hypers, steps_taken(optimizer.param_sets), places)

    def _units(self, optimizer: Optimizer) -> list[_Unit]:
        """Return the sets of parameters (`_Unit`) that are updated together, because a stage computes them together.

        Raise ValueError if the recipe or the model does not permit updates during backward.
        """
        param_sets = list(optimizer.param_sets)
        if len(param_sets) != len(self._known) or any(a is not b for a, b in zip(param_sets, self._known, strict=True)):
            if reasons := [f"{path} ({why})" for path, why in _reasons(optimizer, self._averaged)]:
                raise ValueError(
                    f"release: parameters cannot step during backward with {'; '.join(reasons)}; change the recipe, "
                    "or step without release"
                )
            self._known = param_sets
            self._made = [unit for own in param_sets for unit in _units_of(own, self._parts)]
        return self._made

    def _update_pending(self, optimizer: Optimizer, step: _Step) -> None:
        """Update the parameters whose gradients have been collected (`step.pending`), and free these gradients.

        The list is then empty.
        """
        chosen: dict[ParamSet, NDArray[np.bool_]] = {}
        for unit in step.pending:
            only = chosen.setdefault(unit.param_set, np.zeros(len(unit.param_set.specs), dtype=np.bool_))
            only[unit.positions] = True
        step.pending.clear()
        for param_set, only in chosen.items():
            optimizer.step_some(param_set, step.hypers, step.taken, only)
            for at in np.flatnonzero(only).tolist():
                if param_set.parameters[at].grad is not None:
                    param_set.parameters[at].grad = None
                    step.stepped.append(param_set.names[at])


def rates_differ(one: Hyper, two: Hyper) -> bool:
    """Return True if two values of a param group differ, as far as the host knows without reading from a device."""
    if isinstance(one.lr, Tensor) or isinstance(two.lr, Tensor):
        return one.lr is not two.lr or one.weight_decay != two.weight_decay
    return (one.lr, one.weight_decay) != (two.lr, two.weight_decay)


def _units_of(param_set: ParamSet, parts: int) -> Iterator[_Unit]:
    """Divide the parameters of a set into units, and yield the units. The parameters of a unit are updated together.

    Two parameters are in one unit if both have blocks in the same stack, and this stack is computed at once and not
    parameter by parameter. Two parameters are also in one unit if their blocks are in stacks that are computed
    together. If ranks share the parameters, one of these conditions on one rank is enough. All ranks call this
    function.

    parts: argument of `release`, which must be the same on all ranks.
    """
    sets: list[set[int]] = []
    for group in param_set.together:
        shared = [
            own
            for own in group
            if len(group) > 1 or own.watched or own.host_buffers or not param_set.execution(own).by_parameter
        ]
        sets.append({at for own in shared for at in own.stack.param_ids.tolist()})
    if param_set.rank_group is not None:
        sets = _of_all_ranks(param_set.rank_group.all_ranks, sets, parts)
    sets = [own for own in [*({at} for at in range(len(param_set.specs))), *sets] if own]
    for component in connected(sets):
        positions = sorted(set().union(*(sets[index] for index in component)))
        specs = [param_set.specs[at] for at in positions]
        yield _Unit(param_set, positions, sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs))


def _of_all_ranks(ranks: RankGroup, sets: Sequence[set[int]], parts: int) -> list[set[int]]:
    """Gather sets of parameters from all ranks, and return them in the same order on all ranks. All ranks call it.

    A rank has only stacks of the blocks that it updates. If each rank made units from its own stacks, ranks would have
    different units, update different parameters at the same time, and wait for each other without end.

    sets: positions of parameters. The parameters of a set have blocks in the same stack of this rank, or in stacks that
        are computed together.
    parts: argument of `release`. ValueError is raised if ranks gave different numbers.
    """
    given = parts, sorted({(*sorted(own),) for own in sets if len(own) > 1})
    found = ranks.all_gather_object(given, "release of gradients")
    values = {rank: own for rank, (own, _) in enumerate(found)}
    if len(set(values.values())) > 1:
        raise ValueError(f"release: parts must be the same on all ranks, got {by_value(values)}")
    return [set(own) for own in dict.fromkeys(own for _, sent in found for own in sent)]


def _reasons(optimizer: Optimizer, averaged: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each field, stage or parameter that makes updates during backward impossible.

    The name is the path of a field, stage or slot in the recipe, the name of a parameter, or the name of a wrapper of
    the model. Most reasons are that the gradients of all parameters are needed before the first update.

    averaged: True if the model averages gradients over ranks after they are complete.
    """
    recipe, signals = optimizer.recipe, optimizer.param_sets.signals
    fields = {
        "sam": (recipe.sam is not None, "it computes the gradients of a step twice"),
        "line_search": (recipe.line_search is not None, "it tries steps of all parameters together"),
        "graph": (recipe.graph, "a captured step needs all gradients"),
        "failure.nonfinite=raise": (recipe.failure.nonfinite == "raise", "other parameters may be updated before"),
        "failure.spike": (recipe.failure.spike is not None, "it decides with the loss or norm of all gradients"),
        "distribution.overlap_backward": (recipe.distribution.overlap_backward, "it sends gradients until the step"),
    }
    yield from ((path, why) for path, (holds, why) in fields.items() if holds)
    for name, path in signals.asking.items():
        if name not in RELEASED_SIGNALS:
            yield path, f"its signal '{name}' is known only after backward"
    for param_set in optimizer.param_sets:
        for key, path in param_set.totals.items():
            yield key, f"it is summed over all parameters of {path or 'the update'}"
        plain = [n for n, p in zip(param_set.names, param_set.parameters, strict=True) if not is_dtensor(p)]
        if param_set.rank_group is not None and plain:
            yield plain[0], "a plain tensor on several ranks, whose gradients are averaged after backward"
            break
    if averaged:
        yield "DistributedDataParallel", "it averages gradients after they are complete; use fully_shard"


def _hook(released: weakref.ref[Release]) -> Callable[[Tensor], None]:
    """Return the hook that torch calls with a parameter when backward has completed its gradient.

    The hook calls `Release.note`, which may update the parameter and free its gradient. The hook does nothing after the
    release was deleted.

    released: the release (updates during backward), referenced weakly.
    """

    @kept_from_compiler
    def complete(parameter: Tensor) -> None:
        found = released()
        if found is not None:
            found.note(parameter)

    return complete
