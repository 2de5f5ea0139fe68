"""Checks on ranks that share parameters: values that must be equal on all of these ranks are compared.

At construction the recipe, param groups and values of parameters are compared. In every step, gradients and their
norms, failed roots, rates and numbers of steps are compared before anything changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.checks import (
    BITS,
    NOTHING,
    CheckedSums,
    Field,
    SameNumbers,
    SumCheck,
    by_value,
    checksum,
    gather_differences,
    name_ranks,
)
from eigengraft.distributed.rank_group import DistributedError, RankGroup
from eigengraft.errors import name_some
from eigengraft.numerics import compute_dtype, fake_mode, is_dtensor, kept_on_device, local, norms_by_dtype

from ..write.failure import Failure
from ..write.write import Hyper
from .placement import ParamSpec

SUBJECT = "param groups"
BROADCAST = ", or wrap the model in DistributedDataParallel, which broadcasts"
NO_COPIES = (
    "for plain tensors that differ between ranks (expert or pipeline parallel) use `distribution.mode: local`, or make "
    "them DTensors on a mesh of the ranks that share them"
)
STEPS, AGAIN = "number of steps", "number of steps since the gradients were written"
NUMBERS = ("lr", "peak_lr", "weight_decay", STEPS, AGAIN)
"""Names of the numbers that must be equal on all ranks in a step, for one param group."""
SQUARES, ABSENT, FAILED = "squares of gradients", "ranks without a gradient", "ranks with failed roots"
"""Names of fields `[P]`, with a number for each of P parameters, that are summed over ranks."""
FIRST, EVERY = 3, 100
"""Steps in which ranks compare their copies of gradients: the first `FIRST` steps, and then every `EVERY`-th step."""
TOLERANCE = 1e-4
"""Largest standard deviation of a gradient's norm over ranks, in units of its mean, for which copies count as equal.
Norms differ between ranks by 1e-6 if kernels add in varying order, and by 1e-2 or more if gradients are of different
data."""
STEP_ALIKE = "all ranks must call step() equally often, with the same values in their param groups"
AVERAGE_FIRST = (
    "ranks that hold a whole parameter need its averaged gradient: wrap the whole model in "
    f"DistributedDataParallel, and call the last backward before step() outside of no_sync(); {NO_COPIES}"
)


def check_construction(
    subject: str,
    rank_group: RankGroup,
    texts: Mapping[str, str],
    specs: Sequence[ParamSpec],
    parameters: Sequence[Tensor],
) -> None:
    """Raise ValueError on every rank if ranks received different recipes, param groups or values. All ranks call it.

    subject: name of the param group that this rank checks. If ranks check groups of different names, the ranks have
        different numbers of param groups.
    texts: by title, texts that must be the same on all ranks.
    specs: specifications of the parameters that the ranks share.
    parameters: the parameters. Ranks that hold the same entries must have the same values.
    """
    ranks, rank, checksums = rank_group.all_ranks, rank_group.rank, _checksums(specs, parameters, rank_group.rank)
    copies: dict[tuple[int, ...], list[Hashable]] = {}  # checksums, by the ranks that hold the same entries
    for position, values in checksums.items():
        copies.setdefault(specs[position].placed.layout.holders[rank], []).append(values)
    mine = {title: _digest(text) for title, text in texts.items()}
    mine |= {SUBJECT: subject, **{_digest(repr(holders)): _digest(repr(own)) for holders, own in copies.items()}}
    found = gather_differences(ranks, mine, "agreement on param groups")
    if SUBJECT in found:
        raise ValueError(
            f"{SUBJECT}: all ranks must have the same number of param groups, got {by_value(found[SUBJECT])}"
        )
    for title in filter(found.__contains__, texts):
        others = [rank for rank, text in found[title].items() if text != found[title][0]]
        raise ValueError(
            f"{subject}: all ranks must have the same {title}, but those of {name_ranks(others)} differ from those of "
            "rank 0"
            f"{_remedy('', parameters) if title == 'parameters' else ''}"
        )
    if found:
        boxes = {(specs[at].name, specs[at].placed.layout.boxes[rank]): values for at, values in checksums.items()}
        every = gather_differences(ranks, boxes, f"values of {subject}")
        apart = {name for name, _ in every}
        names = [spec.name for spec in specs if spec.name in apart]
        others = sorted({r for own in every.values() for r, values in own.items() if values != own[min(own)]})
        raise ValueError(
            f"{subject}: ranks that hold the same entries of a parameter must hold the same values, but the values of "
            f"{name_some(names, 5)} on {name_ranks(others)} differ from those on the lowest rank; set the same seed "
            f"or load the same weights on all ranks before composing{_remedy(BROADCAST, parameters)}"
        )


def _checksums(specs: Sequence[ParamSpec], parameters: Sequence[Tensor], rank: int) -> dict[int, tuple[int, int]]:
    """Return a checksum, two integers, of the entries that this rank holds of each parameter, by position.

    Parameters without copies on other ranks, or without values (meta, fake), are left out.
    """
    found: dict[int, Tensor] = {}
    for position, (spec, parameter) in enumerate(zip(specs, parameters, strict=True)):
        layout = spec.placed.layout
        if layout.copies > 1 and layout.boxes[rank].numel and not parameter.is_meta and fake_mode(parameter) is None:
            found[position] = checksum(local(parameter))
    rows = torch.stack([sums.cpu() for sums in found.values()]).tolist() if found else []
    return {position: (total, weighted) for position, (total, weighted) in zip(found, rows, strict=True)}


def _remedy(text: str, parameters: Sequence[Tensor]) -> str:
    """Return advice for the end of an error: `text`, and a remedy for plain tensors that differ between ranks.

    Return "" if all parameters are DTensors, for which there is no such advice.
    """
    return "" if all(is_dtensor(p) for p in parameters) else f"{text}; {NO_COPIES}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def numbers_sent(parameters: int, plain: bool) -> int:
    """Return how many float64 numbers the all-reduce of a step sums.

    parameters: number of parameters.
    plain: True if the parameters are plain tensors. Their gradients must be equal on all ranks, which is checked with
        two more numbers for each parameter.
    """
    return 1 + (5 if plain else 3) * parameters + BITS * len(NUMBERS)


def agreed_numbers(hypers: Mapping[int, Hyper], steps: int, again: int) -> dict[str, float | Tensor]:
    """Return, by name, the numbers that must be equal on all ranks in a step.

    If a learning rate is a tensor on a device, the result has a copy, because the tensor may change before the host
    reads it.

    hypers: values of param groups, by index of the group.
    steps: number of steps before this one.
    again: number of earlier steps that used the same gradients, because no backward has written new ones since.
    """
    found: dict[str, float | Tensor] = {}
    for group, own in hypers.items():
        of = f" of param group {group}" if len(hypers) > 1 else ""
        lr = own.lr.clone() if isinstance(own.lr, Tensor) and own.lr.device.type != "cpu" else float(own.lr)
        found |= {f"lr{of}": lr, f"peak_lr{of}": own.peak_lr, f"weight_decay{of}": own.weight_decay}
    return {**found, STEPS: float(steps), AGAIN: float(again)}


class RankChecks:
    """Checks the gradients of P parameters in every step, and computes sums, on all ranks that update the parameters.

    rank_group: ranks that divide the work on the parameters. With `distribution.group_size` there are several such
        groups, each of which updates all of the parameters. `rank_group.all_ranks` has the ranks of all groups.
    linear: P flags, True for parameters whose updates square no gradient. Gradients of these parameters need only be
        finite; gradients of all other parameters must have finite squares.
    failed: positions of parameters for which a matrix root, such as A^(-1/4), could not be computed on this rank in
        more refreshes in a row than `failure.roots` of the recipe permits. At the next step all ranks raise an error.
    """

    def __init__(
        self, rank_group: RankGroup, specs: Sequence[ParamSpec], failure: Failure, linear: Sequence[bool]
    ) -> None:
        self.rank_group, self.failure, self.names = rank_group, failure, [spec.name for spec in specs]
        self.checked, self.failed = CheckedSums(rank_group.all_ranks), set[int]()
        self._surveys, self._device = 0, specs[0].device
        placements = [spec.placed for spec in specs]
        groups = rank_group.all_ranks.size // rank_group.size
        dtypes = [torch.float64 if own else compute_dtype(x.dtype) for x, own in zip(specs, linear, strict=True)]
        self._dtypes, self._largest = dtypes, _row(torch.finfo(dtype).max for dtype in dtypes)
        self._held = _row(groups * placement.layout.copies for placement in placements)
        self._updated = _row(groups * placement.updated.copies for placement in placements)

    def survey(
        self,
        gradients: Sequence[Tensor | None],
        present: NDArray[np.bool_],
        numbers: Mapping[str, float | Tensor],
        copied: bool,
        more: Mapping[str, Field],
    ) -> RankSurvey:
        """Check gradients and numbers on all ranks, and return their sums over ranks. All ranks call it.

        Each rank checks all entries that it holds, including entries that another rank updates, so that a nan in the
        copy of one rank is detected with every recipe.

        gradients: by position, the entries of the gradient that this rank holds. None: the parameter has no gradient.
        present: `[P]`, True for parameters that have a gradient on this rank.
        numbers: numbers that must be equal on all ranks, by name.
        copied: True if gradients must be equal on all ranks. This is so for plain tensors: before the step,
            DistributedDataParallel, or code that replaces it, averages their gradients.
        more: fields (sequences of numbers by name) that are only summed over ranks, not checked.

        Raises DistributedError if gradients or numbers differ between ranks, and ArithmeticError if roots failed too
        often in the previous step. On a device both errors are raised one step later.
        """
        device = next((gradient.device for gradient in gradients if gradient is not None), self._device)
        norms, squares = self._norms(gradients, device)
        self._held, self._largest = self._held.to(device), self._largest.to(device)
        first = name_some(self.names, 1)
        same = SameNumbers(f"step of {first}", numbers, STEP_ALIKE)
        checks: list[SumCheck] = [same.check, self._check_roots]
        fields: dict[str, Field] = {
            SQUARES: squares / self._held,
            ABSENT: [float(gradient is None) for gradient in gradients],
            FAILED: [float(position in self.failed) for position in range(len(gradients))],
            **same.fields(),
            **more,
        }
        if copied:
            norms = norms if self._surveys < FIRST or self._surveys % EVERY == 0 else torch.zeros_like(norms)
            copies = SameNumbers("gradients", {"gradient norm": norms}, AVERAGE_FIRST, self.names, TOLERANCE, ABSENT)
            checks, fields = [*checks, copies.check], fields | copies.fields()
        self._surveys += 1
        sums = self.checked.reduce(fields, checks, device, f"agreement on gradients ({first})")
        return RankSurvey(self.names, present, sums, self._largest, self.checked.ranks.size)

    def _check_roots(self, ranks: RankGroup, sums: Mapping[str, Tensor], outcome: str) -> None:
        """Raise ArithmeticError if matrix roots of a parameter failed too often on any rank. Empty the set `failed`.

        ranks, sums, outcome: arguments of a `SumCheck`. Only `sums` is read: the sums of fields over ranks, by name.
        """
        self.failed.clear()
        if bad := [name for name, count in zip(self.names, sums[FAILED].tolist(), strict=True) if count]:
            raise failed_roots("update", self.failure.roots, bad)

    def parameter_norms(self, local: Sequence[Tensor]) -> Tensor:
        """Return the norms `[P]` of the full parameters, in float64. All ranks must call it.

        local: the entries of each parameter that this rank updates.
        """
        _, squares = self._norms(local, local[0].device)
        self._updated = self._updated.to(squares)
        return self.checked.ranks.all_reduce(squares / self._updated, "norms of parameters").sqrt()

    def sums(self, positions: Sequence[int], local: Tensor) -> Tensor:
        """Return sums over all entries of n full tensors.

        positions: positions of the parameters to which the tensors belong.
        local: `[n]` float64, sums over the entries that this rank updates.
        """
        self._updated = self._updated.to(local)
        updated = self._updated.index_select(0, kept_on_device(np.array(positions, dtype=np.int64), local.device))
        return self.checked.ranks.all_reduce(local / updated, "sums over constrained parameters")

    def _norms(self, local: Sequence[Tensor | None], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the norms of tensors and their squares, each `[P]` float64. A square that overflows its dtype is inf.

        local: P tensors, the entries that this rank holds. None: the norm is 0.
        device: device of the result.
        """
        found = torch.zeros(2, len(local), dtype=torch.float64, device=device)
        here = [(position, x) for position, x in enumerate(local) if x is not None and x.numel()]
        for places, norms in norms_by_dtype([x for _, x in here], [self._dtypes[position] for position, _ in here]):
            at = kept_on_device(np.array([here[place][0] for place in places], dtype=np.int64), device)
            found.index_copy_(1, at, torch.stack([norms, norms.square()]).double())
        return found[0], found[1]


