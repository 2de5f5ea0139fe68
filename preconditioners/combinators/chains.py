"""Chains as stages: a chain with a name of its own, a sum of chains, and a chain that receives another gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.component import PathName
from eigengraft.schedules import Schedulable
from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Inner, Stage, Stages, Traits, chain_bounds, first_lagged, run_chain


class Chain(Stage):
    """Several stages that run one after another, as one stage with a name."""

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
    """One chain of a `sum`, with a name and a weight."""

    name: PathName = Field(examples=["a"], description="name of the path")
    weight: float = Field(default=1.0, description="factor of the path's direction in the sum")
    stages: Stages = Field(description="chain of the path")


class Sum(Stage):
    """sum_i weight_i path_i(d): several chains, each with a state of its own, on the same gradient and direction.

    d is the incoming direction. For example, CASPR (Duvvuri et al. 2024) is (L^(-1/2) G + 2 L^(-1/4) G R^(-1/4) + G
    R^(-1/2)) / 4 for a matrix G with Shampoo's factors L and R. If a `sum` is inside an `eigenbasis`, all paths work in
    the same basis, and diagonal factors in the paths are the eigenvalues of L and R.
    """

    kind: Literal["sum"] = "sum"
    paths: tuple[Path, ...] = Field(
        min_length=1, strict=False, examples=[[{"name": "a", "stages": "momentum"}]], description="the summands"
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [path.name for path in self.paths]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"paths: names must be distinct, got '{twice[0]}' twice; rename one of the paths")
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


class Transform(Stage):
    """inner(T(g), d)  with T = before, g the gradient and d the direction

    Every stage of `inner` receives T(g) as its gradient, from which it computes statistics and second moments. If no
    stage with state precedes this one, gradient and direction are the same tensor, and `inner` receives T(g) as its
    direction, too.

    The chain T may have state, as in MARS. If T has no state and is at the beginning of a recipe, this stage is not
    needed: the stages of T may precede the stages of `inner` in one chain. An example is `[clip_norm, momentum, rms]`,
    which is Adam with clipped gradients.
    """

    kind: Literal["transform"] = "transform"
    before: Stages = Field(min_length=1, description="the chain T that maps the gradient")
    chain: Stages = Field(alias="inner", min_length=1, description="the chain that receives T(g) as its gradient")

    @model_validator(mode="after")
    def _before_maps_every_gradient(self) -> Self:
        if path := first_lagged(self.before, "before"):
            raise ValueError(
                f"{path}: a lagged stage cannot be in `before`, because it has no result for the first gradient; move "
                "it to `inner`"
            )
        return self

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"before": Inner(self.before, block), "inner": Inner(self.chain, block)}

    def traits(self, block: tuple[int, ...]) -> Traits:
        norm, gain = chain_bounds(self.chain, block)
        entrywise = all(stage.cached_traits().entrywise for stage in (*self.before, *self.chain))
        return Traits(entrywise=entrywise, spectral_norm=norm, spectral_gain=gain)

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        # A lagged stage only initializes its state with the first gradient. In a chain with such a stage, the steps are
        # therefore numbered from 0. The chain `before` has no lagged stage, and its steps are numbered from 1.
        before = replace(context, steps=context.steps + 1) if first_lagged(self.chain) else context
        mapped = run_chain(self.before, state.scope("before"), gradient, gradient, before)
        first = mapped if direction is gradient else direction
        return run_chain(self.chain, state.scope("inner"), mapped, first, context)
