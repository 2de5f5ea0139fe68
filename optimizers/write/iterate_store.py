"""Iterates and constraint slots of several parameters: the state that belongs to a parameter and not to a stage."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.errors import ContractError
from eigengraft.numerics import compute_dtype, differs_from_rounded
from eigengraft.slots import AVERAGING, PARTNER_STAGE, Slot, StateKey

from .averaging import Averaging, IterateBatch, Mode
from .constraints import BoundConstraint, Constraint, ConstraintContext, ParameterUpdate
from .write import Hyper

HELD = StateKey(None, AVERAGING, "train")
"""Key of the training iterate, present while the parameter holds the evaluated one."""


class IterateStore:
    """Iterates and constraint slots of P parameters, addressed by position 0 .. P - 1.

    averaging: the recipe's; None: no iterates.
    constraints: those of every update, by the update's path in the recipe.
    parameters: P tensors, what this rank holds of each parameter.
    paths: P paths, the update of each parameter.
    shard_sums: sums over ranks `[n]` of numbers of tensors at n positions, of which this rank holds shards; None: it
        holds all of them.
    paired: paths of updates that ask what their parameter's partner was, which is kept beside the partner.
    tensors: P dicts of slots by name, by AVERAGING and by "<path>.constraints.<label>".
    signals: what constraints ask for in the present step, by name and position.
    held: P training iterates while the parameters hold the evaluated ones; None in training.
    """

    def __init__(
        self,
        averaging: Averaging | None,
        constraints: Mapping[str, Sequence[Constraint]],
        parameters: Sequence[Tensor],
        paths: Sequence[str],
        shard_sums: Callable[[Sequence[int], Tensor], Tensor] | None = None,
        paired: Container[str] = (),
    ) -> None:
        self.paired = paired
        self.averaging, self.constraints, self.parameters, self.paths = averaging, constraints, parameters, paths
        self.tensors = [self._allocate(parameter, path) for parameter, path in zip(parameters, paths, strict=True)]
        self.held: list[Tensor] | None = None
        self.signals: Mapping[str, Sequence[Tensor | None]] = {}
        self.shard_sums = shard_sums
        self._begin(range(len(parameters)), constrained=shard_sums is None)

    def __bool__(self) -> bool:
        """Whether there are iterates or constraints."""
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
        """The slots of a parameter of that shape and dtype, by stage and name."""
        declared: dict[str, Mapping[str, Slot]] = {}
        if self.averaging is not None:
            declared[AVERAGING] = self.averaging.slots(shape, compute_dtype(dtype) != dtype)
        if path in self.paired:
            declared[PARTNER_STAGE] = {"before": Slot(shape, role="iterate")}
        for constraint in self.constraints[path]:
            declared[_stage(path, constraint)] = self._slots_of(constraint, shape, dtype)
        return declared

    def _slots_of(self, constraint: Constraint, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, Slot]:
        """The slots of a constraint for one parameter; raises ValueError if it rounds what an averaging holds."""
        if constraint.rounds and self.averaging is not None:
            kind = getattr(self.averaging, "kind")  # noqa: B009  every member has a kind, the family has none
            raise ValueError(
                f"constraints: {constraint.label}: no averaging is required, whose iterates have 32 bits, got '{kind}'"
            )
        return constraint.slots(shape) if constraint.keeps(dtype) else {}

    def begin(self, positions: Sequence[int]) -> None:
        """Sets the slots that depend on where parameters are; called before their first update, by all ranks."""
        self._begin(positions, constrained=True)

    def restart(self, position: int, stages: Container[str]) -> None:
        """Lets the constraints of a parameter begin again whose stages are given and whose slots hold zeros."""
        for bound in self._bound(self.paths[position], [position]):
            own = self.tensors[position].get(stage := _stage(self.paths[position], bound.constraint), {})
            if own and stage in stages and not any(bool(x.any()) for x in own.values()):
                bound.constraint.begin(bound.slots, [self.parameters[position]], bound.context)

    @torch.no_grad()
    def _begin(self, positions: Sequence[int], constrained: bool) -> None:
        for path, own in self._alike(positions):
            batch = self._batch(own, np.zeros(len(own), dtype=np.int64))
            if self.averaging is not None:
                self.averaging.begin(batch)
            for bound in self._bound(path, own) if constrained else ():
                bound.constraint.begin(bound.slots, batch.parameters, bound.context)

    @torch.no_grad()
    def adopt_writes(self, positions: Sequence[int]) -> None:
        """Make the slot `y` follow what was written into parameters between steps:  y <- W where W is not round(y).

        A parameter with less precision than its updates holds round(y). Entries that nobody wrote keep y, bit for bit.
        On a CPU comparisons find where nothing was written; on a device every y is written, and the host asks nothing.
        """
        kept = [position for position in positions if "y" in self.tensors[position].get(AVERAGING, {})]
        if not kept:
            return
        held = [self.parameters[position].detach() for position in kept]
        ys = [self.tensors[position][AVERAGING]["y"] for position in kept]
        for index in differs_from_rounded(ys, held):
            y, parameter = ys[index], held[index]
            y.copy_(torch.where(y.to(parameter.dtype) == parameter, y, parameter))

    def step(self, positions: Sequence[int], steps: NDArray[np.int64], update: ParameterUpdate, hyper: Hyper) -> None:
        """Applies an update to n parameters and their iterates.

        positions, steps `[n]`: which parameters, and the updates each has had, this one included.
        update: of the n parameters, without constraints, which are added here.
        hyper: values of the param group.
        """
        place = {position: index for index, position in enumerate(positions)}
        for path, own in self._alike(positions):
            chosen = [place[position] for position in own]
            chosen_update = update.slice_rows(chosen, self._bound(path, own))
            if self.averaging is None:
                chosen_update([self.parameters[position] for position in own])
            else:
                batch = self._batch(own, steps[chosen])
                lr, peak_lr, mask = hyper.lr, hyper.peak_lr, chosen_update.mask
                self.averaging.step(replace(batch, lr=lr, peak_lr=peak_lr, mask=mask), chosen_update)

    def _alike(self, positions: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """(path, positions) of parameters that share update and dtype, and so have the same slots."""
        groups: dict[tuple[str, torch.dtype], list[int]] = {}
        for position in positions:
            groups.setdefault((self.paths[position], self.parameters[position].dtype), []).append(position)
        for (path, _), own in groups.items():
            yield path, own

    def _batch(self, positions: Sequence[int], steps: NDArray[np.int64]) -> IterateBatch:
        return IterateBatch([self.parameters[p] for p in positions], self._named(positions, AVERAGING), steps)

    def _bound(self, path: str, positions: Sequence[int]) -> list[BoundConstraint]:
        sums = None if self.shard_sums is None else partial(self.shard_sums, positions)
        signals = {name: [tensors[position] for position in positions] for name, tensors in self.signals.items()}
        context = ConstraintContext(shard_sums=sums, signals=signals)
        return [BoundConstraint(c, self._named(positions, _stage(path, c)), context) for c in self.constraints[path]]

    def _named(self, positions: Sequence[int], stage: str) -> Mapping[str, list[Tensor]]:
        names = self.tensors[positions[0]].get(stage, {})
        return {name: [self.tensors[position][stage][name] for position in positions] for name in names}

    def decaying(self) -> Sequence[Tensor]:
        """The tensors that weight decay acts on, by position."""
        if self.averaging is None:
            return self.parameters
        found = list(self.parameters)
        for _, own in self._alike(range(len(found))):
            tensors = self.averaging.decaying(self._batch(own, np.zeros(len(own), dtype=np.int64)))
            for position, tensor in zip(own, tensors, strict=True):
                found[position] = tensor
        return found

    def view(self, position: int, mode: Mode | None = None) -> dict[str, Tensor]:
        """The state of a parameter in a mode, right in keys and shapes; default: the present mode."""
        own = self.tensors[position].items()
        tensors = {str(StateKey(None, stage, name)): x for stage, slots in own for name, x in slots.items()}
        if self.held is not None and mode != "train":
            tensors[str(HELD)] = self.held[position]
        elif mode == "eval" and self.averaging is not None:
            tensors[str(HELD)] = self.parameters[position]
        return tensors

    def hold(self, mode: Mode) -> None:
        """Sets the mode without changing parameters: in "eval" a copy of them is held as the training iterate."""
        if mode == "train":
            self.held = None
        elif self.held is None and self.averaging is not None:
            self.held = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def swap(self, mode: Mode, steps: NDArray[np.int64]) -> None:
        """Makes the parameters hold the iterate of a mode; steps `[P]`: updates of each, those with 0 stay."""
        if mode == "train" and self.held is not None:
            torch._foreach_copy_(list(self.parameters), self.held)
        self.hold(mode)
        if mode == "train" or self.averaging is None:
            return
        updated = np.flatnonzero(steps > 0).tolist()
        self.adopt_writes(updated)
        for _, own in self._alike(updated):
            values = self.averaging.evaluated(self._batch(own, steps[own]))
            torch._foreach_copy_([self.parameters[position] for position in own], list(values))


def _require_form(
    declared: Mapping[str, Mapping[str, Slot]], other: Mapping[str, Mapping[str, Slot]], shape: tuple[int, ...]
) -> None:
    """Raises ContractError for a slot that is neither a number nor has the axes of the parameter last.

    A rank that holds a shard has the same entries of such a slot, and checkpoints know nothing else of it.

    declared, other: slots by stage and name, of a parameter of shape `shape` and of one that is longer by 1 on every
        axis, so that no slot has the right shape by chance.
    """
    longer = tuple(n + 1 for n in shape)
    for stage, slots in declared.items():
        for name, slot in slots.items():
            lead, found = len(slot.shape) - len(shape), other[stage][name].shape
            follows = lead >= 0 and slot.shape[lead:] == shape and found == (*slot.shape[:lead], *longer)
            if slot.shape and not follows:
                raise ContractError(
                    f"{stage}: slot '{name}': a shape of () or one that ends with the axes of the parameter, "
                    f"{shape}, is required, got {slot.shape}"
                )


def _stage(path: str, constraint: Constraint) -> str:
    return f"{path}.constraints.{constraint.label}" if path else f"constraints.{constraint.label}"
