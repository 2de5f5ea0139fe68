"""A weighted mean of the incoming direction and the direction of a chain (track 3 of modded-nanogpt)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.numerics import block_norm, per_block, safe_ratio
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..algebra.products import unfold
from ..base import Inner, Stage, Stages, Traits, run_chain


class Trust(Stage):
    """v(d) X / v(X)  with  X = (1 - t) d + t P,  P = v(d) Y / v(Y),  Y = inner(g, d)

    d is the incoming direction, g the gradient, and Y the direction that the chain `inner` computes from both. The norm
    of a block X, as a matrix, is v(X) = ||X X^T||_F^(1/2). P is Y scaled to the norm of d. X is the blend of d and P
    with the weight t of P, and the result is X scaled to the norm of d. Norms and cosines are computed for each block.

    t = a c, clipped to [floor, cap]
    a = (cos(P, d) - agreement) / (1 - agreement), clipped to [0, 1]
    c = cos(P, g) / cos(d, g), clipped to [0, 1]

    a is large if the angle between P and d is small, and c is 1 if P is at least as close to the gradient as d. A stale
    basis in the chain turns P away from the gradient, which makes t smaller (records of 2026 in track 3 of
    modded-nanogpt, `trust_gate`).
    """

    kind: Literal["trust"] = "trust"
    chain: Stages = Field(alias="inner", min_length=1, description="the chain that computes the direction Y")
    agreement: float = Field(default=0.2, ge=0, lt=1, description="cosine of P and d below which P does not count")
    floor: float = Field(default=0.0, ge=0, le=1, description="least weight t of P")
    cap: float = Field(default=1.0, ge=0, le=1, description="largest weight t of P")

    @model_validator(mode="after")
    def _floor_is_below_cap(self) -> Self:
        if not (self.scheduled("floor") or self.scheduled("cap")) and self.floor > self.cap:
            raise ValueError(f"floor: it must be at most cap, {self.cap}, got {self.floor}")
        return self

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"inner": Inner(self.chain, block)}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(matrices=True)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        made = run_chain(self.chain, state.scope("inner"), gradient, direction, context)
        size = _gram_norm(direction)
        made = made * per_block(safe_ratio(size, _gram_norm(made)), made)
        along = (_cosine(made, direction) - self.agreement) / (1 - self.agreement)
        ratio = _cosine(made, gradient) / _cosine(direction, gradient).clamp_min(1e-8)
        weight = (along.clamp(0, 1) * ratio.clamp(0, 1)).clamp(self.floor, self.cap)
        blended = torch.lerp(direction, made, per_block(weight, made))
        return blended * per_block(safe_ratio(size, _gram_norm(blended)), blended)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine of the angle between x and y for each block, `[N]`. If either block is 0, the cosine is 0."""
    x, y = (z * per_block(safe_ratio(torch.ones_like(block_norm(z)), block_norm(z)), z) for z in (x, y))
    return (x * y).flatten(1).sum(1)


def _gram_norm(x: Tensor) -> Tensor:
    """Return ||X X^T||_F^(1/2) of each block, `[N]`, with X the block as a matrix, first axis x the rest."""
    peak = x.flatten(1).abs().amax(1)
    matrix = unfold(x * per_block(safe_ratio(torch.ones_like(peak), peak), x), 0)
    short = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    return peak * block_norm(torch.bmm(short, short.mT)).sqrt()
