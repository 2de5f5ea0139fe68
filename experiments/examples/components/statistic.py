"""A statistic of your own: Gram matrices of gradients scaled to length 1, so that a loss spike counts like any step.

In an experiment:

    imports: [statistic.py]
    recipe: {base: soap, set: {update.eigenbasis.statistic: {kind: unit_gram, beta: 0.95}}}
"""

from typing import Literal

import torch
from torch import Tensor

from eigengraft import StepContext
from eigengraft.numerics import block_norm, per_block, safe_ratio
from eigengraft.preconditioners import Contribution, Statistic


class UnitGram(Statistic):
    """O_k = Y Y^T,  Y the unfolding along axis k of G / ||G||_F"""

    kind: Literal["unit_gram"] = "unit_gram"

    def contribution(self, x: Tensor, axis: int, context: StepContext) -> Contribution:
        norms = block_norm(x)  # [N], without overflow of the squares
        unit = x * per_block(safe_ratio(torch.ones_like(norms), norms), x)
        y = unit.movedim(axis + 1, 1).reshape(len(x), x.shape[axis + 1], -1)  # [N, d, rest]
        return Contribution(y, y)


if __name__ == "__main__":
    from eigengraft.testing import check_statistic

    print(check_statistic(UnitGram(), degree=0))
