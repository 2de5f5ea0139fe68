"""Constraints: what keeps a parameter where it should be, before and after every write."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.chains import ChainOf
from eigengraft.numerics import block_norm, compute_dtype, safe_ratio
from eigengraft.ramps import Schedulable
from eigengraft.slots import Slot

Slots = Mapping[str, Sequence[Tensor]]
"""The slots of n parameters, by name."""

Norms = Callable[[Sequence[Tensor]], Tensor]
"""The Frobenius norms `[n]` of n whole tensors, of which this rank may hold shards: then all ranks call it."""


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

    @property
    def label(self) -> str:
        """The constraint's part of a path: `name`, else `kind`."""
        return self.name or str(getattr(self, "kind"))  # noqa: B009  every member has a kind, the family has none

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, Slot]:
        """The state of one parameter."""
        return {}

    def shardable(self) -> bool:
        """Whether shards of parameters are enough: the constraint mixes no entries of a parameter but by `norms`."""
        return False

    def begin(self, slots: Slots, parameters: Sequence[Tensor], norms: Norms) -> None:
        """Set the slots that depend on where the parameters are; called before the first update."""

    def adjust(
        self, slots: Slots, parameters: Sequence[Tensor], updates: Sequence[Tensor], norms: Norms
    ) -> Sequence[Tensor]:
        """The updates to take; the given ones may not be written to."""
        return updates

    def retract(
        self,
        slots: Slots,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        moved: Sequence[Tensor],
        norms: Norms,
    ) -> Sequence[Tensor]:
        """The parameters after the step, `moved` being where the update took them; nothing given may be written to."""
        return moved


class Hyperball(Constraint):
    """U <- U ||W|| / ||U||;  W <- (W - lr U) ||W_0|| / ||W - lr U||,  Frobenius norms of whole parameters.

    Hyperball optimization: W keeps the norm of W_0, the parameter that its first update finds, and lr is the length of
    a step in units of it. A parameter with W_0 = 0 is left alone, and one with U = 0 stays. Weight decay comes before
    the retraction, which undoes its shrinking: what is left of it is a step longer by 1 / (1 - lr alpha), so that a
    rate of 0 says the same more clearly.
    """

    kind: Literal["hyperball"] = "hyperball"
    relative: bool = Field(default=True, description="scale U to the norm of W first; otherwise U is taken as it is")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"radius": Slot((), role="iterate")}

    def shardable(self) -> bool:
        return True

    def begin(self, slots: Slots, parameters: Sequence[Tensor], norms: Norms) -> None:
        torch._foreach_copy_(list(slots["radius"]), list(norms(parameters).unbind(0)))

    def adjust(
        self, slots: Slots, parameters: Sequence[Tensor], updates: Sequence[Tensor], norms: Norms
    ) -> Sequence[Tensor]:
        if not self.relative:
            return updates
        free = torch.stack(list(slots["radius"])) == 0
        ratios = safe_ratio(norms(parameters), norms(updates))
        scales = torch.where(free, 1.0, ratios).unbind(0)
        return [update * scale for update, scale in zip(updates, scales, strict=True)]

    def retract(
        self,
        slots: Slots,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        moved: Sequence[Tensor],
        norms: Norms,
    ) -> Sequence[Tensor]:
        radii, there = torch.stack(list(slots["radius"])), norms(moved)
        still = (norms(updates) == 0) | (there == 0)
        scales = torch.where(radii == 0, 1.0, safe_ratio(radii, there)).unbind(0)
        stays = (still & (radii != 0)).unbind(0)
        rows = zip(parameters, moved, scales, stays, strict=True)
        return [torch.where(stay, old, new * scale) for old, new, scale, stay in rows]


def local_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The Frobenius norms of tensors of one dtype, `[n]`, without overflow or underflow of the squares."""
    dtype = compute_dtype(tensors[0].dtype)
    if dtype == torch.float64:
        return torch.cat([block_norm(tensor.unsqueeze(0)) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).to(dtype)


Constraints = Annotated[tuple[Constraint, ...], ChainOf("constraint", "constraints")]
"""Constraints in order; in YAML a list, or a single one."""
