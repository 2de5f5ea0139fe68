"""A chain applied in a metric of gradient noise, so that rows and columns with much noise change less (IsoMuon)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.blocking.blocks import matrix_shape
from eigengraft.numerics import block_norm, per_block, safe_ratio
from eigengraft.signals import Request
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..algebra.products import as_matrices
from ..base import Inner, Stage, Stages, Traits, run_chain


class NoiseMetric(Stage):
    """D = B^(-1/2) P A^(-1/2) c  with  P = inner(B^(-1/2) d A^(-1/2)),  c = ||P|| / ||B^(-1/2) P A^(-1/2)||

    B = diag(clip((r / mean r)^power)),  r <- beta r + (1 - beta) (row means of V);   A likewise with column means of V

    d is the direction, and D the result. V is the signal `gradient_variance`: the variance of each entry of the
    gradient over the micro-batches of the step. r is the running mean of the row means of V. clip limits entries to [1
    / bound, bound]. Where r is 0, the entry of B is 1. For `power: 0` the result is P. Blocks are treated as matrices,
    first axis x the rest.

    With Muon's polar factor as `inner` this is IsoMuon (modded-nanogpt track 3, 2026, #370), which damps rows and
    columns by the standard deviation of their noise.

    V is required in the first step only. In a later step without V, r does not change. It is therefore enough to
    compute V at the beginning of a run: in #370, V in the first 3 % of the steps gave 86 % of the gain.
    """

    kind: Literal["noise_metric"] = "noise_metric"
    chain: Stages = Field(alias="inner", min_length=1, description="the chain that is applied in the metric")
    power: float = Field(default=0.5, ge=0, le=2, description="power of variances in A and B; 1/2: standard deviations")
    bound: float = Field(default=2.0, ge=1, description="largest entry of A and B; the smallest entry is 1 / bound")
    beta: float = Field(default=0.95, ge=0, lt=1, description="decay of the running mean r, per step with V")

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"inner": Inner(self.chain, block)}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(matrices=True, signals=(Request("gradient_variance", "first"),))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        rows, columns = matrix_shape(block)
        return {"rows": Slot((rows,), role="second_moment"), "columns": Slot((columns,), role="second_moment")}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        if "gradient_variance" in context.signals:
            variance = as_matrices(context.tensor("gradient_variance", direction))
            for name, axis in (("rows", -1), ("columns", -2)):
                state[name] = torch.lerp(state[name], variance.mean(axis), 1 - self.beta)
        b, a = self._inverse_root(state["rows"]).unsqueeze(-1), self._inverse_root(state["columns"]).unsqueeze(-2)
        scaled = (b * as_matrices(direction) * a).reshape(direction.shape)
        made = run_chain(self.chain, state.scope("inner"), gradient, scaled, context)
        found = (b * as_matrices(made) * a).reshape(direction.shape)
        return found * per_block(safe_ratio(block_norm(made), block_norm(found)), found)

    def _inverse_root(self, means: Tensor) -> Tensor:
        """Return clip((r / mean r)^power)^(-1/2), `[N, n]`: diagonals of B^(-1/2) for rows, of A^(-1/2) for columns.

        Where r is 0, the result is 1. clip limits its argument to [1 / bound, bound].

        means: r, the running means of the variances of n rows, for B, or of n columns, for A, `[N, n]`.
        """
        ratio = safe_ratio(means, means.mean(-1, keepdim=True).expand_as(means))
        ratio = torch.where(ratio > 0, ratio, 1.0)
        return ratio.pow(self.power).clamp(1 / self.bound, self.bound).rsqrt()
