"""The iterates of a parameter set: what is kept for each of its parameters beside the state of the stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.numerics import compute_dtype
from eigengraft.slots import Slot

from .averaging import Track
from .constraints import Constraint
from .mode import Mode
from .parameter_update import Bound, Move

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe

HELD = "averaging/train"
"""State key of the training iterate, which is there while the parameter holds the evaluated one."""


class Iterates:
    """Parameters by position. tensors: of each, by "averaging/<slot>" and "<path>constraints.<label>/<slot>".

    paths: of the update of each. held: the training iterates, in evaluation mode.
    """

    def __init__(self, recipe: Recipe, parameters: Sequence[Tensor], paths: Sequence[str]) -> None:
        self.averaging, self.parameters, self.paths = recipe.averaging, parameters, paths
        self.constraints = {path: update.constraints for path, update in recipe.updates().items()}
        self.tensors = [
            {key: self._allocate(slot, parameter) for key, slot in self._slots(parameter, path)}
            for parameter, path in zip(parameters, paths, strict=True)
        ]
        self.held: list[Tensor] | None = None
        self.begin(range(len(parameters)))

    def __bool__(self) -> bool:
        """Whether there is anything to keep."""
        return self.averaging is not None or any(self.constraints.values())

    def _slots(self, parameter: Tensor, path: str) -> Iterator[tuple[str, Slot]]:
        shape = tuple(parameter.shape)
        if self.averaging is not None:
            coarse = compute_dtype(parameter.dtype) != parameter.dtype
            for name, slot in self.averaging.slots(shape, coarse).items():
                yield f"averaging/{name}", slot
        for constraint in self.constraints[path]:
            for name, slot in constraint.slots(shape).items():
                yield f"{_prefix(path, constraint)}/{name}", slot

    def _allocate(self, slot: Slot, parameter: Tensor) -> Tensor:
        return slot.allocate(1, compute_dtype(parameter.dtype), parameter.device)[0]

    @torch.no_grad()
    def begin(self, positions: Sequence[int]) -> None:
        """Sets what depends on where parameters are, before their first update."""
        for path, own in self._alike(positions):
            track = self._track(own, np.zeros(len(own), dtype=np.int64))
            if self.averaging is not None:
                self.averaging.begin(track)
            for bound in self._bounds(path, own):
                bound.constraint.begin(bound.slots, track.parameters)

    def step(self, positions: Sequence[int], steps: NDArray[np.int64], move: Move, lr: float | Tensor) -> None:
        """One step of some parameters; steps `[n]`: updates of each, this one included. lr: of the group."""
        place = {position: index for index, position in enumerate(positions)}
        for path, own in self._alike(positions):
            chosen = [place[position] for position in own]
            part = move.slice_rows(chosen, self._bounds(path, own))
            if self.averaging is None:
                part([self.parameters[position] for position in own])
            else:
                track = self._track(own, steps[chosen])
                self.averaging.step(replace(track, lr=lr, mask=part.mask), part)

    def _alike(self, positions: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """(path, positions) of parameters with the same update and dtype, and so with the same slots."""
        groups: dict[tuple[str, torch.dtype], list[int]] = {}
        for position in positions:
            groups.setdefault((self.paths[position], self.parameters[position].dtype), []).append(position)
        for (path, _), own in groups.items():
            yield path, own

    def _track(self, positions: Sequence[int], steps: NDArray[np.int64]) -> Track:
        return Track([self.parameters[p] for p in positions], self._named(positions, "averaging"), steps)

    def _bounds(self, path: str, positions: Sequence[int]) -> list[Bound]:
        return [Bound(c, self._named(positions, _prefix(path, c))) for c in self.constraints[path]]

    def _named(self, positions: Sequence[int], prefix: str) -> Mapping[str, list[Tensor]]:
        keys = [key for key in self.tensors[positions[0]] if key.startswith(f"{prefix}/")]
        return {key.rpartition("/")[2]: [self.tensors[position][key] for position in positions] for key in keys}

    def decaying(self) -> Sequence[Tensor]:
        """What weight decay acts on, by position."""
        if self.averaging is None:
            return self.parameters
        found = list(self.parameters)
        for _, own in self._alike(range(len(found))):
            tensors = self.averaging.decaying(self._track(own, np.zeros(len(own), dtype=np.int64)))
            for position, tensor in zip(own, tensors, strict=True):
                found[position] = tensor
        return found

    def view(self, position: int, mode: Mode | None = None) -> dict[str, Tensor]:
        """The state of a parameter; mode: of which its shape is asked for, default the present one."""
        tensors = dict(self.tensors[position])
        if self.held is not None and mode != "train":
            tensors[HELD] = self.held[position]
        elif mode == "eval" and self.averaging is not None:
            tensors[HELD] = self.parameters[position]
        return tensors

    def hold(self, mode: Mode) -> None:
        """Keeps the training iterates if they are to be kept; the parameters stay as they are."""
        if mode == "train":
            self.held = None
        elif self.held is None and self.averaging is not None:
            self.held = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def switch(self, mode: Mode, steps: NDArray[np.int64]) -> None:
        """Makes the parameters hold the iterate of a mode; steps `[P]`: updates of each, those without one stay."""
        if mode == "train" and self.held is not None:
            torch._foreach_copy_(list(self.parameters), self.held)
        self.hold(mode)
        if mode == "train" or self.averaging is None:
            return
        for _, own in self._alike(np.flatnonzero(steps > 0).tolist()):
            values = self.averaging.evaluated(self._track(own, steps[own]))
            torch._foreach_copy_([self.parameters[position] for position in own], list(values))


def _prefix(path: str, constraint: Constraint) -> str:
    return f"{path}.constraints.{constraint.label}" if path else f"constraints.{constraint.label}"
