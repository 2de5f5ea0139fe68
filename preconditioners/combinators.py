"""Stages made of stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from eigengraft.clock import Clock
from eigengraft.slots import State

from .base import Preconditioner, Stages, run_chain


class Chain(Preconditioner):
    """The stages one after another, as one stage with a name of its own."""

    kind: Literal["chain"] = "chain"
    stages: Stages = Field(description="the stages in order")

    def chains(self) -> Mapping[str, Stages]:
        return {"stages": self.stages}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, clock: Clock) -> Tensor:
        return run_chain(self.stages, state.scope("stages"), gradient, direction, clock)
