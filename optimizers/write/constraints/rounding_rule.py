"""Writes into parameters in bfloat16 that lose nothing, or nothing on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.noise import words
from eigengraft.slots import Slot

from .base import Constraint, ConstraintContext, Slots


class Rounding(Constraint):
    """W <- round(W' + r), r <- W' + r - W  with W' = W - lr alpha W - lr U, for parameters in bfloat16.

    Rounded to nearest without r, an update with |lr U| < 2^-9 |W| is lost. compensated: r in bfloat16, 2 bytes a
    parameter (Kahan 1965; Zamirai et al. 2020, arXiv:2010.06192, Algorithm 3). split: r in 2^-7 of half a unit in the
    last place of W, 1 byte: a weight of 24 bits, of which the model sees 16. stochastic: no r, up with probability
    (W' - low) / (high - low) of the two neighbours, so that W is W' on average (the same paper, Algorithm 2).

    Random numbers are a hash of the bits of W' and of the number of the update, so that they are the same on all ranks
    and for any shards; entries with one and the same W' move alike.
    Decay acts on W, not on r. A weight that is written between steps counts as it is, up to half a unit in its last
    place: a larger r is of the weight before it and is dropped. Parameters in other dtypes are written as they are and
    have no state. The last constraint of a list; an averaging keeps its iterates in 32 bits already, and refuses it.
    """

    kind: Literal["rounding"] = "rounding"
    rule: Literal["stochastic", "compensated", "split"] = Field(
        default="compensated", description="random, or with a remainder of 16 or of 8 bits"
    )
    rounds: ClassVar[bool] = True

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, Slot]:
        if self.rule == "stochastic":
            return {"writes": Slot((), role="count", dtype=torch.int64)}
        dtype = torch.bfloat16 if self.rule == "compensated" else torch.int8
        return {"remainder": Slot(shape, role="iterate", dtype=dtype)}

    def keeps(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def shardable(self, whole_rows: bool) -> bool:
        return True

    def retract(
        self,
        slots: Slots,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        moved: Sequence[Tensor],
        context: ConstraintContext,
    ) -> Sequence[Tensor]:
        if not slots:
            return moved
        write = self._write_at_random if self.rule == "stochastic" else self._write_with_remainder
        (own,) = slots.values()
        masks = [None] * len(moved) if context.mask is None else context.mask
        return [write(*row) for row in zip(own, parameters, moved, masks, strict=True)]

    def _write_at_random(self, writes: Tensor, before: Tensor, after: Tensor, mask: Tensor | None) -> Tensor:
        writes.add_(1 if mask is None else mask.to(writes.dtype))
        bits = after.float().view(torch.int32)
        seeds = bits.flatten().long()
        drawn = words(seeds, writes.expand_as(seeds), 1).reshape(bits.shape)
        up = (drawn & 0xFFFF).int()
        return torch.where(after.isfinite(), ((bits + up) & -65536).view(torch.float32), after).to(after.dtype)

    def _write_with_remainder(self, remainder: Tensor, before: Tensor, after: Tensor, mask: Tensor | None) -> Tensor:
        most = _half_ulp(before.bfloat16())
        rest = remainder.float() * (1.0 if self.rule == "compensated" else most / 128)
        wanted = after.float() + torch.where(rest.abs() <= most, rest, 0.0)  # a larger one is of an overwritten weight
        held = wanted.bfloat16()
        rest = wanted - held.float()
        if self.rule == "split":
            rest = (rest / (_half_ulp(held) / 128)).round().clamp(-128, 127)
        rest = torch.where(wanted.isfinite(), rest, 0.0).to(remainder.dtype)
        remainder.copy_(rest if mask is None else torch.where(mask, rest, remainder))
        return held.to(after.dtype)


def _half_ulp(x: Tensor) -> Tensor:
    """Half a unit in the last place of bfloat16 numbers, in float32; one size for zero and all subnormal ones."""
    exponent = x.float().view(torch.int32) & 0x7F800000
    return exponent.clamp_min(1 << 23).view(torch.float32) * 2.0**-8
