"""Stages that multiply a block by one number: a function of its shape, or a number that sets or limits its norm."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.blocking.blocks import matrix_shape
from eigengraft.numerics import block_norm, per_block, safe_ratio
from eigengraft.signals import Request
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage, Traits


class Scale(Stage):
    """factor * rule(m, n) * d, for blocks seen as m x n matrices (first axis x the rest; a vector is m x 1).

    d is the direction; the values of `rule` are:

    constant:      1
    match_rms:     sqrt(max(m, n)); with factor 0.2 updates have about the RMS of Adam's (Liu et al. 2025, Moonlight)
    aspect:        sqrt(max(1, m / n)) (Jordan et al. 2024, Muon)
    spectral:      sqrt(m / n) (Yang et al. 2023)
    inverse_mean:  2 / (m + n) (Frans et al. 2025, SPlus)
    dimensions:    sqrt(m / n) / (sqrt(m) + sqrt(n)) (OKLS)
    fan_in:        1 / n (Pethick et al. 2025, Scion, for signs)
    kernel:        sqrt(m / c) / p for weights of convolutions, m x c x kernel, where the kernel has p positions: such a
                   convolution is a sum of p matrices m x c (Bernstein & Newhouse 2024, Modular Duality; Pethick et al.
                   2025, Scion). sqrt(m / n) for matrices. Blocking must not merge the axes, because p is then unknown.

    For factors that depend on the norm of d, use the stage `normalize`.
    """

    kind: Literal["scale"] = "scale"
    rule: Literal["constant", "match_rms", "aspect", "spectral", "inverse_mean", "dimensions", "fan_in", "kernel"] = (
        Field(default="constant", description="how the factor depends on the shape")
    )
    factor: float | None = Field(
        default=None, gt=0, description="multiplies the rule; default 0.2 for match_rms, 1 for the others"
    )

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * (self._factor * self._rule(direction.shape[1:]))

    def traits(self, block: tuple[int, ...]) -> Traits:
        if self.rule == "kernel":  # the shape as a matrix does not give the number of positions of a kernel
            return Traits()
        return Traits(spectral_gain=self._factor * self._rule(matrix_shape(block)))

    @property
    def _factor(self) -> float:
        return self.factor if self.factor is not None else (0.2 if self.rule == "match_rms" else 1.0)

    def _rule(self, block: tuple[int, ...]) -> float:
        m, n = matrix_shape(block)
        positions = math.prod(block[2:])
        rules = {
            "constant": 1.0,
            "match_rms": math.sqrt(max(m, n)),
            "aspect": math.sqrt(max(1.0, m / n)),
            "spectral": math.sqrt(m / n),
            "inverse_mean": 2 / (m + n),
            "dimensions": math.sqrt(m / n) / (math.sqrt(m) + math.sqrt(n)),
            "fan_in": 1 / n,
            "kernel": math.sqrt(m / (n * positions)),  # n = c p
        }
        return rules[self.rule]


class Normalize(Stage):
    """factor * target * d / ||d||, with Frobenius norms of blocks and d the direction; a zero direction stays zero.

    unit_rms:         target = sqrt(number of entries), an update RMS of 1
    unit_norm:        target = 1
    unit_rows:        target = sqrt(m) for m rows (along the first axis), so that rows have a norm of about 1
    norm_preserving:  target = ||gradient||

    If no stage before this one keeps state, gradient and direction are the same tensor, and `norm_preserving` only
    multiplies by `factor`. To give the result of some stages the norm of their input, use `graft` with these stages as
    `direction` and `identity` as `magnitude`. For factors that depend on the shape alone, use the stage `scale`.
    """

    kind: Literal["normalize"] = "normalize"
    rule: Literal["unit_rms", "unit_norm", "unit_rows", "norm_preserving"] = Field(
        default="unit_rms", description="norm of the result"
    )
    factor: float = Field(default=1.0, gt=0, description="factor of the target norm")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(scale_free=self.rule != "norm_preserving")

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        target = block_norm(gradient)
        if self.rule != "norm_preserving":
            m, n = matrix_shape(direction.shape[1:])
            size = math.sqrt({"unit_rms": m * n, "unit_norm": 1, "unit_rows": m}[self.rule])
            target = target.new_full(target.shape, size)
        return direction * per_block(safe_ratio(target, block_norm(direction)).mul_(self.factor), direction)


class ClipRMS(Stage):
    """d / max(1, RMS(d) / threshold), for each block of the direction d.

    This is the update clipping of Adafactor (Shazeer & Stern 2018, section 6).
    """

    kind: Literal["clip_rms"] = "clip_rms"
    threshold: float = Field(default=1.0, gt=0, description="the largest update RMS that passes unchanged")

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(clip=self.threshold * math.sqrt(math.prod(block)))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        rms = block_norm(direction) / math.sqrt(max(1, direction[0].numel()))
        ratio = rms if self.threshold == 1 else rms / self.threshold
        return direction / per_block(ratio.clamp_min_(1.0), direction)


def norm_over(x: Tensor, per: str, context: StepContext) -> Tensor:
    """Return the Frobenius norm of each block of x, `[N]`. If `per` is "parameter", return for each block the norm over
    all blocks of its parameter.

    per: "block" or "parameter".
    """
    norm = block_norm(x)
    return context.parameter_sum(norm.square()).sqrt() if per == "parameter" else norm


class ClipNorm(Stage):
    """d / max(1, ||d|| / max_norm), Frobenius norms (Pascanu, Mikolov & Bengio 2013, arXiv:1211.5063, algorithm 1).

    d is the direction. If no stage before this one keeps state, gradient and direction are the same tensor, and the
    following stages receive the clipped tensor as both. With `per: model` ||d|| is replaced by the norm of the
    gradients of all parameters, before any stage, as in `torch.nn.utils.clip_grad_norm_`.
    """

    kind: Literal["clip_norm"] = "clip_norm"
    max_norm: float = Field(default=1.0, gt=0, description="the largest norm that passes unchanged")
    per: Literal["block", "parameter", "model"] = Field(
        default="block",
        description="entries over which the norm is computed; model: the gradients of all parameters, before any stage",
    )

    def traits(self, block: tuple[int, ...]) -> Traits:
        signals = (Request("gradient_norm"),) if self.per == "model" else ()
        return Traits(signals, sums=self.per == "parameter", clip=self.max_norm)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        if self.per == "model":
            norm = context.tensor("gradient_norm", direction.new_empty((), dtype=torch.float64))
            return direction * (self.max_norm / norm.clamp_min(self.max_norm)).to(direction.dtype)
        norm = norm_over(direction, self.per, context)
        return direction / per_block((norm / self.max_norm).clamp_min_(1.0), direction)
