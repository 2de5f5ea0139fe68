"""State of whole parameters that belongs to no stage: iterates of an averaging, and slots of constraints."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.errors import ContractError
from eigengraft.numerics import compute_dtype, differs_from_rounded
from eigengraft.slots import AVERAGING, PARTNER_STAGE, Slot, StateKey

from .averaging import Averaging, IterateBatch, Mode
from .constraints import Constraint, ConstraintContext, ParameterUpdate, Slots
from .write import Hyper

HELD = StateKey(None, AVERAGING, "train")
"""Key of the training iterate in the state. It exists only while the parameter holds the evaluated iterate."""


class IterateStore:
    """State of P whole parameters: iterates of an averaging, and slots (state tensors) of constraints.

    An averaging has several iterates of each parameter, such as the trained weights and their mean. The parameter holds
    the training iterate while it is trained, and the evaluated iterate while the model is evaluated.

    averaging: averaging of the recipe. None: no iterates.
    constraints: constraints of each update, by the path of the update in the recipe.
    own_entries: P tensors, the entries of each parameter that this rank updates (`ParamSet.own_entries`).
    paths: P paths in the recipe, one for the update of each parameter.
    shard_sums: function (n positions, numbers `[n]`) that returns the sums of the numbers over the ranks that hold
        shards of these parameters. None: this rank holds whole parameters.
    paired: paths of the updates of paired parameters, such as the factors A and B of a product. The update of A needs
        the value that B had at the last update of A, which is stored in a slot of B. The reverse holds for B.
    tensors: for each parameter, its slots as {stage: {name: tensor}}. A stage is AVERAGING, PARTNER_STAGE or
        "<path>.constraints.<label>".
    signals: all signals of the present step by name. A signal that constraints request is a list of P tensors, in
        which None stands for a parameter without the signal.
    training_iterates: P training iterates, kept here while the parameters hold the evaluated iterates. None: the
        parameters hold the training iterates.
    """

    def __init__(
        self,
        averaging: Averaging | None,
        constraints: Mapping[str, Sequence[Constraint]],
        own_entries: Sequence[Tensor],
        paths: Sequence[str],
        shard_sums: Callable[[Sequence[int], Tensor], Tensor] | None,
        paired: Container[str],
    ) -> None:
        self.paired = paired
        self.averaging, self.constraints, self.own_entries, self.paths = averaging, constraints, own_entries, paths
        self.tensors = [self._allocate(parameter, path) for parameter, path in zip(own_entries, paths, strict=True)]
        self.training_iterates: list[Tensor] | None = None
        self.signals: Mapping[str, Any] = {}
        self.shard_sums = shard_sums
        self.begin(range(len(own_entries)), constrained=shard_sums is None)

    def __bool__(self) -> bool:
        """Return True if there are iterates or constraints."""
        return self.averaging is not None or any(self.constraints.values())

    def _allocate(self, parameter: Tensor, path: str) -> dict[str, dict[str, Tensor]]:
        shape, dtype = tuple(parameter.shape), compute_dtype(parameter.dtype)
        declared, other = (self._declared(s, parameter.dtype, path) for s in (shape, tuple(n + 1 for n in shape)))
        _require_form(declared, other, shape)
        return {
            stage: {name: slot.allocate(1, dtype, parameter.device)[0] for name, slot in slots.items()}
            for stage, slots in declared.items()
        }

    def _declared(self, shape: tuple[int, ...], dtype: torch.dtype, path: str) -> dict[str, Mapping[str, Slot]]:
        """Return the slots of iterates and constraints for a parameter of this shape and dtype.

        The result is {stage: {name: slot}}. A stage is AVERAGING, PARTNER_STAGE or "<path>.constraints.<label>", as in
        the keys of state. Raises ValueError if the recipe has an averaging and a constraint that rounds parameters.
        """
        declared: dict[str, Mapping[str, Slot]] = {}
        if self.averaging is not None:
            declared[AVERAGING] = self.averaging.slots(shape, compute_dtype(dtype) != dtype)
        if path in self.paired:
            declared[PARTNER_STAGE] = {"before": Slot(shape, role="iterate")}
        for constraint in self.constraints[path]:
            if constraint.rounds and self.averaging is not None:
                kind = getattr(self.averaging, "kind")  # noqa: B009  every member has a kind, the family has none
                raise ValueError(
                    f"constraints: {constraint.label}: cannot be combined with the averaging '{kind}', whose iterates "
                    "have 32 bits and lose no updates; remove the constraint"
                )
            declared[constraint.path_in(path)] = constraint.slots(shape) if constraint.keeps(dtype) else {}
        return declared

    def restart(self, position: int, stages: Container[str]) -> None:
        """Reset the slots of a parameter's constraints to their initial values.

        A constraint keeps its slots if any entry of them is not 0. Code outside of the optimizer resets state by
        writing zeros, but zero is not the initial value of every slot.

        stages: stages of the constraints to restart, as "<path>.constraints.<label>". Other constraints do not change.
        """
        constraints, context = self._with_slots(self.paths[position], [position])
        for constraint, slots in constraints:
            named = constraint.path_in(self.paths[position]) in stages
            if slots and named and not any(bool(x.any()) for (x,) in slots.values()):
                constraint.begin(slots, [self.own_entries[position]], context)

    @torch.no_grad()
    def begin(self, positions: Sequence[int], constrained: bool = True) -> None:
        """Set the slots whose initial values depend on the parameters.

        All ranks call it before the first update of the parameters at these positions.

        constrained: False to leave out the slots of constraints, which may need sums over ranks.
        """
        for path, own in self._alike(positions):
            batch = self._batch(own, np.zeros(len(own), dtype=np.int64))
            if self.averaging is not None:
                self.averaging.begin(batch)
            constraints, context = self._with_slots(path, own)
            for constraint, slots in constraints if constrained else ():
                constraint.begin(slots, batch.parameters, context)

    @torch.no_grad()
    def adopt_writes(self, positions: Sequence[int]) -> None:
        """Copy values that were written into parameters between steps into the slot `y`:  y <- W where W != round(y).

        W is the parameter. It has less precision than y, and holds round(y) after a step. Entries that were not
        overwritten keep y, bit for bit. On a CPU, tensors without overwritten entries are detected by comparison and
        skipped. On a device all y are written, so that the host need not wait.
        """
        kept = [position for position in positions if "y" in self.tensors[position].get(AVERAGING, {})]
        if not kept:
            return
        held = [self.own_entries[position].detach() for position in kept]
        ys = [self.tensors[position][AVERAGING]["y"] for position in kept]
        for index in differs_from_rounded(ys, held):
            y, parameter = ys[index], held[index]
            y.copy_(torch.where(y.to(parameter.dtype) == parameter, y, parameter))

    def step(self, positions: Sequence[int], steps: NDArray[np.int64], update: ParameterUpdate, hyper: Hyper) -> None:
        """Apply an update to n parameters and their iterates.

        positions: positions of the n parameters.
        steps: `[n]`, number of updates of each parameter, including this one.
        update: update of the n parameters without constraints. This method adds the constraints.
        hyper: values of the param group.
        """
        place = {position: index for index, position in enumerate(positions)}
        for path, own in self._alike(positions):
            chosen = [place[position] for position in own]
            constraints, context = self._with_slots(path, own)
            chosen_update = replace(update.slice_rows(chosen), constraints=constraints, context=context)
            if self.averaging is None:
                chosen_update([self.own_entries[position] for position in own])
            else:
                batch = self._batch(own, steps[chosen])
                lr, peak_lr, mask = hyper.lr, hyper.peak_lr, chosen_update.mask
                self.averaging.step(replace(batch, lr=lr, peak_lr=peak_lr, mask=mask), chosen_update)

    def _alike(self, positions: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """Divide positions of parameters by update rule and dtype. Yield (path of the rule in the recipe, positions).

        The parameters of one item have the same slots.
        """
        groups: dict[tuple[str, torch.dtype], list[int]] = {}
        for position in positions:
            groups.setdefault((self.paths[position], self.own_entries[position].dtype), []).append(position)
        for (path, _), own in groups.items():
            yield path, own

    def _batch(self, positions: Sequence[int], steps: NDArray[np.int64]) -> IterateBatch:
        return IterateBatch([self.own_entries[p] for p in positions], self._named(positions, AVERAGING), steps)

    def _with_slots(
        self, path: str, positions: Sequence[int]
    ) -> tuple[list[tuple[Constraint, Slots]], ConstraintContext]:
        """Return (pairs of a constraint and its slots, context of the constraints) for some parameters.

        path: path of the parameters' update rule in the recipe, which declares the constraints.
        positions: positions of the parameters (indices in the parameter set). A slot has a tensor for each of them.
        """
        sums = None if self.shard_sums is None else partial(self.shard_sums, positions)
        asked = {name for own in self.constraints[path] for name in own.requires_some & self.signals.keys()}
        signals = {name: [self.signals[name][position] for position in positions] for name in asked}
        pairs: list[tuple[Constraint, Slots]] = [
            (own, self._named(positions, own.path_in(path))) for own in self.constraints[path]
        ]
        return pairs, ConstraintContext(shard_sums=sums, signals=signals)

    def _named(self, positions: Sequence[int], stage: str) -> Mapping[str, list[Tensor]]:
        names = self.tensors[positions[0]].get(stage, {})
        return {name: [self.tensors[position][stage][name] for position in positions] for name in names}

    def decaying(self) -> Sequence[Tensor]:
        """Return the tensors to which weight decay applies, by position."""
        if self.averaging is None:
            return self.own_entries
        found = list(self.own_entries)
        for _, own in self._alike(range(len(found))):
            tensors = self.averaging.decaying(self._batch(own, np.zeros(len(own), dtype=np.int64)))
            for position, tensor in zip(own, tensors, strict=True):
                found[position] = tensor
        return found

    def view(self, position: int, mode: Mode | None = None) -> dict[str, Tensor]:
        """Return the state of a parameter by key, with the keys and shapes that it has in a mode.

        mode: iterate that the parameter is assumed to hold. None: the iterate that it holds now. For the other iterate,
            only keys and shapes are right: values may be those of the present mode.
        """
        own = self.tensors[position].items()
        tensors = {str(StateKey(None, stage, name)): x for stage, slots in own for name, x in slots.items()}
        if self.training_iterates is not None and mode != "train":
            tensors[str(HELD)] = self.training_iterates[position]
        elif mode == "eval" and self.averaging is not None:
            tensors[str(HELD)] = self.own_entries[position]
        return tensors

    def hold(self, mode: Mode) -> None:
        """Record which iterate the parameters hold already. No parameter changes.

        Called when a parameter set is built, and by `swap`. For "eval", a copy of the parameters is stored as the
        training iterate.
        """
        if mode == "train":
            self.training_iterates = None
        elif self.training_iterates is None and self.averaging is not None:
            self.training_iterates = [parameter.detach().clone() for parameter in self.own_entries]

    @torch.no_grad()
    def swap(self, mode: Mode, steps: NDArray[np.int64]) -> None:
        """Set the mode, and copy the iterate for training or evaluation into the parameters.

        steps: `[P]`, number of updates of each parameter. Parameters without updates do not change.
        """
        if mode == "train" and self.training_iterates is not None:
            torch._foreach_copy_(list(self.own_entries), self.training_iterates)
        self.hold(mode)
        if mode == "train" or self.averaging is None:
            return
        updated = np.flatnonzero(steps > 0).tolist()
        self.adopt_writes(updated)
        for _, own in self._alike(updated):
            values = self.averaging.evaluated(self._batch(own, steps[own]))
            torch._foreach_copy_([self.own_entries[position] for position in own], list(values))


def _require_form(
    declared: Mapping[str, Mapping[str, Slot]], other: Mapping[str, Mapping[str, Slot]], shape: tuple[int, ...]
) -> None:
    """Raise ContractError for a slot that is neither 0-d nor ends with the axes of the parameter.

    Checkpoints rely on this form: a rank that holds a shard of the parameter holds the same entries of the slot.

    declared: slots by stage and name, for a parameter of shape `shape`.
    other: the slots for a parameter that is longer by 1 on every axis. A slot whose shape has the form only by chance
        does not have it for this longer parameter.
    """
    longer = tuple(n + 1 for n in shape)
    for stage, slots in declared.items():
        for name, slot in slots.items():
            lead, found = len(slot.shape) - len(shape), other[stage][name].shape
            follows = lead >= 0 and slot.shape[lead:] == shape and found == (*slot.shape[:lead], *longer)
            if slot.shape and not follows:
                raise ContractError(
                    f"{stage}: slot '{name}': the shape must be (), or its last axes must be those of the parameter, "
                    f"got {slot.shape} for a parameter of shape {shape} and {found} for {longer}"
                )
