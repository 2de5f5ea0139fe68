"""Rounding of parameters in 16 bits: a constraint that preserves small updates, and a warning if updates are lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.errors import warn_user
from eigengraft.noise import words
from eigengraft.numerics import HostCopy, equal_stacks, fake_mode, has_values, local, may_branch_on_values, over_stacks
from eigengraft.slots import Slot

from .constraints import Constraint, ConstraintContext, Slots, Tensors
from .write import put


class Rounding(Constraint):
    """W <- round(W' + r), r <- W' + r - W  with W' = W - lr alpha W - lr U, for parameters in bfloat16.

    W' is the parameter after the write, before rounding, and r is the remainder of earlier roundings. If W' is rounded
    to nearest without r, an update with |lr U| < 2^-9 |W| is lost. There are three rules:

    - compensated: r is stored in bfloat16, 2 bytes for each entry (Kahan 1965; Zamirai et al. 2020, arXiv:2010.06192,
      Algorithm 3).
    - split: r is stored as a multiple of 2^-7 of half a unit in the last place of W, 1 byte for each entry. W and r
      together are a weight of 24 bits, and the model uses the first 16 bits.
    - stochastic: there is no r. W' is rounded up with probability (W' - low) / (high - low), where low and high are the
      neighbors of W' in bfloat16. The mean of W is then W' (Zamirai et al. 2020, Algorithm 2).

    The random numbers are a hash of the bits of W' and of the number of the update. They are the same on all ranks and
    for any sharding, and entries with equal W' are rounded in the same direction.
    Decay applies to W, not to r. If a weight is overwritten between steps, an r above half a unit in the last place of
    the new weight is dropped; a smaller r is still added. Parameters in other dtypes are written without this rounding
    and have no state. `rounding` is the last constraint of a list. It cannot be combined with an averaging, because
    iterates of an averaging are stored in 32 bits.
    """

    kind: Literal["rounding"] = "rounding"
    rule: Literal["stochastic", "compensated", "split"] = Field(
        default="compensated",
        description="stochastic: round at random; compensated, split: store the remainder, in 16 or in 8 bits for "
        "each entry",
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
        (own,) = slots.values()
        if self.rule == "stochastic":
            added = torch._foreach_add(list(own), 1)
            put(own, added, context.mask)
            return over_stacks(_rounded_at_random, moved, torch.stack(list(own)))
        held, rests = dict[int, Tensor](), dict[int, Tensor]()
        for indices, stacks in equal_stacks(own, parameters, moved):
            for found, stack in zip((held, rests), self._rounded(*stacks), strict=True):
                found.update(zip(indices, stack.unbind(0), strict=True))
        put(own, [rests[index] for index in range(len(own))], context.mask)
        return [held[index] for index in range(len(own))]

    def _rounded(self, remainder: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Return (W, r): the parameters rounded to bfloat16, and the remainder of this rounding for the next step.

        remainder: stored remainder r of earlier roundings. Entries above half a unit in the last place of `before` are
            dropped.
        before: the parameter before the write.
        after: W', the parameter after the write, before rounding.
        """
        most = _half_ulp(before.bfloat16())
        rest = remainder.float() * (1.0 if self.rule == "compensated" else most / 128)
        # A rounding leaves a remainder of at most half a unit in the last place of the rounded weight. A larger `rest`
        # therefore belongs to an earlier value of the weight, which other code has overwritten, and is dropped.
        wanted = after.float() + torch.where(rest.abs() <= most, rest, 0.0)
        held = wanted.bfloat16()
        rest = wanted - held.float()
        if self.rule == "split":
            rest = (rest / (_half_ulp(held) / 128)).round().clamp(-128, 127)
        rest = torch.where(wanted.isfinite(), rest, 0.0).to(remainder.dtype)
        return held.to(after.dtype), rest


def _rounded_at_random(after: Tensor, writes: Tensor) -> Tensor:
    """Return numbers that were rounded to bfloat16 at random.

    after: the numbers to round.
    writes: number of the update. The same numbers are rounded differently in another update.
    """
    bits = after.float().view(torch.int32)
    seeds = bits.flatten().long()
    drawn = words(seeds, writes.expand_as(bits).flatten(), 1).reshape(bits.shape)
    up = (drawn & 0xFFFF).int()
    return torch.where(after.isfinite(), ((bits + up) & -65536).view(torch.float32), after).to(after.dtype)


def _half_ulp(x: Tensor) -> Tensor:
    """Return half a unit in the last place of bfloat16 numbers, in float32; zero counts as subnormal."""
    exponent = x.float().view(torch.int32) & 0x7F800000
    return exponent.clamp_min(1 << 23).view(torch.float32) * 2.0**-8


_WINDOW = 5
"""Number of steps between the two samples of a parameter that are compared."""
_LEAST = 0.5
"""Smallest fraction of sampled entries that must change between the two samples; if fewer change, there is a warning.
"""
_SAMPLE = 65536
"""Largest number of entries in a sample, which bounds memory and time."""


class RoundingWatch:
    """Warns once if the largest matrix in 16 bits hardly changes.

    In bfloat16 W + dW rounds to W if |dW| < |W| 2^-9. Two samples of the matrix are compared, five steps apart. Samples
    are taken only while the learning rate is at least half of its peak, so that a warm-up causes no warning. Entries
    with a gradient of 0 do not count. `check` is called after each step.

    A learning rate on a device is copied to the host without a wait, and read one step later.
    """

    _chosen: tuple[int, int] | None = None
    _seen: tuple[Tensor, Tensor] | None = None
    _steps = 0
    _copied: HostCopy | None = None

    def check(self, optimizer: torch.optim.Optimizer) -> bool:
        """Sample the largest matrix in 16 bits, or compare it with the sample of five steps before. Warn if the matrix
        hardly changed, because rounding then drops most updates.

        Return True if no further call is needed: there is no matrix in 16 bits, or the samples were compared.
        """
        self._chosen = self._chosen or _largest(optimizer)
        if self._chosen is None:
            return True
        group, position = optimizer.param_groups[self._chosen[0]], self._chosen[1]
        parameter, lr = group["params"][position], self._rate(group["lr"])
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

    def _rate(self, lr: float | Tensor) -> float:
        """Return the learning rate. For a tensor on a device, return that of the last step, and 0 in the first step."""
        if not isinstance(lr, Tensor) or may_branch_on_values(lr):
            return float(lr)
        before, self._copied = self._copied, HostCopy(lr.detach().reshape(()))
        return 0.0 if before is None or not has_values(lr) else float(before.wait())


def _largest(optimizer: torch.optim.Optimizer) -> tuple[int, int] | None:
    """Return the largest trained matrix in 16 bits as (index of the param group, position); None if there is none."""
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
            f"{name}: only {moved / count:.1%} of its entries changed in {_WINDOW} steps at lr {lr:g}, because updates "
            f"that are too small are lost to rounding in {dtype}; keep parameters in float32 and run the model under "
            "torch.autocast, or add `constraints: rounding` to the recipe"
        )
