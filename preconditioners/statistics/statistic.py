"""The base class of statistics, and the statistics that do not whiten the gradient.

A statistic chooses the axes of a block that have a factor, computes the contribution of a gradient to each factor,
accumulates contributions, and returns the estimate that a solver receives.

Legend: A_k `[N, d, d]` is the factor of axis k; O_k is the contribution of one gradient to A_k.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from eigengraft.component import Component
from eigengraft.numerics import block_norm, may_branch_on_values, per_block, symmetrized, tiny, to_power
from eigengraft.schedules import Schedulable
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import ProductDtype, add_symmetric, symmetric_product, unfold
from ..polar.spectral import NewtonSchulz, PolarSolver


class Power(NamedTuple):
    """The power p of the factor A_j of an axis j, as a product (A_j / unit)^p = T^T U. Contributions to other axes are
    whitened by it.

    left: T `[N, d', d]`, or `[N, d]` for a diagonal factor. None: the identity.
    right: U, in the same form as T.
    unit: `[N]`, the mean eigenvalue of A_j, so that eigenvalues of the power are close to 1 for any size of A_j.
    trace: `[N]`, the trace of (A_j / unit)^(p + 1).
    known: bool `[N]`, False where A_j has no data yet, or no root or basis has been computed from A_j yet.
    """

    left: Tensor | None
    right: Tensor | None
    unit: Tensor
    trace: Tensor
    known: Tensor


Powers = Callable[[int, Fraction], Power]
"""Function of (axis, p) that returns the power p of the factor of an axis. A stage passes this function to its
statistic, which uses it if `needs_power` is set.
"""


class Contribution(NamedTuple):
    """The contribution of one gradient to a factor: O_k = s Y Z^T, or O_k = s Y if z is None.

    `Contribution(y)` is enough for a contribution that is computed as a matrix.

    y, z: unfoldings `[N, d, rest]` along the axis. If z is None, y is O_k / s itself, `[N, d, d]`.
    scale: s, a number or `[N]`.
    """

    y: Tensor
    z: Tensor | None = None
    scale: Tensor | float = 1.0

    def multiplied(self) -> Contribution:
        """Compute the product Y Z^T of the fields `y` and `z` in bfloat16. Return the contribution with the product as
        `y`, and without `z`.

        A contribution without `z` is returned as it is. The method is called for `precision: bfloat16`.
        """
        if self.z is None:
            return self
        product = symmetric_product(self.y.bfloat16(), self.z.bfloat16())
        return Contribution(product.to(self.y.dtype), scale=self.scale)


def mean_eigenvalue(factor: Tensor) -> Tensor:
    """Return the mean eigenvalue of each factor, `[N]`, or 1 where the mean is 0.

    factor: factors `[N, d, d]`, or diagonal factors `[N, d]`.
    """
    mean = (factor.diagonal(dim1=-2, dim2=-1) if factor.ndim == 3 else factor).mean(-1)
    return torch.where(mean > tiny(factor.dtype), mean, 1.0)


def has_data(factor: Tensor) -> Tensor:
    """Return bool `[N]`, True where a factor is not zero, so that the statistic has observed a gradient.

    factor: factors of N blocks, `[N, d, d]` or `[N, d]`.
    """
    return factor.flatten(1).any(-1)


def _axes_by_order(value: Any) -> Any:
    if value in ("all", "left", "right", "smaller"):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(
            f"'all', 'left', 'right', 'smaller' or a mapping such as {{2: [0]}} (axes for each order of block) is "
            f"required, got {value!r}"
        )
    if not all(str(key).isdigit() for key in value):
        raise ValueError("keys must be orders of blocks (numbers of axes: 1, 2, ...)")
    return {int(key): tuple(axes) if isinstance(axes, (list, tuple)) else axes for key, axes in value.items()}


AxesByOrder = dict[int, tuple[Annotated[int, Field(ge=0)], ...]]

Side = Annotated[
    Literal["all", "left", "right", "smaller"] | AxesByOrder,
    BeforeValidator(_axes_by_order, json_schema_input_type=str | dict[str, tuple[int, ...]]),
]


class Axes(Component):
    """The choice of the axes of a block that have a factor, and of the form of each factor: a matrix d x d or its
    diagonal.

    An axis of length d, in a block of n entries, is too long for a matrix if d > max_size or d^2 > max_skew n.
    """

    side: Side = Field(
        default="all",
        description="which axes have a factor: all, the first (left), the last (right), or the shortest (smaller); or "
        "a list of axes for each order of block, as {2: [0]}",
    )
    entries: Literal["full", "diagonal"] = Field(
        default="full",
        description="matrices, or their diagonals (of Gram matrices: row and column sums of squares)",
    )
    max_size: int | None = Field(default=None, ge=1, description="longest axis with a full factor; default: no bound")
    max_skew: float | None = Field(
        default=None,
        gt=0,
        description="axes longer than max_skew times the product of the others, d^2 > max_skew n, have no full factor; "
        "default: no bound",
    )
    oversize: Literal["none", "diagonal"] = Field(
        default="none", description="factor of axes that are too long for a matrix: none, or its diagonal"
    )
    vectors: bool = Field(default=True, description="true: blocks with one axis have a factor too")

    @model_validator(mode="after")
    def _options_matter(self) -> Self:
        bounded = self.max_size is not None or self.max_skew is not None
        if self.oversize == "diagonal" and not bounded:
            raise ValueError("oversize: 'diagonal' has no effect without max_size or max_skew; set one of them")
        if self.oversize == "diagonal" and self.entries == "diagonal":
            raise ValueError("oversize: 'diagonal' has no effect with `entries: diagonal`; remove it")
        if isinstance(self.side, dict):
            for order, axes in self.side.items():
                if any(axis >= order for axis in axes):
                    raise ValueError(f"side: blocks of order {order} have only axes below {order}, got {[*axes]}")
            if 1 in self.side and not self.vectors:
                raise ValueError(
                    "vectors: false cannot be combined with a `side` that has an entry for order 1; remove one of the "
                    "two"
                )
        return self

    @property
    def has_diagonals(self) -> bool:
        """True if some axes may have a diagonal as their factor."""
        return "diagonal" in (self.entries, self.oversize)

    def of(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes of a block that have a factor."""
        if block not in self._known:  # cached, because this method is called several times a step for each stack
            chosen = self._chosen(block)
            self._known[block] = tuple(a for a in chosen if self.oversize == "diagonal" or self._fits(block, a))
        return self._known[block]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The axes that `of` has returned before, by shape of the block."""
        return {}

    def _chosen(self, block: tuple[int, ...]) -> Sequence[int]:
        """Return the axes that `side` and `vectors` choose, including axes that are too long for a matrix."""
        order = len(block)
        if order < 2 and not self.vectors:
            return ()
        chosen: Sequence[int] = range(order)
        if isinstance(self.side, dict):
            chosen = [axis for axis in chosen if axis in self.side.get(order, chosen)]
        elif self.side == "smaller":
            chosen = sorted(chosen, key=lambda axis: block[axis])[:1]
        elif self.side != "all":
            chosen = chosen[:1] if self.side == "left" else chosen[-1:]
        return chosen

    def left_out(self, block: tuple[int, ...]) -> tuple[str, ...]:
        """Return a text for each axis that has no factor because it is too long, although `side` chooses it."""
        left = [axis for axis in self._chosen(block) if axis not in self.of(block)]
        return tuple(f"axis {axis} without a factor: {self._too_long(block, axis)}" for axis in left)

    def full(self, block: tuple[int, ...], axis: int) -> bool:
        """Return True if the factor of an axis is a matrix, False if it is a diagonal."""
        return self.entries == "full" and self._fits(block, axis)

    def _fits(self, block: tuple[int, ...], axis: int) -> bool:
        return self._too_long(block, axis) is None

    def _too_long(self, block: tuple[int, ...], axis: int) -> str | None:
        """Return a text with the bound that the length of an axis exceeds, or None if it exceeds no bound."""
        d, n = block[axis], math.prod(block)
        if self.max_size is not None and d > self.max_size:
            return f"{d} > max_size {self.max_size}"
        if self.max_skew is not None and d**2 > self.max_skew * n:
            return f"{d} > max_skew {self.max_skew:g} x {n // d}"
        return None


class SlowMean(Schedulable):
    """A second, slower running mean S_k of the contributions O_k to a factor:  S_k <- beta S_k + (1 - beta) O_k.  It
    has the weight `weight` in the estimate from which roots and bases are computed.
    """

    beta: float = Field(ge=0, lt=1, description="decay of the mean, per observation")
    weight: float = Field(ge=0, le=1, description="weight of the mean in the estimate; the first mean has the rest")
    constants: ClassVar[frozenset[str]] = frozenset({"beta"})


class Statistic(Schedulable, ABC, family="statistic"):
    """A_k <- b A_k + w O_k  for each axis k with a factor;  E_k = A_k / c;  estimate E_k max(tr(E_k), floor)^(-s)

    A_k is the factor of axis k, for example a running mean of G G^T over gradients G. A stage computes a root or a
    basis of the estimate. A member of the family defines O_k by `contribution`; this class accumulates it.

    O_k `[N, d, d]` is the contribution of one gradient, or its diagonal `[N, d]` where `axes` chooses diagonals. b =
    beta, s = trace_scaling, floor = trace_floor, and t is the number of observations. A running mean (b < 1) has w = 1
    - b and c = 1 - b^t, or c = 1 without bias correction. A sum (b = 1) has w = 1 and c = 1. With `damped: false`, w
    and c are 1 for any b.

    With `slow: {beta: b', weight: v}` a second running mean S_k of the same contributions has the decay b', and E_k is
    (1 - v) A_k / c + v S_k / c' in place of A_k / c. c' is computed from b' as c is from b. The K-FAC of the output
    head in modded-nanogpt's track 3 (2026, #341) has two such means.

    With `warm_start`, the first contribution O_k that is not 0 gives A_k = O_k + (||O_k||_F / sqrt(d)) I in place of
    w O_k. At its first refresh, a stage then observes the gradient twice. It computes roots or bases after the first
    observation, so that a contribution that depends on them is computed from them in the second observation (Online
    KL-Shampoo, Tilde 2026).
    """

    beta: float = Field(default=0.95, ge=0, le=1, description="decay of the factors, per observation; 1 = sum")
    bias_correction: bool = Field(default=True, description="divide by 1 - beta^t; a sum has no bias")
    damped: bool = Field(default=True, description="weight w of O_k: 1 - beta; false: 1, without bias correction")
    initial: float = Field(default=0.0, ge=0, description="A_k starts as this times the identity")
    warm_start: bool = Field(
        default=False,
        description="A_k starts as its first contribution plus a multiple of the identity, and the gradient of the "
        "first refresh is observed twice",
    )
    slow: SlowMean | None = Field(
        default=None, description="a second mean with a slower decay, and its weight in the estimate; null: none"
    )
    constants: ClassVar[frozenset[str]] = frozenset({"beta"})
    requires: ClassVar[frozenset[str]] = frozenset()
    """Signals that the statistic needs in every step in which it observes a gradient."""
    of_inputs: ClassVar[bool] = False
    """True if the statistic observes the inputs of layers. Blocks must then be matrices, outputs x inputs."""
    trace_scaling: float = Field(
        default=0.0, ge=0, le=1, description="power s: the estimate is multiplied by trace^(-s); 0 = not at all"
    )
    trace_floor: float = Field(default=0.0, ge=0, description="lower bound of the trace, in units of squared gradients")
    interval: int = Field(default=1, ge=1, description="observe at updates start, start + interval, ...")
    start: int = Field(default=1, ge=1, description="the first update whose gradient is observed")
    source: Literal["gradient", "direction", "orthogonalized"] = Field(
        default="gradient",
        description="observed tensor: the gradient, the direction of the stages before (after `momentum`, the "
        "momentum), or the polar factor of that direction",
    )
    polar: PolarSolver = Field(
        default=NewtonSchulz(), description="solver of the polar factor for `source: orthogonalized`"
    )
    precision: ProductDtype = Field(default="input", description="dtype of the product that computes a contribution")
    axes: Axes = Field(default=Axes(), description="axes that have a factor, as a matrix or as a diagonal")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.contribution is Statistic.contribution and cls.contributions is Statistic.contributions:
            raise TypeError(f"{cls.__name__}: `contribution(self, x, axis, context)` is required; define it")

    @model_validator(mode="after")
    def _options_matter(self) -> Self:
        if self.source != "orthogonalized" and self.polar != type(self).model_fields["polar"].default:
            raise ValueError(
                f"polar: has no effect with source '{self.source}'; remove polar, or set `source: orthogonalized`"
            )
        if self.trace_floor and not self.trace_scaling:
            raise ValueError(f"trace_floor: {self.trace_floor} has no effect with trace_scaling 0; remove it")
        summed = "`beta: 1`" if self.beta == 1 else "`damped: false`" if not self.damped else None
        if self.beta == 1 and not self.damped:
            raise ValueError(
                "damped: false has no effect with `beta: 1`, because contributions then have weight 1 anyway; remove "
                "damped"
            )
        if summed and not self.bias_correction:
            raise ValueError(
                f"bias_correction: false has no effect with {summed}, because a sum has no bias to correct; "
                "remove bias_correction"
            )
        if summed and self.slow is not None:
            raise ValueError(
                f"slow: a second mean cannot be combined with {summed}, because factors are sums then; remove slow"
            )
        if self.warm_start and self.bias_correction:
            raise ValueError(
                "warm_start: true cannot be combined with bias_correction true, because the first contribution has "
                "weight 1 and there is no bias; set bias_correction: false"
            )
        if self.warm_start and self.initial:
            raise ValueError(
                f"warm_start: true cannot be combined with initial {self.initial}, because `initial` starts factors as "
                "a multiple of the identity, and `warm_start` at their first contribution; remove one of the two"
            )
        if self.start > 1 and self.requires:
            raise ValueError(
                f"start: must be 1, because the statistic needs {', '.join(sorted(self.requires))} from the first "
                f"update on, got {self.start}"
            )
        if self.slow is not None and self.slow.beta <= self.beta:
            raise ValueError(f"slow.beta: must be greater than beta, {self.beta}, got {self.slow.beta}")
        if self.precision != "input" and (self.of_inputs or self.axes.entries == "diagonal"):
            raise ValueError(
                f"precision: {self.precision} has no effect, as this statistic computes no products; remove it"
            )
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"beta": self.beta == 1, "damped": self.damped, "source": self.source}

    @property
    def needs_power(self) -> Fraction | None:
        """Exponent p, if the contribution to the factor of an axis is computed with the p-th powers of the factors of
        other axes. None: contributions do not depend on the factors of other axes.
        """
        return None

    @property
    def sequential(self) -> bool:
        """True if the axes take turns (Gauss-Seidel): the factor of an axis is updated and its root or basis computed,
        before the factor of the next axis is updated.
        """
        return False

    @property
    @final
    def every_gradient(self) -> bool:
        """True if the factors start as 0 and accumulate every step's gradient, and nothing else, with one decay."""
        plain = not self.initial and not self.warm_start and self.slow is None
        return self.source == "gradient" and self.interval == self.start == 1 and plain

    @property
    def decay_of_squares(self) -> float | None:
        """Decay b if the marginals of the factors are running means (b < 1) or sums (b = 1) of squared gradients.

        The marginals of the factor A_k are diag(Q^T A_k Q), with Q a basis of axis k. For A_k <- b A_k + w G G^T with
        the gradient's unfolding G, they accumulate the squares of the gradient in this basis, summed over all axes
        except k. If `needs_power` is p, each square is weighted by the power p of the other axes' eigenvalues.

        None: the marginals are neither.
        """
        return None

    def contribution(self, x: Tensor, axis: int, context: StepContext) -> Contribution:
        """Return the contribution of one gradient to the factor of one axis.

        This method is called at every observation, for each axis that has a factor. It is required, unless the
        statistic defines `contributions`.

        x: `[N, *block]`, the gradient, or the tensor that `source` chooses. It must not be written to.
        axis: the axis of the block, of length d.
        """
        raise NotImplementedError

    def contributions(
        self, state: State, x: Tensor, axes: tuple[int, ...], powers: Powers, context: StepContext
    ) -> list[Contribution]:
        """Return the contributions of one gradient to the factors of `axes`, in this order.

        The default calls `contribution` for each axis. Override this method if axes share work, or read each other's
        factors.

        state: state of the stage, with the factors `state["factor.<axis>"]`.
        x: `[N, *block]`, the gradient, or the tensor that `source` chooses. It must not be written to.
        powers: function (axis, p) -> power p of the factor of an axis, for statistics with a `needs_power`.
        """
        return [self.contribution(x, axis, context) for axis in axes]

    def slots(self, block: tuple[int, ...], axes: tuple[int, ...]) -> Mapping[str, Slot]:
        """Return the slots of one block for the factors of these axes. This method is called at construction.

        The default has a slot "factor.<axis>" for each axis: `[d, d]`, or `[d]` for a diagonal. With `slow` each axis
        has a slot "slow.<axis>" of the same shape, too.

        Raises ValueError if the statistic refuses blocks of this shape.
        """
        slots = dict[str, Slot]()
        for axis in axes:
            d = block[axis]
            if self.axes.full(block, axis):
                slot = Slot((d, d), "identity" if self.initial else 0.0, "statistic", axes=(axis,), scale=self.initial)
            else:
                slot = Slot((d,), fill=self.initial, role="statistic", frame="square", axes=(axis,))
            slots |= dict.fromkeys(self._means(axis), slot)
        return slots

    def _means(self, axis: int) -> dict[str, float]:
        """Return the decay of each running mean of an axis, by the name of its slot. The means are the factor and, with
        `slow`, a second mean.
        """
        own = {f"factor.{axis}": self.beta}
        return own if self.slow is None else {**own, f"slow.{axis}": self.slow.beta}

    @final
    def has(self, state: State, axis: int) -> bool:
        """Return True if an axis has a factor in this state."""
        return f"factor.{axis}" in state

    @final
    def rotate(self, state: State, axis: int, rotation: Tensor) -> None:
        """Rotate the factor of one axis, which is a matrix, to a new basis: A <- R^T A R.

        rotation: R `[N, d, d]`, the change from the old basis to the new one.
        """
        for name in self._means(axis):
            state[name] = symmetrized(torch.bmm(rotation.mT, torch.bmm(state[name], rotation)))

    @final
    def observed(self, x: Tensor) -> Tensor:
        """Return the tensor that the statistic observes: x, or the polar factor of x with `source: orthogonalized`."""
        return self.polar.of_blocks(x) if self.source == "orthogonalized" else x

    @final
    def observe(self, state: State, x: Tensor, context: StepContext, axes: tuple[int, ...], powers: Powers) -> None:
        """Accumulate the contributions of x `[N, *block]` to the factors of `axes`.

        All contributions are computed before any factor changes.

        powers: function (axis, p) -> power p of the factor of an axis, for statistics with a `needs_power`.
        """
        now = None
        if self.interval > 1 or self.start > 1:
            due = context.holds(self._observes)
            if due is False:
                return
            now = None if due is True else torch.from_numpy(due).to(device=x.device, dtype=x.dtype)
        contributions = self.contributions(state, x, axes, powers, context)
        for axis, contribution in zip(axes, contributions, strict=True):
            given = contribution
            for name, decay in self._means(axis).items():
                factor = state[name]
                if self.precision != "input" and factor.ndim == 3:
                    given = given.multiplied()  # the product is computed once, for all means
                fresh = ~has_data(factor) if self.warm_start else None
                factor = self._accumulate(factor, given, decay, now)
                state[name] = factor if fresh is None else _warm_started(factor, fresh, 1 - decay)

    def _observes(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return bool `[N]`, True for blocks that observe the gradient of their present step.

        steps: number of updates of each block, including the present one; 0 for the first gradient of a lagged stage.
        """
        due: NDArray[np.bool_] = (steps >= self.start) & ((steps - self.start) % self.interval == 0)
        return due | (steps == 0) if self.start == 1 else due

    def _accumulate(self, factor: Tensor, contribution: Contribution, decay: float, now: Tensor | None) -> Tensor:
        """Update the factor F in place by  F <- decay * F + weight * scale * y z^T,  and return F.

        contribution: y, z and scale.
        decay: 1 for a sum. The weight is 1 - decay for a running mean, and 1 for a sum or if the field `damped` is
            False.
        now: `[N]`, 1 for blocks that observe in this step and 0 for all other blocks. None: all blocks observe.
        """
        y, z, scale = contribution
        weight = 1 - decay if self.damped and decay < 1 else 1.0
        if now is not None:
            factor.mul_(per_block(1 - now * (1 - decay), factor))
            decay, scale = 1.0, now * scale
        if z is None:
            made = (y if factor.ndim == 3 else y.diagonal(dim1=-2, dim2=-1)) * weight
            return factor.mul_(decay).add_(made * (scale if isinstance(scale, float) else per_block(scale, made)))
        if factor.ndim == 2:
            sums = (y * z).sum(-1)
            return factor.mul_(decay).add_(sums * (scale if isinstance(scale, float) else scale[:, None]), alpha=weight)
        if isinstance(scale, float):
            return add_symmetric(factor, y, z, decay, weight * scale)
        return add_symmetric(factor, y * per_block(scale, y), z, decay, weight)

    @final
    def estimate(self, state: State, axis: int, context: StepContext, behind: int = 0, lagged: bool = False) -> Tensor:
        """Return the estimate of one axis for a solver: `[N, d, d]`, or `[N, d]` for a diagonal factor.

        The result is a new tensor or a view of the state.

        behind: 1 if the factor does not contain the contribution of this step yet, else 0.
        lagged: True for the statistic of a lagged stage, which observes the first gradient in step 0.
        """
        count = partial(self._observations, behind=behind, lagged=lagged)
        factor = self._corrected(state[f"factor.{axis}"], self.beta, context, count)
        if self.slow is not None:
            slow = self._corrected(state[f"slow.{axis}"], self.slow.beta, context, count)
            factor = torch.lerp(factor, slow, self.slow.weight)
        if self.trace_scaling:
            trace = (factor.diagonal(dim1=-2, dim2=-1) if factor.ndim == 3 else factor).sum(-1)
            power = to_power(trace.clamp_min(max(self.trace_floor, tiny(trace.dtype))), -self.trace_scaling)
            factor = factor * per_block(power, factor)
        return factor

    def _corrected(
        self, factor: Tensor, beta: float, context: StepContext, count: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return F / c for a mean F with decay beta, with bias correction c as in the formula of the class.

        factor: F.
        count: function that maps the step numbers of blocks `[N]` to the numbers t of gradients that F has observed.
        """
        if beta == 1 or not (self.bias_correction and self.damped):
            return factor
        return factor / context.correction(beta, factor, count)

    def _observations(self, step: Tensor, behind: int, lagged: bool) -> Tensor:
        """Return the number of gradients that the factor has observed up to a step, at least 1.

        The factor observes the gradients of steps start, start + interval, start + 2 interval, ... A lagged stage
        applies its factor to a gradient before the factor observes this gradient. It applies no factor to the very
        first gradient, in step 0. If `start` is 1, the factor observes this gradient, which counts as one observation
        more.

        step: number of updates of each block, including the present one.
        behind: 1 if the factor has not observed the gradient of this step yet, else 0.
        lagged: True for the statistic of a lagged stage.
        """
        seen, primed = step - behind, lagged and self.start == 1
        return (torch.div(seen - self.start, self.interval, rounding_mode="floor") + 1 + primed).clamp_min(1)


def _warm_started(factor: Tensor, fresh: Tensor, weight: float) -> Tensor:
    """Turn the first contributions w O of factors into O + ||O||_F / sqrt(d) I, in place. Return the factors.

    factor: factors `[N, d, d]`, or diagonal factors `[N, d]`.
    fresh: bool `[N]`, True for factors that have only one contribution. The others do not change.
    weight: w.
    """
    if may_branch_on_values(factor) and not fresh.any():
        return factor
    factor.mul_(per_block(1 + fresh.to(factor.dtype) * (1 / weight - 1), factor))
    ridge = torch.where(fresh, block_norm(factor) / math.sqrt(factor.shape[-1]), 0.0)
    (factor.diagonal(dim1=-2, dim2=-1) if factor.ndim == 3 else factor).add_(ridge[:, None])
    return factor


class Gram(Statistic):
    """O_k = mat_k(G) mat_k(G)^T,  mat_k(G) the unfolding of the gradient along axis k (Shi et al. 2023, section 3)

    With `normalize: dimension`, O_k is divided by the product of the other axes' lengths, so that factors do not grow
    with the width of a model.
    """

    kind: Literal["gram"] = "gram"
    normalize: Literal["none", "dimension"] = Field(
        default="none", description="dimension: divide O_k by the other axes' lengths"
    )

    def state_meaning(self) -> Mapping[str, Any]:
        return {**super().state_meaning(), "normalize": self.normalize}

    @property
    def decay_of_squares(self) -> float | None:
        return self.beta if self.every_gradient else None

    def contribution(self, x: Tensor, axis: int, context: StepContext) -> Contribution:
        y = unfold(x, axis)
        return Contribution(y, y, 1.0 if self.normalize == "none" else 1.0 / max(1, y.shape[-1]))


class InputGram(Statistic):
    """O_R = E[x x^T]  over the inputs x of the layer `y = W x`, for the columns of W;  rows have no factor

    The contribution O_R is the signal `activation_gram`, a mean over micro-batches and ranks. The factor is the right
    factor of K-FAC, and K of Newton-Muon (Du & Su 2026, arXiv:2604.01472). With `interval: k` the signal is collected
    only at updates 1, 1 + k, 1 + 2k, ..., and costs nothing in other steps. `initial` is in units of squared inputs.
    """

    kind: Literal["input_gram"] = "input_gram"
    axes: Axes = Field(
        default=Axes(side="right", vectors=False), description="the last axis of matrices: as a matrix or its diagonal"
    )
    requires: ClassVar[frozenset[str]] = frozenset({"activation_gram"})
    of_inputs: ClassVar[bool] = True

    @model_validator(mode="after")
    def _has_inputs(self) -> Self:
        if self.axes.side != "right" or self.axes.vectors:
            got = f"side {self.axes.side!r} and vectors {self.axes.vectors}"
            raise ValueError(
                f"axes: {{side: right, vectors: false}} is required, because only layer inputs have factors, got {got}"
            )
        if self.source != "gradient":
            raise ValueError(
                f"source: '{self.source}' has no effect, as this statistic observes the inputs of layers; remove it"
            )
        return self

    def slots(self, block: tuple[int, ...], axes: tuple[int, ...]) -> Mapping[str, Slot]:
        if len(block) > 2:
            raise ValueError(
                f"input_gram: blocks must have two axes, outputs and inputs, got shape {block}; set "
                f"`blocking: {{merge: N, min_axes: 2}}`, with N at least {math.prod(block[1:])}"
            )
        return super().slots(block, axes)

    def contribution(self, x: Tensor, axis: int, context: StepContext) -> Contribution:
        return Contribution(context.tensor("activation_gram", x))
