"""Rounding of parameters in 16 bits: a constraint that loses no update, and a warning where updates are lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.distributed.layouts import local
from eigengraft.errors import warn_user
from eigengraft.noise import words
from eigengraft.numerics import fake_mode
from eigengraft.slots import Slot

from .constraints import Constraint, ConstraintContext, Slots, Tensors


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
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
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


_WINDOW = 5
"""Steps over which a parameter is watched."""
_LEAST = 0.5
"""Share of the entries that must move in that time for nothing to be said."""
_SAMPLE = 65536
"""Entries that are looked at."""


class RoundingWatch:
    """Warns once if the largest matrix in 16 bits hardly moves:  W + dW rounds to W where |dW| < |W| 2^-9 in bfloat16.

    It looks twice, five steps apart, at no more than 65536 entries, and only while the learning rate is at
    least half of its peak, so that a warm-up says nothing. Entries without a gradient
    do not count. `look` is called after each step.
    """

    def __init__(self) -> None:
        self._chosen: tuple[int, int] | None = None
        self._seen: tuple[Tensor, Tensor] | None = None
        self._steps = 0

    def look(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take a sample of one parameter, or compare it with the one that was taken. Return True if all is known."""
        self._chosen = self._chosen or _largest(optimizer)
        if self._chosen is None:
            return True
        group, position = optimizer.param_groups[self._chosen[0]], self._chosen[1]
        parameter, lr = group["params"][position], float(group["lr"])
        if lr < 0.5 * float(group["peak_lr"]) or parameter.grad is None:
            self._seen = None
        elif self._seen is None or self._seen[0] is not parameter:
            self._seen, self._steps = (parameter, _sample(parameter).clone()), 0
        else:
            self._steps += 1
            if self._steps == _WINDOW:
                names = group.get("param_names") or [f"a parameter of shape {tuple(parameter.shape)}"] * (position + 1)
                _warn(names[position], parameter, self._seen[1], lr)
                return True
        return False


def _largest(optimizer: torch.optim.Optimizer) -> tuple[int, int] | None:
    """The param group and position of the largest matrix in 16 bits that is trained, the first of equal ones."""
    found = [
        (index, position)
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if parameter.dtype.itemsize == 2 and parameter.requires_grad and parameter.ndim > 1 and parameter.numel()
    ]
    return max(found, key=lambda at: optimizer.param_groups[at[0]]["params"][at[1]].numel(), default=None)


def _sample(tensor: Tensor) -> Tensor:
    return local(tensor).detach().flatten()[:_SAMPLE]


def _warn(name: str, parameter: Tensor, before: Tensor, lr: float) -> None:
    assert parameter.grad is not None
    if fake_mode(parameter) is not None:
        return
    trained = _sample(parameter.grad) != 0
    count = int(trained.sum())
    moved = int((_sample(parameter) != before)[trained].sum())
    if moved < _LEAST * count:
        dtype = str(parameter.dtype).removeprefix("torch.")
        warn_user(
            f"{name}: only {moved / count:.1%} of its entries moved in {_WINDOW} steps at lr {lr:g}: smaller updates "
            f"are lost to rounding in {dtype}. Keep parameters in float32 and run the model under torch.autocast, "
            "or let `constraints: rounding` write them"
        )
