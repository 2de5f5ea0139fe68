"""Statistics whose contributions are whitened by the factors of all other axes: KL-Shampoo and related methods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import block_norm, may_branch_on_values, per_block, tiny, to_power
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..algebra.exponents import Rational0
from ..algebra.products import mode_product, unfold
from .statistic import Contribution, Powers, Statistic


class Bregman(Statistic):
    """O_L = G R^(q-1) G^T / Tr(R^q),  O_R = G^T L^(q-1) G / Tr(L^q);  in general G is whitened on all other axes.

    O_L and O_R are the contributions of the gradient G to the factors L of rows and R of columns; g is G as a vector,
    and L x R is the Kronecker product. The fixed points L and R of these updates minimize a divergence between E[g g^T]
    and L x R, one of the trace-power Bregman divergences (Liu et al. 2026). The field `q` chooses it:

    q = 2: the Frobenius divergence.
    q = 1: von Neumann's; L x R is then the product of Shampoo's two factors, divided by the trace.
    q = 1/2: the divergence of the square root, the objective of PSGD-Kron.
    q = 0: Kullback and Leibler's (KL-Shampoo, Lin et al. 2025, arXiv:2509.03378).

    Powers of R are computed from the tensors that the stage stores: inverse roots (`shampoo`), or a basis Q with the
    eigenvalues diag(Q^T R Q) (`eigenbasis`). With `order: jacobi` the contributions to all factors are computed from
    the old factors. With `gauss_seidel` each factor is refreshed before it is read for the next axis (Duvvuri et al.
    2024, CASPR's adaptive form).

    A factor is replaced by r I while it has no data, and while its root or basis has not been computed. With `first:
    identity` r = 1. With `first: rms` r = RMS(G)^(2/k), where k is the number of factors: their product then has the
    size of E[g g^T], and each has an equal share of it. Set `refresh.start` so late that factors have full rank. A
    factor of few gradients is singular, and whitening by its root without a ridge distorts the running mean for a long
    time.
    """

    kind: Literal["bregman"] = "bregman"
    q: Rational0 = Field(default=0, validate_default=True, description="power of the divergence: 2, 1, 1/2, 0, ...")
    order: Literal["jacobi", "gauss_seidel"] = Field(
        default="jacobi",
        description="jacobi: contributions are computed from the old factors of other axes; gauss_seidel: from the new "
        "ones",
    )
    normalize: Literal["trace", "dimension", "none"] = Field(
        default="trace", description="divide a contribution by Tr(R^q), by the length of other axes, or by nothing"
    )
    first: Literal["rms", "identity"] = Field(
        default="rms",
        description="matrix r I that stands for a factor without data: rms: r = RMS(G)^(2/k); identity: r = 1",
    )

    @model_validator(mode="after")
    def _units_agree(self) -> Self:
        if self.normalize == "none" and self.first != "identity":
            raise ValueError(
                f"first: '{self.first}' cannot be combined with `normalize: none`, because factors of different "
                "axes then have different units; set `first: identity`"
            )
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {**super().state_meaning(), "q": self.q, "normalize": self.normalize}

    @property
    def needs_power(self) -> Fraction:
        return self.q - 1

    @property
    def sequential(self) -> bool:
        return self.order == "gauss_seidel"

    @property
    def decay_of_squares(self) -> float | None:
        return self.beta if self.every_gradient else None

    def contributions(
        self, state: State, x: Tensor, axes: tuple[int, ...], powers: Powers, context: StepContext
    ) -> list[Contribution]:
        every = range(len(state.block))
        whitenings = {a: self._whitening(state, x, a, powers) for a in every if any(a != axis for axis in axes)}
        found = {}
        for axis, (left, right) in _whitened_elsewhere((x, x), whitenings, tuple(every), axes):
            y = unfold(left, axis)
            scale = x.new_ones(x.shape[0])
            for other, whitening in whitenings.items():
                scale = scale / whitening.trace if other != axis and self.normalize != "none" else scale
            found[axis] = Contribution(y, y if right is left else unfold(right, axis), scale)
        return [found[axis] for axis in axes]

    def _whitening(self, state: State, x: Tensor, axis: int, powers: Powers) -> _Whitening:
        """Return the map that whitens a gradient along one axis by the power q - 1 of the factor of that axis.

        q is the field `q` of the statistic.

        x: the gradient `[N, *block]`.
        powers: function (axis, p) -> power p of the factor of an axis.
        """
        d = state.block[axis]
        if not self.has(state, axis):
            return _Whitening(None, None, None, None, d)
        power = powers(axis, self.q - 1)
        known = None if may_branch_on_values(x) and bool(power.known.all()) else power.known
        unit = power.unit if known is None else torch.where(known, power.unit, self._size_without_data(state, x))
        half = to_power(unit, -0.5 if self.normalize == "trace" else float(self.q - 1) / 2)
        trace = float(d) if self.normalize == "dimension" else torch.where(power.known, power.trace, float(d))
        return _Whitening(power.left, power.right, half, known, trace)

    def _size_without_data(self, state: State, x: Tensor) -> Tensor:
        """Return r `[N]`. A factor that has no data, or no root or basis yet, is replaced by r I.

        x: the gradient `[N, *block]`.
        """
        if self.first == "identity":
            return x.new_ones(x.shape[0])
        factors = sum(self.has(state, axis) for axis in range(len(state.block)))
        rms = to_power(block_norm(x) / math.sqrt(x[0].numel()), 2 / factors)
        return torch.where(rms > tiny(x.dtype), rms, 1.0)


class _Whitening(NamedTuple):
    """The map that whitens a gradient along one axis, for the contributions to the factors of all other axes.

    The gradient is multiplied by F^(q - 1), where F is the factor of this axis, and q the field `q` of `Bregman`. u is
    the mean eigenvalue of F. In blocks in which F^(q - 1) cannot be computed yet, F is replaced by r I (see `Bregman`),
    and u is r.

    left, right: the two matrices with left^T right = (F / u)^(q - 1), as in `Power`. None: the identity.
    half: `[N]`, the number by which `left` and `right` are both multiplied: u^((q - 1) / 2), or u^(-1/2) with
        `normalize: trace`. None: the axis has no factor.
    known: bool `[N]`, False for blocks in which F^(q - 1) cannot be computed yet. None: there are no such blocks.
    trace: `[N]`, the number by which contributions to other factors are divided: the trace of (F / u)^q, or the length
        of the axis.
    """

    left: Tensor | None
    right: Tensor | None
    half: Tensor | None
    known: Tensor | None
    trace: Tensor | float

    def of(self, pair: _Pair, axis: int) -> _Pair:
        """Return a pair of tensors, whitened along one axis: the first is multiplied by `left`, and the second by
        `right`.

        If both tensors are one object and both matrices are one object, the results are one object, too.

        pair: the two tensors whose product is the contribution of a gradient to another axis' factor.
        """
        left = self._along(pair[0], self.left, axis)
        return left, left if pair[1] is pair[0] and self.right is self.left else self._along(pair[1], self.right, axis)

    def _along(self, x: Tensor, matrix: Tensor | None, axis: int) -> Tensor:
        """Return x `[N, *block]`, multiplied along the axis by `matrix`, and each block by its number in `half`.

        Blocks in which `known` is False are multiplied only by their number in `half`. If `half` is None, the axis has
        no factor, and x is returned.

        matrix: the field `left` or `right`. None: the identity.
        """
        if self.half is None:
            return x
        if matrix is None:
            return x * per_block(self.half, x)
        whitened = mode_product(x, matrix * per_block(self.half, matrix), axis)
        if self.known is None:
            return whitened
        return torch.where(per_block(self.known, x), whitened, x * per_block(self.half, x))


_Pair = tuple[Tensor, Tensor]
"""The two tensors from which a contribution is computed as a product. They are one object if they are equal."""


def _whitened_elsewhere(
    pair: _Pair, whitenings: Mapping[int, _Whitening], axes: tuple[int, ...], wanted: tuple[int, ...]
) -> Iterator[tuple[int, _Pair]]:
    """Yield (axis, pair whitened along all of `axes` except this axis) for each wanted axis.

    The axes are halved recursively, and the two halves share work: the pair is whitened along all axes of one half
    once, for all axes of the other half. With k axes the pair is whitened along each axis about log2 k times, and not k
    - 1 times.

    pair: the two tensors before whitening.
    whitenings: the whitening along each axis.
    axes: all axes along which the pair is not whitened yet.
    wanted: axes for which the result is needed.
    """
    if len(axes) == 1:
        yield axes[0], pair
        return
    middle = len(axes) // 2
    for own, others in ((axes[:middle], axes[middle:]), (axes[middle:], axes[:middle])):
        if set(own) & set(wanted):
            whitened = pair
            for other in others:
                whitened = whitenings[other].of(whitened, other)
            yield from _whitened_elsewhere(whitened, whitenings, own, wanted)
