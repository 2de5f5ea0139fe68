"""A chain that sees another gradient: clipped, centred, corrected, noisy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from eigengraft.slots import State
from eigengraft.step_context import StepContext

from ..base import Stage, Stages, chain_norm, run_chain, walk


class Transform(Stage):
    """inner(T(g), d)  with T = before;  d is T(g) itself where no stage has made another direction of g yet.

    Every stage of `inner` takes T(g) for the gradient: statistics and second moments are made of it. So `{kind:
    transform, before: clip_norm, inner: [momentum, rms]}` is Adam with clipped gradients, where the chain `[clip_norm,
    momentum, rms]` would clip the direction and leave the second moments as they are, and is refused. T may have state,
    as momentum has.
    """

    kind: Literal["transform"] = "transform"
    before: Stages = Field(min_length=1, description="the chain T that maps the gradient")
    inner: Stages = Field(min_length=1, description="the chain that sees T(g) as its gradient")

    @model_validator(mode="after")
    def _before_maps_every_gradient(self) -> Self:
        for path, stage in walk(self.before, "before"):
            if stage.lagged():
                raise ValueError(f"{path}: a stage that maps every gradient is required, got one that is lagged")
        return self

    def chains(self) -> Mapping[str, Stages]:
        return {"before": self.before, "inner": self.inner}

    def entrywise(self) -> bool:
        return all(stage.entrywise() for stage in (*self.before, *self.inner))

    def spectral_norm(self, m: int, n: int, before: float | None) -> float | None:
        return chain_norm(self.inner, m, n, before)

    def inner_gradient(self, part: str, state: State, gradient: Tensor, context: StepContext) -> Tensor:
        return self._mapped(state, gradient, context) if part == "inner" else gradient

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        seen = self._mapped(state, gradient, context)
        start = seen if direction is gradient else direction
        return run_chain(self.inner, state.scope("inner"), seen, start, context)

    def _mapped(self, state: State, gradient: Tensor, context: StepContext) -> Tensor:
        """T(g); where the first gradient only primes `inner`, T has had one gradient more than that."""
        if any(stage.lagged() for _, stage in walk(self.inner)):
            context = replace(context, steps=context.steps + 1)
        return run_chain(self.before, state.scope("before"), gradient, gradient, context)


def require_seen_changes(stages: Stages, path: str) -> None:
    """Raises ValueError for a chain that changes its gradient before a stage that reads it as it came."""
    _changed(stages, path, None, True)


def _changed(stages: Stages, path: str, change: str | None, untouched: bool) -> tuple[str | None, bool]:
    """(path of the stage that changed the gradient, or None; whether the direction still is that gradient) after a
    chain, from those before it. Stages that keep no state leave it the gradient: `scale` before a clip is one."""
    for stage in stages:
        here = f"{path}.{stage.label}"
        if change and stage.reads_gradient():
            raise ValueError(
                f"{here}: {{kind: transform, before: {change.rpartition('.')[2]}, inner: [...]}} with this stage in "
                f"`inner` is required, got {change} before it, which changes the direction and not the gradient that "
                "this stage reads"
            )
        ends = [_changed(inside, f"{here}.{part}", change, untouched) for part, inside in stage.chains().items()]
        if untouched and stage.changes_gradient():
            change = here
        elif ends and not stage.reads_gradient() and all(changed for changed, _ in ends):
            change, untouched = ends[0][0], all(still for _, still in ends)
        else:
            untouched = untouched and not ends and not _remembers(stage)
    return change, untouched


def _remembers(stage: Stage) -> bool:
    """Whether a stage keeps state for a matrix."""
    try:
        return bool(stage.slots((2, 2)))
    except ValueError:  # a stage may refuse a shape; building says so if a parameter has it
        return True
