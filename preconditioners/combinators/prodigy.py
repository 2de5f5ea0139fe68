"""A step size that is learned: an estimate of the distance to the solution (Prodigy, arXiv:2306.06101)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eigengraft.numerics import number_like, per_block, tiny
from eigengraft.signals import Request
from eigengraft.slots import Slot, State
from eigengraft.step_context import StepContext

from ..base import Inner, Stage, Stages, Traits, map_wires, run_chain


class Prodigy(Stage):
    """D inner(D g, D d)  with  D <- max(D, coefficient sum r / sum |s|),  from  D = start

    Afterwards r <- b r + lr D^2 <g, W_0 - W>;  s <- b s + lr D^2 g.  Sums are over all parameters of this stage.

    D is the estimated step size, in units of the parameters. g is the gradient, d the direction, W a parameter and W_0
    its value at its first update. The state r is a number for each block, and s has the shape of the block. b is the
    field `beta` (Mishchenko & Defazio 2023, arXiv:2306.06101, Algorithm 4). The paper has Adam without bias correction
    as `inner`, and the square root of Adam's second decay as b.

    The learning rate lr multiplies D: set lr to 1, or to a schedule with 1 as its peak. An eps inside `inner` is in
    units of D g. Decoupled weight decay is multiplied by D, as in the authors' code (konstmish/prodigy, `decouple`): W
    <- W - lr D alpha W - lr D inner, where alpha is the weight decay.
    """

    kind: Literal["prodigy"] = "prodigy"
    chain: Stages = Field(alias="inner", min_length=1, description="the chain that receives D g as its gradient")
    beta: float = Field(default=0.999**0.5, ge=0, lt=1, description="decay of r and s, per step")
    start: float = Field(
        default=1e-6, gt=0, description="initial value of D, in units of the parameters: too small a value is safe"
    )
    coefficient: float = Field(default=1.0, gt=0, description="factor of the estimate sum r / sum |s|")
    growth: float | None = Field(
        default=None, gt=1, description="largest ratio of D to the D of the step before; null: no bound"
    )
    constants: ClassVar[frozenset[str]] = frozenset({"start"})

    def inner(self, block: tuple[int, ...]) -> Mapping[str, Inner]:
        return {"inner": Inner(self.chain, block)}

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(signals=(Request("lr"), Request("parameter")))

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {
            "origin": Slot(block, role="iterate"),
            "s": Slot(block, role="first_moment", frame="vector", sensitive=True),
            "size": Slot((), role="iterate", total=True),
            "gain": Slot((), role="iterate", total=True),
            "d": Slot((), fill=self.start, role="iterate", step_size=True),
        }

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        d = self._estimate(state, context)
        scale = per_block(d, gradient)
        g, d_in = map_wires(lambda x: x * scale, gradient, direction)
        out = run_chain(self.chain, state.scope("inner"), g, d_in, context)
        self._learn(state, gradient, d, context)
        return out * scale

    def _estimate(self, state: State, context: StepContext) -> Tensor:
        """Compute the next estimate D `[N]` of the step size, store it and return it. D is the same for all blocks that
        are at the same step.
        """
        d = state["d"]
        gain, size = (number_like(context.total(state, name), d) for name in ("gain", "size"))
        found = torch.where(size > tiny(d.dtype), self.coefficient * gain / size.clamp_min(tiny(d.dtype)), 0.0)
        if self.growth is not None:
            found = torch.minimum(found, d * self.growth)
        d = torch.maximum(d, found)
        state["d"] = d
        return d

    def _learn(self, state: State, gradient: Tensor, d: Tensor, context: StepContext) -> None:
        """Update the sums from which the next estimate of D follows: r (slot `gain`), s, and sum |s| (slot `size`).

        The sums are stored divided by `start`, so that they do not underflow.

        d: the present estimate D of the step size, `[N]`.
        """
        now = context.tensor("parameter", gradient)
        fresh = per_block(context.step <= 1, gradient)
        origin = torch.where(fresh, now, state["origin"])
        weight = context.tensor("lr", d) * d * (d / self.start)  # divided by start, so that D^2 does not underflow
        s = state["s"] * self.beta + gradient * per_block(weight, gradient)
        inner = (gradient * (origin - now)).flatten(1).sum(1)
        state["origin"], state["s"] = origin, s
        state["gain"] = state["gain"] * self.beta + weight * inner
        state["size"] = s.flatten(1).abs().sum(1)
