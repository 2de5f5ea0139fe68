"""Stages made of stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.ramps import Schedulable
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Inner, Stage, Stages, chain_bounds, run_chain
from ..traits import Traits


class Chain(Stage):
    """The stages one after another, as one stage with a name of its own."""

    kind: Literal["chain"] = "chain"
    stages: Stages = Field(description="the stages in order")

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"stages": Inner(self.stages, block)}

    def traits(self, block: tuple[int, ...]) -> Traits:
        norm, gain = chain_bounds(self.stages, block)
        return Traits(spectral_norm=norm, spectral_gain=gain)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return run_chain(self.stages, state.scope("stages"), gradient, direction, context)


class Path(Schedulable):
    """One summand of a `sum`."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="what the path is called")
    weight: float = Field(default=1.0, description="what its direction is multiplied by")
    stages: Stages = Field(description="its chain")


class Sum(Stage):
    """sum_i weight_i path_i(d): several chains, each with a state of its own, on the same gradient and direction.

    CASPR (Duvvuri et al. 2024) is the sum of (L^(-1/2) G, 2 L^(-1/4) G R^(-1/4), G R^(-1/2)) / 4. Inside an eigenbasis
    the paths share one basis, and diagonal factors there are its eigenvalues.
    """

    kind: Literal["sum"] = "sum"
    paths: tuple[Path, ...] = Field(min_length=1, strict=False, description="the summands")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [path.name for path in self.paths]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"paths: distinct names are required, got '{twice[0]}' twice")
        return self

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {path.name: Inner(path.stages, block) for path in self.paths}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        total: Tensor | None = None
        for path in self.paths:
            mapped = run_chain(path.stages, state.scope(path.name), gradient, direction, context)
            total = mapped * path.weight if total is None else total.add(mapped, alpha=path.weight)
        assert total is not None
        return total