@dataclass(frozen=True)
class RankSurvey:
    """Facts about P gradients that all ranks share: sums of squares, and on how many ranks a gradient is absent.

    names: names of the parameters.
    present: `[P]`, True for parameters that have a gradient on this rank.
    sums: sums over ranks, float64 `[P]` on the device. The key SQUARES has the sum of squared entries of each full
        gradient, the key ABSENT the number of ranks on which the gradient is absent.
    largest: `[P]`, largest usable sum of squares: the largest finite number of the dtype in which the update is
        computed. For an update that squares no gradient, the dtype is float64, in which the squares of all float32
        numbers are finite.
    ranks: number of ranks.
    """

    gathered: ClassVar[dict[int, Tensor]] = {}
    """Gradients that the check has copied into stacks, by number of the stack. The mapping is always empty here,
    because with several ranks the blocks of a stack are received from other ranks."""
    names: Sequence[str]
    present: NDArray[np.bool_]
    sums: Mapping[str, Tensor]
    largest: Tensor
    ranks: int

    @property
    def squares(self) -> Tensor:
        """Sum of squares of each full gradient, `[P]`."""
        return self.sums[SQUARES]

    @property
    def device(self) -> torch.device:
        """Device of the tensors in `sums`."""
        return self.squares.device

    def scaled(self, factor: float | Tensor) -> Self:
        """Return the facts about the gradients after the caller has multiplied them by `factor` in place."""
        return replace(self, sums={**self.sums, SQUARES: self.squares * factor**2})

    def agreed(self) -> NDArray[np.bool_]:
        """Return `[P]`, True for parameters that have a gradient on all ranks. The host waits for the sums over ranks.

        Raises DistributedError for a parameter that has a gradient on only some ranks.
        """
        counts = self.sums[ABSENT].tolist()
        some = [name for name, count in zip(self.names, counts, strict=True) if 0 < count < self.ranks]
        if some:
            raise DistributedError(
                "gradients: a parameter must have a gradient on all ranks or on none, got a gradient on some ranks for "
                f"{name_some(some, 5)}; {NOTHING}"
            )
        return np.array([count == 0 for count in counts]) & self.present

    def nonzero(self, positions: Sequence[int]) -> bool:
        """Return True if any gradient at these positions is not 0. The host waits for the sums of squares."""
        return bool(self.squares[list(positions)].any())

    def usable(self, positions: Sequence[int], finite: bool) -> Tensor:
        """Return `[n]` booleans on the device: for each of n parameters, True if its gradient can be used.

        positions: positions of the n parameters.
        finite: True if gradients with inf or nan cannot be used. If an update squares gradients, their squares must be
            finite too. False: every gradient that is present can be used.
        """
        usable = self.sums[ABSENT] == 0
        usable = usable & (self.squares <= self.largest) if finite else usable
        return usable.index_select(0, kept_on_device(np.array(positions, dtype=np.int64), usable.device))


def failed_roots(path: str, tolerated: int, names: Sequence[str]) -> ArithmeticError:
    """Return the error for parameters whose roots failed too often.

    path: path of the update in the recipe.
    tolerated: number of failures in a row that are tolerated.
    names: names of these parameters.
    """
    return ArithmeticError(
        f"{path}: more than {tolerated} refreshes in a row, the limit set by failure.roots, could not compute the "
        f"roots or bases of {name_some(names, 5)}; a larger ridge or a lower lr may help"
    )


def _row(values: Iterable[float]) -> Tensor:
    return torch.tensor([float(x) for x in values], dtype=torch.float64, device="cpu")
