"""Changes of the basis of a chain: its state is rotated or reordered, and its second moments are fitted to known sums.

Legend:
    N: number of blocks.
    d: length of an axis.
    r: number of columns of a basis, at most d.
    A_i, Q_i: the statistic of axis i and its basis.
    v: second moments `[N, *block]` in the new basis.
    m: first moments `[N, *block]` in the new basis.
    s_i: the present sums of v over all axes except i, `[N, length of axis i]`.
    d_i: the values that these sums should have according to the statistic, diag(Q_i^T A_i Q_i), called marginals.
    w_j: weights `[N, length of axis j]` of the entries in sums over axis j, if the statistics are whitened along this
        axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from eigengraft.numerics import identity_like, known_to_hold, may_branch_on_values, per_block, tiny, to_power
from eigengraft.signals import SIDES, known_signals, requested
from eigengraft.slots import Slot, State, StateKey

from ..algebra.products import mode_product, reordered, rotate
from ..base import Stage, chain_slots, walk
from ..roots.power_qr import identity_order
from ..statistics import Statistic, mean_eigenvalue
from .base import joined

Transport = Literal["exact", "marginals", "permute", "none"]
ChainSlot = tuple[str, str, Slot]
"""A slot of a chain: (path of the stage in the chain, name of the slot, the slot)."""


class Turn:
    """A change of basis by R = Q_old^T Q_new `[N, r, r]`. R is computed when it is first needed.

    new: Q_new `[N, d, r]`.
    old: Q_old `[N, d, r]`. None: `new` is R itself.
    order: `[N, r]`, the index of the old column from which each new column was computed. None: columns have no old
        counterpart.
    """

    def __init__(self, new: Tensor, old: Tensor | None = None, order: Tensor | None = None) -> None:
        self.new, self.old, self.order = new, old, order

    @cached_property
    def rotation(self) -> Tensor:
        """The matrix R = Q_old^T Q_new `[N, r, r]`, with r the number of columns of a basis."""
        return self.new if self.old is None else torch.bmm(self.old.mT, self.new)

    @cached_property
    def stays(self) -> bool:
        """True if it is known that Q_new equals Q_old for every block, so that nothing has to be transported.

        On a device the value is always False, because the host would have to wait for a comparison.
        """
        before = identity_like(self.new) if self.old is None else self.old
        return may_branch_on_values(self.new) and torch.equal(self.new, before)

    def chunk(self, parts: int) -> list[Turn]:
        """Split this change of N blocks into `parts` changes, each of N / parts consecutive blocks."""
        if parts == 1:
            return [self]
        order: Sequence[Tensor | None] = [None] * parts if self.order is None else self.order.chunk(parts)
        old: Sequence[Tensor | None] = [None] * parts if self.old is None else self.old.chunk(parts)
        found = [Turn(*own) for own in zip(self.new.chunk(parts), old, order, strict=True)]
        if "rotation" in vars(self):  # R is computed already
            for turn, rotation in zip(found, self.rotation.chunk(parts), strict=True):
                turn.rotation = rotation
        return found

    def by_parts(self, x: Tensor, axis: int) -> Tensor | None:
        """Return R^T x along an axis, computed as Q_new^T (Q_old x) without R.

        Return None if R is given, or if it takes fewer operations to compute R and multiply x by R^T.
        """
        d, r = self.new.shape[1:]
        rest = x[0].numel() // r
        if self.old is None or 2 * d * rest >= r * (d + rest):
            return None
        return mode_product(mode_product(x, self.old, axis), self.new.mT, axis)


def transport(slots: Iterable[ChainSlot], state: State, turns: Mapping[int, Turn], how: Transport = "exact") -> None:
    """Transport the slots of a chain to a new basis along each axis in `turns`.

    slots: the slots of the chain, as `chain_slots` yields them.
    state: state of the chain; `state.block` is the shape of a block inside the chain.
    turns: the change of basis of each axis, with the rotation R.
    how: what happens to slots. Their field `frame` is "vector" for momenta, and "square", "row" or "column" for second
      moments, which are called squares here.
      exact: a vector m becomes R^T m, a square v becomes (R*R)^T v, where R*R has the squared entries of R.
      marginals: as exact; the caller must then call `fit_second_moments`.
      permute: vectors are rotated as with exact. Squares are only reordered, as the columns of the basis
        (`Turn.order`).
      none: no slot changes.
    """
    turns = {axis: turn for axis, turn in turns.items() if how != "none" and not turn.stays}
    slots = list(slots) if turns else []
    squared = how != "permute" and any(slot.frame in ("square", "row", "column") for _, _, slot in slots)
    for path, name, slot in slots:
        places = {axis: slot_axis(slot, axis, len(state.block)) for axis in turns}
        own = {place: turns[axis] for axis, place in places.items() if place is not None}
        if not own:
            continue
        scope = state.scope(path)
        if slot.frame == "vector":
            scope[name] = _rotated(scope[name], own, by_rotation=squared)
        elif how != "permute":
            scope[name] = rotate(scope[name], {place: turn.rotation.square().mT for place, turn in own.items()})
        else:
            scope[name] = _reordered(scope[name], own)


def _rotated(x: Tensor, turns: Mapping[int, Turn], by_rotation: bool) -> Tensor:
    """Return x in the new bases: multiplied along each axis in `turns` by R^T, with R = Q_old^T Q_new.

    turns: the change of basis of each axis, with the rotation R.
    by_rotation: True to compute R and multiply by it. This is faster if R is computed in any case for another slot.
    """
    rotations = dict[int, Tensor]()
    for axis, turn in turns.items():
        if by_rotation or (rotated := turn.by_parts(x, axis)) is None:
            rotations[axis] = turn.rotation.mT
        else:
            x = rotated
    return rotate(x, rotations)


def _reordered(x: Tensor, turns: Mapping[int, Turn]) -> Tensor:
    """Return x with its entries along each axis in the new order of that axis's columns of the basis.

    turns: the change of basis of each axis. `Turn.order` is the order; if it is None, the entries are not reordered.
    """
    for axis, turn in turns.items():
        x = x if turn.order is None else reordered(x, axis, turn.order)
    return x


def require_frameless(stages: tuple[Stage, ...], path: str) -> None:
    """Raise ValueError for stages that cannot be inside a basis that changes.

    Such a stage has a slot that cannot be transported to another basis, or requests an input beside the gradient (a
    signal) that cannot be rotated.

    path: path of the chain in the recipe.
    """
    for here, name, slot in chain_slots(stages, (2, 2), path):
        if slot.frame == "none" and slot.role in ("statistic", "root", "basis", "pending"):
            raise ValueError(
                f"{here}: the slot '{name}' cannot be transported to a new basis, so this stage cannot be inside a "
                "stage that changes the basis; move it out of that stage"
            )
    for here, stage in walk(stages, path):
        for signal in sorted(requested(stage)):
            if signal in known_signals() and known_signals()[signal].extent in ("entry", "partner", *SIDES):
                raise ValueError(
                    f"{here}: the signal '{signal}' cannot be rotated into the basis; move this stage out of the basis"
                )


def order_or_identity(order: Tensor | None, ok: Tensor) -> Tensor | None:
    """Return `order` `[N, r]` where ok is True, and 0, 1, ..., r - 1 elsewhere. If `order` is None, return None.

    ok: bool `[N]`, True where the solver succeeded and the new basis is used.
    """
    if order is None or known_to_hold(ok):
        return order
    return torch.where(ok[:, None], order, identity_order(order))


def slot_axis(slot: Slot, axis: int, order: int) -> int | None:
    """Return the index of a block's axis among the axes of a slot, or None if the slot does not have that axis.

    axis: the axis of the block.
    order: number of axes of the block.
    """
    spans = {"row": range(order - 1), "column": [*range(order - 2), order - 1], "none": ()}
    axes = list(spans.get(slot.frame, slot.axes if slot.axes is not None else range(order)))
    return axes.index(axis) if axis in axes else None


def marginals(a: Tensor, basis: Tensor | None, found: Tensor | None = None) -> Tensor:
    """Return the marginals d_i = diag(Q_i^T A_i Q_i) `[N, d]` of an axis. Entries below the rounding error are set to
    0.

    a: statistic A_i `[N, d, d]`, in any unit; the marginals have the same unit.
    basis: Q_i `[N, d, d]`. None: the statistic is already in the basis.
    found: `[N, d]`, the marginals of blocks for which the solver has already computed them, and NaN for all other
        blocks. None: the solver has computed none.
    """
    if basis is None:
        d = a.diagonal(dim1=-2, dim2=-1)
    elif found is None or math.isnan(float(found.sum())):
        d = (basis * torch.bmm(a, basis)).sum(-2)
        d = d if found is None else torch.where(found.isnan(), d, found)
    else:
        d = found
    return torch.where(d > torch.finfo(d.dtype).eps * d.shape[-1] * d.amax(-1, keepdim=True), d, 0.0)


def weights(d: Tensor, exponent: Fraction, floor: float) -> Tensor:
    """Return the weights w_i `[N, length of the axis]` of sums over an axis along which the statistics are whitened.

    The weights are the marginals d divided by their mean, clamped to at least `floor`, and raised to `exponent`.

    d: the marginals of the axis, which are the eigenvalues of its statistic in the basis.
    exponent: power by which the statistics are whitened, `Statistic.needs_power`.
    """
    values = (d / mean_eigenvalue(d)[:, None]).clamp_min(max(floor, tiny(d.dtype)))
    return to_power(values, float(exponent))


def fit_second_moments(
    slots: Iterable[ChainSlot], state: State, marginals: Mapping[int, Tensor], weights: Mapping[int, Tensor]
) -> None:
    """Scale the second moments of a chain after its basis has changed, so that they fit the statistics in the new
    basis.

    A second moment v is a slot with a `decay` b: a running mean of squared gradients. Its sums over all axes except i
    should be the marginals d_i, which are known from the statistics. v is multiplied along each axis i by d_i /
    s_i, with s_i the present sums.

    A factored second moment is v = x y^T / mean(x), stored as the vectors x and y. For each of them the marginals give
    a factor d_i / s_i. A deviation of one entry of v is in both factors, because the entry is part of the sum of its
    row and of its column. If both factors are known, each vector is therefore multiplied by the square root of its
    factor.

    An entry of the fitted v may be too small for the first moments m, so that m / sqrt(v) would be a large update.
    Therefore v of each block is then multiplied by the smallest number c >= 1 for which mean(m^2 / (c v)) is at most
    max(mean m^2 / mean v, 1 - b), for every m. Here mean m^2 / mean v is the value of mean(m^2 / v) if all entries of v
    are equal. 1 - b is the value of m^2 / v after one gradient that is much larger than all before it, if m and v have
    the decay b.

    slots: the slots of the chain, as `chain_slots` yields them.
    marginals: d_i by axis i of the block.
    weights: by axis j of the block, the weights w_j of sums over this axis. Empty: the statistics are not whitened.
    """
    first, second = _moments(slots, state)
    for scope, own in second:
        known = {name: _marginals_of(slot, marginals, state.block) for name, slot in own.items()}
        power = 1 / max(1, sum(map(bool, known.values())))
        new = {name: fit_(scope[name], sums, weights, power) for name, sums in known.items()}
        (decay,) = {slot.decay or 0.0 for slot in own.values()}
        growth = _growth(
            [m[name] for m, name in first], _as_one_tensor([(x, own[name]) for name, x in new.items()]), decay
        )
        for name, x in new.items():
            scope[name] = x.mul_(per_block(growth, x))


def _moments(
    slots: Iterable[ChainSlot], state: State
) -> tuple[list[tuple[State, str]], list[tuple[State, dict[str, Slot]]]]:
    """Return (first, second): the slots of a chain that are first moments, and those that are second moments.

    first: (state of the stage, name of the slot) of each first moment.
    second: (state of the stage, slots by name) of each second moment. A factored second moment has two slots.
    """
    first: list[tuple[State, str]] = []
    second: dict[str, tuple[State, dict[str, Slot]]] = {}
    for path, name, slot in slots:
        if slot.decay is not None:
            group = path if slot.frame in ("row", "column") else StateKey.join(path, name)
            second.setdefault(group, (state.scope(path), {}))[1][name] = slot
        elif slot.role == "first_moment" and slot.frame == "vector" and slot.axes is None:
            first.append((state.scope(path), name))
    return first, list(second.values())


def _growth(first: list[Tensor], v: Tensor, decay: float) -> Tensor:
    """Return for each block the factor c `[N]` by which `fit_second_moments` multiplies v to limit m / sqrt(v).

    c is the largest of mean(m^2 / v) / max(mean m^2 / mean v, 1 - b) over all first moments m, but at least 1. Entries
    of v below the rounding error, for example in directions without gradients, are ignored.

    first: the first moments m, each `[N, *block]`.
    v: a second moment of the same chain.
    decay: decay b of v.
    """
    mean = v.flatten(1).mean(-1)
    # entries of v below `rounding` may be rounding errors of rotations; the factor 16 is a margin
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


def _marginals_of(slot: Slot, marginals: Mapping[int, Tensor], block: tuple[int, ...]) -> dict[int, Tensor]:
    """Return the marginals (sums over all axes except one) of every axis that a slot has, by axis of the slot.

    marginals: the marginals by axis of the block. The result has no marginals of an axis that the slot lacks.
    block: shape of the block.
    """
    places = {axis: slot_axis(slot, axis, len(block)) for axis in marginals}
    return {place: marginals[axis] for axis, place in places.items() if place is not None}


def require_marginals(statistic: Statistic, inner: tuple[Stage, ...], keeps_all_columns: bool) -> None:
    """Raise ValueError if `transport: marginals` cannot be used.

    When a basis changes, this transport scales second moments to sums that follow from the statistic in the new basis.
    They are the sums of a second moment over all axes except one, called marginals. The statistic must determine them.

    statistic: the statistic of which the basis is computed.
    inner: the stages inside the basis, which have the second moments.
    keeps_all_columns: True if the solver computes all columns of the basis.
    """
    if needed := _unmet_condition(statistic, inner, keeps_all_columns):
        raise ValueError(f"transport: 'marginals' needs {needed}; `transport: exact` accepts any chain")


def _unmet_condition(statistic: Statistic, inner: tuple[Stage, ...], keeps_all_columns: bool) -> str | None:
    """Return, as text, the first condition of `transport: marginals` that is not met, or None if all are met.

    The conditions make sure that second moments can be fitted to the statistic when the basis changes. The arguments
    are those of `require_marginals`.
    """
    decay = statistic.decay_of_squares
    if decay is None:
        fields = {name: getattr(statistic, name) for name in ("kind", "interval", "initial", "source")}
        wanted = "a gram or bregman with interval 1, initial 0 and source gradient"
        return f"a statistic that takes every gradient ({wanted}), got {fields}"
    if not keeps_all_columns:
        return "all columns of a basis, got a solver that keeps fewer"
    slots = [slot for *_, slot in chain_slots(inner, (2, 2)) if slot.decay is not None]
    if (found := {slot.decay for slot in slots if slot.decay is not None}) != {decay}:
        got = ", ".join(f"{beta:g}" for beta in sorted(found))
        none = "none (`Slot(decay=beta)` declares that a slot is a second moment)"
        return f"an inner chain whose second moments have the decay of the statistic, {decay:g}, got {got or none}"
    if statistic.needs_power is not None and any(slot.frame != "square" for slot in slots):
        return (
            "a second moment for each entry if the statistic whitens gradients, as this one does, got factored second "
            "moments"
        )
    return None


def _as_one_tensor(parts: list[tuple[Tensor, Slot]]) -> Tensor:
    """Return a second moment v as one tensor `[N, *block]`, with length 1 along each axis over which v is a mean.

    parts: the tensors of the moment, each with its slot. A factored moment has two tensors. All other moments have one
        tensor: a full moment, and a moment with one number for each row or each column.
    """
    along = {"row": -1, "column": -2}
    first, *others = (x.unsqueeze(along[slot.frame]) if slot.frame in along else x for x, slot in parts)
    for other in others:
        first = first / first.mean((-2, -1), keepdim=True).clamp_min(tiny(first.dtype)) * other
    return first


def fit_(
    v: Tensor, marginals: Mapping[int, Tensor], weights: Mapping[int, Tensor] | None = None, power: float = 1.0
) -> Tensor:
    """Scale v in place, v <- v * prod_i (d_i / s_i)^power, and then scale v to its former sum. Return v.

    s_i are the present sums of v over all axes except i, and d_i the sums that v should have. This is one step of
    iterative proportional fitting (Deming & Stephan 1940), for all axes at once. With power 1, the fitted v has exactly
    the marginals d_i if v is an outer product of one vector for each axis, or has a single axis.

    marginals: d_i by axis of v, in any unit. An entry of 0 means that the sum is not known there.
    weights: w_j by axis of v. With weights, s_i is the sum of v prod_(j != i) w_j. None: there are no weights.
    """
    total, sums = v.flatten(1).sum(-1), _sums(v, weights or {})
    factors = _factors(marginals, sums, power)
    if 0 in factors:
        v.mul_(factors[0].reshape(*v.shape[:2], *[1] * (v.ndim - 2)))
    if (rest := _outer(_after_first(factors), v.shape[2:])) is not None:
        v.mul_(rest[:, None])
    return v.mul_(per_block(total / v.flatten(1).sum(-1).clamp_min(tiny(v.dtype)), v))


def _factors(marginals: Mapping[int, Tensor], sums: Sequence[Tensor], power: float) -> dict[int, Tensor]:
    """Return the factor (d_i / s_i)^power of each axis i, as `_factor` computes it. Axes of equal length share one
    call.

    marginals: the wanted sums d_i by axis.
    sums: the present sums s_i of all axes.
    """
    lengths: dict[int, list[int]] = {}
    for axis, d in marginals.items():
        lengths.setdefault(d.shape[-1], []).append(axis)
    found = dict[int, Tensor]()
    for axes in lengths.values():
        d, s = (joined([own[axis] for axis in axes]) for own in (marginals, sums))
        found |= zip(axes, _factor(d, s, power).chunk(len(axes)), strict=True)
    return {axis: found[axis] for axis in marginals}


def _factor(d: Tensor, s: Tensor, power: float) -> Tensor:
    """Return the factors (d / s)^power by which a second moment v is multiplied along one axis to correct its sums.

    d is first scaled to the same total as s. The factor is 1 where d or s is 0. If v is multiplied along this axis and
    no other, with power 1, its sums become d. A smaller power corrects only a part of the difference. The caller uses
    it for a factored second moment, because both of its vectors are corrected (see `fit_second_moments`).

    d: sums that v should have over all other axes, `[N, length of the axis]`.
    s: the present sums of v over all other axes, in the same shape.
    """
    known = (d > 0) & (s > 0)
    unit = (s * known).sum(-1) / (d * known).sum(-1).clamp_min(tiny(d.dtype))
    factor = torch.where(known, d * unit[:, None] / s.clamp_min(tiny(s.dtype)), 1.0)
    return factor if power == 1 else factor.pow(power)


def _sums(v: Tensor, weights: Mapping[int, Tensor]) -> list[Tensor]:
    """Return for every axis i the sums s_i of v over all other axes. Entries are first multiplied by the weights w_j of
    every summed axis j that has weights.

    The sums of the axes after the first are computed from the sum of v over the first axis, which is a smaller tensor.
    """
    if v.ndim <= 2:
        return [v]
    rows, others = v.flatten(2), _after_first(weights)
    weight = _outer(others, v.shape[2:])
    own = rows.sum(2) if weight is None else (rows * weight.flatten(1)[:, None]).sum(2)
    rest = rows.sum(1) if 0 not in weights else (rows * weights[0][..., None]).sum(1)
    return [own, *_sums(rest.reshape(-1, *v.shape[2:]), others)]


def _after_first(by_axis: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the entries of `by_axis` for all axes after the first, with the numbers of the axes reduced by 1."""
    return {axis - 1: x for axis, x in by_axis.items() if axis}


def _outer(factors: Mapping[int, Tensor], shape: Sequence[int]) -> Tensor | None:
    """Return the outer product `[N, *shape]` of vectors, or None if there are no vectors.

    factors: for each axis, a vector `[N, length of the axis]`. Axes without a vector have ones.
    """
    product = None
    for axis, factor in factors.items():
        placed = factor.reshape(-1, *(n if place == axis else 1 for place, n in enumerate(shape)))
        product = placed if product is None else product * placed
    return None if product is None else product.expand(-1, *shape).contiguous()
