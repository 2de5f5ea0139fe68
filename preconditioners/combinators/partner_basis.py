"""A chain for one factor of a product of matrices, in coordinates given by the other factor (LoRA-RITE, LoRA-Muon)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.blocking.blocks import matrix_shape
from eigengraft.numerics import apply_aligned, signs, tiny
from eigengraft.signals import Request
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import mode_product
from ..base import Inner, Stage, Stages, Traits, chain_slots, first_lagged, map_wires, run_chain
from ..kronecker.basis_change import slot_axis


class PartnerBasis(Stage):
    """inner(g R^(-1), d R^(-1)) R^(-T)  with  Y = U R,  Y `[m, r]` the other factor of W = Y X^T, for blocks X `[n, r]`

    W is the product of two parameters, for example in LoRA. X is a block of one of them, and Y the other one, called
    the partner. g and d are the gradient and the direction of X. Y = U R is a QR decomposition: U has orthonormal
    columns, and R `[r, r]` is upper triangular. Because W = U (X R^T)^T, g R^(-1) is the gradient of X R^T. If Y does
    not have full rank, the pseudoinverse of R is used. While Y is 0, X is not changed.

    W stays the same if Y is multiplied from the right by an invertible matrix, and X by the inverse transpose of this
    matrix. g R^(-1) is then only multiplied from the right by an orthogonal matrix, because U changes. The update of W
    stays the same if `inner` commutes with such rotations of the last axis, as polar factors and `shampoo` with `axes:
    {side: right}` do (Yen et al. 2024, LoRA-RITE, arXiv:2410.20625, Algorithm 1 without escaped mass; Cesista et al.
    2026, LoRA-Muon, arXiv:2606.12921).

    When U changes, the state of `inner` is transported by P = U^T U_before. First moments M become M P^T, second
    moments are multiplied by the Hadamard square of P in the same way, and r x r statistics V become P V P^T.

    The recipe must set `view: pairs` and no blocking.
    """

    kind: Literal["partner_basis"] = "partner_basis"
    chain: Stages = Field(alias="inner", min_length=1, description="the chain that receives g R^(-1) and d R^(-1)")

    @model_validator(mode="after")
    def _state_follows(self) -> Self:
        if lagged := first_lagged(self.chain, "inner"):
            raise ValueError(
                f"{lagged}: a lagged stage, which needs a first gradient, cannot be in partner_basis; remove it"
            )
        for path, name, slot in chain_slots(self.chain, (3, 2), "inner"):
            if slot.frame == "none" and (slot.role == "basis" or (_is_matrix(slot) and slot.axes != (1,))):
                raise ValueError(
                    f"{path}: the slot '{name}' cannot be transported when the basis of the last axis changes; "
                    "remove this stage, or, if it is shampoo, set `axes: {side: right}` in its `statistic`"
                )
        return self

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"inner": Inner(self.chain, block)}

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        if len(block) != 2:
            raise ValueError(f"factors must have two axes, as `view: pairs` gives them, got a block of shape {block}")
        return {}

    def traits(self, block: tuple[int, ...]) -> Traits:
        m, n = matrix_shape(block)
        has_state = any(True for _ in chain_slots(self.chain, (3, 2)))
        signals = (Request("partner"), *([Request("partner_before")] if has_state else []))
        return Traits(signals=signals, matrices=True, work=10.0 * m * n**2)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        inner = state.scope("inner")
        u, r = _frame(context.tensor("partner", gradient))
        if "partner_before" in context.signals:
            before, _ = _frame(context.tensor("partner_before", gradient))
            self._transport(inner, torch.bmm(u.mT, before))
        rtol = r.shape[-1] * torch.finfo(r.dtype).eps
        inverse = apply_aligned(lambda own: torch.linalg.pinv(own, rtol=rtol), r)
        g, d = map_wires(lambda x: torch.bmm(x, inverse), gradient, direction)
        return torch.bmm(run_chain(self.chain, inner, g, d, context), inverse.mT)

    def _transport(self, state: State, p: Tensor) -> None:
        """Transport the state of the inner chain when the coordinates of the last axis change.

        state: state of the inner chain.
        p: P `[N, r, r]`. New coordinates are P times the old ones.
        """
        for path, name, slot in chain_slots(self.chain, state.block):
            scope, place = state.scope(path), slot_axis(slot, 1, 2)
            if _is_matrix(slot):
                scope[name] = torch.bmm(torch.bmm(p, scope[name]), p.mT)
            elif place is not None:
                scope[name] = mode_product(scope[name], p if slot.frame == "vector" else p.square(), place)


def _is_matrix(slot: Slot) -> bool:
    """Return True if a slot is an r x r matrix V of the last axis, such as a statistic. When the coordinates change by
    P, V becomes P V P^T.
    """
    return slot.role in ("statistic", "root") and slot.frame == "none"


def _frame(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return U `[N, m, r]` and R `[N, r, r]` of the QR decomposition Y = U R, with the diagonal of R >= 0.

    If m < r, rows of zeros are added to Y first, so that U is `[N, r, r]`.
    """
    short = y.shape[-1] - y.shape[-2]
    y = torch.nn.functional.pad(y, (0, 0, 0, short)) if short > 0 else y
    peak = y.abs().amax((-2, -1), keepdim=True).clamp_min(tiny(y.dtype))
    u, r = apply_aligned(torch.linalg.qr, y / peak)
    turned = signs(r.diagonal(dim1=-2, dim2=-1))
    return u * turned[:, None, :], r * turned[:, :, None] * peak
