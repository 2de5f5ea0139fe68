"""Second moments after a change of basis, fitted to the sums over axes that the statistics of the basis know.

Legend: v second moments `[N, *block]` in the new basis; s_i `[N, d_i]` sums of v over all axes but i; d_i `[N, d_i]`
the same sums as the statistic of axis i has them, diag(Q_i^T A_i Q_i); w_j `[N, d_j]` weights of axis j in the sums of
other axes, for statistics that are whitened on it; m first moments in the new basis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, per_block, tiny, to_power
from eigengraft.slots import Slot, State
from eigengraft.state_key import StateKey

from ..algebra.basis_change import mode_products, slot_axis
from ..base import Stage, chain_slots
from ..statistics import Statistic, mean_eigenvalue


def fit_(
    v: Tensor, marginals: Mapping[int, Tensor], weights: Mapping[int, Tensor] | None = None, power: float = 1.0
) -> Tensor:
    """In place: v <- v * prod_i (d_i / s_i)^power, scaled to the sum that v had; marginals: d_i by axis of v, in any
    unit.

    0 in d_i: not known. weights: w_j by axis of v: s_i sums v prod_(j != i) w_j. One step of iterative proportional
    fitting (Deming & Stephan 1940) that takes all axes alike. It is exact where v is a product of one factor for each
    axis, and whatever v is for a single axis.
    """
    factors = []
    for axis, d in marginals.items():
        others = [place + 1 for place in range(v.ndim - 1) if place != axis]
        weighted = mode_products(v, {place: w for place, w in (weights or {}).items() if place != axis})
        s = weighted.sum(others) if others else weighted
        known = (d > 0) & (s > 0)
        unit = (s * known).sum(-1) / (d * known).sum(-1).clamp_min(tiny(d.dtype))
        factor = torch.where(known, d * unit[:, None] / s.clamp_min(tiny(s.dtype)), 1.0)
        factor = factor if power == 1 else factor.pow(power)
        factors.append(factor.reshape(-1, *(n if place == axis else 1 for place, n in enumerate(v.shape[1:]))))
    total = v.flatten(1).sum(-1)
    for factor in factors:
        v.mul_(factor)
    return v.mul_(per_block(total / v.flatten(1).sum(-1).clamp_min(tiny(v.dtype)), v))


def marginals(a: Tensor, basis: Tensor | None, found: Tensor | None = None) -> Tensor:
    """d_i `[N, d]` from the factor A_i `[N, d, d]`, in any unit; 0 where rounding hides it.

    basis: Q_i `[N, d, d]`; None: the factor lives in it. found: d_i where it is known already, NaN for other blocks.
    """
    if basis is None:
        d = a.diagonal(dim1=-2, dim2=-1)
    elif found is None or bool(found.isnan().any()):
        d = (basis * torch.bmm(a, basis)).sum(-2)
        d = d if found is None else torch.where(found.isnan(), d, found)
    else:
        d = found
    return torch.where(d > torch.finfo(d.dtype).eps * d.shape[-1] * d.amax(-1, keepdim=True), d, 0.0)


def weights(d: Tensor, exponent: Fraction, floor: float) -> Tensor:
    """w_i `[N, d]`: eigenvalues d_i in units of their mean, from `floor` up, to the power that a statistic reads."""
    values = (d / mean_eigenvalue(d)[:, None]).clamp_min(max(floor, tiny(d.dtype)))
    return to_power(values, float(exponent))


class InnerMoments:
    """First and second moments of a chain whose basis changes; made before the change, and told when it is done.

    A second moment is a running mean of squared gradients, whose slots have a `decay`.
    """

    def __init__(self, stages: tuple[Stage, ...], state: State) -> None:
        self._block = state.block
        self._second: dict[str, tuple[State, dict[str, Slot]]] = {}
        self._first = []
        for path, name, slot in chain_slots(stages, state.block):
            if slot.decay is not None:
                group = path if slot.frame in ("row", "column") else StateKey.join(path, name)
                self._second.setdefault(group, (state.scope(path), {}))[1][name] = slot
            elif slot.role == "first_moment" and slot.frame == "vector" and slot.axes is None:
                self._first.append((state.scope(path), name))
        before = {group: {name: scope[name] for name in slots} for group, (scope, slots) in self._second.items()}
        # sums of m^2 and of v are the same in every basis
        self._allowed = {group: torch.maximum(size, even) for group, (size, even) in self._sizes(before).items()}

    def _sizes(self, second: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        """mean m^2 / v and mean m^2 / mean v of each block, `[1 + first moments m, N]` from zeros on, by second moment.

        second: the slots of each v.
        """
        found = {}
        for group, values in second.items():
            v = _spread([(x, self._second[group][1][name]) for name, x in values.items()])
            # v of a direction without gradients is the rounding of rotations, with a margin of 16
            mean = v.flatten(1).mean(-1)
            rounding = mean * (math.prod(self._block) * (16 * torch.finfo(v.dtype).eps) ** 2)
            squares = [m[name].square() for m, name in self._first]
            even = _means(squares, mean) / mean.clamp_min(tiny(v.dtype))
            squares = [x.div_(v) for x in squares]
            if not may_branch_on_values(v) or not bool((v.flatten(1).amin(-1) > rounding).all()):
                hidden = ~(v > per_block(rounding, v))
                squares = [x.masked_fill_(hidden, 0.0) for x in squares]
            found[group] = _means(squares, mean), even
        return found

    def fit(self, marginals: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> None:
        """Fits the second moments to marginals, by axis of the block; scales those with which an update would grow.

        A factored one, v = r c^T / mean(r), of which both factors are known goes half of the way on a logarithmic
        scale, r and c to the roots of what they are times what they should be: what moves to one entry is in its row
        and in its column, and would count twice.

        The scale of a block is the least one, at least 1, with which mean m^2 / v is at most the largest of three,
        whichever first moment m is: what it was before; mean m^2 / mean v, which a v without differences gives in any
        basis; 1 - b, which is m^2 / v after one gradient that outweighs all others if both moments have the decay b.
        """
        new: dict[str, dict[str, Tensor]] = {}
        for group, (scope, slots) in self._second.items():
            known = {name: self._known(slot, marginals) for name, slot in slots.items()}
            power = 1 / max(1, sum(map(bool, known.values())))
            new[group] = {name: fit_(scope[name], own, weights, power) for name, own in known.items()}
        for group, (after, _) in self._sizes(new).items():
            scope, slots = self._second[group]
            (decay,) = {slot.decay or 0.0 for slot in slots.values()}
            most = self._allowed[group].clamp_min(max(1 - decay, tiny(after.dtype)))
            growth = (after / most).amax(0).clamp_min(1.0)
            for name, x in new[group].items():
                scope[name] = x.mul_(per_block(growth, x))

    def _known(self, slot: Slot, marginals: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Marginals by axis of a slot, of axes of the block."""
        places = {axis: slot_axis(slot, axis, len(self._block)) for axis in marginals}
        return {place: marginals[axis] for axis, place in places.items() if place is not None}


