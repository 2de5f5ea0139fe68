"""Signals of one parameter set, gathered from all ranks and reduced as each signal declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eigengraft.distributed.checks import Field, gather_fields
from eigengraft.distributed.rank_group import RankGroup
from eigengraft.errors import warn_user
from eigengraft.numerics import number_like
from eigengraft.signals import Signal

MISSING, SOME, ALL = 0.0, 1.0, 2.0
"""How complete the values of a signal are on a rank. MISSING: a required value is missing. SOME: only optional values
are missing. ALL: no value is missing."""
TENSORS = ("input_matrix", "output_matrix", "outputs")
"""Kinds of signals (`Signal.extent`) whose values are tensors with the same shape on all ranks. Ranks reduce them."""


@dataclass(frozen=True)
class SignalCall:
    """One signal that a parameter set requests in one step, with this rank's values.

    values: provided values by position of the parameter.
    wanted: positions whose update requests the signal.
    needed: positions in `wanted` for which the signal is required in this step.
    """

    signal: Signal
    values: Mapping[int, Tensor]
    wanted: Sequence[int]
    needed: Sequence[int]

    def fields(self, positions: int, device: torch.device) -> dict[str, Field]:
        """Return the numbers that ranks gather for this signal, by name of the field.

        Every signal has a field that says how complete its values are on this rank (`MISSING`, `SOME` or `ALL`). If the
        signal consists of numbers, a second field has the values, `[1]` or `[P]`. If it consists of tensors, the second
        field has the sizes of the tensors, `[P]`. If it has a value for each entry, there is no second field.

        positions: number P of parameters.
        """
        name, extent = self.signal.name, self.signal.extent
        level = ALL if all(position in self.values for position in self.wanted) else SOME
        level = MISSING if any(position not in self.values for position in self.needed) else level
        if extent == "entry":
            return {self.level: [level]}
        if extent in TENSORS:
            sizes = [float(self.values[at].numel()) if at in self.values else 0.0 for at in range(positions)]
            return {self.level: [level], name: sizes}
        zero = torch.zeros((), dtype=torch.float64, device=device)
        places = [next(iter(self.values), 0)] if extent == "step" else range(positions)
        numbers = [number_like(self.values[at].reshape(()), zero) if at in self.values else zero for at in places]
        return {self.level: [level], name: torch.stack(numbers)}

    @property
    def level(self) -> str:
        """Return the name of the field that says how complete the values on a rank are."""
        return f"level of {self.signal.name}"

    def used(self, level: float, sizes: Tensor | None) -> Sequence[int]:
        """Return the positions of the parameters that receive the signal.

        If the signal has one number for each group of outputs, these are the parameters that have a value on all ranks.
        For any other signal they are all in `wanted`, or only those in `needed` if a value is missing on some rank.

        level: the smallest of the numbers `MISSING`, `SOME` and `ALL` that ranks have sent.
        sizes: `[R, P]`, sizes of tensors; None for signals without sizes.
        """
        if self.signal.extent == "outputs" and sizes is not None:
            there = (sizes > 0).all(0).tolist()
            return [at for at in self.wanted if there[at]]
        return self.wanted if level == ALL else self.needed


def gather_signals(
    calls: Sequence[SignalCall], positions: int, device: torch.device, ranks: RankGroup | None, what: str
) -> tuple[dict[str, Tensor], dict[str, dict[int, Tensor]], SignalCall | None]:
    """Gather the values of all ranks and reduce them as each signal declares. All ranks of the group must call it.

    Return three values. The first has numbers by name of the signal, float64: `[P]`, one for each parameter, or 0-d for
    the whole step. The second has tensors by name of the signal and position of the parameter. If a signal has a value
    for each entry, its tensors have the entries that this rank updates. The third is the first required signal that is
    missing on some rank, or None.

    An optional signal that is missing for some parameters is not used in this step, and a warning says so.

    positions: number P of parameters in the set.
    ranks: ranks that share the parameters; None for one process.
    what: name of the collective, for messages.
    """
    fields: dict[str, Field] = {}
    for call in calls:
        fields |= call.fields(positions, device)
    found, missing = gather_fields(ranks, fields, device, what), list[SignalCall]()
    numbers, tensors = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for call in calls:
        level, values, name = float(found[call.level].min()), found.get(call.signal.name), call.signal.name
        if level == MISSING:
            missing.append(call)
        elif used := call.used(level, values):
            if call.signal.extent in ("step", "parameter") and values is not None:
                reduced = _reduced(values, call.signal.reduce)
                numbers[name] = reduced[:1].sum() if call.signal.extent == "step" else reduced
            else:
                tensors[name] = _tensors(call, used, values, ranks)
        elif call.values and call.signal.extent != "outputs":
            warn_user(
                f"provide: the signal '{name}' is not used in this step, because a parameter has no value on some "
                f"rank; on this rank {len(call.values)} of {len(call.wanted)} parameters have a value ({what})"
            )
    return numbers, tensors, next(iter(missing), None)


def _tensors(call: SignalCall, used: Sequence[int], sizes: Tensor | None, ranks: RankGroup | None) -> dict[int, Tensor]:
    """Return the tensors of a signal by position, reduced over ranks. Raise ValueError on all ranks if sizes differ.

    used: positions of the parameters that receive the signal.
    sizes: `[R, P]`, sizes of the tensors on all ranks; None for signals with a value for each entry, which are not
        reduced.
    """
    tensors, signal = {at: call.values[at] for at in used}, call.signal
    if ranks is None or sizes is None:
        return tensors
    given = sizes[:, list(used)]
    if bool((given != given[0]).any()):
        totals = given.sum(1).int().tolist()
        raise ValueError(
            f"provide: the values of '{signal.name}' must have the same shapes on all ranks, got {totals} entries by "
            "rank"
        )
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
