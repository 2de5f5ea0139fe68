"""What all ranks together were provided of the signals that one parameter set asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eigengraft.chains import Signal
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.errors import warn_user

MISSING, SOME, ALL = 0.0, 1.0, 2.0
"""Whether a rank lacks what must be there, what may be there, or nothing."""


@dataclass(frozen=True)
class SignalCall:
    """One signal that a parameter set asks for in one step, and what this rank was provided of it.

    values: by position of the parameter; where nothing was provided none.
    wanted: positions whose update asks for it.
    needed: those of `wanted` where it must be there in this step.
    """

    signal: Signal
    values: Mapping[int, Tensor]
    wanted: Sequence[int]
    needed: Sequence[int]

    @property
    def level(self) -> float:
        """MISSING, SOME or ALL, as far as this rank knows."""
        if any(position not in self.values for position in self.needed):
            return MISSING
        return ALL if all(position in self.values for position in self.wanted) else SOME

    def told(self, positions: int, device: torch.device) -> Tensor:
        """What other ranks are told first, float64: the level, then numbers `[1]`, `[P]` or sizes of tensors `[P]`."""
        level, extent = torch.tensor([self.level], dtype=torch.float64, device=device), self.signal.extent
        if extent == "entry":
            return level
        if extent in ("input_matrix", "output_matrix", "outputs"):
            sizes = [float(self.values[at].numel()) if at in self.values else 0.0 for at in range(positions)]
            return torch.cat([level, torch.tensor(sizes, dtype=torch.float64, device=device)])
        zero = torch.zeros((), dtype=torch.float64, device=device)
        places = [next(iter(self.values), 0)] if extent == "step" else range(positions)
        numbers = [self.values[at].to(zero).reshape(()) if at in self.values else zero for at in places]
        return torch.cat([level, torch.stack(numbers)])

    def agreed_level(self, told: Tensor | None) -> float:
        """The lowest level of all ranks; told `[R, ...]`: what each has told, None: this process is alone."""
        return self.level if told is None else float(told[:, 0].min())

    def used(self, told: Tensor | None) -> Sequence[int]:
        """The positions that have the signal on all ranks; told `[R, ...]`: what each has told, None: there are none.

        Numbers for outputs may be there for some parameters alone; anything else is there for all that want it, or for
        those that need it.
        """
        if self.signal.extent == "outputs":
            if told is None:
                return [at for at in self.wanted if at in self.values and self.values[at].numel()]
            there = (told[:, 1:] > 0).all(0).tolist()
            return [at for at in self.wanted if there[at]]
        return self.wanted if self.agreed_level(told) == ALL else self.needed


@dataclass
class Agreed:
    """The signals of one parameter set in one step.

    numbers: `[P]` or 0-d float64, by name.
    tensors: signals with tensors, by name and position; those of signals with entries are this rank's.
    missing: signals that must be there and are not on some rank.
    """

    numbers: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    missing: list[SignalCall] = field(default_factory=list)


def agree(
    calls: Sequence[SignalCall], positions: int, device: torch.device, ranks: RankGroup | None, what: str
) -> Agreed:
    """What all ranks were provided, reduced as each signal declares; all ranks of the group call it.

    Warns of a signal that some parameters have and others lack, which no parameter gets in this step.
    """
    parts = [call.told(positions, device) for call in calls]
    found = torch.cat(parts)[None]
    if ranks is not None:
        ranks.meet(what, device=device)
        found = ranks.all_gather(found[0], what).wait()  # [R, numbers]
    agreed = Agreed()
    for call, told in zip(calls, torch.split(found, [len(part) for part in parts], dim=1), strict=True):
        every = None if ranks is None else told
        if call.agreed_level(every) == MISSING:
            agreed.missing.append(call)
        elif used := call.used(every):
            _take(call, used, told[:, 1:], agreed, ranks)
        elif call.values and call.signal.extent != "outputs":
            warn_user(
                f"provide: the signal '{call.signal.name}' is left out of a step: values for all parameters that ask "
                f"for it are required, on all ranks, got {len(call.values)} of {len(call.wanted)} here ({what})"
            )
    return agreed


def _take(call: SignalCall, used: Sequence[int], told: Tensor, agreed: Agreed, ranks: RankGroup | None) -> None:
    """Adds one signal to what was agreed on; told `[R, numbers]`: what each rank has told beside its level."""
    signal = call.signal
    if signal.extent in ("step", "parameter"):
        values = _reduced(told, signal.reduce)
        agreed.numbers[signal.name] = values[:1].sum() if signal.extent == "step" else values
        return
    tensors = {at: call.values[at] for at in used}
    if ranks is not None and signal.extent != "entry":
        sizes = told[:, list(used)]
        if bool((sizes != sizes[0]).any()):
            found = sizes.sum(1).int().tolist()
            raise ValueError(f"provide: '{signal.name}' must have the same shapes on all ranks, got {found} numbers")
        tensors = _over_ranks(tensors, signal, ranks)
    agreed.tensors[signal.name] = tensors


def _over_ranks(tensors: Mapping[int, Tensor], signal: Signal, ranks: RankGroup) -> dict[int, Tensor]:
    """Tensors that every rank has one of, reduced as the signal declares."""
    flat, what = torch.cat([tensor.reshape(-1) for tensor in tensors.values()]), f"signal {signal.name}"
    if signal.reduce == "max":
        flat = ranks.all_gather(flat, what).wait().amax(0)
    else:
        flat = ranks.all_reduce(flat, what)
        flat = flat / ranks.size if signal.reduce == "mean" else flat
    parts = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
    return {at: part.view(tensors[at].shape) for at, part in zip(tensors, parts, strict=True)}


def _reduced(values: Tensor, how: str) -> Tensor:
    if how == "max":
        return values.amax(0)
    return values.sum(0) / (len(values) if how == "mean" else 1)
