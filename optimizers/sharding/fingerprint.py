"""Fingerprint of a step: whether all ranks step with the same numbers, from sums over ranks.

Legend: R ranks, F numbers; p: a part of 16 bits of a number in float64, which has four.
All ranks have one p if and only if R sum(p^2) = sum(p)^2. Every sum is exact in float64 up to 2^21 ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.gradients import count_writes

from ..apply.write import Hyper
from .agreement import name_ranks

StepNumbers = Mapping[str, float | Tensor]
"""Numbers that all ranks must step with, by name; a tensor on a device is not read by the host."""

STEPS = "number of steps"
AGAIN = "number of steps since the gradients were written"
NUMBERS = ("lr", "peak_lr", "weight_decay", STEPS, AGAIN)
"""The names of the numbers of one param group."""
LENGTH = 1 + 8 * len(NUMBERS)
"""Entries of their fingerprint."""
SHIFTS = np.array([0, 16, 32, 48], dtype=np.int64)


def step_numbers(hypers: Mapping[int, Hyper], steps: int, again: int) -> StepNumbers:
    """What all ranks must step with.

    hypers: values of param groups, by number. steps: steps before this one; again: those with the present gradients.
    """
    found: dict[str, float | Tensor] = {}
    for group, own in hypers.items():
        of = f" of param group {group}" if len(hypers) > 1 else ""
        found |= {f"lr{of}": own.lr, f"peak_lr{of}": own.peak_lr, f"weight_decay{of}": own.weight_decay}
    return {**found, STEPS: float(steps), AGAIN: float(again)}


def fingerprint(numbers: StepNumbers) -> list[float]:
    """1, the parts `[F, 4]`, their squares `[F, 4]`; zeros for tensors on a device, which `fill_from_device` adds."""
    known = [float(x) + 0.0 if _on_host(x) else 0.0 for x in numbers.values()]
    parts = np.array(known).view(np.int64)[:, None] >> SHIFTS & 0xFFFF
    found: list[float] = [1, *parts.flatten().tolist(), *(parts * parts).flatten().tolist()]
    return found


def fill_from_device(found: Tensor, numbers: StepNumbers) -> None:
    """Writes the parts of tensors on a device into a fingerprint there."""
    rows = found[1:].view(2, len(numbers), len(SHIFTS))
    for row, x in enumerate(numbers.values()):
        if isinstance(x, Tensor) and not _on_host(x):
            bits = (x.detach().to(found.device, torch.float64).reshape(1) + 0.0).view(torch.int64)
            parts = bits >> torch.from_numpy(SHIFTS).to(bits.device) & 0xFFFF
            rows[:, row] = torch.stack([parts, parts * parts]).double()


def differing(sums: Sequence[float], names: Sequence[str] = NUMBERS) -> list[str]:
    """Names of numbers that are not the same on all ranks. sums: fingerprints of all ranks, summed."""
    ranks, (parts, squares) = int(sums[0]), np.array(sums[1:]).astype(np.int64).reshape(2, len(names), len(SHIFTS))
    wrong: NDArray[np.bool_] = (ranks * squares != parts * parts).any(axis=1)
    return [name for name, bad in zip(names, wrong.tolist(), strict=True) if bad]


def tell_apart(names: Sequence[str], found: Sequence[Mapping[str, float]]) -> str:
    """Who has which value of some numbers; found: the numbers of every rank."""
    said = [f"the same {name}, got {by_value([own[name] for own in found])}" for name in names]
    return "; ".join(said) + ("; a rank calls step() more often than others" if AGAIN in names else "")


def by_value(values: Sequence[float]) -> str:
    """Which ranks have which value; values: of every rank."""
    holders: dict[float, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    some = [f"{value:g}" if value.is_integer() else repr(value) for value in holders]
    some = [f"{value} on {name_ranks(own)}" for value, own in list(zip(some, holders.values(), strict=True))[:4]]
    return ", ".join(some) + (f" and {len(holders) - 4} values more" if len(holders) > 4 else "")


def _on_host(x: float | Tensor) -> bool:
    return not isinstance(x, Tensor) or x.device.type == "cpu"


class UsedGradients:
    """The gradients of the last step, to notice a rank that steps again before they are written again.

    parameters: those that are shared with other ranks, a list that may change.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._used: list[tuple[ref[Tensor], int]] = []
        self._times = 0

    def times(self) -> int:
        """How many steps have used the present gradients since one of them was written; 0 if there is none."""
        return self._count(_versions(self.parameters))

    def use(self) -> None:
        """Says that a step uses the present gradients."""
        now = _versions(self.parameters)
        self._times = self._count(now) + 1
        self._used = [(ref(gradient), version) for gradient, version in now]

    def _count(self, now: Sequence[tuple[Tensor, int]]) -> int:
        pairs = zip(self._used, now, strict=False)
        same = len(self._used) == len(now) and all(old() is x and was == version for (old, was), (x, version) in pairs)
        return self._times if same else 0


def _versions(parameters: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """(what this rank holds, number of writes) of each gradient."""
    return [count_writes(parameter.grad) for parameter in parameters if parameter.grad is not None]
