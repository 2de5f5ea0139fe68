"""A constraint of your own: parameters do not grow beyond a norm.

In an experiment:

    imports: [constraint.py]
    recipe: {base: adamw, constraints: {kind: largest_norm, bound: 10.0}}
"""

from typing import Literal

from pydantic import Field

from eigengraft.numerics import safe_ratio
from eigengraft.optimizers.write import Constraint, ConstraintContext, Slots, Tensors


class LargestNorm(Constraint):
    """W <- W min(1, bound / ||W||_F)  after each step, with the norm of the whole parameter W"""

    kind: Literal["largest_norm"] = "largest_norm"
    bound: float = Field(default=10.0, gt=0, description="largest Frobenius norm of a parameter")

    def shardable(self, whole_rows: bool) -> bool:
        return True  # `context.norms` adds over shards

    def retract(
        self, slots: Slots, parameters: Tensors, updates: Tensors, moved: Tensors, context: ConstraintContext
    ) -> Tensors:
        norms = context.norms(moved)  # [n]
        factors = safe_ratio(norms.clamp_max(self.bound), norms)  # 0 for a parameter of zeros
        return [w * factor.to(w.dtype) for w, factor in zip(moved, factors.unbind(0), strict=True)]


if __name__ == "__main__":
    from eigengraft.testing import check_constraint

    print(check_constraint(LargestNorm()))
