"""Second moments after a change of basis, fitted to the sums over axes that the statistics of the basis know.

Legend: v second moments `[N, *block]` in the new basis; d_i `[N, d_i]` sums of v over all axes but i, as the statistic
of axis i has them, diag(Q_i^T A_i Q_i); w_j `[N, d_j]` weights of axis j in the sums of other axes, for statistics that
are whitened on it; m first moments in the new basis.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from eigengraft.numerics import may_branch_on_values, per_block, tiny, to_power
from eigengraft.slots import Slot, State
from eigengraft.state_key import StateKey

from ..algebra.basis_change import slot_axis
from ..algebra.proportional_fitting import fit_
from ..base import Stage, chain_slots
from ..statistics import Statistic, mean_eigenvalue


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


def fit_second_moments(
    stages: tuple[Stage, ...], state: State, marginals: Mapping[int, Tensor], weights: Mapping[int, Tensor]
) -> None:
    """Fits the second moments of a chain, after its basis changed, to marginals, by axis of the block; limits updates.

    A second moment is a running mean of squared gradients, whose slots have a `decay` b. A factored one, v = r c^T /
    mean(r), of which both factors are known goes half of the way on a logarithmic scale, r and c to the roots of what
    they are times what they should be: what moves to one entry is in its row and in its column, and would count twice.

    Then v of a block is multiplied by the least c >= 1 with which mean(m^2 / (c v)) is at most the larger of two,
    whichever first moment m is: mean m^2 / mean v, which a v without differences gives in any basis; and 1 - b, which
    is m^2 / v after one gradient that outweighs all others if both moments have the decay b.
    """
    first, second = _moments(stages, state)
    for scope, slots in second:
        known = {name: _known(slot, marginals, state.block) for name, slot in slots.items()}
        power = 1 / max(1, sum(map(bool, known.values())))
        new = {name: fit_(scope[name], own, weights, power) for name, own in known.items()}
        (decay,) = {slot.decay or 0.0 for slot in slots.values()}
        growth = _growth([m[name] for m, name in first], _spread([(x, slots[name]) for name, x in new.items()]), decay)
        for name, x in new.items():
            scope[name] = x.mul_(per_block(growth, x))


def _moments(
    stages: tuple[Stage, ...], state: State
) -> tuple[list[tuple[State, str]], list[tuple[State, dict[str, Slot]]]]:
    """First moments of a chain that live in the basis, and second moments, factors of one together."""
    first: list[tuple[State, str]] = []
    second: dict[str, tuple[State, dict[str, Slot]]] = {}
    for path, name, slot in chain_slots(stages, state.block):
        if slot.decay is not None:
            group = path if slot.frame in ("row", "column") else StateKey.join(path, name)
            second.setdefault(group, (state.scope(path), {}))[1][name] = slot
        elif slot.role == "first_moment" and slot.frame == "vector" and slot.axes is None:
            first.append((state.scope(path), name))
    return first, list(second.values())


def _growth(first: list[Tensor], v: Tensor, decay: float) -> Tensor:
    """c `[N]`, at least 1: how many times larger v must be for updates m / sqrt(v) to be within their limits.

    Entries of v that are rounding, as of directions without gradients, are not counted.
    """
    mean = v.flatten(1).mean(-1)
    # the rounding of rotations, with a margin of 16
    rounding = mean * (v[0].numel() * (16 * torch.finfo(v.dtype).eps) ** 2)
    hidden = None
    if not may_branch_on_values(v) or not bool((v.flatten(1).amin(-1) > rounding).all()):
        hidden = ~(v > per_block(rounding, v))
    growth = torch.ones_like(mean)
    for m in first:
        squares = m.square()
        even = squares.flatten(1).mean(-1) / mean.clamp_min(tiny(v.dtype))
        sizes = squares.div_(v) if hidden is None else squares.div_(v).masked_fill_(hidden, 0.0)
        most = even.clamp_min(max(1 - decay, tiny(v.dtype)))
        growth = torch.maximum(growth, sizes.flatten(1).mean(-1) / most)
    return growth


def _known(slot: Slot, marginals: Mapping[int, Tensor], block: tuple[int, ...]) -> dict[int, Tensor]:
    """Marginals by axis of a slot, of axes of the block."""
    places = {axis: slot_axis(slot, axis, len(block)) for axis in marginals}
    return {place: marginals[axis] for axis, place in places.items() if place is not None}


def require_marginals(statistic: Statistic, inner: tuple[Stage, ...], keeps_all_columns: bool) -> None:
    """Raises ValueError where a statistic does not know sums of the second moments of a chain in its basis."""
    if needed := _needed(statistic, inner, keeps_all_columns):
        raise ValueError(f"transport: 'marginals' needs {needed}; `transport: exact` takes any chain")


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
        got = ", ".join(f"{beta:g}" for beta in sorted(found))
        told = "none (a slot that is a running mean of squared gradients says so by `Slot(decay=beta)`)"
        return f"second moments inside with the decay of the statistic, {decay:g}, got {got or told}"
    if statistic.needs_power is not None and any(slot.frame != "square" for slot in slots):
        return "second moments of every entry with a statistic that is whitened, got factored ones"
    return None


def _spread(parts: list[tuple[Tensor, Slot]]) -> Tensor:
    """v `[N, *block]`, or of length 1 along an axis that it does not have: whole, of rows, of columns, or rank one."""
    along = {"row": -1, "column": -2}
    first, *others = (x.unsqueeze(along[slot.frame]) if slot.frame in along else x for x, slot in parts)
    for other in others:
        first = first / first.mean((-2, -1), keepdim=True).clamp_min(tiny(first.dtype)) * other
    return first
