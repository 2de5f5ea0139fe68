"""Notice of updates that rounding loses: parameters in 16 bits that stand still."""

from __future__ import annotations

import torch
from torch import Tensor

from eigengraft.distributed.layouts import local
from eigengraft.errors import warn_user
from eigengraft.numerics import fake_mode

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
