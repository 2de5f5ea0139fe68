"""The contract of a constraint."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from eigengraft.component import ChainOf
from eigengraft.numerics import block_norm, compute_dtype
from eigengraft.schedules import Schedulable
from eigengraft.signals import Request
from eigengraft.slots import Slot

Slots = Mapping[str, Sequence[Tensor]]
"""The slots of n parameters, by name."""


@dataclass(frozen=True)
class ConstraintContext:
    """What constraints know beside n parameters and their updates, of which this rank may hold shards.

    lr: learning rate of the update.
    mask: n 0-d booleans, False where neither parameter nor slots may change; None: all may.
    shard_sums: `[n]` float64 -> the sums over all ranks, of numbers of n tensors, which all ranks call; None: this rank
        holds whole tensors.
    signals: what constraints have declared in `requires_some`, by name: for each tensor numbers that multiply it, None
        where it has none in this step.
    """

    lr: float | Tensor = 0.0
    mask: Sequence[Tensor] | None = None
    shard_sums: Callable[[Tensor], Tensor] | None = None
    signals: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The Frobenius norms `[n]` of n whole tensors."""
        if self.shard_sums is None:
            return _norms(tensors)
        squares = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()
        return self.shard_sums(squares).sqrt().to(compute_dtype(tensors[0].dtype))

    def dots(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """The sums of x y `[n]` float64 over the entries of n whole tensors."""
        found = torch.stack([(x.double() * y).sum() for x, y in zip(xs, ys, strict=True)])
        return found if self.shard_sums is None else self.shard_sums(found)


class Constraint(Schedulable, ABC, family="constraint"):
    """Changes n updates U before the write (`adjust`) and n parameters W after it (`retract`).

    The write between the two is W <- W - lr alpha W - lr U. W and U are whole parameters in the dtype they are computed
    in, or a rank's shards of them, if the constraint is `shardable`. With an averaging whose base iterate is not the
    parameter, the base iterate is written and constrained.
    """

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="what the constraint is called in paths; default: its kind. Needed where a kind repeats",
    )

    requires_some: ClassVar[frozenset[str]] = frozenset()
    """Signals with outputs that must be provided in every step for some parameter at least, by name."""

    rounds: ClassVar[bool] = False
    """Whether the parameter is rounded here, so that no constraint may follow and no averaging hold it elsewhere."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """The signals that a parameter may have in a step: those that some parameter must have."""
        return tuple(Request(name, "if_given") for name in sorted(self.requires_some))

    def signals_at(self, step: int) -> frozenset[str]:
        """The signals that every parameter must have at a step: none."""
        return frozenset()

    @property
    def label(self) -> str:
        """The constraint's part of a path: `name`, else `kind`."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009  every member has a kind, the family has none

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, Slot]:
        """The state of one parameter. A slot has the axes of the parameter last, after any of its own, or is a number
        of shape (); anything else raises a ContractError when an optimizer is made."""
        return {}

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether parameters of a dtype have the slots."""
        return True

    def sets_length(self) -> bool:
        """Whether the length of an update is replaced, so that what multiplies it has no effect."""
        return False

    def shardable(self, whole_rows: bool) -> bool:
        """Whether shards of parameters are enough: no entries of a parameter are mixed but by what the context has.

        whole_rows: whether parameters are cut along the first axis alone.
        """
        return False

    def begin(self, slots: Slots, parameters: Sequence[Tensor], context: ConstraintContext) -> None:
        """Set the slots that depend on where the parameters are; called before the first update."""

    def adjust(
        self, slots: Slots, parameters: Sequence[Tensor], updates: Sequence[Tensor], context: ConstraintContext
    ) -> Sequence[Tensor]:
        """The updates to take; the given ones may not be written to."""
        return updates

    def retract(
        self,
        slots: Slots,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        moved: Sequence[Tensor],
        context: ConstraintContext,
    ) -> Sequence[Tensor]:
        """The parameters after the step, `moved` being where the update took them; nothing given may be written to."""
        return moved


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The Frobenius norms of tensors of one dtype, `[n]`, without overflow or underflow of the squares."""
    dtype = compute_dtype(tensors[0].dtype)
    if dtype == torch.float64:
        return torch.cat([block_norm(tensor.unsqueeze(0)) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).to(dtype)


def _rounded_last(constraints: tuple[Constraint, ...]) -> tuple[Constraint, ...]:
    early = [constraint.label for constraint in constraints[:-1] if constraint.rounds]
    if early:
        raise ValueError(f"'{early[0]}' is required to be the last, after which a parameter is as it is stored")
    return constraints


Constraints = Annotated[tuple[Constraint, ...], ChainOf("constraint", "constraints"), AfterValidator(_rounded_last)]
"""Constraints in order; in YAML a list, or a single one."""