def require_marginals(statistic: Statistic, inner: tuple[Stage, ...], keeps_all_columns: bool) -> None:
    """Raises ValueError where a statistic does not know sums of the second moments of a chain in its basis."""
    if needed := _needed(statistic, inner, keeps_all_columns):
        raise ValueError(f"transport: 'marginals' needs {needed}; 'exact' needs nothing of a chain")


def _needed(statistic: Statistic, inner: tuple[Stage, ...], keeps_all_columns: bool) -> str | None:
    """What is missing for fitted second moments, and what there is in its place."""
    decay = statistic.decay_of_squares
    if decay is None:
        fields = {name: getattr(statistic, name) for name in ("kind", "interval", "initial", "source")}
        wanted = "a gram or bregman, interval 1, initial 0, source gradient"
        return f"the squares of every gradient: {wanted}; got {fields}"
    if not keeps_all_columns:
        return "all columns of a basis, got a solver that keeps fewer"
    slots = [slot for *_, slot in chain_slots(inner, (2, 2)) if slot.decay is not None]
    if (found := {slot.decay for slot in slots if slot.decay is not None}) != {decay}:
        got = ", ".join(f"{beta:g}" for beta in sorted(found)) or "none"
        return f"second moments inside with the decay of the statistic, {decay:g}, got {got}"
    if statistic.needs_power is not None and any(slot.frame != "square" for slot in slots):
        return "second moments of every entry with a statistic that is whitened, got factored ones"
    return None


def _means(squares: list[Tensor], like: Tensor) -> Tensor:
    """Means over each block `[1 + n, N]`, after zeros as `like`, which are all there is without first moments."""
    return torch.stack([torch.zeros_like(like), *(x.flatten(1).mean(-1) for x in squares)])


def _spread(parts: list[tuple[Tensor, Slot]]) -> Tensor:
    """v `[N, *block]`, or of length 1 along an axis that it does not have: whole, of rows, of columns, or rank one."""
    along = {"row": -1, "column": -2}
    first, *others = (x.unsqueeze(along[slot.frame]) if slot.frame in along else x for x, slot in parts)
    for other in others:
        first = first / first.mean((-2, -1), keepdim=True).clamp_min(tiny(first.dtype)) * other
    return first
