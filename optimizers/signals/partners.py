"""Partner signals: a parameter that is one factor of a product receives values or gradients of the other factor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eigengraft.blocking import Factor
from eigengraft.numerics import is_dtensor, local
from eigengraft.signals import PARTNER
from eigengraft.slots import PARTNER_STAGE

from ..recipe.routing import ParamInfo
from ..step.inputs import StepInputs
from ..step.step import ParamSet, ReadySteps


@dataclass(frozen=True)
class PairedParameter:
    """A parameter that may have a partner: the two are factors of a product, as in LoRA.

    factor: name of the partner and the parameter's side of the product; None if the parameter has no partner.
    param_set: the set that contains the parameter; None if the parameter is frozen.
    position: position of the parameter in the set.
    inputs: inputs of the present step of the set; None if the set makes no step.
    """

    parameter: Tensor
    factor: Factor | None
    param_set: ParamSet | None = None
    position: int = 0
    inputs: StepInputs | None = None

    def full(self, mine: Tensor, what: str) -> Tensor:
        """Gather a tensor that is sharded as the parameter is. All ranks that share the parameter must call it.

        mine: this rank's shard of the tensor.
        what: name of the collective, for messages.
        """
        if self.param_set is None:
            return self.parameter.full_tensor() if is_dtensor(self.parameter) else mine
        spec, ranks = self.param_set.specs[self.position], self.param_set.rank_group
        if ranks is None or spec.placement is None or spec.placement.layout.replicated:
            return mine
        return spec.placement.layout.gather(mine, ranks, f"{what} {spec.name}")

    @property
    def partner(self) -> str:
        """Return the name of the partner."""
        assert self.factor is not None
        return self.factor.partner

    def signal(self, name: str, partner: PairedParameter) -> Tensor:
        """Return the value of a signal: the partner's present value, its earlier value, or its gradient.

        The parameter and its partner are the two factors of a product, and have one axis in common. In the result this
        axis is the last one. The result is a copy, because the partner may be updated before the signal is used.

        name: name of the signal, "partner", "partner_before" or "partner_gradient".
        """
        assert self.factor is not None and self.param_set is not None
        if name == "partner_gradient":
            mine = partner.gradient
        else:
            first = self.param_set.update_counts[self.position] < 1
            mine = partner.value if name == "partner" or first else partner.kept
        return self.factor.tall(partner.full(mine, name)).clone()

    @property
    def value(self) -> Tensor:
        """Return this rank's shard of the parameter."""
        return local(self.parameter.detach())

    @property
    def kept(self) -> Tensor:
        """Return this rank's shard of the parameter, as it was when the partner was last updated (`remember`).

        If no shard has been stored, return the present shard.
        """
        slots = {} if self.param_set is None else self.param_set.iterates.tensors[self.position]
        return slots[PARTNER_STAGE]["before"] if PARTNER_STAGE in slots else self.value

    @property
    def gradient(self) -> Tensor:
        """Return this rank's shard of the gradient, or zeros if the gradient is missing or not finite."""
        inputs = self.inputs
        given = None if inputs is None or not inputs.active[self.position] else inputs.gradients[self.position]
        if given is None or inputs is None:
            return torch.zeros_like(self.value)
        mine: Tensor = given
        return mine if inputs.mask is None else torch.where(inputs.mask[self.position], mine, 0.0)

    def remember(self, partner: PairedParameter) -> None:
        """Store the present value of the partner (the other factor of a LoRA pair), if this step updates the parameter.

        In the next update of the parameter, the stored value is the signal "partner_before".
        """
        assert self.inputs is not None
        if self.inputs.active[self.position]:
            now, kept, mask = partner.value, partner.kept, self.inputs.mask
            kept.copy_(now if mask is None else torch.where(mask[self.position], now.to(kept.dtype), kept))


def with_partners(
    asked: Mapping[str, Mapping[str, str]], rows: Iterable[tuple[Tensor, ParamInfo]], ready: ReadySteps
) -> ReadySteps:
    """Return the inputs of a step with the partner signals added: values and gradients of the other factor of a pair.

    All ranks of the optimizer must call it.

    asked: {path of an update rule: {name of a signal that the rule requests: path of the stage that requests it}}.
    rows: all parameters of the optimizer with their descriptions.
    ready: pairs of a parameter set and the inputs of its step, None for a set that makes no step.
    """
    if not any(PARTNER & names.keys() for names in asked.values()):
        return ready
    paired, taken = _paired(rows, ready), list[tuple[PairedParameter, PairedParameter]]()
    found = list[tuple[ParamSet, StepInputs | None]]()
    for param_set, inputs in ready:
        given: dict[str, dict[int, Tensor]] = {}
        for at, parameter in enumerate(param_set.parameters if inputs is not None else ()):
            names = PARTNER & asked[param_set.specs[at].path].keys()
            if names:
                own = paired[id(parameter)]
                partner = paired[own.partner]
                taken.append((own, partner))
                for name in sorted(names):
                    given.setdefault(name, {})[at] = own.signal(name, partner)
        found.append((param_set, inputs and replace(inputs, signals={**inputs.signals, **given})))
    for own, partner in taken:
        own.remember(partner)
    return found


def _paired(rows: Iterable[tuple[Tensor, ParamInfo]], ready: ReadySteps) -> dict[int | str, PairedParameter]:
    """Return every parameter as a `PairedParameter`, both by its `id` and by its name.

    rows: all parameters of the optimizer with their descriptions, also frozen ones.
    ready: pairs of a parameter set and the inputs of its step, None for a set that makes no step.
    """
    stepped = {id(p): (own, at, inputs) for own, inputs in ready for at, p in enumerate(own.parameters)}
    found: dict[int | str, PairedParameter] = {}
    for parameter, info in rows:
        one = PairedParameter(parameter, info.facts.factor, *stepped.get(id(parameter), ()))
        found |= {id(parameter): one} if info.name is None else {id(parameter): one, info.name: one}
    return found
