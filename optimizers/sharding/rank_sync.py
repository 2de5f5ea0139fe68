"""Agreement between the ranks that share parameters in every step: usable gradients, norms, failed roots, rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eigengraft.distributed.rank_group import DistributedError, RankGroup
from eigengraft.distributed.work import HostCopy
from eigengraft.numerics import compute_dtype, norms_by_dtype

from ..apply.failure import Failure
from .fingerprint import StepNumbers, differing, fill_from_device, fingerprint, tell_apart
from .placement import ParamSpec

NOTHING, LATER = "nothing was changed", "found one step later"
"""What errors say of a step that ranks disagree about: on a device the host hears of it only then."""


class RankSync:
    """What ranks tell each other of P parameters in every step, beside the exchange of blocks.

    rank_group: ranks that divide the work on them; everyone: all ranks that do the same, groups of such ranks.
    linear: P, parameters whose updates square nothing, whose gradients must be finite alone; None: none of them.
    failed: positions of parameters whose roots have failed on this rank too often; all ranks hear it at the next step.
    """

    def __init__(
        self, rank_group: RankGroup, specs: Sequence[ParamSpec], failure: Failure, linear: Sequence[bool] | None = None
    ) -> None:
        self.rank_group, self.everyone, self.failure = rank_group, rank_group.everyone, failure
        self.names = [spec.name for spec in specs]
        self.failed: set[int] = set()
        self._device = specs[0].device
        placements = [spec.placement for spec in specs if spec.placement is not None]
        groups = self.everyone.size // rank_group.size
        copies: dict[Literal["held", "updated"], list[float]] = {
            "held": [float(groups * placement.layout.copies) for placement in placements],
            "updated": [float(groups * placement.updated.copies) for placement in placements],
        }
        self._copies = {
            entries: torch.tensor(own, dtype=torch.float64, device="cpu") for entries, own in copies.items()
        }
        self._numels = torch.tensor([float(math.prod(spec.shape)) for spec in specs], dtype=torch.float64, device="cpu")
        squared = [not own for own in linear or [False] * len(specs)]
        self._dtypes = [compute_dtype(x.dtype) if own else torch.float64 for x, own in zip(specs, squared, strict=True)]
        self._largest = torch.tensor(
            [torch.finfo(dtype).max for dtype in self._dtypes], dtype=torch.float64, device="cpu"
        )
        self._told: _Told | None = None

    def survey(
        self,
        gradients: Sequence[Tensor | None],
        present: NDArray[np.bool_],
        numbers: StepNumbers,
        notes: Tensor | None = None,
    ) -> RankSurvey:
        """What all ranks together know of their gradients, and sums of their notes `[n]`; every rank must call it.

        Each rank checks all entries that it holds, those too that another rank updates: a nan in the copy of one rank
        is found whatever the recipe. That reads R times as many entries as a rank updates, for R copies, which is
        fewer than the parameters it receives in the same step.

        gradients: what this rank holds of each gradient, by position.

        Raises DistributedError on every rank if they step with other numbers, and ArithmeticError if on one of them
        roots had failed too often one step ago; on a device both are read one step later still, so that the host never
        waits for them.
        """
        self._raise_told()
        total, what = len(gradients), f"agreement on gradients ({self._named()})"
        device = next((gradient.device for gradient in gradients if gradient is not None), self._device)
        self.everyone.meet(what, device=device)
        absent = [float(gradient is None) for gradient in gradients]
        failed = [float(position in self.failed) for position in range(total)]
        self.failed.clear()
        told = torch.tensor([*absent, *failed, *fingerprint(numbers)], dtype=torch.float64, device=device)
        end = total + len(told)
        fill_from_device(told[2 * total :], numbers)
        found = torch.cat(
            [self._squares(gradients, "held", device), told, *([] if notes is None else [notes.to(device)])]
        )
        self.everyone.all_reduce(found, what)
        kept = {name: x.clone() if isinstance(x, Tensor) else x for name, x in numbers.items()}
        self._told = _Told(HostCopy(found[2 * total : end]), kept)
        if self.reads_at_once(device):
            self._raise_told(NOTHING)
        return RankSurvey(self, present, found[:total], found[total : 2 * total], found[3 * total], found[end:])

    def reads_at_once(self, device: torch.device) -> bool:
        """Whether the host has what ranks told each other, without waiting for the device."""
        return device.type == "cpu"

    def _named(self) -> str:
        """The first parameter, and how many more there are."""
        return f"{self.names[0]} and {len(self.names) - 1} more"

    def _raise_told(self, outcome: str = LATER) -> None:
        """Raises DistributedError for numbers that differ between ranks, ArithmeticError for roots that have failed."""
        if self._told is None:
            return
        told, self._told = self._told, None
        failures, sums = told.sums.wait().tensor_split([len(self.names)])
        names = differing(sums.tolist(), list(told.numbers))
        if names:
            mine, step = {name: float(value) for name, value in told.numbers.items()}, f"step of {self._named()}"
            found = self.everyone.all_gather_object(mine, f"numbers of a {step}")
            raise DistributedError(f"{step}: all ranks must have {tell_apart(names, found)}; {outcome}")
        bad = torch.nonzero(failures).flatten().tolist()
        if bad:
            raise failed_roots("update", self.failure.roots, [self.names[position] for position in bad])

    def require_presence(self, absent: Sequence[float]) -> None:
        """Raises DistributedError if a parameter has a gradient on some ranks only; absent `[P]`: ranks without."""
        some = [self.names[p] for p, count in enumerate(absent) if 0 < count < self.everyone.size]
        if some:
            raise DistributedError(
                f"gradients: all ranks or none must have one of a parameter, got some ranks for {', '.join(some[:5])}"
                f"{f' and {len(some) - 5} more' if len(some) > 5 else ''}; nothing was changed"
            )

    def finite(self, squares: Tensor) -> Tensor:
        """Which gradients have a finite sum of squares in the dtype they are computed in, `[P]`.

        Sums of gradients that nothing squares are taken in float64, where squares of all numbers in 32 bits are finite.
        """
        self._largest = self._largest.to(squares.device)
        return squares <= self._largest

    def parameter_rms(self, local: Sequence[Tensor]) -> Tensor:
        """The root mean square of each full parameter, `[P]`; local: what this rank holds of it."""
        squares = self._squares(local, "updated", local[0].device)
        self.everyone.all_reduce(squares, "norms of parameters")
        return (squares / self._numels.to(squares)).sqrt()

    def sums(self, positions: Sequence[int], local: Tensor) -> Tensor:
        """The sums over all entries of full tensors at n positions; local `[n]` float64: over those of this rank."""
        own = local / self._copies["updated"].to(local.device)[list(positions)]
        return self.everyone.all_reduce(own, "sums over constrained parameters")

    def _squares(
        self, local: Sequence[Tensor | None], entries: Literal["held", "updated"], device: torch.device
    ) -> Tensor:
        """Return this rank's share of the sum of squares of each full tensor, `[P]` float64.

        local: the entries of each tensor that this rank holds, or those of them that it updates, as `entries` says.
        """
        squares = torch.zeros(len(local), dtype=torch.float64, device=device)
        here = [(position, x) for position, x in enumerate(local) if x is not None and x.numel()]
        dtypes = [self._dtypes[position] for position, _ in here]
        for places, norms in norms_by_dtype([x for _, x in here], dtypes):
            at = torch.tensor([here[place][0] for place in places], dtype=torch.int64, device=device)
            squares[at] = norms.square().double()
        self._copies[entries] = self._copies[entries].to(device)
        return squares / self._copies[entries]


@dataclass(frozen=True)
class _Told:
    """What ranks have told each other in one step.

    sums: ranks on which the roots of each parameter have failed `[P]`, and the sum of fingerprints.
    numbers: what this rank has stepped with.
    """

    sums: HostCopy
    numbers: StepNumbers


@dataclass(frozen=True)
class RankSurvey:
    """What all ranks together know of the gradients of P parameters.

    present: `[P]`, which parameters have a gradient on this rank.
    squares: `[P]` float64 on the device, sum of squares of each full gradient.
    absent:  `[P]` float64 on the device, number of ranks without a gradient.
    ranks: 0-d float64 on the device, number of ranks.
    notes: float64 on the device, what else was summed.
    """

    rank_sync: RankSync
    present: NDArray[np.bool_]
    squares: Tensor
    absent: Tensor
    ranks: Tensor
    notes: Tensor

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self.squares.device

    def agreed(self) -> NDArray[np.bool_]:
        """Which parameters have a gradient on all ranks, read on the host; DistributedError if some have on a few."""
        counts = self.absent.tolist()
        self.rank_sync.require_presence(counts)
        return np.array([count == 0 for count in counts]) & self.present

    def nonzero(self, positions: Sequence[int]) -> bool:
        """Whether any of these gradients has an entry other than 0, read on the host."""
        return bool(self.squares[list(positions)].any())

    def usable(self, positions: Sequence[int], finite: bool) -> Tensor:
        """Which gradients can be used, `[n]` on the device; finite: whether they must be finite."""
        usable = self.rank_sync.finite(self.squares) if finite else torch.ones_like(self.squares) > 0
        usable = usable & (self.absent == 0)
        return usable[torch.tensor(list(positions), dtype=torch.int64, device=usable.device)]


def failed_roots(path: str, tolerated: int, names: Sequence[str]) -> ArithmeticError:
    """The error of roots that failed too often."""
    return ArithmeticError(
        f"{path}: at most {tolerated} failed roots in a row are tolerated (failure.roots), got more for "
        f"{', '.join(names[:5])}; a larger ridge or a lower lr may help"
    )
