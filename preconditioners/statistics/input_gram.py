"""The second moment of the inputs of a layer as the factor of the last axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..axes import Axes
from .base import Statistic
from .terms import Contribution, Powers


class InputGram(Statistic):
    """O_R = E[x x^T] over the inputs x of the layer `y = W x`, for the columns of a block; rows have no factor.

    The signal `activation_gram`, mean over micro-batches and ranks: the right factor of K-FAC, and K of Newton-Muon (Du
    & Su 2026, arXiv:2604.01472). With `interval: k` it is collected at updates 1, 1 + k, 1 + 2k, ... and costs nothing
    in between. `initial` is in units of squared inputs.
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
            raise ValueError(f"axes: {{side: right, vectors: false}} is required, where inputs are, got {got}")
        if self.source != "gradient":
            raise ValueError(f"source: nothing else than inputs is observed, got '{self.source}'")
        return self

    def slots(self, block: tuple[int, ...], axes: tuple[int, ...]) -> Mapping[str, Slot]:
        if len(block) > 2:
            raise ValueError(
                f"input_gram: blocks with two axes are required, outputs and inputs, got shape {block}; set "
                "`blocking: {merge: ..., keep_axes: 2}`"
            )
        return super().slots(block, axes)

    def contribution(self, state: State, x: Tensor, axis: int, powers: Powers, context: StepContext) -> Contribution:
        return Contribution(context.tensor("activation_gram", x), None, 1.0)
