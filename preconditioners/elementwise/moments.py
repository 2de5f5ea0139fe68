"""First and second moments: means and sums of directions, and division by the root of accumulated squares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import in_registers, number_like, per_block
from eigengraft.schedules import Schedulable
from eigengraft.slots import Frame, Slot, State
from eigengraft.step_context import StepContext

from ..algebra.exponents import Exponents, exponent_of
from ..base import FirstMoment, SecondMoment, Stage, Traits

PRODUCT = Slot((), fill=1.0, role="count", dtype=torch.float64)
"""Slot for the product b_1 ... b_t of the decays of steps 1 to t. If the decay is scheduled, this product takes the
place of b^t in the bias correction.
"""

_ROOT = Fraction(1, 2)
"""Default of the exponent e in `rms`, which divides by v^e."""
_MEAN_OVER = {"row": -1, "column": -2}
"""Axis over which `rms` averages squares, for the values "row" and "column" of its field `per`."""


class Momentum(Stage):
    """A running mean m of directions d, with decay b = beta, in step t.

        m <- b m + (1 - b) d;  m / (1 - b^t)
    nesterov:  (b m + (1 - b) d) / (1 - b^(t+1))
    beta3:     (b3 m_old + (1 - b3) d) / (1 - b3 b^(t-1))

    The denominators are the sums of all weights so far. Without bias correction they are 1. If b is scheduled, b^t
    stands for the product of its values in steps 1 to t. The sum m <- b m + d is the stage `heavy_ball`.

    With `nesterov` the newest direction is added a second time, as Sutskever et al. 2013 (section 2) do with a sum.
    NAdam (Dozat 2016) has one denominator for each of the two terms, b m / (1 - b^(t+1)) + (1 - b) d / (1 - b^t), so
    that the weights add up to more than 1.

    With the field `beta3`, b3, the newest direction has the weight 1 - b3 in the result, and m_old is the mean before
    this step (Shi et al. 2023, filtered gradient).
    """

    kind: Literal["momentum"] = "momentum"
    beta: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment, per step")
    nesterov: bool = Field(default=False, description="look ahead: add the new direction a second time")
    beta3: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="weight b3 of m_old in the result; none: the result is m or, with `nesterov`, its look-ahead",
    )
    bias_correction: bool = Field(default=True, description="divide by the sum of the weights so far")

    @model_validator(mode="after")
    def _one_look_ahead(self) -> Self:
        if self.beta3 is not None and self.nesterov:
            raise ValueError("nesterov: true cannot be combined with beta3, which replaces it; remove one of the two")
        return self

    def traits(self, block: tuple[int, ...]) -> Traits:
        plain = self.bias_correction and not self.nesterov and self.beta3 is None
        return Traits(entrywise=True, spectral_gain=1.0, moment=FirstMoment("m", self.beta) if plain else None)

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        own = {"m": Slot(block, fill=0.0, role="first_moment", frame="vector")}
        return {**own, "product": PRODUCT} if self.scheduled("beta") and self.bias_correction else own

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        m = state["m"]
        if self.beta3 is not None:
            return self._filtered(state, m, direction, self.beta3, context)
        m.lerp_(direction, 1 - self.beta)
        state["m"] = m
        ahead = torch.lerp(direction, m, self.beta) if self.nesterov else m
        if not self.bias_correction:
            return ahead
        if "product" in state:  # beta is scheduled
            product = _multiplied(state, self.beta)
            return ahead / per_block(1 - (product * self.beta if self.nesterov else product), ahead).to(ahead.dtype)
        return ahead / context.correction(self.beta, m, ahead=int(self.nesterov))

    def _filtered(self, state: State, m: Tensor, direction: Tensor, beta3: float, context: StepContext) -> Tensor:
        """Return the new direction of a stage with the field `beta3`, and update the mean m in its slot.

        With beta3 as b3, the direction is (b3 m + (1 - b3) d) / (1 - b3 b^(t-1)). Without bias correction, the
        denominator is 1.

        m: the mean before this step.
        """
        out = torch.lerp(m, direction, 1 - beta3)
        m.lerp_(direction, 1 - self.beta)
        state["m"] = m
        if not self.bias_correction:
            return out
        if "product" in state:
            before = state["product"].clone()
            _multiplied(state, self.beta)
            return out / per_block(1 - before * beta3, out).to(out.dtype)
        return out / context.per_block(lambda step: 1 - beta3 * self.beta ** (step - 1), m)


def _multiplied(state: State, beta: float) -> Tensor:
    """Multiply the slot `product` by `beta`, the decay of this step. Return the product `[N]` of the decays of all
    steps so far.
    """
    product = state["product"] * beta
    state["product"] = product
    return product


class RunningMean(Schedulable):
    """One running mean of a `momentum_mixture`:  m <- beta m + (1 - beta) d."""

    beta: float = Field(ge=0, lt=1, description="decay of the mean, per step; its mean age is beta / (1 - beta) steps")
    weight: float = Field(description="weight of the mean in the sum")


class MomentumMixture(Stage):
    """A weighted sum of running means with different decays.

    m_k <- b_k m_k + (1 - b_k) d;   o = sum_k w_k m_k
    nesterov n:   n o + (1 - n) d

    d is the direction, m_k the k-th mean with decay b_k and weight w_k, o the sum, and n the field `nesterov`. The
    means have no bias correction. Mean k = 0, 1, ... is stored in the slot `m<k>`, so that a recipe can store the slow
    means in 8 bits. Decays and weights may be schedules. A mixture may start with equal decays, as one momentum, and
    change to different decays later without a jump, because means with equal decays are equal.

    Two means with weights 0.4385 and 0.5615 are bi-Maxwell momentum (modded-nanogpt #339, #340). K-Maxwell momentum
    (#357, #359) has six or eight means whose weights change during the run; `k_maxwell` computes these weights.
    `maximum_entropy` computes weights with which a mixture approximates the momentum of #368 and #369. Earlier mixtures
    with constant weights are QHM (Ma & Yarats 2019, arXiv:1810.06801) and AggMo (Lucas et al. 2019, arXiv:1804.00325).
    """

    kind: Literal["momentum_mixture"] = "momentum_mixture"
    means: tuple[RunningMean, ...] = Field(
        min_length=1,
        strict=False,
        examples=[[{"beta": 0.9, "weight": 1.0}]],
        description="the means, each with its weight",
    )
    nesterov: float | None = Field(
        default=None, ge=0, lt=1, description="weight n of the sum; the new direction has 1 - n; null: the sum alone"
    )

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True)

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        mean = Slot(block, fill=0.0, role="first_moment", frame="vector")
        return {f"m{k}": mean for k in range(len(self.means))}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        total: Tensor | None = None
        for k, mean in enumerate(self.means):
            m = state[f"m{k}"].lerp_(direction, 1 - mean.beta)
            state[f"m{k}"] = m
            total = m * mean.weight if total is None else total.add_(m, alpha=mean.weight)
        assert total is not None
        return total if self.nesterov is None else torch.lerp(direction, total, self.nesterov)


class HeavyBall(Stage):
    """A decaying sum of directions, the momentum of torch.optim.SGD.

    m <- b m + w d;  m               w = 1 - dampening, b = beta, d the direction
    nesterov:  b m + w d             (Sutskever et al. 2013)

    All directions have the weight w by default. torch.optim.SGD gives the weight 1 to the first direction (set
    `undamped_start`), and to the direction that `nesterov` adds (set `undamped_nesterov`). For a running mean use the
    stage `momentum`.
    """

    kind: Literal["heavy_ball"] = "heavy_ball"
    beta: float = Field(default=0.9, ge=0, lt=1, description="decay of the sum, per step")
    dampening: float = Field(default=0.0, ge=0, lt=1, description="a direction enters with weight 1 - dampening")
    nesterov: bool = Field(default=False, description="look ahead: add the new direction once more")
    undamped_start: bool = Field(default=False, description="the first direction enters with weight 1")
    undamped_nesterov: bool = Field(default=False, description="the look-ahead adds the direction with weight 1")

    @model_validator(mode="after")
    def _weights_matter(self) -> Self:
        if self.undamped_nesterov and not self.nesterov:
            raise ValueError(
                "undamped_nesterov: has no effect with `nesterov: false`; set `nesterov: true`, or remove it"
            )
        if self.dampening == 0 and (self.undamped_start or self.undamped_nesterov):
            which = "undamped_start" if self.undamped_start else "undamped_nesterov"
            raise ValueError(f"{which}: has no effect with `dampening: 0`; set a dampening or remove it")
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"dampening": self.dampening}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(entrywise=True, spectral_gain=(1 - self.dampening) / (1 - self.beta))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"m": Slot(block, fill=0.0, role="first_moment", frame="vector")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        m = state["m"].mul_(self.beta)
        if self.undamped_start:
            m.add_(direction * context.per_block(self._weight, m))
        else:
            m.add_(direction, alpha=1 - self.dampening)
        state["m"] = m
        weight = 1.0 if self.undamped_nesterov else 1 - self.dampening
        return torch.add(m * self.beta, direction, alpha=weight) if self.nesterov else m

    def _weight(self, step: Tensor) -> Tensor:
        """Return the weight of the direction with `undamped_start`: 1 in the first step, and 1 - dampening later.

        step: numbers of the steps of the blocks. The result has the same shape.
        """
        return torch.where(step == 1, 1.0, torch.full_like(step, 1 - self.dampening))


class RMS(Stage):
    """Divide by a power of accumulated squares.  v <- b v + w x^2;  d / ((v / c)^e + eps),  e = 1/2

    d is the direction, b is `beta`, t the step, and e the `exponent`. x is the gradient, or with `source: direction`
    the direction: in NorMuon and AdaMuon the orthogonalized momentum.

    A running mean (b < 1) has w = 1 - b, and c = 1 - b^t with bias correction (Adam, Kingma & Ba 2015) or c = 1 without
    (RMSprop). A sum (b = 1) has w = 1 and c = 1 (AdaGrad, Duchi et al. 2011). With `damped: false`, w and c are 1 for
    any b. If b is scheduled, b^t stands for the product of its values in steps 1 to t. With `eps_on: raw` eps is added
    before bias correction, and the divisor is (v^e + eps) / c^e, as in implementations that fold the correction into
    the step size.

    v has one number for each entry, or with `per` one for several entries. Then x^2 is replaced by its mean: with `per:
    row` over the last axis, with `per: column` over the last but one, and with `per: block` over all entries of the
    block (Adam-mini, Zhang et al. 2024, arXiv:2406.16793). `per: longest` is `row` for blocks with at least as many
    rows as columns, and else `column`. `per: longer` is the same, but `block` for blocks with as many rows as columns.
    """

    kind: Literal["rms"] = "rms"
    beta: float = Field(default=0.999, ge=0, le=1, description="decay of the second moment, per step; 1 = sum")
    eps: float = Field(default=1e-8, gt=0, description="added to (v / c)^e, in units of the gradient for e = 1/2")
    bias_correction: bool = Field(default=True, description="divide v by 1 - beta^t; a sum (beta = 1) has no bias")
    eps_on: Literal["corrected", "raw"] = Field(
        default="corrected", description="corrected: add eps after bias correction; raw: before it"
    )
    damped: bool = Field(
        default=True, description="weight w of squares: 1 - beta; false: w = 1, without bias correction"
    )
    source: Literal["gradient", "direction"] = Field(default="gradient", description="tensor that is squared")
    per: Literal["entry", "row", "column", "longest", "longer", "block"] = Field(
        default="entry",
        description="entries that share one v: one entry, a row, a column or the block; longest: a row if there are at "
        "least as many rows as columns, else a column; longer: the same, but the block for square blocks; blocks of "
        "one axis have one v for each entry, except with block",
    )
    exponent: Exponents = Field(default=None, description="power e, or one for each order of block; default 1/2")

    @model_validator(mode="after")
    def _one_exponent(self) -> Self:
        if isinstance(self.exponent, dict) and any(
            len({*parts}) > 1 or not parts[0] for parts in self.exponent.values()
        ):
            raise ValueError(
                "exponent: one number above 0 is required for each order of block (its number of axes); lists with one "
                "number for each axis, and 0, are not allowed"
            )
        return self

    @model_validator(mode="after")
    def _options_matter(self) -> Self:
        if self.beta == 1 and not self.damped:
            raise ValueError(
                "damped: false has no effect with `beta: 1`, because squares then have weight 1 anyway; remove damped"
            )
        summed = "`beta: 1`" if self.beta == 1 else "`damped: false`" if not self.damped else None
        if summed and not self.bias_correction:
            raise ValueError(
                f"bias_correction: false has no effect with {summed}, because a sum of squares has no bias to "
                "correct; remove bias_correction"
            )
        uncorrected = summed or (None if self.bias_correction else "`bias_correction: false`")
        if uncorrected and self.eps_on == "raw":
            raise ValueError(
                f"eps_on: 'raw' cannot be combined with {uncorrected}, because no bias is corrected then; set "
                "eps_on to 'corrected'"
            )
        return self

    def state_meaning(self) -> Mapping[str, Any]:
        return {"beta": self.beta == 1, "damped": self.damped, "source": self.source, "per": self.per}

    def traits(self, block: tuple[int, ...]) -> Traits:
        bounded = self.beta < 1 and self.damped and self.source == "gradient" and self.exponent is None
        plain = bounded and self._corrected() and self.eps_on == "corrected" and self._per(block) == "entry"
        return Traits(
            entrywise=self.per == "entry",
            spectral_norm=math.prod(block) ** 0.5 if bounded else None,
            moment=SecondMoment("v", self.beta, self.eps) if plain else None,
        )

    def _per(self, block: tuple[int, ...]) -> str:
        """Return which entries of a block of this shape share one second moment: the entries of a "row", a "column" or
        the "block". The result is "entry" if each entry has a second moment of its own.

        The result is the field `per`, with three exceptions. For a vector it is "entry", unless `per` is "block". For
        "longest" it is "row" if the block has at least as many rows as columns, and else "column". For "longer" it is
        the same, but "block" for square blocks.
        """
        if len(block) < 2 and self.per != "block":
            return "entry"
        if self.per == "longer" and block[-2] == block[-1]:
            return "block"
        if self.per in ("longest", "longer"):
            return "row" if block[-2] >= block[-1] else "column"
        return self.per

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        own = {"v": self._moment(block)}
        return {**own, "product": PRODUCT} if self.scheduled("beta") and self._corrected() else own

    def _moment(self, block: tuple[int, ...]) -> Slot:
        """Return the declaration of the slot v, the second moment, for blocks of this shape."""
        per, plain = self._per(block), self.source == "gradient" and not self.scheduled("beta")
        if per == "block":
            return Slot((), role="second_moment")
        shape = {"entry": block, "row": block[:-1], "column": (*block[:-2], *block[-1:])}[per]
        frames: dict[str, Frame] = {"entry": "square", "row": "row", "column": "column"}
        return Slot(shape, role="second_moment", frame=frames[per], decay=self.beta if plain else None)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        v = self._accumulate(state, gradient if self.source == "gradient" else direction)
        exponent = _ROOT if self.exponent is None else exponent_of(self.exponent, len(state.block), 0, _ROOT)
        denominator = v.sqrt() if exponent == _ROOT else v.pow(float(exponent))
        per = self._per(state.block)
        if per != "entry":
            wide = per_block(denominator, direction) if per == "block" else denominator.unsqueeze(_MEAN_OVER[per])
            denominator = wide.expand_as(direction).clone()
        if not self._corrected():
            return torch.div(direction, denominator.add_(self.eps), out=denominator)
        root = self._correction(state, float(exponent), direction, context)
        if self.eps_on == "raw":
            return torch.div(direction, denominator.add_(self.eps), out=denominator).mul_(root)
        return torch.div(direction, denominator.div_(root).add_(self.eps), out=denominator)

    def _correction(self, state: State, exponent: float, like: Tensor, context: StepContext) -> Tensor:
        """Return c^e, shaped to divide v^e. c = 1 - b^t is the bias correction of the second moment v, and e the
        exponent.
        """
        if "product" in state:  # beta is scheduled
            return per_block((1 - _multiplied(state, self.beta)) ** exponent, like).to(like.dtype)
        return context.correction(self.beta, like, exponent=exponent)

    def _corrected(self) -> bool:
        """Return True if the second moment v has bias correction."""
        return self.bias_correction and self.beta < 1 and self.damped

    def _accumulate(self, state: State, x: Tensor) -> Tensor:
        """Update the second moment v in its slot with the squares of x `[N, *block]`, and return v."""
        v = state["v"]
        weight = 1 - self.beta if self.beta < 1 and self.damped else 1.0
        per = self._per(state.block)
        if per == "entry":
            v.mul_(self.beta).addcmul_(x, x, value=weight)
        else:
            mean = x.square().flatten(1).mean(1) if per == "block" else x.square().mean(_MEAN_OVER[per])
            v.mul_(self.beta).add_(mean, alpha=weight)
        state["v"] = v
        return v


class LaggedRMS(Stage):
    """clip(d / max(sqrt(v), eps), -t^p, t^p);  then  v <- b v + (1 - b) g^2,  from  v = g^2  of the first gradient

    The first gradient only initializes v; the parameter is not changed in that step.

    d is the direction, g the gradient, b = beta, p = clip_power, and t = 1, 2, ... the number of the update. ADOPT
    (Taniguchi et al. 2024, arXiv:2411.02853, Algorithm 2) is this stage before a momentum. A gradient is divided by a v
    that does not contain this gradient, so that Adam converges with any b.
    """

    kind: Literal["lagged_rms"] = "lagged_rms"
    beta: float = Field(default=0.9999, ge=0, lt=1, description="decay of the second moment, per step")
    eps: float = Field(default=1e-6, gt=0, description="lower bound of sqrt(v), in units of the gradient")
    clip_power: float | None = Field(
        default=0.25, ge=0, description="power p: entries are clipped to [-t^p, t^p]; null: entries are not clipped"
    )

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(lagged=True, entrywise=True, spectral_norm=math.sqrt(math.prod(block)))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"v": Slot(block, role="second_moment", frame="square")}

    def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
        v = state["v"]
        weight = context.per_block(lambda step: 1 - self.beta * step.clamp_max(1), v)  # 1 at first: v = g^2
        state["v"] = v.add_((gradient.square() - v) * weight)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        out = direction / state["v"].sqrt().clamp_min_(self.eps)
        if self.clip_power is None:
            return out
        power = self.clip_power
        bound = number_like(context.per_block(lambda step: step**power, out), out)
        return torch.minimum(torch.maximum(out, -bound, out=out), bound, out=out)


class Atan2(Stage):
    """scale * atan2(d, width * sqrt(v / (1 - b^t)))  with  v <- b v + (1 - b) g^2,  b = beta, in step t

    This is Adam without an eps (Everett et al. 2024, arXiv:2407.05872, section 4.3, "Adam-atan2"). g is the gradient, d
    the direction. The result does not depend on the scale of the gradient, however small, and no entry is larger than
    scale * pi / 2. For small ratios it is close to scale / width times Adam's d / sqrt(v).
    """

    kind: Literal["atan2"] = "atan2"
    beta: float = Field(default=0.999, ge=0, lt=1, description="decay of the second moment, per step")
    scale: float = Field(default=1.27, gt=0, description="factor of the angle; with 4 / pi, a ratio of 1 gives 1")
    width: float = Field(default=1.0, gt=0, description="factor of the root; the larger, the closer to a division")
    constants: ClassVar[frozenset[str]] = frozenset({"beta"})

    def traits(self, block: tuple[int, ...]) -> Traits:
        most = self.scale * math.atan2(1, self.width) * math.sqrt(math.prod(block))
        return Traits(entrywise=True, spectral_norm=most)

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"v": Slot(block, role="second_moment", frame="square")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        v = state["v"].mul_(self.beta).addcmul_(gradient, gradient, value=1 - self.beta)
        state["v"] = v
        root = (v / context.correction(self.beta, v)).sqrt_().mul_(self.width)
        return in_registers(torch.atan2, direction, root).mul_(self.scale)
