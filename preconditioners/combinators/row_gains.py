"""Rows written as a gain times a unit vector: weight normalization inside the optimizer. One chain updates the gains,
another chain the vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import block_norm, safe_ratio
from eigengraft.signals import Request
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Inner, Stage, Stages, Traits, run_chain


class RowGains(Stage):
    """W = diag(g) U  with  U = diag(1 / n) V,  n_i = ||V_i||;  V <- V - lr D,  g <- g - lr a,  from which W follows.

    d_g = row sums of d * U;   d_V = diag(g / n) (d - diag(d_g) U);   D = inner(d_V),  a = gain(d_g)

    W is the parameter, d its direction, and lr the learning rate. Row i of W has the entries with index i of the first
    axis; a vector is one row. It is written as W_i = g_i U_i, with a gain g_i and a unit vector U_i = V_i / n_i. V has
    the shape of W, and n_i is the norm of row i of V. d_g and d_V are the directions of g and V that follow from d,
    where d * U is the product of entries. Blocking should not cut rows.

    This is weight normalization (Salimans & Kingma 2016, arXiv:1602.07868) without a change of the model. With Muon as
    `inner` and Adam as `gain` it is Muown (Lion et al. 2026, arXiv:2605.10797).

    The result is (W - W') / lr, where W' is W after the step. Row i of the result is computed by a formula without a
    division by lr, so that no digits cancel and lr may be 0. With n'_i = ||V_i - lr D_i||, the norm after the step, the
    row is

    U_i a_i + (g_i - lr a_i) (U_i (lr ||D_i||^2 - 2 <V_i, D_i>) / (n'_i (n'_i + n_i)) + D_i / n'_i)

    g is computed as the norm of each row of W, so that it is also right for weights that were loaded or rounded since
    the last step. g after the step is never below 0. The slot `norm` stores n, which starts as g. While D is nearly
    orthogonal to V, as d_V is, n grows from step to step, so that a row turns less and less. For a row of W that is 0,
    U is undefined, and the result is D.
    """

    kind: Literal["row_gains"] = "row_gains"
    chain: Stages = Field(alias="inner", min_length=1, description="the chain that updates V")
    gain: Stages = Field(min_length=1, description="the chain that updates g, on blocks with one number for each row")

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"inner": Inner(self.chain, block), "gain": Inner(self.gain, (_rows(block),))}

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"norm": Slot((_rows(block),), sensitive=True)}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("parameter"), Request("lr")))

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        count, rows = len(direction), _rows(state.block)
        weight, d = (x.reshape(count, rows, -1) for x in (context.tensor("parameter", direction), direction))
        lr = context.tensor("lr", direction)
        gains = _row_norms(weight)
        stored = state["norm"].unsqueeze(-1)
        norms = torch.where(stored > 0, stored, gains)
        unit = weight * safe_ratio(torch.ones_like(gains), gains)
        along = (d * unit).sum(-1, keepdim=True)
        across = (d - along * unit) * safe_ratio(gains, norms)
        across = torch.where(gains > 0, across, d).reshape(direction.shape)
        turn = run_chain(self.chain, state.scope("inner"), across, across, context).reshape(d.shape)
        slope = along.squeeze(-1)
        change = run_chain(self.gain, state.scope("gain", (rows,)), slope, slope, context).unsqueeze(-1)
        change = torch.minimum(change, safe_ratio(gains, lr.expand_as(gains)).where(lr > 0, change))
        after = _row_norms(norms * unit - lr * turn)
        state["norm"] = after.squeeze(-1)
        inverse = safe_ratio(torch.ones_like(after), after)
        radial = lr * turn.square().sum(-1, keepdim=True) - 2 * norms * (unit * turn).sum(-1, keepdim=True)
        turned = unit * (radial * inverse * safe_ratio(torch.ones_like(after), after + norms)) + turn * inverse
        moved = unit * change + (gains - lr * change) * turned
        return torch.where(gains > 0, moved, turn).reshape(direction.shape)


def _rows(block: tuple[int, ...]) -> int:
    """Return the number of rows of a block; a vector is one row."""
    return block[0] if len(block) > 1 else 1


def _row_norms(x: Tensor) -> Tensor:
    """Return the norms `[N, m, 1]` of rows `[N, m, n]`."""
    return block_norm(x.flatten(0, 1)).view(*x.shape[:2], 1)
