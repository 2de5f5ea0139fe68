"""Check of copies: ranks that hold copies of a parameter have one and the same gradient of it.

Nothing but DistributedDataParallel, or what takes its place, makes gradients of plain tensors the same on all ranks.
Legend: C parameters that all R ranks hold; n the norm of a gradient. All have one n if R sum(n^2) = sum(n)^2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eigengraft.distributed.rank_group import DistributedError
from eigengraft.distributed.work import HostCopy
from eigengraft.numerics import norms_by_dtype

from .fingerprint import by_value
from .rank_sync import LATER, NOTHING, RankSurvey, RankSync

FIRST, EVERY = 3, 100
"""Steps that are checked: the first ones, and every so many."""
TOLERANCE = 1e-4
"""Standard deviation of norms over ranks, in units of their mean, up to which gradients count as the same: kernels that
add in any order, run on every rank apart, are 1e-6 off; other data is 1e-2 off, or more."""
AVERAGE_FIRST = (
    "average gradients before step(): wrap the whole model in DistributedDataParallel, no parameter outside of it, and "
    "run the last backward before step() outside of no_sync(); parameters that are no copies of each other need "
    "`distribution.mode: local`, or to be DTensors on a mesh of the ranks that share them"
)


class CopyCheck:
    """Compares the gradients of plain tensors that all ranks hold.

    rank_sync: what the ranks tell each other.
    parameters: the tensors, a list that may change.
    """

    def __init__(self, rank_sync: RankSync, parameters: Sequence[Tensor]) -> None:
        self.rank_sync, self.parameters = rank_sync, parameters
        self._surveys = 0
        self._mine: Tensor | None = None
        self._told: HostCopy | None = None

    def tell(self) -> Tensor:
        """`[2 C]`: norms of gradients and their squares at steps that are checked, zeros at others.

        Raises DistributedError for the step before, if that was heard too late to raise there.
        """
        self._judge(LATER)
        is_checked = self._surveys < FIRST or self._surveys % EVERY == 0
        self._surveys += 1
        gradients = [(place, p.grad) for place, p in enumerate(self.parameters) if p.grad is not None and p.numel()]
        device = self.parameters[0].device
        norms = torch.zeros(len(self.parameters), dtype=torch.float64, device=device)
        for places, found in norms_by_dtype([gradient for _, gradient in gradients]) if is_checked else ():
            norms[torch.tensor([gradients[place][0] for place in places], dtype=torch.int64, device=device)] = (
                found.double()
            )
        self._mine = norms if is_checked else None
        return torch.cat([norms, norms.square()])

    def hear(self, survey: RankSurvey) -> None:
        """Raises DistributedError on every rank if gradients differ; on a device in the next step.

        survey: of the step, whose notes are the sums of what ranks told.
        """
        if self._mine is not None:
            self._told = HostCopy(torch.cat([survey.notes, survey.ranks - survey.absent]))
            if self.rank_sync.reads_at_once(survey.device):
                self._judge(NOTHING)

    def _judge(self, outcome: str) -> None:
        if self._told is None or self._mine is None:
            return
        total, squares, ranks = self._told.wait().chunk(3)
        mine, names, self._told = self._mine.tolist(), self.rank_sync.names, None
        apart = ranks * squares - total.square() > (TOLERANCE * total).square()  # not where a norm is not finite
        places = torch.nonzero(apart).flatten().tolist()
        if places:
            name, more = names[places[0]], f" and {len(places) - 1} more" if len(places) > 1 else ""
            found = self.rank_sync.everyone.all_gather_object(mine[places[0]], f"norms of gradients ({name})")
            norms = by_value([float(f"{norm:.6g}") for norm in found])
            raise DistributedError(
                f"gradient of {name}{more}: all ranks must have the same, because all hold the whole parameter, got "
                f"norms {norms}; {outcome}; {AVERAGE_FIRST}"
            )
