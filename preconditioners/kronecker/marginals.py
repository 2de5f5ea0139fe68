"""Second moments after a change of basis, fitted to the sums over axes that the statistics of the basis know.

Legend: v second moments `[N, *block]` in the new basis; s_i `[N, d_i]` sums of v over all axes but i; d_i `[N, d_i]`
the same sums as the statistic of axis i has them, diag(Q_i^T A_i Q_i).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eigengraft.numerics import per_block, tiny
from eigengraft.slots import Slot, State

from ..algebra.basis_change import slot_axis
from ..base import Stage, chain_slots
from ..statistics import Statistic


def fitted(v: Tensor, marginals: Mapping[int, Tensor]) -> Tensor:
    """v * prod_i (d_i / s_i), scaled to the sum that v had; marginals: d_i by axis of v, in any unit, 0: not known.

    One step of iterative proportional fitting (Deming & Stephan 1940) that takes all axes alike. It is exact where v is
    a product of one factor for each axis, and whatever v is for a single axis.
    """
    out, total = v, v.flatten(1).sum(-1)
    for axis, d in marginals.items():
        others = [place + 1 for place in range(v.ndim - 1) if place != axis]
        s = v.sum(others) if others else v
        known = (d > 0) & (s > 0)
        unit = (s * known).sum(-1) / (d * known).sum(-1).clamp_min(tiny(d.dtype))
        factor = torch.where(known, d * unit[:, None] / s.clamp_min(tiny(s.dtype)), 1.0)
        out = out * factor.reshape(-1, *(n if place == axis else 1 for place, n in enumerate(v.shape[1:])))
    return out * per_block(total / out.flatten(1).sum(-1).clamp_min(tiny(v.dtype)), v)


def marginals(a: Tensor, basis: Tensor | None, newest: Tensor | None) -> Tensor:
    """d_i `[N, d]` from the factor A_i `[N, d, d]`, without the newest gradient; 0 where rounding hides it.

    basis: Q_i `[N, d, d]`; None: the factor lives in it. newest `[N, d]`: what the newest gradient added to d_i, if the
    second moments do not have it yet.
    """
    d = a.diagonal(dim1=-2, dim2=-1) if basis is None else (basis * torch.bmm(a, basis)).sum(-2)
    rounding = torch.finfo(d.dtype).eps * d.shape[-1] * d.amax(-1, keepdim=True)
    return torch.where((before := d if newest is None else d - newest) > rounding, before, 0.0)


class InnerMoments:
    """First and second moments of a chain whose basis changes; made before the change, and told when it is done.

    A second moment is a running mean of squared gradients, whose slot has a `decay`.
    """

    def __init__(self, stages: tuple[Stage, ...], state: State) -> None:
        slots = [(state.scope(path), name, slot) for path, name, slot in chain_slots(stages, state.block)]
        self._order = len(state.block)
        self._second = [entry for entry in slots if entry[2].decay is not None]
        self._first = [(scope, name) for scope, name, slot in slots if slot.role == "first_moment" and _whole(slot)]
        self._ratios = [self._largest_ratios(scope[name]) if _whole(slot) else [] for scope, name, slot in self._second]

    def _largest_ratios(self, v: Tensor) -> list[Tensor]:
        """max |m|^2 / v over each block, `[N]`, of every first moment m."""
        floor = tiny(v.dtype)
        return [(scope[name].square() / v.clamp_min(floor)).flatten(1).amax(-1) for scope, name in self._first]

    def fit(self, marginals: Mapping[int, Tensor]) -> None:
        """Fits the second moments to marginals, by axis of the block; then max |m| / sqrt(v) is what it was at most."""
        for (scope, name, slot), ratios in zip(self._second, self._ratios, strict=True):
            places = {axis: slot_axis(slot, axis, self._order) for axis in marginals}
            v = fitted(scope[name], {place: marginals[axis] for axis, place in places.items() if place is not None})
            for (inside, moment), ratio in zip(self._first, ratios, strict=False):  # no ratios of a factored one
                v = torch.maximum(v, inside[moment].square() / per_block(ratio.clamp_min(tiny(v.dtype)), v))
            scope[name] = v


def require_marginals(statistic: Statistic, inner: tuple[Stage, ...], keeps_all_columns: bool) -> None:
    """Raises ValueError where a statistic does not know sums of the second moments of a chain in its basis."""
    decay, rule = statistic.decay_of_squares, "transport: 'marginals' needs"
    if decay is None:
        fields = {name: getattr(statistic, name) for name in ("kind", "interval", "initial", "source")}
        raise ValueError(
            f"{rule} the squares of every gradient: a gram, interval 1, initial 0, source gradient; got {fields}"
        )
    if not keeps_all_columns:
        raise ValueError(f"{rule} all columns of a basis, got a solver that keeps fewer")
    found = {slot.decay for *_, slot in chain_slots(inner, (2, 2)) if slot.decay is not None}
    if found != {decay}:
        raise ValueError(
            f"{rule} second moments inside with the decay of the statistic, {decay:g}, got "
            f"{', '.join(f'{beta:g}' for beta in sorted(found)) or 'none'}"
        )


def _whole(slot: Slot) -> bool:
    """Whether the slot has one number for each entry of the block."""
    return slot.frame in ("vector", "square") and slot.axes is None
