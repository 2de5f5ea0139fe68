"""Signals of partners: what the other factor of a product has, given to the parameter that is one of its factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from eigengraft.blocking import Factor
from eigengraft.distributed.layouts import is_dtensor, local
from eigengraft.signals import PARTNER
from eigengraft.slots import PARTNER_STAGE

from ..step.exchange import Step
from ..step.step import ParamSet
from .signals import DescribedSets, Signals

Steps = Sequence[tuple[ParamSet, Step | None]]


class AskedSets(DescribedSets, Protocol):
    """All parameter sets of an optimizer, with the signals that their stages ask for."""

    signals: Signals


@dataclass(frozen=True)
class PairedParameter:
    """A parameter with its partner, and where it is stepped.

    factor: what its name or module tells of its partner.
    param_set, position, step: the parameter set, the one in it and its step; None: the parameter is frozen.
    """

    parameter: Tensor
    factor: Factor | None
    param_set: ParamSet | None = None
    position: int = 0
    step: Step | None = None

    def full(self, mine: Tensor, what: str) -> Tensor:
        """A whole tensor that lies as the parameter does, of which this rank holds `mine`; all that hold it call it."""
        if self.param_set is None:
            return self.parameter.full_tensor() if is_dtensor(self.parameter) else mine
        spec, ranks = self.param_set.specs[self.position], self.param_set.rank_group
        if ranks is None or spec.placement is None or spec.placement.layout.replicated:
            return mine
        boxes, what = spec.placement.layout.boxes, f"{what} {spec.name}"
        flat = mine.new_zeros(max(box.numel for box in boxes))
        flat[: mine.numel()] = mine.reshape(-1)
        ranks.synchronize(what, device=mine.device)
        whole = mine.new_empty(spec.shape)
        for part, box in zip(ranks.all_gather(flat, what).wait(), boxes, strict=True):
            whole[tuple(map(slice, box.start, box.stop))] = part[: box.numel].view(box.shape)
        return whole

    @property
    def partner(self) -> str:
        """The name of the other factor."""
        assert self.factor is not None
        return self.factor.partner

    def signal(self, name: str, partner: PairedParameter) -> Tensor:
        """The signal of that name, a copy `[p, r]`, for stacks that are computed when others have moved."""
        assert self.factor is not None and self.param_set is not None
        if name == "partner_gradient":
            mine = partner.gradient
        else:
            first = self.param_set.update_counts[self.position] < 1
            mine = partner.value if name == "partner" or first else partner.kept
        return self.factor.tall(partner.full(mine, name)).clone()

    @property
    def value(self) -> Tensor:
        """What this rank holds of the parameter."""
        return local(self.parameter.detach())

    @property
    def kept(self) -> Tensor:
        """What this rank holds of the parameter as its partner's last update saw it; itself, if nothing is kept."""
        slots = {} if self.param_set is None else self.param_set.iterates.tensors[self.position]
        return slots[PARTNER_STAGE]["before"] if PARTNER_STAGE in slots else self.value

    @property
    def gradient(self) -> Tensor:
        """What this rank holds of the gradient, 0 if it is not there or of no use."""
        step = self.step
        given = None if step is None or not step.active[self.position] else step.gradients[self.position]
        if given is None or step is None:
            return torch.zeros_like(self.value)
        mine: Tensor = given
        return mine if step.mask is None else torch.where(step.mask[self.position], mine, 0.0)

    def remember(self, partner: PairedParameter) -> None:
        """Keeps the partner as it is, if this parameter takes its gradient now; nothing where nothing is kept."""
        assert self.step is not None
        if self.step.active[self.position]:
            now, kept, mask = partner.value, partner.kept, self.step.mask
            kept.copy_(now if mask is None else torch.where(mask[self.position], now.to(kept.dtype), kept))


def with_partners(param_sets: AskedSets, steps: Steps) -> Steps:
    """The steps with what their stages ask of partners; param_sets: all of an optimizer, whose ranks all call it."""
    asked = param_sets.signals.listeners.asked
    if not any(PARTNER & names.keys() for names in asked.values()):
        return steps
    paired, taken = _paired(param_sets, steps), list[tuple[PairedParameter, PairedParameter]]()
    found = list[tuple[ParamSet, Step | None]]()
    for param_set, step in steps:
        given: dict[str, dict[int, Tensor]] = {}
        for at, parameter in enumerate(param_set.parameters if step is not None else ()):
            names = PARTNER & asked[param_set.specs[at].path].keys()
            if names:
                own = paired[id(parameter)]
                partner = paired[own.partner]
                taken.append((own, partner))
                for name in sorted(names):
                    given.setdefault(name, {})[at] = own.signal(name, partner)
        found.append((param_set, step and replace(step, partners=given)))
    for own, partner in taken:
        own.remember(partner)
    return found


def _paired(param_sets: AskedSets, steps: Steps) -> dict[int | str, PairedParameter]:
    """Every parameter by `id` and by name."""
    stepped = {id(p): (own, at, step) for own, step in steps for at, p in enumerate(own.parameters)}
    found: dict[int | str, PairedParameter] = {}
    for infos, parameters in zip(param_sets.infos, param_sets.parameters, strict=True):
        for info, parameter in zip(infos, parameters, strict=True):
            one = PairedParameter(parameter, info.facts.factor, *stepped.get(id(parameter), ()))
            found |= {id(parameter): one} if info.name is None else {id(parameter): one, info.name: one}
    return found
